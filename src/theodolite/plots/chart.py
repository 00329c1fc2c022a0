"""Rows in groups, drawn into one Axes: how every such drawing begins and ends, and the keywords that all of them take."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypedDict, TypeVar

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from theodolite.arguments import Rule, checked, shown
from theodolite.plots.axes_style import label_axes, labelled, legend, legend_title, note, note_left_out, set_scales
from theodolite.plots.style import Look, a_figure, an_axes, looks, new_axes, style
from theodolite.plots.tables import By, Group, groups, read, require_columns
from theodolite.results import Row

P = ParamSpec("P")
R = TypeVar("R")


def drawing(*columns: str, **rules: Rule) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """For drawings of rows: arguments are checked by `rules`, and those called `columns` must name columns of the rows."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        rest = next((name for name, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), "")

        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            bound = signature.bind(*args, **kwargs)
            given: Any = bound.arguments
            given["rows"] = table = read(given["rows"])
            for name in columns:
                place = given if name in signature.parameters else given.get(rest, {})
                optional = name not in signature.parameters or signature.parameters[name].default is None
                if name in place and not (place[name] is None and optional):
                    require_columns(name, given_name(name, place[name]), table)
            return function(*bound.args, **bound.kwargs)

        return checked(ax=an_axes, figure=a_figure, order=some_keys, **rules)(called)

    return decorate


def some_keys(name: str, value: Any) -> list[Any]:
    """Values of the column that tells groups apart, at least one."""
    shape = getattr(value, "ndim", 1)
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable) or shape != 1 or not len(list(value)):
        raise ValueError(f"{name} must list values of the column that tells groups apart. Got {shown(value)}.")
    return list(value)


def given_name(name: str, value: Any) -> Any:
    """The name of a column, or several, but not None."""
    if value is None:
        raise TypeError(f"{name} must be the name of a column. Got None.")
    return value


class Labels(TypedDict, total=False):
    """What the axes say, and which they are."""

    xlabel: str | None
    ylabel: str | None
    title: str | None
    ax: Axes | None


class Grouping(Labels, total=False):
    """Also what tells groups apart: `by`; `order` picks and sorts them, `label` names a single one."""

    by: By
    order: Sequence[Any] | None
    label: str


@dataclass
class Chart:
    """A drawing under way: iterating gives each group with its look. Of `total` values those that are not drawn are counted."""

    ax: Axes
    table: list[Row]
    groups: list[Group]
    looks: list[Look]
    names: tuple[Any, ...]
    legend_title: str | None
    total: int
    bad: int = 0
    negative: int = 0
    marked: bool = False
    outside: int = 0

    def __iter__(self) -> Iterator[tuple[Group, Look]]:
        return zip(self.groups, self.looks, strict=True)

    def count(self, usable: NDArray[np.bool_], shown: NDArray[np.bool_]) -> None:
        """Of the `usable` values, which are finite, the logarithmic axes allow those that are `shown`."""
        self.bad += int((~usable).sum())
        self.negative += int((usable & ~shown).sum())


@contextmanager
def chart(
    rows: Any,
    *columns: str | None,
    log: str = "",
    size: tuple[float, float] | None = None,
    own_legend: bool = False,
    by: By = None,
    order: Sequence[Any] | None = None,
    label: str = "",
    xlabel: str | None = None,
    ylabel: str | None = None,
    title: str | None = None,
    ax: Axes | None = None,
) -> Iterator[Chart]:
    """Axes in our style for groups of rows with these columns; in the end labels (the first two columns), legend and notes."""
    table = read(rows, *columns, by)
    found = [replace(group, label=group.label or label) for group in groups(table, by, order)]
    with style():
        ax = new_axes(ax, size=size)
        set_scales(ax, log)
        looking = looks([group.key for group in found], start=labelled(ax))
        drawn = Chart(ax, table, found, looking, columns[:2], legend_title(by, found), len(table))
        yield drawn
        label_axes(ax, drawn.names[0], drawn.names[1], xlabel, ylabel, title)
        if not own_legend:
            legend(ax, drawn.legend_title)
        note_left_out(ax, drawn.bad, drawn.total, negative=drawn.negative, marked=drawn.marked)
        if drawn.outside:
            note(ax, f"{drawn.outside} of {drawn.total} values outside the bins")
