"""How sure can one be that no eigenvalue was overlooked?

A Lanczos chain started at a random unit vector z sees the spectrum through the measure
`μ = Σ_i (u_iᵀz)² δ(λ_i)`. The polynomials p_0 … p_j orthonormal for μ follow from the chain's own
coefficients, and a point mass ξ² at x obeys `ξ² Σ_i p_i(x)² ≤ 1` (the Christoffel function bounds every
mass). An eigenvalue at or beyond x, outside the chain's Ritz values, therefore has `(uᵀz)² ≤ 1/Σ p_i(x)²`;
for z uniform on the sphere in d dimensions the chance of that is at most `sqrt(2 d / (π Σ p_i(x)²))`.
No gap of the spectrum has to be known or guessed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

#: Chance accepted that a missed eigenvalue stays hidden from the verification chain.
RISK = 1e-3


@dataclass
class Chain:
    """The coefficients of a Lanczos chain from a random unit vector in `dimension` dimensions.

    >>> chain = Chain(100)
    >>> chain.extend(0.0, 1.0); chain.extend(0.0, 0.0)
    >>> round(chain.reach(), 12)
    1.0
    >>> chain.miss_probability(2.0)
    0.0
    """

    dimension: int
    diagonal: list[float] = field(default_factory=list)
    offdiagonal: list[float] = field(default_factory=list)

    @classmethod
    def of_projection(cls, projection: Tensor, remainder: float, dimension: int) -> Chain:
        """The chain whose tridiagonal matrix is `projection`, with the norm of its last remainder."""
        return cls(dimension, projection.diagonal().tolist(), [*projection.diagonal(1).tolist(), remainder])

    @property
    def length(self) -> int:
        return len(self.diagonal)

    def extend(self, alpha: float, beta: float, scale: float = 0.0) -> None:
        """Add a step: its diagonal entry and the norm of its remainder (0 where it is rounding of `scale`)."""
        self.diagonal.append(alpha)
        self.offdiagonal.append(0.0 if beta <= 1e-13 * scale else beta)

    def reach(self, *, both_ends: bool = False) -> float:
        """The chain's largest Ritz value (largest magnitude with `both_ends`)."""
        matrix = torch.diag(torch.tensor(self.diagonal, dtype=torch.float64))
        if self.length > 1:
            beta = torch.tensor(self.offdiagonal[:-1], dtype=torch.float64)
            matrix = matrix + torch.diag(beta, 1) + torch.diag(beta, -1)
        values = torch.linalg.eigvalsh(matrix)
        return float(values.abs().max() if both_ends else values.max())

    def miss_probability(self, x: float, *, both_ends: bool = False) -> float:
        """Bound on the chance that an eigenvalue at or beyond `x` stayed hidden (beyond `±x` with `both_ends`).

        A chain that has closed (a remainder of 0) has seen all that its start can see.
        """
        if 0.0 in self.offdiagonal:
            return 0.0
        total = self._christoffel(x)
        if both_ends:
            total = min(total, self._christoffel(-x))
        return min(1.0, math.sqrt(2.0 * self.dimension / (math.pi * total)))

    def _christoffel(self, x: float) -> float:
        """`Σ_i p_i(x)²` of an open chain."""
        previous, current, beta, total = 0.0, 1.0, 0.0, 1.0
        for alpha, following in zip(self.diagonal, self.offdiagonal, strict=True):
            numerator = (x - alpha) * current - beta * previous
            if abs(numerator) > 1e100 * following:
                return math.inf
            previous, current, beta = current, numerator / following, following
            total += current * current
        return total
