"""Reading matrices whose rows are signals or atoms, and the visible coordinates, from NumPy or torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = Tensor | NDArray[Any]

#: No length is divided by that is shorter than this.
FLOOR = 1e-12


def as_rows(name: str, values: Array) -> Tensor:
    """The matrix `values` without gradient: float32 tensors as they are, all else in float64; refuses what has no meaning."""
    x = values.detach() if isinstance(values, Tensor) else torch.from_numpy(np.array(values, dtype=np.float64))
    if x.is_complex():
        raise ValueError(f"{name} must hold real numbers. Got {x.dtype}.")
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"{name} must be a matrix with at least one row and one column. Got shape {tuple(x.shape)}.")
    x = x if x.dtype == torch.float32 else x.double()
    if not bool(torch.isfinite(x).all()):
        raise ValueError(f"{name} holds NaN or infinity; remove those rows first, or fill them.")
    return x


def as_pair(first: str, a: Array, second: str, b: Array) -> tuple[Tensor, Tensor]:
    """Two matrices over the same coordinates, on the device of the first and in the wider precision of the two."""
    left, right = as_rows(first, a), as_rows(second, b)
    if left.shape[1] != right.shape[1]:
        raise ValueError(
            f"{first} and {second} must have the same number of columns (coordinates). Got {left.shape[1]} and {right.shape[1]}; "
            "rows are atoms or signals: transpose a matrix that has them as columns."
        )
    dtype = torch.promote_types(left.dtype, right.dtype)
    return left.to(dtype), right.to(left.device, dtype)


def as_visible(visible: Array, shape: tuple[int, int], *, shared: bool = False, empty: bool = False) -> Tensor:
    """The visible coordinates as booleans, (d,) or one row per signal (n, d); `shared` allows the first form only.

    `empty` allows signals of which nothing is seen.
    """
    mask = visible.detach() if isinstance(visible, Tensor) else torch.as_tensor(np.asarray(visible))
    n, d = shape
    accepted = f"({d},)" if shared else f"({d},) or ({n}, {d})"
    if mask.dtype != torch.bool or tuple(mask.shape) not in ((d,), *(() if shared else (shape,))):
        raise ValueError(f"visible must be booleans of shape {accepted}. Got {mask.dtype} of shape {tuple(mask.shape)}.")
    if not empty and not bool(mask.any(-1).all()):
        raise ValueError("visible must leave at least one coordinate to see.")
    return mask


def unit_rows(x: Tensor) -> Tensor:
    """Rows divided by their lengths; a zero row stays zero."""
    lengths: Tensor = x.norm(dim=1, keepdim=True)
    return x / lengths.clamp_min(FLOOR)
