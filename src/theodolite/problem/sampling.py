"""The error that comes from measuring on a sample of the data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from theodolite.problem.batches import Batch
from theodolite.problem.tensors import map_tensors, named_tensors

if TYPE_CHECKING:
    from theodolite.problem.problem import Problem


def jackknife_error(problem: Problem, quantity: Callable[[Problem], float], *, groups: int, population: int | None) -> float:
    """Delete-a-group jackknife: the spread of the quantity when each group of samples is left out in turn."""
    singles = [b.part(slice(i, i + 1)) for b in problem.data for i in range(b.size)]
    if not 2 <= groups <= len(singles):
        raise ValueError(f"groups must be between 2 and the number of samples, {len(singles)}. Got {groups}.")
    # Groups at random: data that is sorted, or goes through the classes in turn, must not make them unlike or alike.
    order = torch.randperm(len(singles), generator=torch.Generator().manual_seed(0)).tolist()
    values = []
    for group in range(groups):
        kept = [singles[place] for i, place in enumerate(order) if i % groups != group]
        values.append(float(quantity(problem.with_batches(merge(kept)))))
    spread = torch.tensor(values, dtype=torch.float64)
    variance = (groups - 1) / groups * float((spread - spread.mean()).square().sum())
    finite = 1.0 if population is None else max(0.0, 1.0 - len(singles) / population)
    return math.sqrt(variance * finite)


def merge(batches: list[Batch]) -> list[Batch]:
    """Single samples joined into one batch where their shapes allow it."""
    first = batches[0]

    def signature(batch: Batch) -> list[Any]:
        return [(n, t.shape, t.dtype) for n, t in named_tensors({**batch.inputs, "target": batch.target})]

    if any(signature(b) != signature(first) for b in batches):
        return batches

    def join(pick: Callable[[Batch], Any]) -> Any:
        columns = [[t for _, t in named_tensors(pick(b))] for b in batches]
        joined = iter([torch.cat(tensors) if tensors[0].ndim else tensors[0] for tensors in zip(*columns, strict=True)])
        return map_tensors(lambda _: next(joined), pick(first))

    return [Batch(join(lambda b: b.args), join(lambda b: b.kwargs), join(lambda b: b.target), len(batches))]
