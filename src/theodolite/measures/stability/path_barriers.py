"""What stands between the ends of a path, from its profile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Accuracy may fall this far below the weaker end between two connected solutions (a share, so 2 percentage points).
ALLOWED_DROP = 0.02
#: Where there is no accuracy: the loss may lie this share of the worse end's loss above it.
ALLOWED_RISE = 0.02


@dataclass(frozen=True)
class Barrier:
    """How high a barrier is, where, and its standard error over samples (None where it is not known)."""

    value: float
    alpha: float
    error: float | None = None


def accuracy_barrier(alphas: Any, accuracy: Any, right: Sequence[Tensor] | None = None) -> Barrier:
    """min(acc(0), acc(1)) - min over [0, 1] of acc, and where that smallest accuracy is.

    `right` holds the bits of the right answers at the points inside [0, 1], in order; the error is then the standard error of
    the paired difference between the weaker end and the lowest point, which takes that point as given.

    >>> accuracy_barrier([-1, 0, 0.5, 1], [0.1, 0.9, 0.6, 0.8])
    Barrier(value=0.20000000000000007, alpha=0.5, error=None)
    """
    at, values = inside(alphas, accuracy)
    end = 0 if values[0] <= values[-1] else len(values) - 1
    lowest = int(values.argmin())
    error = None
    if right is not None:
        fallen = right[end].double() - right[lowest].double()
        error = float(fallen.std()) / math.sqrt(len(fallen)) if len(fallen) > 1 else 0.0
    return Barrier(float(values[end] - values[lowest]), float(at[lowest]), error)


def loss_barrier(alphas: Any, loss: Any) -> Barrier:
    """max over [0, 1] of the loss - max(loss(0), loss(1)), and where that largest loss is.

    >>> loss_barrier([0, 0.5, 1], [1.0, 3.0, 2.0])
    Barrier(value=1.0, alpha=0.5, error=None)
    """
    at, values = inside(alphas, loss)
    highest = int(values.argmax())
    return Barrier(float(values[highest] - torch.maximum(values[0], values[-1])), float(at[highest]))


def loss_excess(alphas: Any, loss: Any) -> Barrier:
    """The largest height in [0, 1] of the loss above the straight line between its values at the ends, and where.

    >>> loss_excess([0, 0.5, 1], [1.0, 3.0, 2.0])
    Barrier(value=1.5, alpha=0.5, error=None)
    """
    at, values = inside(alphas, loss)
    above = values - torch.lerp(values[0], values[-1], at)
    above[0] = above[-1] = 0.0
    highest = int(above.argmax())
    return Barrier(float(above[highest]), float(at[highest]))


def inside(alphas: Any, values: Any) -> tuple[Tensor, Tensor]:
    """The part of a profile with 0 <= alpha <= 1, in order; both ends must be there."""
    at, numbers = (torch.as_tensor(x, dtype=torch.float64).flatten() for x in (alphas, values))
    order = at.argsort()
    at, numbers = at[order], numbers[order]
    kept = (at >= -1e-12) & (at <= 1 + 1e-12)
    at, numbers = at[kept], numbers[kept]
    if len(at) < 2 or abs(float(at[0])) > 1e-12 or abs(float(at[-1]) - 1) > 1e-12:
        raise ValueError("A barrier needs the values at both ends, alpha = 0 and alpha = 1.")
    return at, numbers
