"""The best learning rate of a quadratic, and the descent to it along its meta-gradient."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from theodolite.arguments import also_called, checked, count, fraction, positive
from theodolite.measures.stepsize.quadratics.quadratic import Quadratic, Spectrum, quadratic_of
from theodolite.problem.arguments import numbers_in
from theodolite.progress import Advance, counting
from theodolite.results import Cost, Result, Row, number
from theodolite.text import plural

#: Rates that the search for the best one looks at in one round, in closed form and with products.
POINTS, FEWER_POINTS = 64, 16


@checked(steps=count, tol=fraction)
def optimal_rate(hessian: Any, w0: Any, steps: int, *, tol: float = 1e-13, progress: bool | None = None) -> OptimalRate:
    """The learning rate with the smallest `f(w_t)` of `f = ½ wᵀHw` after t steps from w₀.

    F' is negative below it, positive above it, and changes sign once, between 1/λ_max and 1/λ_min; that interval is divided
    until it is narrower than `tol` times the rate. `hessian` and `w0` are those of `stable_meta_gradient`; with products, t + 1
    of them are made for each of about a hundred rates.

    >>> round(optimal_rate(torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0]), 1_000_000).value, 6)      # → 2/(3 + 1)
    0.5
    """
    began = time.perf_counter()
    quadratic = quadratic_of(hessian, w0)
    with counting("rates tried", progress=progress) as advance:
        found = best_rate_of(quadratic, steps, tol, advance)
    value, curvature, log_loss, products = found
    return OptimalRate(
        value=value,
        curvature=curvature,
        log_value=log_loss,
        limit=quadratic.limit,
        steps=steps,
        products=products,
        cost=Cost(seconds=time.perf_counter() - began, route=quadratic.route),
    )


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class OptimalRate(Result):
    """The rate `value` with the smallest loss after `steps` steps, and the second derivative of (1/t) log f there.

    `log_value` is log f(w_t) at it, and `limit` the best rate for t → ∞, 2/(λ_max + λ_min); None where only products were made.
    """

    value: float
    curvature: float
    log_value: float
    limit: float | None
    steps: int
    products: int

    def rows(self) -> list[Row]:
        names = ("steps", "value", "curvature", "log_value", "limit", "products")
        return [{name: getattr(self, name) for name in names}]

    def sentence(self) -> str:
        later = "" if self.limit is None else f"; for very long runs it is {number(self.limit)}"
        return f"The best learning rate for {plural(self.steps, 'step')} is {number(self.value)}{later}."


class Best(NamedTuple):
    """The best rate, F'' and log f there, and the products that finding it took."""

    rate: float
    curvature: float
    log_loss: float
    products: int


def best_rate_of(quadratic: Quadratic, steps: int, tol: float, advance: Advance | None = None) -> Best:
    """The root of F' by cutting its bracket into many parts at once, and what the objective is there."""
    low, high = quadratic.bracket(steps)
    points, products = (POINTS if isinstance(quadratic, Spectrum) else FEWER_POINTS), 0

    def slopes(rates: Tensor) -> Tensor:
        nonlocal products
        found = quadratic.at(rates, steps)
        products += found.products
        if advance is not None:
            advance(len(rates))
        return found.slope

    rate = _sign_change(slopes, low, high, tol, points)
    there = quadratic.at(torch.tensor([rate], dtype=torch.float64), steps)
    if there.curvature is not None:
        curvature = float(there.curvature)
    else:
        around = slopes(torch.tensor([rate * (1 - 1e-5), rate * (1 + 1e-5)], dtype=torch.float64))
        curvature = float(around[1] - around[0]) / (2e-5 * rate)
    return Best(rate, curvature, float(there.log_loss), products + there.products)


def _sign_change(slopes: Callable[[Tensor], Tensor], low: float, high: float, tol: float, points: int) -> float:
    """Where slopes that are negative first and positive later change sign.

    >>> round(_sign_change(lambda x: x - 0.3, 0.0, 1.0, 1e-12, 10), 12)
    0.3
    """
    while high - low > tol * high:
        rates = torch.linspace(low, high, points + 2, dtype=torch.float64)
        left = int((slopes(rates[1:-1]) < 0).sum())
        before = high - low
        low, high = float(rates[left]), float(rates[left + 1])
        if not high - low < before:
            break  # two neighbouring numbers of float64
    return 0.5 * (low + high)


@also_called(lr="rate")
@checked(rate=numbers_in(least=0), steps=count, updates=count, meta_rate=positive)
def descend_rate(
    hessian: Any,
    w0: Any,
    rate: Any,
    steps: int,
    *,
    updates: int = 1000,
    meta_rate: float = 0.01,
    progress: bool | None = None,
) -> RateDescent:
    """Tune the learning rate by its meta-gradient: `η_k = max(0, η_{k−1} − meta_rate/√k · F'(η_{k−1}))`.

    F is (1/t) log f(w_t); `hessian`, `w0` and `steps` are those of `stable_meta_gradient`. It converges from any start; how soon
    its ripples around the best rate die out is `RateDescent.settles`.

    Args:
        hessian: As for `stable_meta_gradient`.
        w0: As for `stable_meta_gradient`.
        rate: (or `lr`) The first rate, or several that are tuned side by side.
        steps: t, the steps of gradient descent behind each update.
        updates: How many updates of the rate.
        meta_rate: The factor of 1/√k.
        progress: Show a bar; None does on a terminal.

    >>> found = descend_rate(torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0]), [0.1, 2.0], 5, updates=400, meta_rate=0.1)
    >>> found.converged
    [True, True]
    """
    began = time.perf_counter()
    quadratic = quadratic_of(hessian, w0)
    best = best_rate_of(quadratic, steps, 1e-13)
    now = torch.as_tensor(rate, dtype=torch.float64).detach().cpu().reshape(-1)
    rates, found = [now], [quadratic.at(now, steps)]
    with counting("updates of the rate", progress=progress, total=updates) as advance:
        for k in range(1, updates + 1):
            now = (now - meta_rate / math.sqrt(k) * found[-1].slope).clamp(min=0)
            rates.append(now)
            found.append(quadratic.at(now, steps))
            advance(1)
    return RateDescent(
        rates=torch.stack(rates),
        gradients=torch.stack([each.slope for each in found]),
        values=torch.stack([each.log_loss for each in found]) / steps,
        optimum=best.rate,
        curvature=best.curvature,
        steps=steps,
        meta_rate=meta_rate,
        method="stable meta-gradient",
        products=best.products + sum(each.products for each in found),
        cost=Cost(seconds=time.perf_counter() - began, route=quadratic.route),
    )


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class RateDescent(Result):
    """A learning rate as it was tuned: `rates`, `gradients` and `values` are (updates + 1, starts), at the start first.

    `gradients` are those used at each rate, of (1/t) log f(w_t) or as `method` says; `values` are (1/t) log f(w_t). `optimum` is
    the best rate and `curvature` the second derivative of (1/t) log f(w_t) there.
    """

    rates: Tensor
    gradients: Tensor
    values: Tensor
    optimum: float
    curvature: float
    steps: int
    meta_rate: float
    method: str
    products: int

    @property
    def updates(self) -> int:
        return len(self.rates) - 1

    @property
    def settles(self) -> float:
        """k from which `meta_rate/√k · F''(η*) < 2`: before it the rate jumps from one side of the best to the other."""
        return (self.meta_rate * self.curvature / 2) ** 2

    @property
    def ends(self) -> list[float]:
        """The median of the last hundred rates, or of the later half of fewer."""
        return self.rates[-min(100, max(1, len(self.rates) // 2)) :].quantile(0.5, dim=0).tolist()

    @property
    def converged(self) -> list[bool]:
        """Whether `ends` lies within 5 % of the best rate, for each start."""
        return [abs(end - self.optimum) <= 0.05 * self.optimum for end in self.ends]

    @checked(within=positive)
    def outside(self, within: float) -> list[int]:
        """For each start, the last update at which the rate was further than `within` from the best; −1 for none."""
        away = ~((self.rates - self.optimum).abs() <= within)
        return [int(column.nonzero().max()) if bool(column.any()) else -1 for column in away.T]

    def rows(self) -> list[Row]:
        columns = {"rate": self.rates, "gradient": self.gradients, "value": self.values}
        values = {name: column.double().tolist() for name, column in columns.items()}
        return [
            {"update": k, "start": float(start), **{name: column[k][i] for name, column in values.items()}}
            for i, start in enumerate(self.rates[0])
            for k in range(len(self.rates))
        ]

    def sentence(self) -> str:
        best = f"the best rate for {plural(self.steps, 'step')}, {number(self.optimum)}"
        if len(self.ends) > 1:
            share = f"{sum(self.converged)} of {len(self.ends)} starts are"
            return f"After {plural(self.updates, 'update')} {share} within 5 % of {best}."
        end = self.ends[0]
        if not math.isfinite(end):
            return f"After {plural(self.updates, 'update')} the rate is no number; {best}."
        where = f"within {100 * abs(end / self.optimum - 1):.2g} % of" if self.converged[0] else "away from"
        return f"After {plural(self.updates, 'update')} the rate is {number(end)}, {where} {best}."
