"""Rows read for drawing: columns as numbers, groups with labels, repeats summarised. Nothing here draws."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from theodolite.results import Result, Row
from theodolite.text import nearest

Array = NDArray[np.float64]
By = str | Sequence[str] | None
Band = Literal["stderr", "std", "quantiles", "range"]

#: Beyond this size a number counts as not finite, and below its inverse as zero on a log axis: axes cannot hold it.
DRAWABLE = 1e140


@dataclass(frozen=True)
class Group:
    """The rows of one value of the grouping column(s)."""

    key: Any
    label: str
    rows: list[Row]


@dataclass(frozen=True)
class Summary:
    """Repeated values at each x: a centre, a band, and what could not be used.

    `y` is NaN where any repeat is not finite; those x stand in `above` (NaN, +inf) or `below` (-inf).
    """

    x: Array
    y: Array
    low: Array
    high: Array
    repeats: NDArray[np.int64]
    above: Array
    below: Array
    bad: int
    total: int


def read(rows: Any, *columns: str | Sequence[str] | None) -> list[Row]:
    """Rows (dicts, a pandas DataFrame or a `Result`) as a list of dicts that has the named columns.

    >>> read([{"step": 1, "loss": 0.5}], "step", "loss")
    [{'step': 1, 'loss': 0.5}]
    """
    if isinstance(rows, Result):
        rows = rows.rows()
    elif hasattr(rows, "to_dict") and hasattr(rows, "columns"):
        rows = rows.to_dict("records")
    if isinstance(rows, (Mapping, str)) or not isinstance(rows, Iterable):
        raise ValueError(f"rows must be a list of dicts, a DataFrame or a Result. Got {type(rows).__name__}.")
    table = list(rows)
    for row in table:
        if not isinstance(row, Mapping):
            raise ValueError(f"Each row must be a dict. Got {type(row).__name__}.")
    if not table:
        raise ValueError("There are no rows to draw.")
    known = list(dict.fromkeys(name for row in table for name in row))
    for name in (name for names in columns for name in _names(names)):
        if name not in known:
            raise ValueError(f"The rows have no column {name!r}. Nearest: {', '.join(nearest(name, map(str, known)))}.")
    return table


def numbers(rows: Sequence[Mapping[str, Any]], name: str) -> Array:
    """A column as float64; None and missing entries become NaN."""
    return np.array([_number(row.get(name), name, i) for i, row in enumerate(rows)], dtype=np.float64)


def _number(value: Any, name: str, i: int) -> float:
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return math.nan
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"Column {name!r} must hold numbers. Row {i} holds {value!r}.") from error
    if isinstance(value, str) and math.isfinite(number):
        raise ValueError(f"Column {name!r} must hold numbers. Row {i} holds the text {value!r}.")
    return number


def finite(values: Array) -> NDArray[np.bool_]:
    """Which values can be drawn."""
    return np.isfinite(values) & (np.abs(np.nan_to_num(values)) < DRAWABLE)


def positive(values: Array) -> NDArray[np.bool_]:
    """Which values a logarithmic axis can show."""
    return np.asarray(np.nan_to_num(values) > 1 / DRAWABLE)


def on_axes(x: Array, y: Array, log: str) -> NDArray[np.bool_]:
    """Which points the axes can show, of which those named by `log` are logarithmic."""
    shown = np.ones(len(x), dtype=bool)
    for axis in log:
        shown &= positive(x if axis == "x" else y)
    return shown


def groups(rows: list[Row], by: By, order: Sequence[Any] | None = None) -> list[Group]:
    """Rows by the value of `by`: numbers ascending, else by first appearance; `order` picks and sorts.

    >>> [g.label for g in groups([{"b": 50}, {"b": 5}, {"b": 50}], "b")]
    ['5', '50']
    """
    names = _names(by)
    if not names:
        return [Group(None, "", rows)]
    found: dict[Hashable, list[Row]] = {}
    for row in rows:
        values = tuple(_plain(row.get(name)) for name in names)
        found.setdefault(values[0] if len(values) == 1 else values, []).append(row)
    keys = list(found)
    if all(is_number(key) for key in keys):
        keys.sort(key=float)  # type: ignore[arg-type]
    if order is not None:
        missing = [key for key in order if key not in found]
        if missing:
            raise ValueError(f"order names {missing[0]!r}, which {by!r} does not hold. It holds {', '.join(map(repr, keys))}.")
        keys = list(order)
    return [Group(key, label_of(key), found[key]) for key in keys]


def is_number(value: Any) -> bool:
    """A real number that is not a truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def label_of(value: Any) -> str:
    r"""A value from the rows as a label: short, on one line, never read as mathematics or hidden by matplotlib.

    >>> label_of(0.30000000000000004), label_of(("cost $", None))
    ('0.3', 'cost \\$, none')
    """
    if isinstance(value, tuple):
        return ", ".join(label_of(part) for part in value)
    if value is None:
        return "none"
    text = f"{value:g}" if isinstance(value, float) else " ".join(str(value).split())
    if len(text) > 40:
        text = text[:39] + "…"
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def words(name: str) -> str:
    """A column name as an axis label.

    >>> words("test_loss")
    'test loss'
    """
    return label_of(name.replace("_", " ").strip() or name)


def summarise(x: Array, y: Array, band: Band | None = "stderr", quantiles: tuple[float, float] = (0.25, 0.75)) -> Summary:
    """Centre and band of the repeats at each x, the same whatever the order of the rows.

    The centre is the mean, for quantiles the median. A mean with a value that is not finite is not finite: such a
    point is left out and reported, not replaced by the mean of the survivors.

    >>> s = summarise(np.array([1.0, 1.0, 2.0]), np.array([2.0, 4.0, 5.0]))
    >>> s.y.tolist(), s.low.tolist()
    ([3.0, 5.0], [2.0, nan])
    """
    _check_band(band, quantiles)
    total = len(x)
    usable = finite(x)
    lost = int((~usable).sum())
    x, y = x[usable], y[usable]
    ordering = np.lexsort((y, x))
    x, y = x[ordering], y[ordering]
    at, first, repeats = np.unique(x, return_index=True, return_counts=True)
    good = finite(y)
    if len(at) == len(x):
        center, low, high = np.where(good, y, np.nan), np.full(len(y), np.nan), np.full(len(y), np.nan)
    else:
        parts = [_center(part, band, quantiles) for part in np.split(y, first[1:])]
        center, low, high = np.array(parts, dtype=np.float64).reshape(-1, 3).T
    below = np.unique(x[~good & np.isneginf(y)])
    above = np.setdiff1d(x[~good], below)
    return Summary(at, center, low, high, repeats, above, below, lost + int((~good).sum()), total)


def _center(values: Array, band: Band | None, quantiles: tuple[float, float]) -> tuple[float, float, float]:
    if not finite(values).all():
        return math.nan, math.nan, math.nan
    count = len(values)
    if band == "quantiles":
        low, middle, high = np.quantile(values, [quantiles[0], 0.5, quantiles[1]])
        return (middle, low, high) if count > 1 else (middle, math.nan, math.nan)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = float(values.mean())
        if count == 1 or band is None:
            return mean, math.nan, math.nan
        if band == "range":
            return mean, float(values[0]), float(values[-1])
        spread = float(values.std(ddof=1)) / (math.sqrt(count) if band == "stderr" else 1.0)
    return mean, mean - spread, mean + spread


def _check_band(band: Any, quantiles: tuple[float, float]) -> None:
    if band not in (None, "stderr", "std", "quantiles", "range"):
        raise ValueError(f'band must be "stderr", "std", "quantiles", "range" or None. Got {band!r}.')
    if not 0 <= quantiles[0] < quantiles[1] <= 1:
        raise ValueError(f"quantiles must be two shares in [0, 1], the smaller first. Got {quantiles!r}.")


def _names(names: str | Sequence[str] | None) -> list[str]:
    return [] if names is None else [names] if isinstance(names, str) else list(names)


def _plain(value: Any) -> Hashable:
    """NumPy and torch scalars as Python ones, so that groups can be compared and printed."""
    value = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
    if isinstance(value, list):
        value = tuple(value)
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    return value if isinstance(value, Hashable) else str(value)
