"""The inequalities of the convex case on every pair of a logistic regression, with the constants of the batches it saw."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from theodolite.experiments.stability.configurations import Setting
from theodolite.experiments.stability.trained_pairs import own_task
from theodolite.measures.stability import convex_bounds, largest_norm, largest_smoothness
from theodolite.measures.stability.pairs import draw_swaps
from theodolite.results import Row
from theodolite.training.feeding import epoch_order

#: Batches of each pair whose smoothness is computed, from the first on.
BATCHES = 500


def with_bounds(rows: list[Row], setting: Setting, m: int, pairs: int) -> list[Row]:
    """Rows of pairs with distance and stability as shares of their bounds, and the rate as a share of 2/β_s.

    The bounds are `D ≤ (2ηL/B) h` with the visits h so far, and `stability ≤ L_test D` with the measured D; where nothing has
    moved yet the shares are 0.
    """
    constants, tested = _constants(setting, m, pairs)
    found = []
    for row in rows:
        largest, smoothness = constants[row["pair"]]
        bounds = convex_bounds(
            largest_input=largest,
            largest_test_input=tested,
            rate=setting.rate,
            batch=min(setting.batch, m),
            visits=row["visits"],
            smoothness=smoothness,
        )
        shares = {
            "distance_share": _share(row["dist"], float(bounds.distance_bound)),
            "stability_share": _share(row["stab"], tested * row["dist"]),
            "rate_share": setting.rate / bounds.largest_rate,
        }
        found.append({**row, **shares})
    return found


@lru_cache(maxsize=32)
def _constants(setting: Setting, m: int, pairs: int) -> tuple[list[tuple[float, float]], float]:
    """L and the largest β_s of each pair, and L of the test examples."""
    bench = own_task(setting).bench
    inputs = bench.joined[0]
    places = batch_places(m, setting.batch, min(BATCHES, setting.steps))
    found = []
    for swap in draw_swaps(len(bench.train), len(bench.test), m, pairs, 0):
        both = swap.rows(len(bench.train))
        batches = both[:, places].flatten(0, 1).unique(dim=0)  # those of S and S' are mostly the same
        smoothness = largest_smoothness(inputs, batches, enough=2.0 / setting.rate)
        found.append((largest_norm(inputs[both.unique()]), smoothness))
    return found, largest_norm(bench.evaluation[0])


def batch_places(m: int, batch: int, count: int, *, order_seed: int = 0) -> Tensor:
    """Places (count, B) of the training set in the first batches of the common order, incomplete ones left out.

    >>> batch_places(5, 2, 3).shape
    torch.Size([3, 2])
    """
    width = min(batch, m)
    each = m // width
    epochs = [epoch_order(order_seed, epoch, m)[: each * width].reshape(each, width) for epoch in range(-(-count // each))]
    return torch.cat(epochs)[:count]


def _share(value: float, bound: float) -> float:
    return value / bound if bound else 0.0 if value == 0 else float("inf")
