"""The high-probability bound on the generalisation gap by uniform stability (Feldman and Vondrák 2019)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def fv_bound(beta: Any, m: Any, delta: Any, c: float = 1.0) -> Any:
    """What a β-uniformly stable algorithm can lose from training to test, with probability at least 1 − δ over the training set:

    `c (β log(m) log(m/δ) + sqrt(log(1/δ)) / sqrt(m))`.

    The constant c is not known, so only the shape in β, m and δ means anything. With β = 1/m the bound falls towards m^(−1/2);
    with a constant β it grows with m and is vacuous.

    Parameters
    ----------
    beta : ≥ 0.  m : ≥ 1.  delta : 0 < δ < 1. Floats, arrays or tensors, which broadcast.

    >>> round(fv_bound(0.0, 100, 0.1), 6)                                # sqrt(log 10) / 10
    0.151743
    """
    _check("beta", beta, lambda x: x >= 0, "at least 0")
    _check("m", m, lambda x: x >= 1, "at least 1")
    _check("delta", delta, lambda x: (x > 0) & (x < 1), "between 0 and 1")
    _check("c", c, lambda x: x > 0, "positive")
    if any(isinstance(x, Tensor) for x in (beta, m, delta)):
        like = next(x for x in (beta, m, delta) if isinstance(x, Tensor))
        dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
        beta, m, delta = (torch.as_tensor(x, dtype=dtype, device=like.device) for x in (beta, m, delta))
        return c * (beta * m.log() * (m / delta).log() + (-delta.log()).sqrt() / m.sqrt())
    beta, m, delta = (np.asarray(x, dtype=np.float64) for x in (beta, m, delta))
    bound = c * (beta * np.log(m) * np.log(m / delta) + np.sqrt(-np.log(delta)) / np.sqrt(m))
    return bound if bound.ndim else float(bound)


def _check(name: str, value: Any, inside: Any, accepted: str) -> None:
    ok = inside(value if isinstance(value, Tensor) else np.asarray(value, dtype=np.float64))
    if not bool(ok.all()):
        raise ValueError(f"{name} must be {accepted}. Got {value!r}.")
