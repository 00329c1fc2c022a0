"""A uniform sample of bounded size from a stream of unknown length."""

from __future__ import annotations

import torch
from torch import Tensor

#: Numbers a sample of states may hold, and rows at most.
NUMBERS, ROWS = 2**25, 8192


def rows_within_budget(dim: int) -> int:
    """How many states (d,) a sample holds.

    >>> rows_within_budget(768), rows_within_budget(8192)
    (8192, 4096)
    """
    return max(1, min(ROWS, NUMBERS // max(dim, 1)))


class Reservoir:
    """Keeps the `size` rows with the smallest random keys, which is a uniform sample at every moment; all rows while they fit.

    A row is what several tensors hold at one index: `offer(states, values, places)` takes (N, ...) each.
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size, self.seen = size, 0
        self._generator = torch.Generator().manual_seed(seed)
        self._keys = torch.empty(size, dtype=torch.float64)
        self._held: list[Tensor] = []

    def __len__(self) -> int:
        return min(self.seen, self.size)

    @property
    def complete(self) -> bool:
        """Whether every row offered is held."""
        return self.seen <= self.size

    def offer(self, *parts: Tensor) -> None:
        """Let N more rows try for a place."""
        count = len(parts[0])
        keys = torch.rand(count, generator=self._generator, dtype=torch.float64)
        self._grow(len(self) + count, parts)
        free = min(self.size - len(self), count)
        self._put(torch.arange(len(self), len(self) + free), torch.arange(free), keys, parts)
        self.seen += count
        if free < count:
            self._replace(torch.arange(free, count), keys, parts)

    def _replace(self, rows: Tensor, keys: Tensor, parts: tuple[Tensor, ...]) -> None:
        """Rows whose keys are below the largest held take the places of those."""
        rows = rows[keys[rows] < self._keys.max()]
        order = torch.cat([self._keys, keys[rows]]).argsort()
        leaving, entering = order[self.size :], order[: self.size]
        places, chosen = leaving[leaving < self.size], entering[entering >= self.size] - self.size
        self._put(places, rows[chosen], keys, parts)

    def _grow(self, rows: int, parts: tuple[Tensor, ...]) -> None:
        """Room for so many rows, up to the size, doubling: short streams stay cheap."""
        room = len(self._held[0]) if self._held else 0
        if room >= min(rows, self.size):
            return
        new = min(max(rows, 2 * room), self.size)
        held = self._held or [part[:0] for part in parts]
        self._held = [
            torch.cat([old, part.new_empty(new - room, *part.shape[1:])]) for old, part in zip(held, parts, strict=True)
        ]

    def _put(self, places: Tensor, rows: Tensor, keys: Tensor, parts: tuple[Tensor, ...]) -> None:
        self._keys[places] = keys[rows]
        for held, part in zip(self._held, parts, strict=True):
            held[places.to(held.device)] = part[rows.to(part.device)]

    def rows(self) -> tuple[Tensor, ...]:
        """The sample, one tensor (at most `size`, ...) per part."""
        return tuple(held[: len(self)].clone() for held in self._held)
