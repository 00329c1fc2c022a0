"""The data along a path: whatever its form, as batches of bounded size, with the loss that fits them."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from theodolite.problem import Batch, Problem
from theodolite.problem.calling import Loss, unwrap


def loss_for(model: nn.Module, loss: Loss) -> Loss:
    """The loss to evaluate: the one given, None for a model that computes its own, else cross entropy."""
    if loss is not None:
        return loss
    taken = inspect.signature(unwrap(model).forward).parameters.values()
    own = any(p.name == "labels" or (p.kind is p.VAR_KEYWORD and hasattr(model, "config")) for p in taken)
    return None if own else nn.CrossEntropyLoss()


def problem_of(model: nn.Module, loss: Loss, data: Any, batch_size: int, name: str, *, inferred: bool) -> Problem:
    """The data with the model; a `Dataset` is read in batches."""
    if isinstance(data, TensorDataset):
        data = data.tensors
    elif isinstance(data, Dataset):
        data = DataLoader(data, batch_size=batch_size)
    problem = Problem(model, loss, data, params="*", check=False)
    target = next(iter(problem.data)).target
    if inferred and loss is not None and not (isinstance(target, Tensor) and not target.is_floating_point()):
        kind = f"of {target.dtype}" if isinstance(target, Tensor) else f"a {type(target).__name__}"
        raise ValueError(
            f"loss=None takes integer class labels as targets. Those of {name} are {kind}: name a loss, nn.MSELoss() say."
        )
    return problem


def in_parts(problem: Problem, batch_size: int) -> Problem:
    """The problem in batches of at most `batch_size`, where they are held in memory."""
    if not problem.data.held or all(batch.size <= batch_size for batch in problem.data):
        return problem
    return problem.with_batches([part for batch in problem.data for part in _parts(batch, batch_size)])


def _parts(batch: Batch, most: int) -> Iterator[Batch]:
    """A batch cut into parts of about equal size: a rest of one sample would have no batch statistics."""
    count = -(-batch.size // most)
    if count == 1:
        yield batch
        return
    edges = [batch.size * i // count for i in range(count + 1)]
    yield from (batch.part(slice(low, high)) for low, high in itertools.pairwise(edges))
