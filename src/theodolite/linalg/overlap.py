"""How much of one subspace lies in another."""

from __future__ import annotations

import torch
from torch import Tensor


def subspace_overlap(u: Tensor, v: Tensor) -> float:
    """`‖UᵀV‖²_F / k` for orthonormal columns: the mean squared cosine of the canonical angles, in [0, 1].

    Two random k-dimensional subspaces of R^n overlap by k/n on average.

    >>> e = torch.eye(4).double()
    >>> subspace_overlap(e[:, :2], e[:, 1:3])
    0.5
    """
    u, v = _check(u, v)
    if u.shape[1] != v.shape[1]:
        raise ValueError(f"Both subspaces must have the same dimension. Got {u.shape[1]} and {v.shape[1]} columns.")
    return float((u.T @ v).square().sum()) / u.shape[1]


def overlap_curve(u: Tensor, v: Tensor) -> Tensor:
    """`subspace_overlap(U[:, :k], V[:, :k])` for k = 1, 2, ... up to the smaller width.

    >>> e = torch.eye(4).double()
    >>> overlap_curve(e[:, :2], e[:, [1, 0]])
    tensor([0., 1.], dtype=torch.float64)
    """
    u, v = _check(u, v)
    width = min(u.shape[1], v.shape[1])
    squares = (u[:, :width].T @ v[:, :width]).square()
    sums = squares.cumsum(0).cumsum(1).diagonal()
    return sums / torch.arange(1, width + 1, dtype=sums.dtype, device=sums.device)


def _check(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    for name, x in (("U", u), ("V", v)):
        if x.ndim != 2 or x.shape[1] < 1 or x.shape[1] > x.shape[0]:
            raise ValueError(f"{name} must be a matrix (n, k) with 1 <= k <= n. Got shape {tuple(x.shape)}.")
    if u.shape[0] != v.shape[0]:
        raise ValueError(f"U and V must have the same number of rows. Got {u.shape[0]} and {v.shape[0]}.")
    u, v = u.detach().double(), v.detach().double().to(u.device)
    for name, x in (("U", u), ("V", v)):
        gap = float((x.T @ x - torch.eye(x.shape[1], dtype=x.dtype, device=x.device)).abs().max())
        if not gap < 1e-3:
            raise ValueError(
                f"The columns of {name} must be orthonormal (they miss by {gap:.1e}); torch.linalg.qr({name}).Q makes them so."
            )
    return u, v
