"""Straight lines by least squares, and power laws read from them: the one log-log fit of the package."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class LogLogFit(NamedTuple):
    """`log y = intercept + slope · log x`, logarithms to base e.

    `stderr` is the standard error of the slope and `scatter` the standard deviation of log y about the line, both NaN for two
    points; `points` counts those with a positive weight.
    """

    slope: float
    stderr: float
    intercept: float
    scatter: float
    points: int


def log_log_fit(x: Any, y: Any, *, weights: Any = None) -> LogLogFit:
    """The exponent of y in x, by least squares on the logarithms; the error comes from the scatter about the line.

    A value of y that is not a number, or infinite, makes every number of the fit NaN.

    Args:
        x: Positive numbers, at least two different ones.
        y: Positive numbers, one for each x.
        weights: How much each point counts, such as the number of values it is the mean of; all alike where not given.

    Raises:
        ValueError: Lengths that differ, numbers that are not positive, fewer than two different x.

    >>> fit = log_log_fit([1, 2, 4], [3, 12, 48])
    >>> round(fit.slope, 9), round(math.exp(fit.intercept), 9), fit.points
    (2.0, 3.0, 3)
    >>> round(log_log_fit([1, 2, 4], [3, 12, 480], weights=[1, 1, 0]).slope, 9)
    2.0
    """
    x, y = np.asarray(x, dtype=np.float64).reshape(-1), np.asarray(y, dtype=np.float64).reshape(-1)
    w = np.ones_like(x) if weights is None else np.asarray(weights, dtype=np.float64).reshape(-1)
    if not len(x) == len(y) == len(w):
        raise ValueError(f"x, y and weights must have the same length. Got {len(x)}, {len(y)} and {len(w)}.")
    if not (w >= 0).all():
        raise ValueError("weights must be numbers of at least 0.")
    x, y, w = (part[w > 0] for part in (x, y, w))
    if not (np.isfinite(x) & (x > 0)).all() or (y <= 0).any():
        raise ValueError("A log-log fit needs positive x and y. Leave the others out, or give them weight 0.")
    if len(x) < 2 or not np.ptp(x) > 0:
        raise ValueError(f"A log-log fit needs two different x. Got {len(x)} points.")
    if not np.isfinite(y).all():
        return LogLogFit(math.nan, math.nan, math.nan, math.nan, len(x))
    u, v, w = np.log(x), np.log(y), w * (len(x) / w.sum())  # the scale of the weights does not matter
    slope, intercept = (float(part) for part in straight_line(u, v, w))
    rest = float((w * np.square(v - intercept - slope * u)).sum())
    scatter = math.sqrt(rest / (len(x) - 2)) if len(x) > 2 else math.nan
    spread = float((w * np.square(u - np.average(u, weights=w))).sum())
    return LogLogFit(slope, scatter / math.sqrt(spread), intercept, scatter, len(x))


def straight_line(u: Array, v: Array, weights: Array) -> tuple[Array, Array]:
    """Slope and intercept of v (..., n) over u (..., n) by weighted least squares, each (...)."""
    total = np.maximum(weights.sum(-1), 1e-300)
    mean_u, mean_v = (weights * u).sum(-1) / total, (weights * v).sum(-1) / total
    away = u - mean_u[..., None]
    slope = (weights * away * v).sum(-1) / np.maximum((weights * away * away).sum(-1), 1e-300)
    return slope, mean_v - slope * mean_u
