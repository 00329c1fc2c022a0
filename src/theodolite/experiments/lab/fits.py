"""Fits that several chapters take of their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import fmean
from typing import Any

from theodolite.experiments.query import Query, Value, split
from theodolite.measures.fits import log_log_fit
from theodolite.results import Row


def log_log_slope(x: Iterable[float], y: Iterable[float]) -> float:
    """The exponent p of y ≈ c xᵖ, by least squares on the logarithms.

    >>> round(log_log_slope([1, 2, 4], [3, 12, 48]), 9)
    2.0
    """
    return log_log_fit([*x], [*y]).slope


def power_of(query: Query, x: str, y: str, reduce: Callable[[list[Any]], float] = fmean) -> Value:
    """The exponent p of y ≈ c xᵖ in some rows; those of equal x are reduced to one value first.

    >>> from theodolite.experiments import rows
    >>> power_of(rows, "m", "norm", min)([{"m": 1, "norm": 2.0}, {"m": 4, "norm": 1.0}, {"m": 4, "norm": 3.0}])
    -0.5
    """

    def fit(rows: list[Row]) -> float:
        groups = split(rows, x)
        return log_log_slope(groups, (reduce([row[y] for row in group]) for group in groups.values()))

    return query.measure(fit)
