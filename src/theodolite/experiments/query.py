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
from typing import Any, Generic, Self, TypeVar

from theodolite.measures.fits import log_log_fit
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


def split(rows: Iterable[Row], *names: str) -> dict[Any, list[Row]]:
    """The rows of each value of a column, in the order of first appearance; of several columns, of each tuple of values.

    >>> split([{"k": 2, "v": 1}, {"k": 1, "v": 2}, {"k": 2, "v": 3}], "k")
    {2: [{'k': 2, 'v': 1}, {'k': 2, 'v': 3}], 1: [{'k': 1, 'v': 2}]}
    """
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[names[0]] if len(names) == 1 else tuple(row[name] for name in names), []).append(row)
    return groups


def values_of(rows: Iterable[Row], *names: str) -> list[Any]:
    """The values of a column in the order of their first appearance, each once; of several columns, tuples.

    >>> values_of([{"k": 2}, {"k": 1}, {"k": 2}], "k")
    [2, 1]
    """
    return list(split(rows, *names))


C = TypeVar("C", bound="_Computed[Any]")
Found = TypeVar("Found")
Operation = Callable[[Any, Any], Any]


def _operator(operation: Operation) -> tuple[Callable[[C, Any], C], Callable[[C, Any], C]]:
    """The methods of an operation: with another thing on the right, and on the left."""
    return lambda a, b: a._with(b, operation), lambda b, a: b._with(a, lambda right, left: operation(left, right))


class _Computed(Generic[Found]):
    """What is computed from rows: `it(rows)`. Arithmetic with numbers and others of its kind gives further ones."""

    def __init__(self, compute: Callable[[list[Row]], Found]) -> None:
        self._compute = compute

    def __call__(self, rows: list[Row]) -> Found:
        return self._compute(rows)

    def _with(self, other: Any, operation: Operation) -> Self:
        raise NotImplementedError

    __add__, __radd__ = _operator(operator.add)
    __sub__, __rsub__ = _operator(operator.sub)
    __mul__, __rmul__ = _operator(operator.mul)
    __truediv__, __rtruediv__ = _operator(operator.truediv)


class Value(_Computed[Any]):
    """A number to be computed from rows. `value(rows)` computes it; arithmetic with numbers and values gives others."""

    def then(self, function: Callable[[Any], Any]) -> Value:
        """A function of the value."""
        return Value(lambda rows: function(_bare(self(rows))))

    def with_error(self, error: Value) -> Value:
        """The value with another one as its error."""
        return Value(lambda rows: Measured(_bare(self(rows)), float(_bare(error(rows)))))

    def _with(self, other: Any, operation: Operation) -> Value:
        return Value(lambda rows: operation(_bare(self(rows)), _bare(other(rows)) if isinstance(other, Value) else other))

    def __abs__(self) -> Value:
        return self.then(abs)

    def __neg__(self) -> Value:
        return self.then(operator.neg)


def _bare(value: Any) -> Any:
    return value.value if isinstance(value, Measured) else value


def _reduction(function: Callable[[list[Any]], Any]) -> Callable[[Column], Value]:
    """A method of columns: a function of the list of their values."""
    return lambda column: column.reduce(function)


class Column(_Computed[list[Any]]):
    """The values of a column in the rows of a query, or what becomes of them; `max`, `mean`, ... make a `Value` of it."""

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

    #: The largest and the smallest; NaN where one of them is.
    max = _reduction(lambda values: _nan_first(values, max))
    min = _reduction(lambda values: _nan_first(values, min))
    mean = _reduction(statistics.fmean)
    median = _reduction(statistics.median)
    sum = _reduction(sum)
    first = _reduction(lambda values: values[0])
    last = _reduction(lambda values: values[-1])
    #: The one value; several are an error.
    only = _reduction(lambda values: _only(values))
    #: The mean, with half the distance between the largest and the smallest as its error.
    mean_and_range = _reduction(lambda values: Measured(statistics.fmean(values), 0.5 * (max(values) - min(values))))

    def share(self, condition: Callable[[Any], bool]) -> Value:
        """The share of the values for which a condition holds."""
        return self.map(lambda value: bool(condition(value))).mean()

    def count(self, condition: Callable[[Any], bool]) -> Value:
        """How many of the values fulfil a condition."""
        return self.map(lambda value: bool(condition(value))).sum()

    def _with(self, other: Any, operation: Operation) -> Column:
        def compute(rows: list[Row]) -> list[Any]:
            mine = self(rows)
            others = other(rows) if isinstance(other, Column) else [other] * len(mine)
            return [operation(a, b) for a, b in zip(mine, others, strict=True)]

        return Column(compute)

    def __abs__(self) -> Column:
        return self.map(abs)


def _nan_first(values: list[Any], pick: Callable[[list[Any]], Any]) -> Any:
    return next((value for value in values if value != value), None) or pick(values)


def _only(values: list[Any]) -> Any:
    if len(values) != 1:
        raise ValueError(f"there must be one value. There are {len(values)}")
    return values[0]


def _of_column(method: Callable[[Column], Value]) -> Callable[[Query, str], Value]:
    """A method of queries: `rows.max("loss")` is `rows["loss"].max()`."""
    return lambda query, name: method(query[name])


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

    def power(self, x: str, y: str, reduce: Callable[[list[Any]], float] = statistics.fmean) -> Value:
        """The exponent p of y ≈ c xᵖ in the rows; those of equal x are reduced to one value first.

        >>> rows.power("m", "norm", min)([{"m": 1, "norm": 2.0}, {"m": 4, "norm": 1.0}, {"m": 4, "norm": 3.0}])
        -0.5
        """

        def fit(rows: list[Row]) -> float:
            groups = split(rows, x)
            return log_log_fit([*groups], [reduce([row[y] for row in group]) for group in groups.values()]).slope

        return self.measure(fit)

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

    max, min = _of_column(Column.max), _of_column(Column.min)
    mean, median, only = _of_column(Column.mean), _of_column(Column.median), _of_column(Column.only)

    def change(self, name: str) -> Column:
        """The distances of a ratio from 1."""
        return self[name].change()


@dataclass(frozen=True)
class Groups:
    """Rows in groups; `each` measures every group and gives a column of the results, in the order of first appearance."""

    query: Query
    names: tuple[str, ...]

    def each(self, measure: Callable[[list[Row]], Any]) -> Column:
        """A value (or any function of rows) of every group."""
        return Column(lambda rows: [_bare(measure(group)) for group in split(self.query.found(rows), *self.names).values()])


#: All rows; `rows(kind="run")` are some of them.
rows = Query()
