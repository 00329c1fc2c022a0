"""`trace`: Hutchinson, Hutch++ and XTrace, each with an honest standard error.

All three draw vectors uniformly on the sphere of radius √n: rotation-invariant, unbiased, and exact for
multiples of the identity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from theodolite.arguments import choice, fraction, integer, random_seed
from theodolite.linalg.lockstep import solve
from theodolite.operators import LinearOperator
from theodolite.results import Cost, Outcome, Result, Row

Method = Literal["hutch++", "hutchinson", "xtrace"]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class TraceEstimate(Result):
    """An estimated trace with its standard error from `samples` exchangeable terms."""

    value: float
    stderr: float
    matvecs: int
    samples: int
    method: str

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """A t-interval that holds the trace with probability `level`."""
        from scipy.stats import t

        half = float(t.ppf(0.5 + fraction("level", level) / 2, max(1, self.samples - 1))) * self.stderr
        return self.value - half, self.value + half

    def rows(self) -> list[Row]:
        names = ("value", "stderr", "method", "matvecs", "seed")
        return [{"quantity": "trace", **{name: getattr(self, name) for name in names}}]

    def sentence(self) -> str:
        return f"trace = {self.value:.5g} ± {self.stderr:.2g} ({self.method}, {self.matvecs} products)."


@dataclass(frozen=True)
class _Terms:
    """Exchangeable estimates of the trace whose mean is the answer."""

    values: Tensor
    matvecs: int
    inflation: float = 1.0  # of the standard error, where the terms depend on one another


Steps = Generator[Tensor, Tensor, _Terms]
Draw = Callable[[int], Tensor]


def trace(op: Any, *, matvecs: int = 100, method: Method = "hutch++", seed: int = 0, progress: bool | None = None) -> Any:
    """The trace of a square operator (a `TraceEstimate`), or of each one of a mapping in lockstep.

    `"hutchinson"` averages `zᵀAz`; `"hutch++"` treats a sketched top subspace exactly and averages the rest;
    `"xtrace"` uses every vector for both and is the most accurate for decaying spectra.

    Returns:
        A `TraceEstimate`: `value`, its standard `error` and the `matvecs` spent; of a mapping, one by name.

    >>> import torch
    >>> round(trace(torch.eye(5).double() * 2, matvecs=12).value, 9)
    10.0
    """
    choice("method", method, _METHODS)
    least = {"hutchinson": 2, "hutch++": 6, "xtrace": 4}[method]
    seed = random_seed(seed)
    integer("matvecs", matvecs, least=least, wanted=f"an integer of at least {least} for {method!r}")

    def steps(_: str, operator: LinearOperator) -> Steps:
        if operator.shape[0] != operator.shape[1]:
            raise ValueError(f"trace needs a square operator. Got shape {operator.shape}.")
        n, generator = operator.shape[0], torch.Generator().manual_seed(seed)

        def draw(count: int) -> Tensor:
            """Columns uniform on the sphere of radius √n."""
            x = torch.randn(n, count, generator=generator, dtype=torch.float64).to(operator.device)
            columns: Tensor = x * (math.sqrt(n) / x.norm(dim=0))
            return columns

        return _METHODS[method](n, matvecs, draw)

    def result(_: LinearOperator, terms: _Terms, cost: Cost) -> TraceEstimate:
        value, stderr = mean_and_error(terms.values, terms.inflation)
        return TraceEstimate(
            value=value,
            stderr=stderr,
            matvecs=terms.matvecs,
            samples=len(terms.values),
            method=method,
            outcome=Outcome.ESTIMATED,
            seed=seed,
            cost=cost,
        )

    return solve(op, "trace", steps, result, progress=progress, total=lambda _: matvecs)


def mean_and_error(values: Tensor, inflation: float = 1.0) -> tuple[float, float]:
    """Mean and standard error; the error never falls below the rounding of the mean."""
    mean = float(values.mean())
    spread = inflation * float(values.std()) / math.sqrt(len(values))
    return mean, max(spread, 8 * torch.finfo(values.dtype).eps * abs(mean))


def _hutchinson(n: int, matvecs: int, draw: Draw) -> Steps:
    z = draw(matvecs)
    az = yield z
    return _Terms((z * az.double()).sum(0), matvecs)


def _hutch_plus_plus(n: int, matvecs: int, draw: Draw) -> Steps:
    sketch = min(matvecs // 3, n)
    image = yield draw(sketch)
    q, _ = torch.linalg.qr(image.double())
    aq = yield q
    top = (q * aq.double()).sum()
    count = matvecs - 2 * sketch
    z = draw(count)
    z = z - q @ (q.T @ z)
    if n - q.shape[1] <= 0:
        return _Terms(top.expand(2), 2 * sketch)
    z = z * (math.sqrt(n - q.shape[1]) / z.norm(dim=0))
    az = yield z
    return _Terms(top + (z * az.double()).sum(0), 2 * sketch + count)


def _xtrace(n: int, matvecs: int, draw: Draw) -> Steps:
    """Leave-one-out Hutch++: the basis without column i is Q(I − s sᵀ), s the unit i-th column of R⁻ᵀ."""
    m = min(matvecs // 2, n)
    omega = draw(m)
    y = (yield omega).double()
    q, r = torch.linalg.qr(y)
    z = (yield q).double()
    if m == n or _rank_deficient(r):
        # The sketch holds the whole range of A, so the trace on it is exact.
        return _Terms((q * z).sum().expand(2), 2 * m)
    h, w, t = q.T @ z, q.T @ omega, z.T @ omega
    s = torch.linalg.solve_triangular(r, torch.eye(m, dtype=r.dtype, device=r.device), upper=True).T
    s = s / s.norm(dim=0)
    c = w - s * (s * w).sum(0)
    quadratic = (w * r).sum(0) - (t * c).sum(0) - (c * r).sum(0) + (c * (h @ c)).sum(0)
    scale = (n - m + 1) / (n - c.square().sum(0)).clamp(min=1e-300)
    # The terms share all but one vector, so their spread understates the error. Calibrated over flat,
    # decaying and outlier spectra with n = 100 and 1000, and frozen.
    inflation = 1.1 * (1 - m / (n + 1)) ** -0.5
    return _Terms(h.trace() - (s * (h @ s)).sum(0) + scale * quadratic, 2 * m, inflation)


def _rank_deficient(r: Tensor) -> bool:
    diagonal = r.diagonal().abs()
    return float(diagonal.min()) <= 1e-13 * max(float(diagonal.max()), 1e-300)


_METHODS: dict[str, Callable[[int, int, Draw], Steps]] = {
    "hutch++": _hutch_plus_plus,
    "hutchinson": _hutchinson,
    "xtrace": _xtrace,
}
