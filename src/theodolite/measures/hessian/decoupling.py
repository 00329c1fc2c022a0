"""How far a layer's block is from the product of its factors."""

from __future__ import annotations

from theodolite.linalg import Eigenpairs, top_eigenpairs
from theodolite.operators import KroneckerFactors, LinearOperator


def decoupling_error(
    block: LinearOperator, factors: KroneckerFactors, *, tol: float = 1e-3, seed: int = 0, max_matvecs: int | None = None
) -> float:
    """`‖E[M] ⊗ E[x xᵀ] − E[M ⊗ x xᵀ]‖ / ‖E[M ⊗ x xᵀ]‖` in the spectral norm, by Lanczos on the difference.

    >>> import torch
    >>> from theodolite.operators import DenseOperator
    >>> from theodolite.operators.kronecker import factors_of
    >>> factors = factors_of(torch.eye(2).double(), torch.eye(3).double())
    >>> round(decoupling_error(DenseOperator(torch.eye(6).double() * 2), factors), 6)
    0.5
    """
    settings = {"which": "magnitude", "tol": tol, "seed": seed, "max_matvecs": max_matvecs, "progress": False}
    whole = top_eigenpairs(block, 1, **settings)  # type: ignore[call-overload]
    gap = top_eigenpairs(block - factors.operator(), 1, **settings)  # type: ignore[call-overload]
    return relative_norm(gap, whole)


def relative_norm(gap: Eigenpairs, whole: Eigenpairs) -> float:
    """The spectral norm of one symmetric matrix over that of another, by their eigenvalues of largest magnitude."""
    size = abs(float(whole.values[0]))
    return abs(float(gap.values[0])) / size if size > 0 else 0.0
