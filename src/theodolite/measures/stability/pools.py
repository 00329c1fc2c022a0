"""The pools that training sets are drawn from: whatever the user gave, as tensors that do not change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from theodolite.errors import NonFiniteError, NotRepeatableError

#: Samples of a data set that are read a second time.
READ_TWICE = 256


@dataclass(frozen=True)
class Pool:
    """Examples `(inputs, targets)`, sample axis first."""

    inputs: Tensor
    targets: Tensor
    name: str

    def __len__(self) -> int:
        return len(self.inputs)

    def part(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Some examples."""
        return self.inputs[index], self.targets[index]

    @property
    def both(self) -> tuple[Tensor, Tensor]:
        return self.inputs, self.targets

    def followed_by(self, other: Pool) -> tuple[Tensor, Tensor]:
        """The examples of both, those of `other` behind: the numbers of the first stay."""
        pairs = zip(self.both, other.both, strict=True)
        try:
            inputs, targets = (torch.cat([mine, theirs.to(mine.dtype)]) for mine, theirs in pairs)
        except RuntimeError as error:
            shapes = f"{tuple(self.inputs.shape[1:])} and {tuple(other.inputs.shape[1:])}"
            raise ValueError(
                f"{self.name} and {other.name} must hold examples of one shape, for one is exchanged. Inputs are {shapes}, "
                f"targets {tuple(self.targets.shape[1:])} and {tuple(other.targets.shape[1:])}."
            ) from error
        return inputs, targets


def read_pool(data: Any, name: str) -> Pool:
    """Accept `(inputs, targets)`, a `Dataset`, a `DataLoader` (its data set is taken), or a list of batches or of samples.

    A data set that gives other numbers when it is read again (augmentation, moving data) is refused: the size of a training set
    must be known, and the run must be repeatable.
    """
    data = getattr(data, "dataset", data)
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, IterableDataset | Iterator):
        raise ValueError(
            f"{name} can be read only once or in one order; give tensors (inputs, targets) or a data set with an index."
        )
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        inputs, targets = data
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, str | dict):
        inputs, targets = _read_samples(data, name)
    else:
        raise ValueError(f"{name} must be tensors (inputs, targets), a data set, or a loader of one. Got {type(data).__name__}.")
    if not inputs.ndim or not targets.ndim or len(inputs) != len(targets):
        raise ValueError(
            f"{name} must have as many inputs as targets. Got shapes {tuple(inputs.shape)} and {tuple(targets.shape)}."
        )
    if not len(inputs):
        raise ValueError(f"{name} is empty: give at least one example.")
    for part, t in (("inputs", inputs), ("targets", targets)):
        if t.is_floating_point() and not bool(torch.isfinite(t).all()):
            raise NonFiniteError(
                f"{name}: its {part} hold {int((~torch.isfinite(t)).sum())} NaN or inf values; remove or impute them."
            )
    return Pool(inputs.detach(), targets.detach(), name)


def _read_samples(data: Any, name: str) -> tuple[Tensor, Tensor]:
    """All samples of a data set, or of a list of batches, stacked."""
    size = len(data)
    if not size:
        raise ValueError(f"{name} is empty: give at least one example.")
    first = data[0]
    if not isinstance(first, Sequence) or len(first) != 2:
        raise ValueError(f"The examples of {name} must be pairs (input, target). The first is a {type(first).__name__}.")
    batches = isinstance(data, list) and all(isinstance(part, Tensor) and part.ndim for part in first)
    samples = [data[i] for i in range(size)]
    again = range(0, size, max(1, size // READ_TWICE))
    for i in again:
        if not all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(samples[i], data[i], strict=True)):
            raise NotRepeatableError(
                f"{name}: example {i} changed between two readings. Usual causes: random augmentation, a data set that keeps a "
                "state. Remedy: fixed transforms, or tensors (inputs, targets)."
            )
    if batches:
        inputs, targets = (torch.cat(list(column)) for column in zip(*samples, strict=True))
    else:
        inputs, targets = default_collate(samples)
    if not isinstance(inputs, Tensor) or not isinstance(targets, Tensor):
        raise ValueError(f"The inputs and targets of {name} must be one tensor each.")
    return inputs, targets
