"""A loader whose order is its own: whatever else draws random numbers meanwhile, its batches are the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from theodolite.interrupts import unbroken_context
from theodolite.problem.batches import generators_of


class OwnOrder:
    """The batches of a loader, epoch by epoch, each read with random states that follow from `seed` and the epoch alone.

    A loader that shuffles draws from torch's global state, and so does a model with dropout: runs of two models would part ways
    in their second epoch. Here they see the same batches. The first pass is epoch `first`, the next one the one after it; the
    states of torch, NumPy, Python and the loader's own generators are given back after each batch.

    >>> from torch.utils.data import DataLoader
    >>> order = OwnOrder(DataLoader(range(4), shuffle=True), seed=0)
    >>> one = [int(x) for x in order]
    >>> _ = torch.rand(7)
    >>> two = [int(x) for x in OwnOrder(DataLoader(range(4), shuffle=True), seed=0)]
    >>> one == two, sorted(one)
    (True, [0, 1, 2, 3])
    """

    def __init__(self, loader: Any, seed: int, first: int = 0) -> None:
        self.loader, self.seed, self.next_epoch = loader, seed, first
        self.generators = generators_of(loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        epoch, self.next_epoch = self.next_epoch, self.next_epoch + 1
        states: list[Any] = []
        with self._own(states, (self.seed * 1_000_003 + epoch) % 2**63):
            batches = iter(self.loader)
        while True:
            with self._own(states):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch

    @unbroken_context
    def _own(self, states: list[Any], seed: int = 0) -> Iterator[None]:
        """The random states of the order inside, those of everybody else outside."""
        outer = self._read()
        if states:
            self._write(states)
        else:
            torch.default_generator.manual_seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002  a data set of the user may draw from it
            random.seed(seed)
            for generator in self.generators:
                generator.manual_seed(seed)
        try:
            yield
        finally:
            states[:] = self._read()
            self._write(outer)

    def _read(self) -> list[Any]:
        numpy = np.random.get_state()  # noqa: NPY002
        return [torch.get_rng_state(), numpy, random.getstate(), [g.get_state() for g in self.generators]]

    def _write(self, states: list[Any]) -> None:
        own, numpy, python, generators = states
        torch.set_rng_state(own)
        np.random.set_state(numpy)  # noqa: NPY002
        random.setstate(python)
        for generator, state in zip(self.generators, generators, strict=True):
            generator.set_state(state)
