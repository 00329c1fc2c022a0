"""Least squares over a stream: the Gram matrix and its right-hand sides, in float64, whatever the number of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

#: Directions whose eigenvalue is below this fraction of the largest, after scaling the columns, are left out of a solution:
#: those along which the scaled columns are a millionth of their largest.
CUTOFF = 1e-12
SAFE_PIVOT = 1e-9
#: Rows widened to float64 at a time.
ROWS = 1024


@dataclass(eq=False)
class NormalEquations:
    """Sums over rows h (d,) with targets y (K,); a constant column is added, which a fit may use or not.

    Memory is (d + 1)² numbers. `+` joins two parts of a stream. Errors are differences of sums, so sums are taken of what a
    `reference` fit (d + 1, K) leaves of the targets: where that is good, an exact fit shows as one to the last digits.

    >>> x = torch.arange(6.0)[:, None]
    >>> sums = NormalEquations(1, 1)
    >>> sums.update(x, 2 * x + 1)
    >>> fit = sums.solve(intercept=True)
    >>> fit.round(decimals=6).tolist(), round(float(sums.mse(fit)[0]), 9)
    ([[2.0], [1.0]], 0.0)
    """

    dim: int
    targets: int
    rows: int = 0
    reference: Tensor | None = None
    gram: Tensor = field(init=False)  # (d + 1, d + 1)
    cross: Tensor = field(init=False)  # (d + 1, K), with what the reference leaves, and so are the squares
    squares: Tensor = field(init=False)  # (K,)
    shift: Tensor | None = field(init=False, default=None)  # (K,), the first targets: far from 0 their variance would cancel
    sums: Tensor = field(init=False)  # (2, K), of the targets less the shift and of the squares of that
    low: Tensor = field(init=False)  # (K,)
    high: Tensor = field(init=False)  # (K,)

    def __post_init__(self) -> None:
        size, count = self.dim + 1, self.targets
        self.gram = torch.zeros(size, size, dtype=torch.float64)
        self.cross = torch.zeros(size, count, dtype=torch.float64)
        self.squares = torch.zeros(count, dtype=torch.float64)
        self.sums = torch.zeros(2, count, dtype=torch.float64)
        self.low = torch.full((count,), torch.inf, dtype=torch.float64)
        self.high = torch.full((count,), -torch.inf, dtype=torch.float64)

    def update(self, states: Tensor, values: Tensor) -> None:
        """Add rows: states (N, d) and values (N, K)."""
        if not len(states):
            return
        h, y = _with_constant(states), values.double()
        if self.shift is None:
            self.shift = y[0].to(self.sums.device, copy=True)
        moved = y - self.shift.to(y.device)
        left = y if self.reference is None else y - h @ self.reference.to(h.device)
        self.rows += len(states)
        self.gram += (h.mT @ h).to(self.gram.device)
        self.cross += (h.mT @ left).to(self.gram.device)
        self.squares += left.square().sum(0).to(self.gram.device)
        self.sums += torch.stack([moved.sum(0), moved.square().sum(0)]).to(self.gram.device)
        self.low = torch.minimum(self.low, y.amin(0).to(self.low.device))
        self.high = torch.maximum(self.high, y.amax(0).to(self.high.device))

    def __add__(self, other: NormalEquations) -> NormalEquations:
        total = NormalEquations(self.dim, self.targets, self.rows + other.rows, self.reference)
        for name in ("gram", "cross", "squares"):
            setattr(total, name, getattr(self, name) + getattr(other, name))
        total.shift = other.shift if self.shift is None else self.shift
        total.sums = self._shifted_sums(total.shift) + other._shifted_sums(total.shift)
        total.low, total.high = torch.minimum(self.low, other.low), torch.maximum(self.high, other.high)
        return total

    def _shifted_sums(self, shift: Tensor | None) -> Tensor:
        """`sums` for another shift."""
        if self.shift is None or shift is None:
            return self.sums
        by, (first, second) = self.shift - shift, self.sums
        return torch.stack([first + self.rows * by, second + 2 * by * first + self.rows * by.square()])

    @property
    def mean(self) -> Tensor:
        """Means (K,) of the targets."""
        mean: Tensor = self.sums[0] / self.rows
        return mean if self.shift is None else mean + self.shift

    @property
    def variance(self) -> Tensor:
        """Variances (K,) of the targets: the mean square error of predicting their mean."""
        means = self.sums / self.rows
        return (means[1] - means[0].square()).clamp_min(0)

    def solve(self, *, intercept: bool = False, rows: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """The least squares coefficients, (d, K), or (d + 1, K) with that of the constant column last.

        Columns are scaled to length 1 first, and directions that the rows do not hold get the coefficient 0. Where the `rows`
        (states, values) behind the sums are still at hand, what the solution leaves of them is solved for once more, which
        makes up for the squared condition number.
        """
        size = self.dim + intercept
        gram, cross = self.gram[:size, :size], self.cross[:size]
        length = gram.diagonal().sqrt()
        scale = torch.where(length > 0, 1 / length, 0.0)[:, None]
        start = length[:, None] * self._reference(size)
        inverse = _inverse(scale * gram * scale.mT)
        found = scale * inverse(scale * cross, start)
        if rows is None:
            return found
        left = torch.zeros_like(cross)
        for states, values in zip(*(part.split(ROWS) for part in rows), strict=True):
            h = _with_constant(states)[:, :size]
            left += (h.mT @ (values.double() - h @ found.to(h.device))).to(left.device)
        return found + scale * inverse(scale * left, torch.zeros_like(start))

    def mse(self, coefficients: Tensor) -> Tensor:
        """The mean square errors (K,) of coefficients (d, K) or (d + 1, K) on these rows.

        A difference of sums: what is below 1e-15 times the mean square that the reference leaves is rounding.
        """
        size = len(coefficients)
        gram, cross = self.gram[:size, :size], self.cross[:size]
        beyond = coefficients - self._reference(size)
        explained = (beyond * (2 * cross - gram @ beyond)).sum(0)
        return ((self.squares - explained) / self.rows).clamp_min(0)

    def _reference(self, size: int) -> Tensor:
        """The reference (size, K); one for d columns has no constant."""
        return torch.zeros(size, self.targets, dtype=torch.float64) if self.reference is None else self.reference[:size]

    def constant_mse(self, constants: Tensor) -> Tensor:
        """The mean square errors (K,) of predicting the constants (K,)."""
        return self.variance + (self.mean - constants).square()

    @property
    def memory(self) -> int:
        """Bytes held."""
        return sum(t.nbytes for t in (getattr(self, f.name) for f in fields(self)) if isinstance(t, Tensor))


def _with_constant(states: Tensor) -> Tensor:
    """[h; 1] (N, d + 1) in float64."""
    h = states.new_ones(len(states), states.shape[1] + 1, dtype=torch.float64)
    h[:, :-1] = states
    return h


def _inverse(gram: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """(cross, start) → x with gram · (x − start) = cross: by Cholesky where all columns stand apart, else by eigenvalues above
    the cut-off.

    In the second case x, start included, has no part in the directions that are cut off.
    """
    factor, failed = torch.linalg.cholesky_ex(gram)
    # A squared pivot is what the columns before leave of one of length 1.
    if not int(failed) and float(factor.diagonal().square().min()) > SAFE_PIVOT:
        return lambda cross, start: start + torch.cholesky_solve(cross, factor)
    values, vectors = torch.linalg.eigh(gram)
    kept = values > CUTOFF * values[-1]
    inverse = torch.where(kept, 1 / values, 0.0)[:, None]
    return lambda cross, start: vectors @ (inverse * (vectors.mT @ cross) + kept[:, None] * (vectors.mT @ start))
