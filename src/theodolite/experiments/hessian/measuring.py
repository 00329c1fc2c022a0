"""What the experiments of this chapter measure again and again: eigenpairs and factors of a layer, overlap of models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from itertools import combinations
from statistics import median
from typing import Any

import torch

from theodolite.experiments.hessian.networks import Setup, problem_of
from theodolite.linalg import Eigenpairs, overlap_curve, top_eigenpairs
from theodolite.measures.hessian import autocorrelation, predicted_overlap, rank_one_count
from theodolite.operators import KroneckerFactors, kronecker_factors, layer_hessians
from theodolite.results import Row

#: A network and the seed it was trained with.
Model = tuple[Setup, int]

#: Overlap is looked at up to so many outputs of the layer: far enough to see a peak at m and the decline behind it.
REACH = 1.5

#: Residual of eigenvectors over the largest eigenvalue; those that are compared are up to a thousand times smaller than it.
TOLERANCE = 1e-5


def as_job(setup: Setup) -> dict[str, Any]:
    """A setup as plain values, for a job."""
    return asdict(setup)


def setup_of(job: Mapping[str, Any], key: str = "setup") -> Setup:
    """The setup that a job carries."""
    return Setup(**job[key])


def layer_pairs(model: Model, layer: str, k: int) -> Eigenpairs:
    """The k largest eigenpairs of a layer's block, k capped at its size."""
    return pairs_of(model, (layer,), k)[layer]


@lru_cache(maxsize=64)
def pairs_of(model: Model, layers: tuple[str, ...], k: int, tol: float = TOLERANCE) -> dict[str, Eigenpairs]:
    """The k largest eigenpairs of several layers, in lockstep."""
    found = top_eigenpairs(layer_hessians(problem_of(*model), layers), k, tol=tol, seed=0, progress=False)
    return {name: found[name] for name in layers}


def layer_factors(model: Model, layer: str) -> KroneckerFactors:
    """The Kronecker factors of a layer."""
    return factors_of_layers(model, (layer,))[layer]


@lru_cache(maxsize=64)
def factors_of_layers(model: Model, layers: tuple[str, ...]) -> dict[str, KroneckerFactors]:
    """The Kronecker factors of several layers, by one pass over the data."""
    found = kronecker_factors(problem_of(*model), layers)
    return {name: found[name] for name in layers}


def overlap_rows(models: Sequence[Model], layer: str, reach: float = REACH, **shared: Any) -> Iterator[Row]:
    """The overlap of the top k eigenvectors of a layer, k = 1, 2, ..., over all pairs of the models.

    One row per k: the mean and the standard deviation over the pairs, the mean of what the factors predict, and chance. Then one
    row of the layer: m, K*, γ₁/γ₂ (medians over the models), and (v₁·v₁')², the mean over the pairs.
    """
    factors = [layer_factors(model, layer) for model in models]
    m, n = factors[0].output.shape[0], factors[0].input.shape[0]
    k = min(round(reach * m), m * n)
    vectors = [layer_pairs(model, layer, k).vectors for model in models]
    curves = torch.stack([overlap_curve(a, b) for a, b in combinations(vectors, 2)])
    predicted = torch.stack([predicted_overlap(a, b, k) for a, b in combinations(factors, 2)]).mean(0)
    spread = curves.std(0) if len(curves) > 1 else torch.full((k,), float("nan"), dtype=curves.dtype)
    for i in range(k):
        yield {
            "kind": "overlap",
            **shared,
            "layer": layer,
            "k": i + 1,
            "overlap": float(curves[:, i].mean()),
            "spread": float(spread[i]),
            "predicted": float(predicted[i]),
            "chance": (i + 1) / (m * n),
            "outputs": m,
        }
    leading = [torch.linalg.eigh(f.input)[1][:, -1] for f in factors]
    yield {
        "kind": "layer",
        **shared,
        "layer": layer,
        "outputs": m,
        "pairs": len(curves),
        "rank_one_count": median(rank_one_count(f) for f in factors),
        "ratio": median(autocorrelation(f).ratio for f in factors),
        "squared_dot": float(sum(float(a @ b) ** 2 for a, b in combinations(leading, 2)) / len(curves)),
    }


def select(rows: Sequence[Row], **where: Any) -> list[Row]:
    """Rows whose columns have these values."""
    return [row for row in rows if all(row.get(name) == value for name, value in where.items())]


def values_of(rows: Sequence[Row], name: str) -> list[Any]:
    """The values of a column in the order of their first appearance, each once."""
    return list(dict.fromkeys(row[name] for row in rows))


def peak(rows: Sequence[Row], column: str = "overlap", upto: float = float("inf")) -> Row:
    """The row with the largest value of a column among those with k up to a limit."""
    return max((row for row in rows if not row["k"] > upto), key=lambda row: row[column])


def farthest(ratios: Sequence[float]) -> float:
    """The ratio farthest from 1, up or down; NaN if one of them is."""
    if any(not ratio > 0 for ratio in ratios):
        return float("nan")
    return max(ratios, key=lambda ratio: max(ratio, 1.0 / ratio))
