"""Training sets that differ in one example: the pools they are drawn from, the pairs, and when the example is seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from theodolite.errors import NonFiniteError, NotRepeatableError
from theodolite.training.schedules import epoch_order

Examples = tuple[Tensor, Tensor]

#: Samples of a data set that are read a second time.
READ_TWICE = 256


# The pools that training sets are drawn from: whatever the user gave, as tensors that do not change.


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

    def in_types_of(self, other: Pool) -> Pool:
        """Floats in the width of the other pool; what holds other kinds of numbers is refused, for a cast would change them."""
        parts = {"inputs": (self.inputs, other.inputs), "targets": (self.targets, other.targets)}
        for part, (mine, theirs) in parts.items():
            whole = part == "targets" and _is_whole(mine) and _is_whole(theirs)
            if mine.dtype != theirs.dtype and not whole and not (mine.is_floating_point() and theirs.is_floating_point()):
                raise ValueError(
                    f"The {part} of {other.name} and {self.name} must hold the same kind of numbers, for one is exchanged. "
                    f"Got {theirs.dtype} and {mine.dtype}: convert one pool as the other was, scaling included."
                )
        inputs, targets = (mine.to(theirs.dtype) if mine.is_floating_point() else mine for mine, theirs in parts.values())
        return replace(self, inputs=inputs, targets=targets)

    def followed_by(self, other: Pool) -> tuple[Tensor, Tensor]:
        """The examples of both, those of `other` behind: the numbers of the first stay."""
        pairs = zip(self.both, other.in_types_of(self).both, strict=True)
        try:
            inputs, targets = (torch.cat(pair) for pair in pairs)
        except RuntimeError as error:
            shapes = f"{tuple(self.inputs.shape[1:])} and {tuple(other.inputs.shape[1:])}"
            raise ValueError(
                f"{self.name} and {other.name} must hold examples of one shape, for one is exchanged. Inputs are {shapes}, "
                f"targets {tuple(self.targets.shape[1:])} and {tuple(other.targets.shape[1:])}."
            ) from error
        return inputs, targets


def read_pool(data: Any, name: str) -> Pool:
    """Accept `(inputs, targets)`, a `Dataset`, a plain `DataLoader` (its data set is taken), or a list of batches or of samples.

    A data set that gives other numbers when it is read again (augmentation, moving data) is refused: the size of a training set
    must be known, and the run must be repeatable.
    """
    if isinstance(data, DataLoader):
        data = _set_behind(data, name)
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


def _set_behind(loader: DataLoader[Any], name: str) -> Any:
    """The data set of a loader that gives all its samples as they are; other loaders are refused."""
    data, batches = loader.dataset, loader.batch_sampler
    if isinstance(data, IterableDataset):
        return data
    chosen = batches.sampler if type(batches) is BatchSampler else batches
    every = type(chosen) is SequentialSampler or (type(chosen) is RandomSampler and not chosen.replacement)
    if not every or len(chosen) != len(data):  # type: ignore[arg-type]
        raise ValueError(
            f"{name} is a loader whose {type(chosen).__name__} need not give every sample once; give its data set, or tensors "
            "(inputs, targets) of the samples that count."
        )
    if loader.collate_fn is not default_collate:
        raise ValueError(
            f"{name} is a loader with a collate_fn of its own, which makes the examples; give its data set, or tensors."
        )
    return data


def _is_whole(t: Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)


def _read_samples(data: Any, name: str) -> tuple[Tensor, Tensor]:
    """All samples of a data set, or of a list of batches, stacked."""
    size = len(data)
    if not size:
        raise ValueError(f"{name} is empty: give at least one example.")
    first = data[0]
    if not isinstance(first, Sequence) or len(first) != 2:
        raise ValueError(f"The examples of {name} must be pairs (input, target). The first is a {type(first).__name__}.")
    samples = [data[i] for i in range(size)]
    for i in range(0, size, max(1, size // READ_TWICE)):
        if not all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(samples[i], data[i], strict=True)):
            raise NotRepeatableError(
                f"{name}: example {i} changed between two readings. Usual causes: random augmentation, a data set that keeps a "
                "state. Remedy: fixed transforms, or tensors (inputs, targets)."
            )
    if isinstance(data, list) and all(isinstance(part, Tensor) and part.ndim for part in first):  # batches
        inputs, targets = (torch.cat(list(column)) for column in zip(*samples, strict=True))
    else:
        inputs, targets = default_collate(samples)
    if not isinstance(inputs, Tensor) or not isinstance(targets, Tensor):
        raise ValueError(f"The inputs and targets of {name} must be one tensor each.")
    return inputs, targets


# Pairs of training sets that differ in one example.


@dataclass(frozen=True)
class Swap:
    """S is `members` (m,) of the training pool; S' has example `z` of the test pool at place `i`."""

    members: Tensor
    i: int
    z: int

    def rows(self, pool: int) -> Tensor:
        """(2, m): both sets as numbers in the training pool of that size, followed by the test pool."""
        both = self.members.repeat(2, 1)
        both[1, self.i] = pool + self.z
        return both


def draw_swap(train_size: int, test_size: int, m: int, rng: np.random.Generator) -> Swap:
    """m examples without repetition, one of the test pool, and a place, all uniform."""
    members = rng.choice(train_size, m, replace=False)
    return Swap(torch.from_numpy(members.astype(np.int64)), z=int(rng.integers(test_size)), i=int(rng.integers(m)))


def draw_swaps(train_size: int, test_size: int, m: int, pairs: int, seed: int) -> list[Swap]:
    """So many pairs; further ones do not change the first. They depend on the seed, the size and the number of the pair alone."""
    return [draw_swap(train_size, test_size, m, np.random.default_rng([seed, m, pair])) for pair in range(pairs)]


def make_pair(train_pool: Any, test_pool: Any, m: int, rng: np.random.Generator | int) -> tuple[Examples, Examples, int, int]:
    """A training set S of m examples, S' with one of them exchanged, its place i, and the number z of what came.

    `rng` is a generator of NumPy, or the seed of one.

    >>> pool = torch.arange(6.0)[:, None], torch.zeros(6)
    >>> (x, _), (x2, _), i, z = make_pair(pool, (torch.full((2, 1), 9.0), torch.ones(2)), 4, np.random.default_rng(0))
    >>> int((x != x2).sum()), float(x2[i])
    (1, 9.0)
    """
    train, test = read_pool(train_pool, "the training pool"), read_pool(test_pool, "the test pool")
    check_size(m, len(train))
    swap = draw_swap(len(train), len(test), m, np.random.default_rng(rng))
    inputs, targets = train.followed_by(test)
    first, second = ((inputs[rows], targets[rows]) for rows in swap.rows(len(train)))
    return first, second, swap.i, swap.z


def check_size(m: Any, pool: int) -> None:
    """Refuse a training set larger than the pool."""
    if not isinstance(m, int | np.integer) or isinstance(m, bool) or not 1 <= m <= pool:
        raise ValueError(f"A training set must hold 1 to {pool} examples, as many as the training pool has. Got {m!r}.")


# When an example is seen: the batches of the common order that hold a given place of the training set.


def batches_per_epoch(m: int, batch_size: int, drop_last: bool) -> int:
    """Batches in which m examples are seen once; one that is incomplete counts unless it is left out.

    >>> batches_per_epoch(23, 5, drop_last=True), batches_per_epoch(23, 5, drop_last=False)
    (4, 5)
    """
    width = min(batch_size, m)
    return m // width if drop_last else -(-m // width)


def visiting_steps(places: Tensor, m: int, batch_size: int, steps: int, *, order_seed: int, drop_last: bool = True) -> Tensor:
    """Whether step t sees place i of the training set: bool (P, T) for `places` (P,), t = 0 .. T-1.

    The order is that of a fleet with the same seed. An example left out by `drop_last` is not seen in that epoch.

    >>> visiting_steps(torch.tensor([0]), 4, 2, 4, order_seed=0).sum()        # two epochs of two batches: seen twice
    tensor(2)
    """
    width = min(batch_size, m)
    batches = batches_per_epoch(m, batch_size, drop_last)
    seen = torch.zeros(len(places), batches * (-(-steps // batches)), dtype=torch.bool)
    if width == m:
        seen[:] = True
        return seen[:, :steps]
    rows = torch.arange(len(places))
    for epoch in range(-(-steps // batches)):
        slot = torch.argsort(epoch_order(order_seed, epoch, m))[places] // width  # the batch of each place, (P,)
        kept = slot < batches
        seen[rows[kept], epoch * batches + slot[kept]] = True
    return seen[:, :steps]
