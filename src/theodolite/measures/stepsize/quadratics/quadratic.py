"""How the loss after t steps of gradient descent on a quadratic changes with the learning rate, without overflow for any t.

On `f(w) = ½ wᵀHw` with eigenvalues λᵢ of H and coefficients cᵢ of w₀ in its eigenvectors, t steps at the rate η give

    f(w_t) = ½ Σ cᵢ² λᵢ zᵢ^(2t),   zᵢ = 1 − ηλᵢ,
    F(η) = (1/t) log f(w_t),   F'(η) = −2 Σ pᵢ λᵢ/zᵢ,   pᵢ ∝ cᵢ² λᵢ zᵢ^(2t),   Σ pᵢ = 1.

f(w_t) leaves the range of float64 after some hundred steps at a rate that is too large. The shares pᵢ and F' never do, so they
are computed from logarithms: in closed form where the eigenvalues are at hand, and by products with H where they are not. The
loss itself is kept as its logarithm. A quadratic whose minimum is not at 0 is one in w − w*.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from theodolite.arguments import also_called, checked, count, one_of, shown
from theodolite.operators import LinearOperator, as_operator
from theodolite.problem.arguments import a_finite_tensor, as_finite_tensor, numbers_in
from theodolite.progress import Advance, counting
from theodolite.results import Cost, Result, Row, number
from theodolite.text import plural

Array = NDArray[np.float64]
Objective = Literal["log_last", "last"]

#: |1 − ηλ| is not known better than this where it is zero.
SMALLEST = 1e-17
#: ηλ counts as this where it is more.
LARGEST = 1e307
#: Relative error of f that rounding may cause with products before it is refused.
ROUNDED = 0.05


class Slopes(NamedTuple):
    """log f(w_t), F' and F'' at each rate: (R,) each, and the products that were made for them."""

    log_loss: Tensor
    slope: Tensor
    curvature: Tensor | None
    products: int = 0


@dataclass(frozen=True, eq=False)
class Spectrum:
    """A quadratic by its eigenvalues (n,), all positive, and log cᵢ² (n,): everything in closed form.

    In NumPy, whose calls on a few numbers take a tenth of the time: a descent on the rate is thousands of them.
    """

    values: Array
    log_weights: Array

    route = "eigenvalues"

    def at(self, rates: Tensor, steps: int, advance: Advance | None = None) -> Slopes:
        """The objective at rates (R,)."""
        z = self._factors(rates)
        top, parts = _scaled(self.log_weights + np.log(self.values) + 2 * steps * np.log(np.abs(z)))
        total = parts.sum(1)
        shares, ratio = parts / total[:, None], self.values / z
        mean = (shares * ratio).sum(1)
        spread = (shares * np.square(ratio - mean[:, None])).sum(1)
        # From F'' = 2(2t−1) E[(λ/z)²] − 4t E[λ/z]², without the difference of two large numbers.
        curvature = (4 * steps - 2) * spread - 2 * np.square(mean)
        log_loss = top + np.log(total) - math.log(2)
        return Slopes(torch.from_numpy(log_loss), torch.from_numpy(-2 * mean), torch.from_numpy(curvature))

    def log_norm(self, rates: Tensor, steps: int) -> Tensor:
        """log ‖w_t‖ over the directions of curvature: (R,)."""
        top, parts = _scaled(self.log_weights + 2 * steps * np.log(np.abs(self._factors(rates))))
        return torch.from_numpy(0.5 * (top + np.log(parts.sum(1))))

    def _factors(self, rates: Tensor) -> Array:
        """z = 1 − ηλ, (R, n); never 0."""
        known = np.minimum(rates.numpy(), LARGEST / self.values.max())
        z: Array = 1 - known[:, None] * self.values
        z[z == 0] = SMALLEST
        return z

    def bracket(self, steps: int) -> tuple[float, float]:
        """1/λ_max and 1/λ_min, between which the best rate lies."""
        return 1 / float(self.values.max()), 1 / float(self.values.min())

    @property
    def limit(self) -> float:
        """2/(λ_max + λ_min), the best rate for t → ∞."""
        return 2 / float(self.values.max() + self.values.min())


def _scaled(terms: Array) -> tuple[Array, Array]:
    """exp(terms) (R, n) over its largest entry in each row, and the logarithm of that."""
    top = terms.max(1)
    return top, np.exp(terms - top[:, None])


@dataclass(frozen=True, eq=False)
class Products:
    """A quadratic by its products, all rates as columns of one block.

    Since `dw_t/dη = −t H w_{t−1}` on a quadratic, `F' = −2 ⟨Hw_t, Hw_{t−1}⟩ / ⟨w_t, Hw_t⟩`: no tangent is carried along. The
    iterate is kept as a direction, and its length as a logarithm.
    """

    op: LinearOperator
    start: Tensor

    limit = None

    @property
    def route(self) -> str:
        return f"products: {self.op.cost().route}"

    def at(self, rates: Tensor, steps: int, advance: Advance | None = None) -> Slopes:
        """The objective at rates (R,); R columns are multiplied in each step."""
        rates = rates.to(self.start.device)
        scale = 1 / rates.clamp(min=1.0)  # large rates are divided out, so that no single step overflows
        length = self.start.norm()
        w = (self.start / length)[:, None].repeat(1, len(rates))  # (n, R)
        logs = length.log() - steps * scale.log()
        size, step = torch.ones_like(scale), scale * rates
        before = image = self._times(w)
        curved = image.norm(dim=0)
        for _ in range(steps):
            before = image
            w = scale * w - step * before
            size = w.norm(dim=0)
            size = torch.where(size > 0, size, 1.0)
            w, logs = w / size, logs + size.log()
            image = self._times(w)
            if advance is not None:
                advance(len(rates))
        twice = (w * image).sum(0)  # 2f
        self._refuse_rounded(w, twice, torch.maximum(curved, image.norm(dim=0)), rates, steps)
        slope = (-2 * (image * before).sum(0) * (scale / size) / twice).masked_fill(twice <= 0, 0.0)
        log_loss = (twice.clamp(min=0) / 2).log() + 2 * logs
        return Slopes(log_loss.cpu(), slope.cpu(), None, (steps + 1) * len(rates))

    def _refuse_rounded(self, w: Tensor, twice: Tensor, curved: Tensor, rates: Tensor, steps: int) -> None:
        """Where ⟨w, Hw⟩ of directions w is below 0, or not known from the rounding of Hw (of size `curved`), there is no loss."""
        noise = torch.finfo(self.op.dtype).eps * curved
        if bool((twice < -100 * noise).any()):
            raise ValueError(_NEGATIVE.format(f"wᵀHw = {float(twice.min()):.3g} for some w of length 1"))
        lost = (noise > ROUNDED * twice) & (w != 0).any(0)
        if bool(lost.any()):
            raise ValueError(
                f"w0 must have no large part along which the loss is flat: after {plural(steps, 'step')} at rate "
                f"{float(rates[lost][0]):.4g} the loss is lost in the rounding of its products. Leave that part out, use a "
                "float64 model, or give the matrix itself."
            )

    def _times(self, x: Tensor) -> Tensor:
        return self.op @ x

    def bracket(self, steps: int) -> tuple[float, float]:
        """Two rates between which F' changes sign: from ⟨w, Hw⟩/‖Hw‖², which lies between 1/λ_max and 1/λ_min, upwards."""
        image = self._times(self.start)
        rate = float((self.start * image).sum() / image.square().sum())
        low = 0.0
        while True:
            rates = rate * 2.0 ** torch.arange(8, dtype=torch.float64)
            falls = self.at(rates, steps).slope < 0
            if not bool(falls.all()):
                left = int(falls.sum())
                return (float(rates[left - 1]) if left else low), float(rates[left])
            low, rate = float(rates[-1]), 2 * float(rates[-1])


Quadratic = Spectrum | Products

_NEGATIVE = (
    "hessian must have no negative eigenvalues: the loss ½ wᵀHw would have no minimum. Got {}. "
    "The Gauss-Newton matrix (theodolite.gauss_newton) never has any."
)
_FLAT = "w0 must have a part along which the loss is curved: here the loss is 0 whatever the rate. Name another start."


@also_called(lr="rate")
@checked(rate=numbers_in(least=0), steps=count, objective=one_of("log_last", "last"))
def stable_meta_gradient(
    hessian: Any,
    w0: Any,
    rate: Any,
    steps: int,
    *,
    objective: Objective = "log_last",
    progress: bool | None = None,
) -> StableMetaGradient:
    """`d/dη (1/t) log f(w_t)` of `f = ½ wᵀHw` after t steps of gradient descent from w₀: finite for any t and any rate.

    Where unrolling and backpropagating gives 0 or NaN, this is right to about 1e-10.

    Args:
        hessian: A symmetric matrix without negative eigenvalues, or its eigenvalues (a vector): closed form, in float64. Or any
            `LinearOperator` (such as `theodolite.gauss_newton(problem)`), SciPy or curvlinops operator: t + 1 products for each
            rate, all rates in one block.
        w0: The start (n,), measured from the minimum; with eigenvalues, its coefficients in the eigenvectors. With products, a
            large part in directions without curvature is refused once a small loss is lost in its rounding.
        rate: (or `lr`) One learning rate or a tensor of them, 0 or more.
        steps: t, at least 1.
        objective: "log_last" is (1/t) log f(w_t), with the factor 1/t; "last" is f(w_t) itself, which may leave the range of
            float64: `log_value`, `log_gradient` and `sign` do not.
        progress: Show a bar while products are made; None does on a terminal.

    Returns:
        A `StableMetaGradient`, whose tensors have the shape of `rate`.

    >>> found = stable_meta_gradient(torch.tensor([4.0, 1.0]), torch.tensor([1.0, 1.0]), 1.0, 1_000_000)
    >>> round(float(found.gradient), 9), round(float(found.value), 6)          # 2 · 4/3 and 2 log 3
    (2.666666667, 2.197225)
    """
    began = time.perf_counter()
    quadratic = quadratic_of(hessian, w0)
    rates = torch.as_tensor(rate, dtype=torch.float64).detach().cpu()
    total = steps * rates.numel() if isinstance(quadratic, Products) else 1
    with counting("steps of gradient descent", progress=progress, total=total) as advance:
        found = quadratic.at(rates.reshape(-1), steps, advance)
    value, gradient, second = (
        _last(found, steps) if objective == "last" else (found.log_loss / steps, found.slope, found.curvature)
    )
    return StableMetaGradient(
        rate=rates,
        value=value.reshape(rates.shape),
        gradient=gradient.reshape(rates.shape),
        second=None if second is None else second.reshape(rates.shape),
        log_value=found.log_loss.reshape(rates.shape),
        log_gradient=_log_gradient(found, steps).reshape(rates.shape),
        sign=found.slope.sign().reshape(rates.shape),
        steps=steps,
        objective=objective,
        products=found.products,
        cost=Cost(seconds=time.perf_counter() - began, route=quadratic.route),
    )


def _log_gradient(found: Slopes, steps: int) -> Tensor:
    """log |df(w_t)/dη|, from f' = f · t F'."""
    return found.log_loss + found.slope.abs().log() + math.log(steps)


def _last(found: Slopes, steps: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """f(w_t) and its derivatives: f'' = f · ((t F')² + t F'')."""
    gradient = found.slope.sign() * _log_gradient(found, steps).exp()
    if found.curvature is None:
        return found.log_loss.exp(), gradient, None
    bent = (steps * found.slope).square() + steps * found.curvature
    return found.log_loss.exp(), gradient, bent.sign() * torch.exp(found.log_loss + bent.abs().log())


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class StableMetaGradient(Result):
    """How the loss after `steps` steps depends on the learning rate; every tensor has the shape of `rate`.

    `value`, `gradient` and `second` (None where only products were made) are the `objective` and its derivatives in the rate.
    `log_value`, `log_gradient` and `sign` are the natural logarithms of f(w_t) and |df(w_t)/dη| and the sign of the latter,
    whatever the objective: they stay finite where the loss itself does not. With one eigenvalue λ and η = 1/λ the loss would be 0
    and its logarithm have a pole: |1 − ηλ| counts as 1e-17 there. `products` counts columns multiplied by the Hessian.
    """

    rate: Tensor
    value: Tensor
    gradient: Tensor
    log_value: Tensor
    log_gradient: Tensor
    sign: Tensor
    second: Tensor | None
    steps: int
    objective: str
    products: int

    @property
    def log10_loss(self) -> Tensor:
        """The decimal logarithm of f(w_t): outside ±38 it is out of the range of float32, outside ±308 of float64."""
        return self.log_value / math.log(10)

    def rows(self) -> list[Row]:
        names = [
            "rate",
            "value",
            "gradient",
            "log_value",
            "log_gradient",
            "sign",
            *(["second"] if self.second is not None else []),
        ]
        columns = [getattr(self, name).reshape(-1).tolist() for name in names]
        return [{**dict(zip(names, values, strict=True)), "steps": self.steps} for values in zip(*columns, strict=True)]

    def sentence(self) -> str:
        what = "(1/t) log f" if self.objective == "log_last" else "f"
        if self.rate.numel() == 1:
            way = {1: "rises", -1: "falls", 0: "stands still"}[int(self.sign)]
            slope = f": d/dη {what} = {number(float(self.gradient))}" if math.isfinite(float(self.gradient)) else ""
            where = f"After {plural(self.steps, 'step')} at rate {float(self.rate):.4g} the loss is {_power(self.log10_loss)}"
            return f"{where}; it {way} with the rate{slope}."
        best = int(self.log_value.reshape(-1).argmin())
        rate, loss = float(self.rate.reshape(-1)[best]), _power(self.log10_loss.reshape(-1)[best])
        return f"Of {self.rate.numel()} rates, {rate:.4g} has the smallest loss after {plural(self.steps, 'step')}, {loss}."


def _power(log10: Tensor) -> str:
    """A number by its decimal logarithm, which may be far out of range.

    >>> _power(torch.tensor(-2.0)), _power(torch.tensor(1143.42)), _power(torch.tensor(-math.inf))
    ('0.01', '10^1143.4', '0')
    """
    exponent = float(log10)
    return f"{10**exponent:.4g}" if abs(exponent) < 100 or exponent == -math.inf else f"10^{exponent:.1f}"


# What a quadratic may be given as


def quadratic_of(hessian: Any, w0: Any) -> Quadratic:
    """The quadratic of a matrix, of eigenvalues or of an operator, with the start: checked, in float64."""
    if isinstance(hessian, Tensor | np.ndarray):
        return spectrum_of(hessian, w0)
    op = as_operator(hessian, name="hessian")
    _refuse_unsymmetric(op)
    start = start_of(w0, op.shape[1], op.device)
    image = op @ start
    curved = float(start @ image)
    if curved < 0:
        raise ValueError(_NEGATIVE.format(f"w0ᵀHw0 = {curved:.3g}"))
    if not curved > 0:
        raise ValueError(_FLAT)
    return Products(op, start)


def spectrum_of(hessian: Tensor | np.ndarray, w0: Any) -> Spectrum:
    """From a matrix, or from eigenvalues; directions without curvature or without a part of w₀ are left out."""
    given = matrix_or_vector(hessian)
    if given.ndim == 1 and len(given) and not given.is_complex():
        values, noise = given.double(), 0.0
        coefficients = start_of(w0, len(values), values.device)
    else:
        values, vectors = torch.linalg.eigh(dense_of(given))
        noise = len(values) * torch.finfo(torch.float64).eps * float(values.abs().max())
        coefficients = vectors.T @ start_of(w0, len(values), values.device)
    if float(values.min()) < -noise:
        raise ValueError(_NEGATIVE.format(f"{float(values.min()):.3g}"))
    seen = (values > noise) & (coefficients != 0)
    if not bool(seen.any()):
        raise ValueError(_FLAT)
    return Spectrum(values[seen].cpu().numpy(), 2 * coefficients[seen].abs().log().cpu().numpy())


def matrix_or_vector(hessian: Tensor | np.ndarray) -> Tensor:
    """A tensor of finite numbers that is not sparse."""
    if isinstance(hessian, Tensor) and hessian.layout != torch.strided:
        hessian = hessian.to_dense()
    return as_finite_tensor("hessian", hessian).detach()


def dense_of(matrix: Tensor) -> Tensor:
    """A symmetric matrix in float64; refuses others."""
    if matrix.ndim != 2:
        raise ValueError(f"hessian must be a symmetric matrix, a vector of eigenvalues or an operator. Got {shown(matrix)}.")
    op = as_operator(matrix, name="hessian")
    _refuse_unsymmetric(op)
    dense = op.to_dense().double()
    return 0.5 * (dense + dense.T)


def _refuse_unsymmetric(op: LinearOperator) -> None:
    if op.shape[0] != op.shape[1]:
        raise ValueError(f"hessian must be square. Got {op.shape[0]} x {op.shape[1]}.")
    if not op.symmetric:
        raise ValueError("hessian must be symmetric. Got one that is not; 0.5 * (A + A.T) of a matrix A is.")


def start_of(w0: Any, n: int, device: torch.device) -> Tensor:
    """The start (n,) in float64, beside the Hessian."""
    start = a_finite_tensor("w0", w0) if isinstance(w0, Tensor) else as_finite_tensor("w0", w0)
    if start.shape != (n,) or start.is_complex():
        raise ValueError(f"w0 must be a vector of {n} real numbers, as the hessian has {n} columns. Got {shown(start)}.")
    return start.detach().to(device=device, dtype=torch.float64)
