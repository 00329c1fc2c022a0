"""What the rows of pairs say: power laws of the maxima, compared between quantities, configurations and seed-trials."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from theodolite.experiments import rows
from theodolite.experiments.query import Column, Measured, Value
from theodolite.measures.stability import PowerFit, explains, fit_power_law
from theodolite.results import Row

#: Sizes from which an exponent is read.
LEAST = 3


def law(rows: list[Row], quantity: str) -> PowerFit:
    """The power law of the maxima over pairs."""
    sizes = sorted({row["m"] for row in rows})
    if len(sizes) < LEAST:
        raise ValueError(f"an exponent needs {LEAST} sizes. There are {len(sizes)}")
    return fit_power_law(sizes, [[row[quantity] for row in rows if row["m"] == m] for m in sizes])


def half(low: float, high: float) -> float:
    """Half an interval, as an error."""
    return (high - low) / 2


def fitted(quantity: str, **where: Any) -> Value:
    """The law of the rows with these values."""
    return rows(**where).measure(law, quantity)


def slope(quantity: str, **where: Any) -> Value:
    """b, its exponent."""
    return fitted(quantity, **where).then(lambda fit: fit.b)


def exponent(quantity: str, **where: Any) -> Value:
    """b, with half its bootstrap interval."""
    return fitted(quantity, **where).then(lambda fit: Measured(fit.b, half(fit.b_low, fit.b_high)))


def upper_end(quantity: str, **where: Any) -> Value:
    """The upper end of the interval of b."""
    return fitted(quantity, **where).then(lambda fit: fit.b_high)


def difference(first: str, second: str, **where: Any) -> Value:
    """Distance between the exponents of two quantities."""
    return abs(slope(first, **where) - slope(second, **where))


def delta(**where: Any) -> Value:
    """Δb, the exponent of stability minus that of the gap, with half its interval."""
    found = rows(**where).measure(explains)
    return found.then(lambda reading: Measured(reading.delta_b, half(reading.delta_low, reading.delta_high)))


def kept(quantity: str, **where: Any) -> Value:
    """The maximum at the largest size over that at the smallest."""
    return fitted(quantity, **where).then(lambda fit: fit.g[-1] / fit.g[0])


# Over seed-trials


def by_trial(measure: Value, **where: Any) -> Column:
    """A value of each seed-trial."""
    return rows(**where).by("trial").each(measure)


def over_trials(reduce: Callable[[list[float]], float], quantity: str, **where: Any) -> Value:
    """The smallest, largest, ... exponent of the seed-trials, with half its distance to the other end as error."""
    found = by_trial(slope(quantity), **where)
    return found.reduce(lambda slopes: Measured(reduce(slopes), half(min(slopes), max(slopes))))


def unexplained(threshold: float, **where: Any) -> Value:
    """Seed-trials in which stability falls more slowly than the gap by at least so much."""
    return by_trial(delta(), **where).count(lambda difference: difference >= threshold)


def gain(first: str, second: str, **where: Any) -> Value:
    """The exponent of one quantity minus that of another, median of the seed-trials."""
    return by_trial(slope(first) - slope(second), **where).median()
