"""Is a layer's input nearly one direction? The mean against the auto-correlation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.operators import KroneckerFactors


@dataclass(frozen=True)
class Autocorrelation:
    """`squared_dot` is (v₁·μ̂)², `ratio` γ₁/γ₂, `bound` ‖μ‖²/‖Σ‖, which `ratio` never falls below."""

    squared_dot: float
    ratio: float
    bound: float
    values: Tensor


def autocorrelation(factors: KroneckerFactors) -> Autocorrelation:
    """How dominant the leading eigenvector of `E[x xᵀ]` is, and how near to the mean input.

    γ₁ >= ‖μ‖² because μ̂ is a test vector, and γ₂ <= ‖Σ‖ by interlacing; so γ₁/γ₂ >= ‖μ‖²/‖Σ‖, always.

    >>> from theodolite.operators.kronecker import factors_of
    >>> mean = torch.tensor([2.0, 0.0]).double()
    >>> found = autocorrelation(factors_of(torch.eye(1).double(), torch.outer(mean, mean) + 0.5 * torch.eye(2).double(), mean))
    >>> found.squared_dot, found.ratio, found.bound
    (1.0, 9.0, 8.0)
    """
    values, vectors = torch.linalg.eigh(factors.input)
    values, vectors = values.flip(0), vectors.flip(1)
    norm = float(factors.mean.norm())
    dot = float(vectors[:, 0] @ factors.mean) / norm if norm > 0 else 0.0
    spread = float(torch.linalg.matrix_norm(factors.covariance, 2))
    second = float(values[1]) if len(values) > 1 else 0.0
    return Autocorrelation(
        squared_dot=dot * dot,
        ratio=float(values[0]) / second if second > 0 else float("inf"),
        bound=norm * norm / spread if spread > 0 else float("inf"),
        values=values,
    )
