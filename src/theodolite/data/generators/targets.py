"""Regression targets that depend on few directions, with their expected gradient outer products."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from theodolite.arguments import at_least, between, choice
from theodolite.data.generators.seeding import stream

Rank = Literal["rank-2", "rank-3", "rank-4", "full"]


@dataclass(frozen=True, eq=False)
class RankTarget:
    """A function of x ~ N(0, I) with what is known of it.

    `egop` is E[∇f ∇fᵀ] (dim, dim) and `variance` that of f(x): predicting the mean of noisy labels costs
    `variance + noise²`.
    """

    name: Rank
    function: Callable[[Tensor], Tensor]
    egop: Tensor
    variance: float

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x)


@dataclass(frozen=True, eq=False)
class TargetSample:
    """Points (n, dim), noisy labels, labels without noise, and the target."""

    x: Tensor
    y: Tensor
    clean: Tensor
    target: RankTarget


def rank_k_target(name: Rank, dim: int = 100) -> RankTarget:
    """`x₁x₂`, `x₁x₂(x₁+...+x₁₀)`, `x₁+x₁x₂+x₁x₂x₃+x₁x₂x₃x₄` or `‖x‖/√dim`, for rank-2, rank-3, rank-4 and full.

    >>> rank_k_target("rank-4", dim=5).egop.diag().tolist()
    [4.0, 3.0, 2.0, 1.0, 0.0]
    """
    choice("name", name, _TARGETS)
    least, function, egop, variance = _TARGETS[name]
    at_least(least, dim=dim)
    return RankTarget(name, function, egop(dim), variance(dim))


def rank_k_targets(
    name: Rank, n: int, *, dim: int = 100, noise: float = 0.1, seed: int = 0, dtype: torch.dtype = torch.float32
) -> TargetSample:
    """`y = f(x) + noise · N(0, 1)` at n points x ~ N(0, I)."""
    at_least(1, n=n)
    between(0, math.inf, noise=noise)
    target, generator = rank_k_target(name, dim), stream("rank_k_targets", seed)
    x = torch.randn(n, dim, generator=generator, dtype=torch.float64)
    clean = target(x)
    y = clean + noise * torch.randn(n, generator=generator, dtype=torch.float64)
    return TargetSample(x.to(dtype), y.to(dtype), clean.to(dtype), target)


def _diagonal(dim: int, *values: float) -> Tensor:
    return torch.diag(torch.tensor([*values, *[0.0] * (dim - len(values))], dtype=torch.float64))


def _egop3(dim: int) -> Tensor:
    # With S = x₁+...+x₁₀: ∂₁ = x₂S + x₁x₂, ∂₂ = x₁S + x₁x₂, ∂ⱼ = x₁x₂ for j = 3..10.
    egop = torch.zeros(dim, dim, dtype=torch.float64)
    egop[:10, :10] = 1.0
    egop[:2, :10] = egop[:10, :2] = 2.0
    egop[:2, :2] = torch.tensor([[15.0, 5.0], [5.0, 15.0]])
    return egop


def _rank4(x: Tensor) -> Tensor:
    return x[:, :4].cumprod(1).sum(1)


def _variance_full(dim: int) -> float:
    # 1 - (E‖x‖)²/dim with E‖x‖ = √2 Γ((dim+1)/2) / Γ(dim/2); about 1/(2 dim).
    return 1 - 2 / dim * math.exp(2 * (math.lgamma((dim + 1) / 2) - math.lgamma(dim / 2)))


# Name -> least dimension, function, expected gradient outer product, variance.
_TARGETS: dict[str, tuple[int, Callable[[Tensor], Tensor], Callable[[int], Tensor], Callable[[int], float]]] = {
    "rank-2": (2, lambda x: x[:, 0] * x[:, 1], lambda dim: _diagonal(dim, 1, 1), lambda dim: 1.0),
    "rank-3": (10, lambda x: x[:, 0] * x[:, 1] * x[:, :10].sum(1), _egop3, lambda dim: 14.0),
    "rank-4": (4, _rank4, lambda dim: _diagonal(dim, 4, 3, 2, 1), lambda dim: 4.0),
    "full": (
        1,
        lambda x: x.norm(dim=1) / math.sqrt(x.shape[1]),
        lambda dim: torch.eye(dim, dtype=torch.float64) / dim**2,
        _variance_full,
    ),
}
