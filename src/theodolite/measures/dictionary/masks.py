"""Which coordinates are hidden in a step of learning: a random set, blocks in turn, or a set of its own for each sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

Masks = Literal["batch", "sample", "cycle"]


def hidden_count(dim: int, hidden_fraction: float) -> int:
    """How many of `dim` coordinates are hidden: ⌊fraction · dim⌋, at least one, and at least one stays visible.

    >>> hidden_count(100, 0.1), hidden_count(5, 0.1)
    (10, 1)
    """
    if not 0 < hidden_fraction < 1:
        raise ValueError(f"hidden_fraction must lie between 0 and 1. Got {hidden_fraction}.")
    if dim < 2:
        raise ValueError(
            f"Hiding coordinates needs at least 2 features; got {dim} feature(s) while a minimum of 2 is required. "
            'Use objective="reconstruction".'
        )
    return min(dim - 1, max(1, math.floor(hidden_fraction * dim + 1e-9)))


def check_masks(masks: str) -> None:
    if masks not in get_args(Masks):
        raise ValueError(f"masks must be one of {', '.join(map(repr, get_args(Masks)))}. Got {masks!r}.")


def visible_masks(dim: int, hidden: int, *, masks: Masks, batch: int, step: int, seeds: Sequence[int]) -> Tensor:
    """What is visible in one step, bool (runs, 1, dim), or (runs, batch, dim) for `masks="sample"`.

    "batch" hides one random set in the whole batch, "cycle" goes round a fixed random order, block after block.
    Each step has its own random stream, so that a run may be taken up at any step.
    """
    check_masks(masks)
    rows = [_hidden(dim, hidden, masks, batch, step, seed) for seed in seeds]
    seen = torch.ones(len(rows), rows[0].shape[0], dim, dtype=torch.bool)
    return seen.scatter_(2, torch.from_numpy(np.stack(rows)), False)


def _hidden(
    dim: int, hidden: int, masks: Masks, batch: int, step: int, seed: int
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Hidden coordinates (1 or batch, hidden)."""
    if masks == "cycle":
        order = np.random.default_rng((seed, 0)).permutation(dim)
        return np.asarray(order[(step * hidden + np.arange(hidden)) % dim][None], dtype=np.int64)
    random = np.random.default_rng((seed, step + 1))
    if masks == "batch":
        return np.asarray(random.permutation(dim)[:hidden][None], dtype=np.int64)
    return np.asarray(random.random((batch, dim)).argpartition(hidden - 1, axis=1)[:, :hidden], dtype=np.int64)
