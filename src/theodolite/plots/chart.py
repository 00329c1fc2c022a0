"""Rows in groups, drawn into one Axes: how every such drawing begins and ends, and the keywords that all of them take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from theodolite.plots.axes_style import label_axes, labelled, legend, legend_title, note, note_left_out, set_scales
from theodolite.plots.style import Look, looks, new_axes, style
from theodolite.plots.tables import By, Group, groups, read
from theodolite.results import Row


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
