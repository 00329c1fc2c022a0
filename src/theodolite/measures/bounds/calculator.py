"""PAC-Bayes bounds as arithmetic: what an error rate, a divergence and a number of samples say about the true error rate.

For a prior P that does not depend on the n samples, and any Q, with probability 1 − δ over the samples

    kl(ê(Q) ‖ e(Q)) ≤ (KL(Q‖P) + log(2√n / δ)) / n                                   (Maurer 2004)

where ê is the error rate of networks drawn from Q on the samples and e that on new ones. `kl_inverse` solves it for e. The other
forms are weaker statements of the same kind. Choices among several priors are paid for by a union bound: their `penalty`, in
nats, is added to the divergence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from scipy.stats import beta
from torch import Tensor

from theodolite.arguments import checked, count, finite, fraction, nonnegative, positive, share, shown, whole

#: λ = CEILING · exp(−j / PRECISION), j = 1, 2, ...: the prior variances among which a certificate chooses.
CEILING, PRECISION = 0.1, 100.0
#: That of j = 1; j = 0, the ceiling itself, has no probability and is never taken.
HIGHEST = CEILING * math.exp(-1 / PRECISION)
#: Fewer samples than this and the constants of Maurer's form are not proven.
FEWEST = 8
_STEPS = 60


def _rates(name: str, value: Any) -> Any:
    """Error rates, between 0 and 1."""
    found = _numbers(name, value)
    if not bool(((found >= 0) & (found <= 1)).all()):
        raise ValueError(f"{name} must hold numbers from 0 to 1. Got {shown(value)}.")
    return value


def _budgets(name: str, value: Any) -> Any:
    """Divergences, 0 or more; infinite ones rule nothing out."""
    if not bool((_numbers(name, value) >= 0).all()):
        raise ValueError(f"{name} must hold numbers of 0 or more. Got {shown(value)}.")
    return value


def _numbers(name: str, value: Any) -> Tensor:
    """Numbers of any shape; truth values are none."""
    if isinstance(value, bool) or getattr(value, "dtype", None) in (torch.bool, np.bool_) or getattr(value, "is_meta", False):
        raise ValueError(f"{name} must hold numbers. Got {shown(value)}.")
    try:
        found = torch.as_tensor(value, dtype=torch.float64).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must hold numbers. Got {shown(value)}.") from error
    if not found.numel():
        raise ValueError(f"{name} must hold numbers. Got none.")
    return found


@checked(q=_rates, p=_rates)
def bernoulli_kl(q: Any, p: Any) -> Tensor:
    """`kl(q‖p) = q log(q/p) + (1−q) log((1−q)/(1−p))` of two error rates, in float64.

    >>> float(bernoulli_kl(0.0, 0.5)), float(bernoulli_kl(0.3, 0.3))
    (0.6931471805599453, 0.0)
    """
    q, p = (torch.as_tensor(value, dtype=torch.float64) for value in (q, p))
    return sum(torch.where(a > 0, torch.special.xlogy(a, a / b), 0.0) for a, b in ((q, p), (1 - q, 1 - p)))  # type: ignore[return-value]


@checked(q=_rates, budget=_budgets)
def kl_inverse(q: Any, budget: Any) -> Tensor:
    """`sup {p : kl(q‖p) ≤ budget}`: the largest error rate that an observed one leaves possible.

    Returns:
        Element by element, in float64; differentiable in both arguments.

    >>> round(float(kl_inverse(0.0, 1.0)), 12)        # 1 − exp(−1)
    0.632120558829
    >>> round(float(kl_inverse(0.02347, 0.06337)), 3)
    0.12
    """
    q, budget = (torch.as_tensor(value, dtype=torch.float64) for value in (q, budget))
    return _KLInverse.apply(*torch.broadcast_tensors(q, budget))  # type: ignore[no-any-return]


class _KLInverse(torch.autograd.Function):
    """The root by Newton's method; its derivatives by the implicit function theorem."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, budget: Tensor) -> Tensor:
        distance = _distance(q, budget)
        p = (q + distance).clamp(max=1.0)
        ctx.save_for_backward(q, p, distance)
        return p

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        q, p, distance = ctx.saved_tensors
        by_budget = p * (1 - p) / distance  # 1 / (∂kl/∂p)
        # −∂kl/∂q: the log of the ratio of odds
        slope = torch.log1p(distance / q) - torch.log1p(-distance / (1 - q))
        by_q = torch.where(distance > 0, by_budget * slope, torch.ones_like(q))
        certain = p >= 1
        return grad * by_q.masked_fill(certain, 0.0), grad * by_budget.masked_fill(certain, 0.0)


def _distance(q: Tensor, budget: Tensor) -> Tensor:
    """`p − q`, which is accurate where p is close to q; kl is convex in it, so Newton's steps from above never overshoot."""
    rest = 1 - q
    entropy = -torch.special.xlogy(q, q) - torch.special.xlogy(rest, rest)
    # Two upper bounds: Pinsker's, and kl(q‖p) ≥ −entropy − rest · log(1−p).
    ceiling = rest - torch.exp(-(budget + entropy) / rest)
    d = torch.minimum((budget / 2).sqrt(), ceiling).clamp(min=0.0)
    for _ in range(_STEPS):
        value = -torch.where(q > 0, q * torch.log1p(d / q), 0.0) - rest * torch.log1p(-d / rest)
        slope = d / ((q + d) * (rest - d))
        step = (value - budget) / slope
        usable = (slope > 0) & torch.isfinite(step) & (step > 0)
        if not bool(usable.any()):
            break
        d = torch.where(usable, (d - step).clamp(min=0.0), d)
    return torch.where(torch.isinf(budget) | (q >= 1), rest, torch.where(budget > 0, d, 0.0))


def budget_of(kl: float, n: int, delta: float, penalty: float = 0.0) -> float:
    """`(KL + penalty + log(2√n/δ)) / n`: what Maurer's form allows `kl(ê‖e)` to be."""
    return (kl + penalty + math.log(2 * math.sqrt(n) / delta)) / n


@checked(empirical=share, kl=nonnegative, n=count, delta=fraction, penalty=nonnegative)
def all_bounds(empirical: float, kl: float, n: int, delta: float = 0.025, penalty: float = 0.0) -> dict[str, float]:
    """Every form of the bound on the same numbers, by name.

    `"maurer"` inverts kl exactly; `"langford"` is the source's `(KL + log(n/δ)) / (n−1)`; `"pinsker"`, `"quadratic"` and
    `"lambda"` relax the inverse of Maurer's; `"catoni"` is linear for each of 25 temperatures, of which the best is taken and
    paid for by log 25.

    >>> found = all_bounds(0.02, 4000.0, 60_000)
    >>> min(found, key=found.get), round(found["maurer"], 4), round(found["pinsker"], 4)
    ('maurer', 0.117, 0.2028)
    """
    if n < FEWEST:
        raise ValueError(f"n must be {FEWEST} or more for these bounds to be proven. Got {n}.")
    half = budget_of(kl, n, delta, penalty) / 2
    source = (kl + penalty + math.log(n / delta)) / (n - 1)
    found = {
        "maurer": float(kl_inverse(empirical, 2 * half)),
        "langford": float(kl_inverse(empirical, source)),
        "pinsker": empirical + math.sqrt(half),
        "quadratic": (math.sqrt(empirical + half) + math.sqrt(half)) ** 2,
        "lambda": _lambda_bound(empirical, 2 * half),
        "catoni": _catoni(empirical, kl + penalty, n, delta),
    }
    return {name: min(value, 1.0) for name, value in found.items()}


def _lambda_bound(empirical: float, budget: float) -> float:
    """`min over λ in (0, 2) of ê/(1−λ/2) + B/(λ(1−λ/2))`, true of all λ at once (Thiemann and others 2017)."""
    best = 2 / (math.sqrt(2 * empirical / budget + 1) + 1)
    return empirical / (1 - best / 2) + budget / (best * (1 - best / 2))


#: Temperatures of Catoni's form, fixed beforehand.
TEMPERATURES = tuple(math.exp(i / 4) for i in range(-12, 13))


def _catoni(empirical: float, nats: float, n: int, delta: float) -> float:
    """`(1 − exp(−βê − (KL + log(25/δ))/n)) / (1 − exp(−β))` at the best of 25 temperatures β."""
    price = (nats + math.log(len(TEMPERATURES) / delta)) / n
    return min(-math.expm1(-t * empirical - price) / -math.expm1(-t) for t in TEMPERATURES)


@checked(errors=whole, n=count, delta=fraction)
def held_out_bound(errors: int, n: int, delta: float = 0.035) -> float:
    """The largest error rate at which `errors` or fewer of n held-out samples still have probability `delta`: exact binomial.

    Of one fixed classifier, on samples that had no part in its making.

    Returns:
        A bound that is true with probability `1 − delta` over the samples.

    >>> round(held_out_bound(0, 100, 0.05), 5)         # 1 − 0.05^(1/100)
    0.02951
    """
    if errors > n:
        raise ValueError(f"errors must be at most n = {n}. Got {errors}.")
    return 1.0 if errors == n else float(beta.ppf(1 - delta, errors + 1, n - errors))


# The grid of prior variances


@checked(variance=positive, precision=positive, ceiling=positive)
def grid_index(variance: float, precision: float = PRECISION, ceiling: float = CEILING) -> float:
    """`j = b log(c/λ)`: where a prior variance lies on the grid λ = c exp(−j/b).

    >>> round(grid_index(0.1 * math.exp(-0.36)), 9)
    36.0
    """
    return precision * math.log(ceiling / variance)


@checked(j=count)
def grid_penalty(j: int) -> float:
    """Nats that the choice of the j-th variance costs: `log(π² j² / 6)`, since Σ 6/(π² j²) = 1.

    >>> round(grid_penalty(1), 6)
    0.4977
    """
    return math.log(math.pi**2 * j**2 / 6)


@checked(variance=positive, precision=positive, ceiling=positive)
def rounded_variance(variance: float, precision: float = PRECISION, ceiling: float = CEILING) -> tuple[float, int]:
    """The nearest variance of the grid and its index j.

    >>> variance, j = rounded_variance(5.0)
    >>> j, round(variance, 6)
    (1, 0.099005)
    """
    j = max(1, round(grid_index(variance, precision, ceiling)))
    return ceiling * math.exp(-j / precision), j


@checked(
    ebar=share, kl=nonnegative, rho=finite, n=count, delta=fraction, precision=positive, ceiling=positive,
)  # fmt: skip
def bound_from_summary(
    ebar: float,
    kl: float,
    rho: float,
    n: int,
    delta: float = 0.025,
    precision: float = PRECISION,
    ceiling: float = CEILING,
) -> float:
    """The bound of the source from one row of its tables: error rate `ebar`, divergence, ρ = ½ log λ, number of samples.

    `kl⁻¹(ē | (KL + 2 log j + log(π² n / 6δ)) / (n−1))` with j = b (log c − 2ρ), at least 1: at j = 0 the form is not valid.

    >>> round(bound_from_summary(0.02347, 3766.1, -1.2913, 60_000), 4)     # T-600, ITER
    0.1198
    """
    if n < FEWEST:
        raise ValueError(f"n must be {FEWEST} or more. Got {n}.")
    j = max(1, round(precision * (math.log(ceiling) - 2 * rho)))
    nats = kl + 2 * math.log(j) + math.log(math.pi**2 * n / (6 * delta))
    return float(kl_inverse(ebar, nats / (n - 1)))


def total(penalty: Mapping[str, float] | float) -> float:
    """Nats of all unions together."""
    return math.fsum(penalty.values()) if isinstance(penalty, Mapping) else float(penalty)
