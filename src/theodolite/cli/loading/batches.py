"""Looking into data of any form that `Problem` takes: its first batch, its targets, some of its samples, other batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from theodolite.problem.batches import is_bare
from theodolite.problem.tensors import map_tensors, named_tensors

LABELS = "labels"


def is_one_batch(data: Any) -> bool:
    """Whether data is a single batch, a mapping or tensors that end in the target, and not a collection of batches."""
    if isinstance(data, Mapping):
        return True
    return isinstance(data, tuple | list) and len(data) >= 2 and is_bare(data[-1])


def raw_batches(data: Any) -> Iterator[Any]:
    """The batches of the data, one after the other."""
    if is_one_batch(data):
        yield data
    elif isinstance(data, Iterable):
        yield from data


def parts_of(batch: Any) -> tuple[Any, Any]:
    """Inputs and target of one batch; a target that is not there is None."""
    if isinstance(batch, Mapping):
        return {k: v for k, v in batch.items() if k != LABELS}, batch.get(LABELS)
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        return (batch[0] if len(batch) == 2 else tuple(batch[:-1])), batch[-1]
    return batch, None


def first_parts(data: Any, option: str = "--data") -> tuple[Any, Any]:
    """Inputs and target of the first batch."""
    for batch in raw_batches(data):
        return parts_of(batch)
    came = f"{type(data).__name__}" if not isinstance(data, Iterable) else "nothing in it"
    raise ValueError(f"{option} must give (inputs, targets), a mapping, a list of batches or a DataLoader. Got {came}.")


def size_of(batch: Any) -> int:
    """Samples in one batch: the first size of its first tensor."""
    return next((t.shape[0] for _, t in named_tensors(batch) if t.ndim), 1)


def rows_of(batch: Any, rows: Tensor | slice) -> Any:
    """Some samples of one batch."""
    size = size_of(batch)
    return map_tensors(lambda t: t[rows] if t.ndim and t.shape[0] == size else t, batch)


def top_label(data: Any) -> int:
    """The largest integer target."""
    tops = [int(y.max()) for _, y in map(parts_of, raw_batches(data)) if isinstance(y, Tensor) and y.numel()]
    return max(tops, default=-1)


def with_targets(data: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same data with its targets changed, a loader as a list."""

    def one(batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return {**batch, LABELS: change(batch[LABELS])}
        return (*batch[:-1], change(batch[-1]))

    return one(data) if is_one_batch(data) else [one(batch) for batch in data]


def with_inputs(data: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same data with the inputs of its pairs changed, a loader as a list."""
    if is_one_batch(data):
        return (change(data[0]), *data[1:])
    return [(change(batch[0]), *batch[1:]) for batch in data]


def take_samples(data: Any, samples: int | None, seed: int) -> tuple[Any, int | None]:
    """A seeded choice of samples, in the order of the data, and how many there are in all; None where all are taken.

    From a list or a loader whole batches are taken until there are enough.

    >>> take_samples((torch.arange(4.0), torch.arange(4)), 2, seed=0)[1]
    4
    """
    if samples is None:
        return data, None
    if is_one_batch(data):
        size = size_of(data)
        if samples >= size:
            return data, None
        chosen = torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:samples].sort().values
        return rows_of(data, chosen), size
    taken, count = [], 0
    total = len(data.dataset) if hasattr(data, "dataset") and hasattr(data.dataset, "__len__") else None
    if isinstance(data, list):
        total = sum(map(size_of, data))
    for batch in data:
        taken.append(batch)
        count += size_of(batch)
        if count >= samples:
            break
    return taken, total if total is not None and total > count else None


def in_batches(data: Any, batch_size: int) -> Any:
    """Tensors as a list of batches of this size; data that comes in batches has its own."""
    if not is_one_batch(data):
        if isinstance(data, list) and len(data) == 1 and is_one_batch(data[0]):
            data = data[0]
        else:
            raise ValueError("--batch-size is for data given as tensors; a list of batches or a loader brings its own.")
    return [rows_of(data, slice(i, i + batch_size)) for i in range(0, size_of(data), batch_size)]
