"""How far an unrolled meta-gradient can be trusted: plain autograd through t steps beside the stable form, on a quadratic.

Backpropagation through t steps of gradient descent forms `d log f/df = 1/f(w_t)`, which is exponentially large where the rate
is stable and exponentially small where it is not, and multiplies it by a number that is exponentially small or large in turn.
Once one of them leaves the range of the dtype, what comes back is 0, infinity or NaN. `unrolled_meta_gradient` and
`descend_unrolled` do this on purpose, as others do: they are what the stable form is compared with.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from theodolite.arguments import also_called, checked, count, nonnegative, one_of, one_or_each, positive, shown
from theodolite.interrupts import unbroken
from theodolite.measures.stepsize.quadratics.quadratic import Spectrum, dense_of, matrix_or_vector, spectrum_of, start_of
from theodolite.measures.stepsize.quadratics.quadratic_descent import RateDescent, best_rate_of
from theodolite.problem.arguments import numbers_in
from theodolite.progress import counting
from theodolite.results import Cost, Outcome, Result, Row
from theodolite.text import listed, plural

#: An unrolled gradient is right within this relative error, and is lost where it is 0 though the true one is larger than that.
RIGHT, NOTHING = 1e-2, 1e-12
#: What may become of an unrolled gradient.
OK, ZERO, INFINITE, NAN, WRONG = "ok", "zero", "inf", "nan", "wrong"
#: Where loss and weights lie in the range of the dtype.
INSIDE, TOO_LARGE, BOTH_TOO_LARGE, TOO_SMALL = "inside", "loss overflows", "loss and weights overflow", "loss underflows"


def _dtypes(name: str, value: Any) -> tuple[torch.dtype, ...]:
    """One dtype of real numbers or several."""
    given = (value,) if isinstance(value, torch.dtype) else value
    if (
        not isinstance(given, tuple | list)
        or not given
        or not all(isinstance(dtype, torch.dtype) and dtype.is_floating_point for dtype in given)
    ):
        raise ValueError(f"{name} must be torch.float32, torch.float64 or several such. Got {shown(value)}.")
    return tuple(given)


def _dtype(name: str, value: Any) -> torch.dtype:
    if isinstance(value, tuple | list):
        raise ValueError(f"{name} must be one dtype, such as torch.float32. Got {shown(value)}.")
    return _dtypes(name, value)[0]


@also_called(lr="rate")
@checked(rate=numbers_in(least=0), steps=count, dtype=_dtype)
def unrolled_meta_gradient(
    hessian: Any,
    w0: Any,
    rate: Any,
    steps: int,
    *,
    dtype: torch.dtype = torch.float32,
    divide_by_t: bool = False,
    detach_inner_grad: bool = False,
) -> Tensor:
    """`d/dη log f(w_t)` of `f = ½ wᵀHw` by unrolling t steps and backpropagating: what overflows. See `stable_meta_gradient`.

    Args:
        hessian: A symmetric matrix, or its eigenvalues (a vector): then f is ½ Σ λᵢ wᵢ², and overflows without mixed signs.
        w0: The start (n,).
        rate: (or `lr`) One learning rate, or a tensor of them.
        steps: t.
        dtype: In which all is computed.
        divide_by_t: Take (1/t) log f, as `stable_meta_gradient` does.
        detach_inner_grad: Leave out the derivative of the inner gradients ("no second derivatives"): another number.

    Returns:
        A tensor of that dtype in the shape of `rate`.

    >>> float(unrolled_meta_gradient(torch.tensor([4.0, 1.0]), torch.tensor([1.0, 1.0]), 1.0, 1000))
    nan
    >>> round(float(unrolled_meta_gradient(torch.tensor([4.0, 1.0]), torch.tensor([1.0, 1.0]), 1.0, 10, divide_by_t=True)), 6)
    2.666667
    """
    matrix, start = _tensors(hessian, w0)
    rates = torch.as_tensor(rate, dtype=torch.float64).detach()
    found = _unrolled(matrix.to(dtype), start.to(dtype), rates.reshape(-1).to(dtype), steps, detach_inner_grad)
    return (found / steps if divide_by_t else found).reshape(rates.shape)


def _unrolled(matrix: Tensor, start: Tensor, rates: Tensor, steps: int, detach: bool) -> Tensor:
    """d/dη log f(w_t) at rates (R,), each a column of its own."""
    with unbroken(torch.inference_mode(False)), torch.enable_grad():
        matrix, rates = matrix.clone(), rates.clone().requires_grad_()
        w = start.clone()[:, None].expand(-1, len(rates))  # (n, R)
        for _ in range(steps):
            gradient = _times(matrix, w)
            w = w - rates * (gradient.detach() if detach else gradient)
        loss = 0.5 * (w * _times(matrix, w)).sum(0)
        (found,) = torch.autograd.grad(loss.log().sum(), rates)
    return found.detach()


def _times(matrix: Tensor, w: Tensor) -> Tensor:
    return matrix[:, None] * w if matrix.ndim == 1 else matrix @ w


def _tensors(hessian: Any, w0: Any) -> tuple[Tensor, Tensor]:
    """The matrix, or the eigenvalues, and the start: autograd has to pass through the products."""
    if not isinstance(hessian, Tensor | np.ndarray):
        raise TypeError(
            "hessian must be a matrix or a vector of eigenvalues, since autograd passes through its products; "
            f"op.to_dense() makes a matrix of a small operator. Got {shown(hessian)}."
        )
    given = matrix_or_vector(hessian)
    matrix = given.double() if given.ndim == 1 and not given.is_complex() else dense_of(given)
    return matrix, start_of(w0, len(matrix), matrix.device)


@also_called(lr="rate")
@checked(
    rate=numbers_in(least=0), steps=count, updates=count, meta_rate=positive, clip=positive, dtype=_dtype,
    meta_optimizer=one_of("sgd", "rmsprop"),
)  # fmt: skip
def descend_unrolled(
    hessian: Any,
    w0: Any,
    rate: Any,
    steps: int,
    *,
    updates: int = 1000,
    meta_rate: float = 0.001,
    meta_optimizer: Literal["sgd", "rmsprop"] = "sgd",
    dtype: torch.dtype = torch.float32,
    divide_by_t: bool = False,
    detach_inner_grad: bool = False,
    nonfinite_to_zero: bool = True,
    clip: float = 1e4,
    progress: bool | None = None,
) -> RateDescent:
    """Tune the learning rate by unrolled meta-gradients, as others do: the negative control of `descend_rate`.

    Args:
        hessian: A symmetric matrix, or its eigenvalues.
        w0: The start (n,).
        rate: (or `lr`) The first rate, or several that are tuned side by side.
        steps: t, the steps of gradient descent that are unrolled for each update.
        updates: How many updates of the rate.
        meta_rate: The rate of the meta-optimizer, the same in all updates; nothing keeps the tuned rate above 0.
        meta_optimizer: "sgd", or "rmsprop" as TensorFlow 1 has it: decay 0.9, ε = 1e-10 under the root, no momentum, a mean
            square that begins at 1.
        dtype: In which all is computed.
        divide_by_t: Descend on (1/t) log f and not on log f.
        detach_inner_grad: See `unrolled_meta_gradient`.
        nonfinite_to_zero: Replace what is not finite by 0, so that the rate stays where it is.
        clip: Gradients are cut off at ± this.
        progress: Show a bar; None does on a terminal.

    >>> start = torch.tensor([1.0, 1.0])
    >>> found = descend_unrolled(torch.tensor([3.0, 1.0]), start, [3.0, 0.4], 200, updates=5, meta_optimizer="rmsprop")
    >>> found.rates[-1].tolist()[0], found.gradients[0].tolist()[0]              # stuck at 3.0
    (3.0, nan)
    """
    began = time.perf_counter()
    matrix, start = (part.to(dtype) for part in _tensors(hessian, w0))
    spectrum = spectrum_of(hessian, w0)
    best = best_rate_of(spectrum, steps, 1e-13)
    now = torch.as_tensor(rate, dtype=torch.float64).detach().reshape(-1).to(matrix.device, dtype)
    raw, mean_square = torch.full_like(now, math.nan), torch.ones_like(now)
    moves = torch.ones_like(now, dtype=torch.bool)
    rates, gradients = [now], []
    with counting("updates of the rate", progress=progress, total=updates) as advance:
        for _ in range(updates):
            if bool(moves.any()):  # a gradient of 0 leaves a rate as it is, and so the next one is 0 again
                raw = raw.clone()
                raw[moves] = _unrolled(matrix, start, now[moves], steps, detach_inner_grad) / (steps if divide_by_t else 1)
                used = torch.where(raw.isfinite(), raw, 0.0) if nonfinite_to_zero else raw
                used = used.clamp(-clip, clip)
                mean_square = 0.9 * mean_square + 0.1 * used.square()
                scale = (mean_square + 1e-10).sqrt() if meta_optimizer == "rmsprop" else 1.0
                now = now - meta_rate * used / scale
                moves = used != 0
            rates.append(now)
            gradients.append(raw)
            advance(1)
    path = torch.stack(rates).double().cpu()
    return RateDescent(
        rates=path,
        gradients=torch.stack([*gradients, torch.full_like(now, math.nan)]).double().cpu(),
        values=spectrum.at(path.reshape(-1), steps).log_loss.reshape(path.shape) / steps,
        optimum=best.rate,
        curvature=best.curvature,
        steps=steps,
        meta_rate=meta_rate,
        method=f"unrolled, {_name(dtype)}, {meta_optimizer}",
        products=0,
        outcome=Outcome.FINISHED,
        cost=Cost(seconds=time.perf_counter() - began, route="autograd"),
    )


@also_called(lr="rates")
@checked(rates=one_or_each(nonnegative), steps=one_or_each(count), dtype=_dtypes)
def meta_gradient_health(
    hessian: Any,
    w0: Any,
    rates: Any,
    steps: Any,
    *,
    dtype: Any = (torch.float32, torch.float64),
    progress: bool | None = None,
) -> MetaGradientHealth:
    """Where plain autograd through t steps gives the meta-gradient, and where 0, infinity, NaN or a wrong number.

    `d/dη (1/t) log f(w_t)` of `f = ½ wᵀHw` by backpropagation beside `stable_meta_gradient`, for each horizon, rate and dtype.

    Args:
        hessian: A symmetric matrix without negative eigenvalues, or its eigenvalues (a vector).
        w0: The start (n,), or its coefficients in the eigenvectors.
        rates: (or `lr`) Learning rates, 0 or more.
        steps: One horizon t or several.
        dtype: One dtype or several.
        progress: Show a bar; None does on a terminal.

    Returns:
        A `MetaGradientHealth`, whose `table` has a row for each horizon, rate and dtype.

    >>> start, single = torch.tensor([1.0, 1.0]), torch.float32
    >>> found = meta_gradient_health(torch.tensor([4.0, 1.0]), start, [0.4, 1.0], [10, 50], dtype=single)
    >>> [row["health"] for row in found.table]                                   # t = 10, then t = 50
    ['ok', 'ok', 'ok', 'zero']
    """
    began = time.perf_counter()
    rates = rates if isinstance(rates, list) else [rates]
    horizons = steps if isinstance(steps, list) else [steps]
    matrix, start = _tensors(hessian, w0)
    spectrum = spectrum_of(hessian, w0)
    table: list[Row] = []
    with counting("horizons and dtypes", progress=progress, total=len(horizons) * len(dtype)) as advance:
        for each_dtype in dtype:
            for t in horizons:
                table.extend(_judged(spectrum, matrix, start, torch.tensor(rates, dtype=torch.float64), t, each_dtype))
                advance(1)
    return MetaGradientHealth(table=tuple(table), cost=Cost(seconds=time.perf_counter() - began, route="autograd"))


def _judged(spectrum: Spectrum, matrix: Tensor, start: Tensor, rates: Tensor, steps: int, dtype: torch.dtype) -> Iterator[Row]:
    """A row for each rate."""
    exact = spectrum.at(rates, steps)
    norms = spectrum.log_norm(rates, steps) / math.log(10)
    losses = exact.log_loss / math.log(10)
    found = _unrolled(matrix.to(dtype), start.to(dtype), rates.to(matrix.device, dtype), steps, False).double().cpu() / steps
    columns = (rates, found, exact.slope, losses, norms)
    for rate, gradient, truth, loss, norm in zip(*(column.tolist() for column in columns), strict=True):
        error = abs(gradient - truth) / max(abs(truth), NOTHING)
        yield {
            "steps": steps,
            "rate": rate,
            "dtype": _name(dtype),
            "autograd": gradient,
            "exact": truth,
            "error": error,
            "health": _health(gradient, truth, error),
            "log10_loss": loss,
            "log10_weights": norm,
            "range": _range(loss, norm, dtype),
        }


def _health(gradient: float, truth: float, error: float) -> str:
    if math.isnan(gradient):
        return NAN
    if math.isinf(gradient):
        return INFINITE
    if gradient == 0 and abs(truth) > NOTHING:
        return ZERO
    return OK if error < RIGHT else WRONG


def _range(log10_loss: float, log10_weights: float, dtype: torch.dtype) -> str:
    """Where a loss and weights of these sizes lie in the range of a dtype."""
    most, least = math.log10(torch.finfo(dtype).max), math.log10(torch.finfo(dtype).smallest_normal)
    if log10_loss > most:
        return BOTH_TOO_LARGE if log10_weights > most else TOO_LARGE
    return TOO_SMALL if log10_loss < least else INSIDE


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class MetaGradientHealth(Result):
    """What autograd made of the meta-gradient, a row for each dtype, horizon and rate.

    `health` is "ok" (right within 1 %), "zero" (exactly 0, where the true one is not), "inf", "nan" or "wrong"; `error` is
    relative to the `exact` one. `range` says what the size of the loss f(w_t) foretells: "loss overflows" gives 0 (1/∞), "loss
    and weights overflow" and "loss underflows" give NaN, the last one not at once: numbers below the smallest normal one first
    lose digits. A dense matrix mixes the signs of what overflows and may give NaN for 0.
    """

    table: tuple[Row, ...]

    @property
    def horizons(self) -> dict[tuple[str, float], int]:
        """By dtype and rate, the longest horizon tried up to which all gradients are right; 0 where none is."""
        found: dict[tuple[str, float], int] = {}
        for key in dict.fromkeys((row["dtype"], row["rate"]) for row in self.table):
            tried = sorted((row["steps"], row["health"]) for row in self.table if (row["dtype"], row["rate"]) == key)
            broken = next((i for i, (_, health) in enumerate(tried) if health != OK), len(tried))
            found[key] = tried[broken - 1][0] if broken else 0
        return found

    @property
    def foretold(self) -> float:
        """The share of the cases in which the size of the loss alone says whether the gradient is right."""
        agree = [bool((row["health"] == OK) == (row["range"] == INSIDE)) for row in self.table]
        return sum(agree) / len(agree)

    def rows(self) -> list[Row]:
        return [dict(row) for row in self.table]

    def sentence(self) -> str:
        dtypes = dict.fromkeys(row["dtype"] for row in self.table)
        counted = []
        for dtype in dtypes:
            own = [row for row in self.table if row["dtype"] == dtype]
            counted.append(f"{sum(row['health'] == OK for row in own)} of {len(own)} in {dtype}")
        text = f"Meta-gradients by autograd that are right: {listed(counted)}."
        first = min((row for row in self.table if row["health"] != OK), key=lambda row: row["steps"], default=None)
        if first is None:
            return text
        what = {ZERO: "exactly 0", NAN: "no number", INFINITE: "infinite", WRONG: "wrong"}[first["health"]]
        return (
            f"{text} At rate {first['rate']:.4g} the one of {first['dtype']} is {what} after {plural(first['steps'], 'step')}, "
            f"where the loss is 10^{first['log10_loss']:.0f}."
        )
