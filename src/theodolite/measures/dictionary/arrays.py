"""Reading matrices whose rows are signals or atoms, and the visible coordinates, from NumPy or torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from theodolite.arguments import shown
from theodolite.problem.arguments import a_tensor

Array = Tensor | NDArray[Any]


def as_real(name: str, values: Any) -> Tensor:
    """Numbers from a tensor, an array, a table or lists, without gradient: float32 as it is, all else in float64."""
    if isinstance(values, Tensor):
        x = a_tensor(name, values).detach()
    else:
        try:
            array = np.asarray(values)
            array = array if array.dtype == np.float32 or np.iscomplexobj(array) else array.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name} must be numbers in rows of equal length. {error}") from None
        x = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=")))
    if x.is_complex():
        raise ValueError(f"{name} must hold real numbers. Got {x.dtype}; take real and imaginary parts as coordinates.")
    return x if x.dtype == torch.float32 else x.double()


def as_rows(name: str, values: Array) -> Tensor:
    """The matrix `values` as `as_real` reads it; refuses what has no meaning."""
    x = as_real(name, values)
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"{name} must be a matrix with at least one row and one column. Got shape {tuple(x.shape)}.")
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
    array = visible if isinstance(visible, Tensor) else np.asarray(visible)
    if getattr(array.dtype, "kind", "b") not in "biuf":
        raise ValueError(f"visible must be booleans, one for each coordinate. Got {shown(visible)}.")
    mask = a_tensor("visible", visible).detach() if isinstance(visible, Tensor) else torch.as_tensor(array)
    n, d = shape
    accepted = f"({d},)" if shared else f"({d},) or ({n}, {d})"
    if mask.dtype != torch.bool or tuple(mask.shape) not in ((d,), *(() if shared else (shape,))):
        raise ValueError(f"visible must be booleans of shape {accepted}. Got {mask.dtype} of shape {tuple(mask.shape)}.")
    if not empty and not bool(mask.any(-1).all()):
        raise ValueError("visible must leave at least one coordinate to see.")
    return mask


def without_missing(values: NDArray[Any]) -> tuple[Tensor, Tensor | None]:
    """Signals with zeros where they are NaN, and what is there (None: everything)."""
    signals = torch.from_numpy(np.ascontiguousarray(values))
    there = ~signals.isnan()
    return (signals, None) if bool(there.all()) else (torch.nan_to_num(signals, nan=0.0), there)


def unit_rows(x: Tensor) -> Tensor:
    """Rows divided by their lengths, however short or long; a zero row stays zero."""
    largest = x.abs().amax(-1, keepdim=True)
    rows = torch.where(largest > 0, x / largest, 0.0)
    lengths: Tensor = rows.norm(dim=-1, keepdim=True)
    return rows / lengths.clamp_min(1.0)
