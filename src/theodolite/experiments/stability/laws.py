"""What the rows of pairs say: power laws of the maxima, compared between quantities, configurations and seed-trials."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from theodolite.experiments.claims import Measure
from theodolite.experiments.query import Measured, chosen
from theodolite.measures.stability import Explanation, PowerFit, explains, fit_power_law
from theodolite.results import Row

#: Sizes from which an exponent is read.
LEAST = 3


def law(rows: list[Row], quantity: str, **where: Any) -> PowerFit:
    """The power law of the maxima over pairs, of the rows with these values."""
    table = chosen(rows, **where)
    sizes = sorted({row["m"] for row in table})
    if len(sizes) < LEAST:
        raise ValueError(f"an exponent needs {LEAST} sizes. There are {len(sizes)}")
    return fit_power_law(sizes, [[row[quantity] for row in table if row["m"] == m] for m in sizes])


def reading(rows: list[Row], **where: Any) -> Explanation:
    """Gap and stability side by side, of the rows with these values."""
    return explains(chosen(rows, **where))


def half(low: float, high: float) -> float:
    """Half an interval, as an error."""
    return (high - low) / 2


def exponent(quantity: str, **where: Any) -> Measure:
    """b, with half its bootstrap interval."""

    def measure(rows: list[Row]) -> Measured:
        fit = law(rows, quantity, **where)
        return Measured(fit.b, half(fit.b_low, fit.b_high))

    return measure


def upper_end(quantity: str, **where: Any) -> Measure:
    """The upper end of the interval of b."""
    return lambda rows: law(rows, quantity, **where).b_high


def difference(first: str, second: str, **where: Any) -> Measure:
    """Distance between the exponents of two quantities."""
    return lambda rows: abs(law(rows, first, **where).b - law(rows, second, **where).b)


def delta(**where: Any) -> Measure:
    """Δb, the exponent of stability minus that of the gap, with half its interval."""

    def measure(rows: list[Row]) -> Measured:
        found = reading(rows, **where)
        return Measured(found.delta_b, half(found.delta_low, found.delta_high))

    return measure


def kept(quantity: str, **where: Any) -> Measure:
    """The maximum at the largest size over that at the smallest."""

    def measure(rows: list[Row]) -> float:
        g = law(rows, quantity, **where).g
        return g[-1] / g[0]

    return measure


# Over seed-trials


def trials_of(rows: list[Row]) -> Sequence[int]:
    return sorted({row["trial"] for row in rows})


def over_trials(reduce: Callable[[list[float]], float], quantity: str, **where: Any) -> Measure:
    """The smallest, largest, ... exponent of the seed-trials, with half its distance to the other end as error."""

    def measure(rows: list[Row]) -> Measured:
        found = [law(rows, quantity, trial=trial, **where).b for trial in trials_of(rows)]
        return Measured(reduce(found), half(min(found), max(found)))

    return measure


def unexplained(threshold: float, **where: Any) -> Measure:
    """Seed-trials in which stability falls more slowly than the gap by at least so much."""
    return lambda rows: sum(reading(rows, trial=t, **where).delta_b >= threshold for t in trials_of(rows))


def gain(first: str, second: str, **where: Any) -> Measure:
    """The exponent of one quantity minus that of another, median of the seed-trials."""
    return lambda rows: median(
        law(rows, first, trial=t, **where).b - law(rows, second, trial=t, **where).b for t in trials_of(rows)
    )
