"""Which batch comes when: the order depends on the seed and the epoch alone, so a resumed run sees the same data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from theodolite.arguments import optional_integer
from theodolite.problem.batches import Batch, BatchParser


class Feed:
    """Batches epoch by epoch.

    Tensors are shuffled by their own generator. A list of batches is taken in its order, a loader as it comes (its
    shuffling follows torch's random state, which `train` seeds and saves).
    """

    def __init__(self, data: Any, *, batch_size: int | None, shuffle: bool, own_loss: bool, target: str, seed: int) -> None:
        self._parse = BatchParser(own_loss=own_loss, target_key=target)
        self.batch_size, self.shuffle, self.seed = batch_size, shuffle, seed
        self.generator: torch.Generator | None = getattr(data, "generator", None)  # a loader's own
        self._whole: Batch | None = None
        self._parts: Sequence[Any] | Iterable[Any] = ()
        if isinstance(data, tuple) and data and isinstance(data[-1], Tensor):
            self._whole = self._parse(data, 0)
        elif isinstance(data, Iterator):
            raise ValueError("data can be read only once; give a list of batches or a DataLoader.")
        elif isinstance(data, Iterable) and not isinstance(data, Mapping | str):
            if batch_size is not None:
                raise ValueError("batch_size is for data given as tensors; a list or a loader brings its own batches.")
            self._parts = data
        else:
            raise ValueError(f"data must be (inputs, targets), a list of batches or a DataLoader. Got {type(data).__name__}.")
        optional_integer("batch_size", batch_size, least=1)

    def epoch(self, number: int) -> Iterator[Batch]:
        """The batches of one epoch."""
        if self._whole is None:
            for i, raw in enumerate(self._parts):
                yield self._parse(raw, i)
            return
        size = self._whole.size
        width = min(self.batch_size or size, size)
        if width == size:
            yield self._whole
            return
        order = self._order(number, size)
        for first in range(0, size, width):
            yield self._whole.part(order[first : first + width])

    def _order(self, number: int, size: int) -> Tensor:
        if not self.shuffle:
            return torch.arange(size)
        return epoch_order(self.seed, number, size)


def epoch_order(seed: int, epoch: int, size: int) -> Tensor:
    """The order of the samples in an epoch."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
