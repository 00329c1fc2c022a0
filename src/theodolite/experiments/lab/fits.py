"""Fits that several chapters take of their rows."""

from __future__ import annotations

from collections.abc import Iterable

from theodolite.measures.fits import log_log_fit


def log_log_slope(x: Iterable[float], y: Iterable[float]) -> float:
    """The exponent p of y ≈ c xᵖ, by least squares on the logarithms.

    >>> round(log_log_slope([1, 2, 4], [3, 12, 48]), 9)
    2.0
    """
    return log_log_fit([*x], [*y]).slope
