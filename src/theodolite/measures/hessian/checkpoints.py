"""States of one architecture, one after the other: modules, state dicts or flat vectors, put into a copy of the model."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.errors import NonFiniteError, nearest
from theodolite.problem import Problem, split_like
from theodolite.problem.parameters import clean_names

Checkpoint = nn.Module | Mapping[str, Tensor] | Tensor
Label = int | float | str


def labelled(checkpoints: Any, labels: Iterable[Label] | None, first: int = 0) -> Iterator[tuple[Label, Checkpoint]]:
    """Checkpoints with their labels, taken one at a time; by default the labels count on from `first`."""
    alone = isinstance(checkpoints, nn.Module | Mapping | str) or (isinstance(checkpoints, Tensor) and checkpoints.ndim < 2)
    if alone or not isinstance(checkpoints, Iterable):
        kind = type(checkpoints).__name__
        raise ValueError(f"checkpoints must be a list or a generator of them, [checkpoint] for a single one. Got one {kind}.")
    if labels is None:
        yield from zip(itertools.count(first), checkpoints, strict=False)
        return
    if isinstance(labels, Sized) and isinstance(checkpoints, Sized) and len(labels) != len(checkpoints):
        raise ValueError(f"There are {len(labels)} labels for {len(checkpoints)} checkpoints; each needs one.")
    names = iter(labels)
    for place, checkpoint in enumerate(checkpoints):
        label = next(names, None)
        if label is None:
            raise ValueError(f"labels ended after {place}, but there are more checkpoints; each needs one.")
        yield label, checkpoint


def load(checkpoint: Any, into: Problem, home: Problem, label: Label) -> None:
    """Put a checkpoint into the problem that is measured, a copy of `home`; a vector leaves the rest as it is in `home`."""
    if isinstance(checkpoint, Tensor):
        _load_vector(checkpoint, into, home, label)
        return
    state = checkpoint.state_dict() if isinstance(checkpoint, nn.Module) else checkpoint
    if not isinstance(state, Mapping):
        accepted = "a module, a state dict or a flat vector"
        raise ValueError(f"Checkpoint {label!r} must be {accepted}. Got {type(checkpoint).__name__}.")
    into.model.load_state_dict(_fitted(into.model, state, label))


@contextmanager
def telling(label: Label) -> Iterator[None]:
    """Errors inside say at which checkpoint they happened."""
    try:
        yield
    except Exception as error:
        error.add_note(f"This happened at checkpoint {label!r}.")
        raise


def _load_vector(vector: Tensor, into: Problem, home: Problem, label: Label) -> None:
    if vector.shape != (home.size,):
        raise ValueError(
            f"Checkpoint {label!r} is a tensor of shape {tuple(vector.shape)}; "
            f"a flat vector of the measured parameters has shape ({home.size},)."
        )
    _check_finite({"the vector": vector}, label)
    into.model.load_state_dict(home.model.state_dict())
    with torch.no_grad():
        for parameter, part in zip(into.parameters, split_like(vector.detach(), into.parameters), strict=True):
            parameter.copy_(part)


def _fitted(model: nn.Module, state: Mapping[str, Any], label: Label) -> dict[str, Any]:
    """A state dict under the model's own names; raises where it belongs to another architecture."""
    own = model.state_dict()
    keys = {name: key for key, name in clean_names(own).items()}
    given = {name: state[key] for key, name in clean_names(state).items()}
    unknown = [name for name in given if name not in keys]
    if unknown:
        near = ", ".join(nearest(unknown[0], keys, count=3))
        raise ValueError(f"Checkpoint {label!r} holds {unknown[0]!r}, which the problem's model has not. Nearest names: {near}.")
    for name, key in keys.items():
        if name not in given:
            raise ValueError(f"Checkpoint {label!r} lacks {name!r}. Save the whole state: model.state_dict().")
        mine, shape = own[key], tuple(getattr(given[name], "shape", ()))
        if isinstance(mine, Tensor) and shape != tuple(mine.shape):
            raise ValueError(f"Checkpoint {label!r}: {name} has shape {shape}; in the problem's model it is {tuple(mine.shape)}.")
    _check_finite(given, label)
    return {keys[name]: value for name, value in given.items()}


def _check_finite(tensors: Mapping[str, Any], label: Label) -> None:
    for name, value in tensors.items():
        if isinstance(value, Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise NonFiniteError(f"Checkpoint {label!r}: {name} holds NaN or inf. The run has diverged there; leave it out.")
