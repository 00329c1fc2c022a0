"""What a finished solve knows about the eigenvectors next to the wanted ones, and how that speeds up the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Neighbours kept beside the wanted pairs, and the most memory they may take, in bytes.
COUNT = 10
MEMORY = 256 * 2**20

#: For more wanted pairs than this their own residuals point as well as the corrected ones.
FEW = 5


@dataclass(frozen=True)
class Neighbours:
    """Rough eigenpairs beyond the wanted ones: `values` (g,) and orthonormal `vectors` (n, g).

    They make `M = Σ_j g_j u_j u_jᵀ`, an operator like A that can be inverted. To first order an eigenvector with
    value θ and residual r moves by `(θ − M)⁻¹ r`: large along neighbours with a close value, where a plain
    residual would need many steps.

    >>> near = Neighbours(torch.tensor([2.0]).double(), torch.tensor([[0.0], [1.0], [0.0]]).double())
    >>> near.correct(torch.tensor([[0.0], [1.0], [1.0]]).double(), torch.tensor([4.0]).double())[:, 0].tolist()
    [0.0, 0.5, 0.25]
    """

    values: Tensor
    vectors: Tensor

    def correct(self, residuals: Tensor, theta: Tensor) -> Tensor:
        """`(θ_i − M)⁻¹ r_i` for every column (n, j); differences below 1 % of the largest θ are held there."""
        theta = theta.to(residuals)
        vectors, values = self.vectors.to(residuals), self.values.to(residuals)
        inside = vectors.T @ residuals
        floor = 1e-2 * float(theta.abs().max())
        rest = (residuals - vectors @ inside) / _away_from_zero(theta, floor)
        return rest + vectors @ (inside / _away_from_zero(theta - values[:, None], floor))

    def outside(self, basis: Tensor) -> Neighbours:
        """The same neighbours made orthogonal to the columns of `basis` (n, k); those that lie in it are dropped."""
        vectors = self.vectors.to(basis)
        vectors = vectors - basis @ (basis.T @ vectors)
        kept = vectors.norm(dim=0) > 0.5
        vectors, _ = torch.linalg.qr(vectors[:, kept])
        return Neighbours(self.values[kept.cpu()], vectors.to(self.vectors.dtype))


def room_for(n: int, k: int, dtype: torch.dtype) -> int:
    """How many neighbours of length n are worth keeping beside k pairs."""
    return min(COUNT, MEMORY // max(1, n * dtype.itemsize)) if k <= FEW else 0


def _away_from_zero(x: Tensor, floor: float) -> Tensor:
    return torch.where(x.abs() < floor, torch.where(x < 0, -floor, floor), x)
