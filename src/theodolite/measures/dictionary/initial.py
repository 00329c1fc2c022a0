"""Where learning starts: atoms taken from samples, random ones, or given ones."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import torch
from sklearn.utils import check_random_state
from torch import Tensor

from theodolite.measures.dictionary.arrays import as_real

Start = Literal["samples", "random"]


def start_seeds(random_state: Any, count: int = 1) -> tuple[int, ...]:
    """The seeds of `count` starts that a scikit-learn `random_state` (seed, generator or None) stands for."""
    drawn = check_random_state(random_state).randint(np.iinfo(np.int32).max, size=count)
    return tuple(int(seed) for seed in drawn)


def initial_dictionary(signals: Tensor, atoms: int, init: Any = "samples", *, seed: int = 0) -> Tensor:
    """`atoms` directions (atoms, dim) to start from.

    "samples" takes signals (n, dim) without repetition, those that are not zero; what is lacking, and everything for
    "random", is Gaussian. An array (atoms, dim) is taken as it is.
    """
    dim = signals.shape[1]
    if not isinstance(init, str):
        given = as_real("init", init).to(signals)
        if tuple(given.shape) != (atoms, dim):
            raise ValueError(f"init must be ({atoms}, {dim}): n_components atoms of as many features. Got {tuple(given.shape)}.")
        if not torch.isfinite(given).all():
            raise ValueError("init has NaN or infinite entries.")
        if not given.any(1).all():
            raise ValueError("init has atoms of length zero: give each a direction.")
        return given.clone()
    if init not in get_args(Start):
        raise ValueError(f"init must be 'samples', 'random' or an array (atoms, dim). Got {init!r}.")
    random = np.random.default_rng((seed, 2))
    start = torch.from_numpy(random.standard_normal((atoms, dim))).to(signals)
    if init == "samples":
        usable = torch.nonzero(signals.square().sum(1) > 0)[:, 0].cpu().numpy()
        chosen = torch.from_numpy(random.permutation(usable)[:atoms]).to(signals.device)
        start[: len(chosen)] = signals[chosen]
    return start
