"""Queries on rows: what a claim measures, written down once and evaluated when there are rows.

>>> runs = rows(kind="run")
>>> table = [{"kind": "run", "rate": 1.0, "ratio": 0.5}, {"kind": "run", "rate": 2.0, "ratio": 0.25}, {"kind": "edge", "at": 3.0}]
>>> (1 - runs.max("ratio"))(table), runs(rate=[2.0, 4.0])["ratio"].mean()(table), runs.share(ratio=0.5)(table)
(0.5, 0.25, 0.5)
>>> (runs["ratio"] / runs["rate"]).min()(table)
0.125
"""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from theodolite.results import Row


@dataclass(frozen=True)
class Measured:
    """A measured value with its error."""

    value: Any
    error: float | None = None


def fits(row: Mapping[str, Any], where: Mapping[str, Any]) -> bool:
    """Whether a row has these values; a list names several that will do, a function is asked about the value."""
    return all(_fits(row.get(name), wanted) for name, wanted in where.items())


def _fits(value: Any, wanted: Any) -> bool:
    if callable(wanted):
        return bool(wanted(value))
    return value in wanted if isinstance(wanted, list | tuple | set | frozenset | range) else bool(value == wanted)


def select(rows: Iterable[Row], **where: Any) -> list[Row]:
    """The rows with these values, at once; see `fits`.

    >>> select([{"k": 1}, {"k": 2}, {"k": 5}], k=[1, 5])
    [{'k': 1}, {'k': 5}]
    """
    return [row for row in rows if fits(row, where)]


def chosen(rows: Iterable[Row], **where: Any) -> list[Row]:
    """As `select`, at once; no rows are an error.

    >>> chosen([{"k": 1}], k=2)
    Traceback (most recent call last):
    ValueError: no rows with k = 2
    """
    return Query()(**where).found(rows)


def values_of(rows: Iterable[Row], *names: str) -> list[Any]:
    """The values of a column in the order of their first appearance, each once; of several columns, tuples.

    >>> values_of([{"k": 2}, {"k": 1}, {"k": 2}], "k")
    [2, 1]
    """
    return list(dict.fromkeys(row[names[0]] if len(names) == 1 else tuple(row[name] for name in names) for row in rows))


class Value:
    """A number to be computed from rows. `value(rows)` computes it; arithmetic with numbers and values gives others."""

    def __init__(self, compute: Callable[[list[Row]], Any]) -> None:
        self._compute = compute

    def __call__(self, rows: list[Row]) -> Any:
        return self._compute(rows)

    def then(self, function: Callable[[Any], Any]) -> Value:
        """A function of the value."""
        return Value(lambda rows: function(_bare(self(rows))))

    def with_error(self, error: Value) -> Value:
        """The value with another one as its error."""
        return Value(lambda rows: Measured(_bare(self(rows)), float(_bare(error(rows)))))

    def _with(self, other: Any, operation: Callable[[Any, Any], Any], swapped: bool = False) -> Value:
        def compute(rows: list[Row]) -> Any:
            a, b = _bare(self(rows)), _bare(other(rows)) if isinstance(other, Value) else other
            return operation(b, a) if swapped else operation(a, b)

        return Value(compute)

    def __add__(self, other: Any) -> Value:
        return self._with(other, operator.add)

    def __sub__(self, other: Any) -> Value:
        return self._with(other, operator.sub)

    def __mul__(self, other: Any) -> Value:
        return self._with(other, operator.mul)

    def __truediv__(self, other: Any) -> Value:
        return self._with(other, operator.truediv)

    def __radd__(self, other: Any) -> Value:
        return self._with(other, operator.add, swapped=True)

    def __rsub__(self, other: Any) -> Value:
        return self._with(other, operator.sub, swapped=True)

    def __rmul__(self, other: Any) -> Value:
        return self._with(other, operator.mul, swapped=True)

    def __rtruediv__(self, other: Any) -> Value:
        return self._with(other, operator.truediv, swapped=True)

    def __abs__(self) -> Value:
        return self.then(abs)

    def __neg__(self) -> Value:
        return self.then(operator.neg)


def _bare(value: Any) -> Any:
    return value.value if isinstance(value, Measured) else value


class Column:
    """The values of a column in the rows of a query, or what becomes of them; `max`, `mean`, ... make a `Value` of it."""

    def __init__(self, compute: Callable[[list[Row]], list[Any]]) -> None:
        self._compute = compute

    def __call__(self, rows: list[Row]) -> list[Any]:
        return self._compute(rows)

    @staticmethod
    def of(*values: Callable[[list[Row]], Any]) -> Column:
        """Several values as a column: `Column.of(a, b).max()`."""
        return Column(lambda rows: [_bare(value(rows)) for value in values])

    def map(self, function: Callable[[Any], Any]) -> Column:
        """A function of each value."""
        return Column(lambda rows: [function(value) for value in self(rows)])

    def change(self) -> Column:
        """The distance of each ratio from 1."""
        return self.map(lambda value: abs(value - 1))

    def reduce(self, function: Callable[[list[Any]], Any]) -> Value:
        """Any function of the list of values."""
        return Value(lambda rows: function(self(rows)))

    def steps(self, function: Callable[[Any, Any], Any] = lambda earlier, later: later - earlier) -> Column:
        """The change from each value to the next, or another function of both."""
        return Column(lambda rows: [function(earlier, later) for earlier, later in pairwise(self(rows))])

    def max(self) -> Value:
        """The largest; NaN where one of them is."""
        return self.reduce(lambda values: _nan_first(values, max))

    def min(self) -> Value:
        """The smallest; NaN where one of them is."""
        return self.reduce(lambda values: _nan_first(values, min))

    def mean(self) -> Value:
        return self.reduce(statistics.fmean)

    def median(self) -> Value:
        return self.reduce(statistics.median)

    def sum(self) -> Value:
        return self.reduce(sum)

    def first(self) -> Value:
        return self.reduce(lambda values: values[0])

    def last(self) -> Value:
        return self.reduce(lambda values: values[-1])

    def only(self) -> Value:
        """The one value; several are an error."""
        return self.reduce(_only)

    def half_range(self) -> Value:
        """Half the distance between the largest and the smallest, as an error."""
        return self.reduce(lambda values: 0.5 * (max(values) - min(values)))

    def mean_and_range(self) -> Value:
        """The mean, with half the range as its error."""
        return self.mean().with_error(self.half_range())

    def share(self, condition: Callable[[Any], bool]) -> Value:
        """The share of the values for which a condition holds."""
        return self.map(lambda value: bool(condition(value))).mean()

    def count(self, condition: Callable[[Any], bool]) -> Value:
        """How many of the values fulfil a condition."""
        return self.map(lambda value: bool(condition(value))).sum()

    def _with(self, other: Any, operation: Callable[[Any, Any], Any], swapped: bool = False) -> Column:
        def compute(rows: list[Row]) -> list[Any]:
            mine = self(rows)
            others = other(rows) if isinstance(other, Column) else [other] * len(mine)
            pairs = zip(others, mine, strict=True) if swapped else zip(mine, others, strict=True)
            return [operation(a, b) for a, b in pairs]

        return Column(compute)

    def __add__(self, other: Any) -> Column:
        return self._with(other, operator.add)

    def __sub__(self, other: Any) -> Column:
        return self._with(other, operator.sub)

    def __mul__(self, other: Any) -> Column:
        return self._with(other, operator.mul)

    def __truediv__(self, other: Any) -> Column:
        return self._with(other, operator.truediv)

    def __radd__(self, other: Any) -> Column:
        return self._with(other, operator.add, swapped=True)

    def __rsub__(self, other: Any) -> Column:
        return self._with(other, operator.sub, swapped=True)

    def __rmul__(self, other: Any) -> Column:
        return self._with(other, operator.mul, swapped=True)

    def __rtruediv__(self, other: Any) -> Column:
        return self._with(other, operator.truediv, swapped=True)

    def __abs__(self) -> Column:
        return self.map(abs)


def _nan_first(values: list[Any], pick: Callable[[list[Any]], Any]) -> Any:
    return next((value for value in values if value != value), None) or pick(values)


def _only(values: list[Any]) -> Any:
    if len(values) != 1:
        raise ValueError(f"there must be one value. There are {len(values)}")
    return values[0]


class Query:
    """Some of the rows, named by the values they have; see `rows`."""

    def __init__(self, conditions: Sequence[Callable[[Row], bool]] = (), words: str = "") -> None:
        self._conditions, self._words = tuple(conditions), words

    def __call__(self, **where: Any) -> Query:
        """Those of the rows that also have these values; a list names several that will do, a function is asked."""
        words = ", ".join(f"{name} = {getattr(value, '__name__', value)}" for name, value in where.items())
        return self._also(lambda row: fits(row, where), words)

    def where(self, condition: Callable[[Row], bool]) -> Query:
        """Those of the rows that fulfil a condition."""
        return self._also(condition, getattr(condition, "__name__", "a condition"))

    def _also(self, condition: Callable[[Row], bool], words: str) -> Query:
        return Query((*self._conditions, condition), f"{self._words}, {words}" if self._words else words)

    def of(self, rows: Iterable[Row]) -> list[Row]:
        """The rows at once; there may be none."""
        return [row for row in rows if all(condition(row) for condition in self._conditions)]

    def found(self, rows: Iterable[Row]) -> list[Row]:
        """The rows at once; none is an error."""
        found = self.of(rows)
        if not found:
            raise ValueError(f"no rows with {self._words}" if self._words else "there are no rows")
        return found

    def measure(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Value:
        """A function of the list of rows."""
        return Value(lambda rows: function(self.found(rows), *arguments, **named))

    def if_any(self, measure: Callable[[list[Row]], Any]) -> Value:
        """A measure of the rows; NaN where there are none, as of what a size does not compute."""
        return Value(lambda rows: measure(found) if (found := self.of(rows)) else math.nan)

    def count(self, **where: Any) -> Value:
        """How many of the rows have these values."""
        return self.measure(lambda rows: len(select(rows, **where)))

    def share(self, **where: Any) -> Value:
        """The share of the rows that have these values."""
        return self.measure(lambda rows: len(select(rows, **where)) / len(rows))

    def by(self, *names: str) -> Groups:
        """The rows in groups of equal values of these columns."""
        return Groups(self, names)

    def peak(self, column: str, show: str) -> Value:
        """The value of one column where another is largest."""
        return self.measure(lambda rows: max(rows, key=lambda row: row[column])[show])

    def __getitem__(self, name: str) -> Column:
        return Column(lambda rows: [row[name] for row in self.found(rows)])

    def column(self, function: Callable[[Row], Any]) -> Column:
        """A function of each row."""
        return Column(lambda rows: [function(row) for row in self.found(rows)])

    def max(self, name: str) -> Value:
        return self[name].max()

    def min(self, name: str) -> Value:
        return self[name].min()

    def mean(self, name: str) -> Value:
        return self[name].mean()

    def median(self, name: str) -> Value:
        return self[name].median()

    def only(self, name: str) -> Value:
        return self[name].only()

    def change(self, name: str) -> Column:
        """The distances of a ratio from 1."""
        return self[name].change()


class Groups:
    """Rows in groups; `each` measures every group and gives a column of the results, in the order of first appearance."""

    def __init__(self, query: Query, names: tuple[str, ...]) -> None:
        self._query, self._names = query, names

    def each(self, measure: Callable[[list[Row]], Any]) -> Column:
        """A value (or any function of rows) of every group."""

        def compute(rows: list[Row]) -> list[Any]:
            groups: dict[tuple[Any, ...], list[Row]] = {}
            for row in self._query.found(rows):
                groups.setdefault(tuple(row[name] for name in self._names), []).append(row)
            return [_bare(measure(group)) for group in groups.values()]

        return Column(compute)


#: All rows; `rows(kind="run")` are some of them.
rows = Query()
