"""How much of one subspace lies in another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def subspace_overlap(u: Any, v: Any) -> float:
    """`‖UᵀV‖²_F / k` for orthonormal columns: the mean squared cosine of the canonical angles, in [0, 1].

    U and V are tensors or arrays (n, k). Two random k-dimensional subspaces of R^n overlap by k/n on average.

    Returns:
        The overlap as a float: 1 for the same subspace, 0 for orthogonal ones.

    >>> e = torch.eye(4).double()
    >>> subspace_overlap(e[:, :2], e[:, 1:3])
    0.5
    """
    one, other = _check(u, v)
    if one.shape[1] != other.shape[1]:
        raise ValueError(f"Both subspaces must have the same dimension. Got {one.shape[1]} and {other.shape[1]} columns.")
    return float((one.T @ other).square().sum()) / one.shape[1]


def overlap_curve(u: Any, v: Any) -> Tensor:
    """`subspace_overlap(U[:, :k], V[:, :k])` for k = 1, 2, ... up to the smaller width.

    Returns:
        The overlaps as a vector, the first that of one column each.

    >>> e = torch.eye(4).double()
    >>> overlap_curve(e[:, :2], e[:, [1, 0]])
    tensor([0., 1.], dtype=torch.float64)
    """
    one, other = _check(u, v)
    width = min(one.shape[1], other.shape[1])
    squares = (one[:, :width].T @ other[:, :width]).square()
    sums = squares.cumsum(0).cumsum(1).diagonal()
    return sums / torch.arange(1, width + 1, dtype=sums.dtype, device=sums.device)


def _check(u: Any, v: Any) -> tuple[Tensor, Tensor]:
    for name, x in (("U", u), ("V", v)):
        if not hasattr(x, "__array__") or "complex" in str(x.dtype) or getattr(x, "is_meta", False):
            came = f"{x.dtype} numbers on {getattr(x, 'device', 'cpu')}" if hasattr(x, "dtype") else type(x).__name__
            raise ValueError(f"{name} must be a real matrix (n, k), a tensor or a NumPy array. Got {came}.")
    u, v = torch.as_tensor(u), torch.as_tensor(v)
    for name, x in (("U", u), ("V", v)):
        if x.ndim != 2 or x.shape[1] < 1 or x.shape[1] > x.shape[0]:
            raise ValueError(f"{name} must be a matrix (n, k) with 1 <= k <= n. Got shape {tuple(x.shape)}.")
    if u.shape[0] != v.shape[0]:
        raise ValueError(f"U and V must have the same number of rows. Got {u.shape[0]} and {v.shape[0]}.")
    u, v = u.detach().double(), v.detach().double().to(u.device)
    for name, x in (("U", u), ("V", v)):
        if not bool(torch.isfinite(x).all()):
            raise ValueError(f"{name} holds NaN or inf.")
        gap = float((x.T @ x - torch.eye(x.shape[1], dtype=x.dtype, device=x.device)).abs().max())
        if gap >= 1e-3:
            raise ValueError(
                f"The columns of {name} must be orthonormal (they miss by {gap:.1e}); torch.linalg.qr({name}).Q makes them so."
            )
    return u, v
