"""Pairs of training sets that differ in one example."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from theodolite.measures.stability.pools import read_pool

Examples = tuple[Tensor, Tensor]


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

    @property
    def null(self) -> Tensor:
        """(2, m): the swap that changes nothing."""
        return self.members.repeat(2, 1)


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
    if not isinstance(m, int | np.integer) or isinstance(m, bool) or not 1 <= m <= pool:
        raise ValueError(f"A training set must hold 1 to {pool} examples, as many as the training pool has. Got {m!r}.")
