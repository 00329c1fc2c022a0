"""What leaves linear dynamics along the top eigenvector of the tangent kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: Below this share of the residual its part along the eigenvector is too small to divide by.
TOO_SMALL = 1e-8


class TopDirection(NamedTuple):
    """Between two steps, each (...): `rho_f` = p·R_f p and `rho_K` = p·R_K p of the source, and where they act.

    `lambda_1` and `vector` p (..., n) are the top eigenpair of the first kernel, `share` the part of the first loss along p.
    """

    lambda_1: Tensor
    vector: Tensor
    share: Tensor
    rho_f: Tensor
    rho_K: Tensor  # noqa: N815 (as the source writes it)


def top_direction(
    kernel: Tensor, next_kernel: Tensor, residual: Tensor, next_residual: Tensor, rate: Tensor | float
) -> TopDirection:
    """Kernels (..., n, n) and residuals f − y (..., n) of consecutive steps of ½ Σ (f − y)² at `rate` (...).

    `rho_f = ⟨p, r'⟩/⟨p, r⟩ − 1 + ηλ₁` and `rho_K = λ₁ − p·K'p`; both are 0 for a linear model. `rho_f` is NaN where the
    residual has no part along p to speak of.

    >>> K, r = torch.diag(torch.tensor([3.0, 1.0])), torch.tensor([1.0, 1.0])
    >>> found = top_direction(K, K, r, r - 0.5 * K @ r, 0.5)
    >>> float(found.rho_f), float(found.rho_K), float(found.share)
    (0.0, 0.0, 0.5)
    """
    values, vectors = torch.linalg.eigh(kernel)
    lambda_1, p = values[..., -1], vectors[..., -1]
    before, after = (p * residual).sum(-1), (p * next_residual).sum(-1)
    size = residual.square().sum(-1)
    usable = before.abs() >= TOO_SMALL * size.sqrt()
    quotient = torch.where(usable & (size > 0), after / torch.where(before == 0, 1.0, before), torch.nan)
    rho_K = lambda_1 - (p * (next_kernel @ p[..., None])[..., 0]).sum(-1)
    return TopDirection(lambda_1, p, before.square() / size, quotient - 1 + rate * lambda_1, rho_K)
