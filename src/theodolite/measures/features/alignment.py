"""How alike two average gradient outer products are: the cosine between them as vectors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from theodolite.measures.features.gradients import InputGradients

#: Rows of a Gram matrix made at once.
ROWS = 4096


def agop_alignment(a: Tensor | InputGradients, b: Tensor | InputGradients) -> float:
    """`Tr(AᵀB) / (‖A‖ ‖B‖)`, in [0, 1] for average gradient outer products; 1 where they are alike up to scale.

    Each is a d × d matrix or `InputGradients`, in any mix; two sets of gradients need no d × d matrix.

    >>> round(agop_alignment(torch.diag(torch.tensor([2.0, 0.0])), torch.eye(2)), 4)
    0.7071
    """
    require_same_inputs(a, b)
    sizes = inner(a, a), inner(b, b)
    if min(sizes) == 0.0:
        which = "first" if sizes[0] == 0.0 else "second"
        raise ValueError(f"The {which} matrix is zero, so it has no direction: that model does not depend on its inputs.")
    if not all(map(math.isfinite, sizes)):
        raise ValueError("Alignment needs finite matrices. Got NaN or inf.")
    cosine = inner(a, b) / sizes[0] * math.sqrt(sizes[0] / sizes[1])
    return min(1.0, cosine)


def inner(a: Tensor | InputGradients, b: Tensor | InputGradients) -> float:
    """`Tr(AᵀB)`: products in the wider precision of the two, their sum in float64."""
    a, b = _smaller(a), _smaller(b)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return float((a.double() * b.to(a.device).double()).sum())
    if isinstance(a, Tensor):
        a, b = b, a
    assert isinstance(a, InputGradients)
    other = b if isinstance(b, Tensor) else b.rows
    dtype = torch.promote_types(a.rows.dtype, other.dtype)
    other = other.to(a.rows.device, dtype)
    total = 0.0
    for part in a.rows.to(dtype).split(ROWS):
        if isinstance(b, Tensor):
            total += float(((part @ other) * part).sum(dtype=torch.float64))
        else:
            total += sum(float((part @ rows.T).square().sum(dtype=torch.float64)) for rows in other.split(ROWS)) / b.count
    return total / a.count


def _smaller(a: Tensor | InputGradients) -> Tensor | InputGradients:
    """The matrix where there are more gradients than coordinates."""
    if isinstance(a, Tensor) or len(a.rows) <= a.dim:
        return a
    return a.matrix()


def require_same_inputs(*matrices: Tensor | InputGradients) -> None:
    """Raise unless both are d × d matrices, or gradients, over the same d coordinates."""
    dims = []
    for m in matrices:
        if isinstance(m, InputGradients):
            dims.append(m.dim)
        elif isinstance(m, Tensor) and m.ndim == 2 and m.shape[0] == m.shape[1]:
            dims.append(m.shape[0])
        else:
            got = f"shape {tuple(m.shape)}" if isinstance(m, Tensor) else type(m).__name__
            raise ValueError(f"agop_alignment takes d × d tensors or InputGradients. Got {got}.")
    if dims[0] != dims[1]:
        raise ValueError(f"Both must be over the same inputs. Got {dims[0]} and {dims[1]} coordinates.")
