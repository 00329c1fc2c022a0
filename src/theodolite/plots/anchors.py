"""Anchor vectors as pictures: histograms that come as counts, and bars of several models side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from theodolite.plots.axes_style import label_axes, labelled, legend, legend_title, set_scales
from theodolite.plots.style import looks, new_axes, style
from theodolite.plots.tables import By, groups, label_of, numbers, read


def counted_histogram(
    rows: Any,
    *,
    low: str = "low",
    high: str = "high",
    density: str = "density",
    by: By = None,
    order: Sequence[Any] | None = None,
    xlabel: str | None = None,
    ylabel: str | None = None,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Histograms whose bars are the rows: their edges and the density between them, one outline per value of `by`.

    >>> ax = counted_histogram([{"low": 0.0, "high": 1.0, "density": 0.25}, {"low": 1.0, "high": 2.0, "density": 0.75}])
    >>> ax.patches[0].get_data().values.tolist()
    [0.25, 0.75]
    """
    table = read(rows, low, high, density, by)
    found = groups(table, by, order)
    with style():
        ax = new_axes(ax)
        for group, look in zip(found, looks([g.key for g in found], start=labelled(ax)), strict=True):
            left, right, heights = (numbers(group.rows, name) for name in (low, high, density))
            edges = np.append(left, right[-1:])
            ax.stairs(heights, edges, fill=True, color=look.colour, alpha=0.22)
            ax.stairs(heights, edges, color=look.colour, linestyle=look.line, linewidth=1.4, label=group.label)
        label_axes(ax, low, density, xlabel, ylabel, title)
        if by is not None:
            ax.set_ylim(top=ax.get_ylim()[1] * (1 + 0.13 * len(found)))  # room for the key
            legend(ax, legend_title(by, found))
    return ax


def grouped_bars(
    rows: Any,
    x: str,
    y: str,
    *,
    by: str,
    mark: str | None = None,
    log: bool = False,
    xlabel: str = "",
    ylabel: str | None = None,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Column `y` as bars, those of the same `x` side by side and named by `by`; a black line across each marks column `mark`.

    >>> ax = grouped_bars([{"model": "a", "error": 1.0, "of": "all"}, {"model": "a", "error": 0.5, "of": "bulk"}],
    ...                   "model", "error", by="of")
    >>> [float(bar.get_height()) for bar in ax.patches]
    [1.0, 0.5]
    """
    found = groups(read(rows, x, y, by, mark), x)
    with style():
        ax = new_axes(ax)
        set_scales(ax, "y" if log else "")
        for place, group in enumerate(found):
            width = 0.8 / len(group.rows)
            heights = numbers(group.rows, y)
            marks = heights if mark is None else numbers(group.rows, mark)
            for i, look in enumerate(looks(range(len(heights)))):
                at = place - 0.4 + (i + 0.5) * width
                ax.bar(at, heights[i], 0.92 * width, color=look.colour, alpha=0.75)
                if mark is not None:
                    ax.plot([at - 0.46 * width, at + 0.46 * width], [marks[i]] * 2, color="#222222", linewidth=1.6)
                text = label_of(group.rows[i][by]).replace(" (", "\n(")
                over = (at, float(max(heights[i], marks[i])))
                ax.annotate(text, over, xytext=(0, 4), textcoords="offset points", ha="center", fontsize=7.5)
        ax.set_xticks(range(len(found)), [group.label for group in found])
        label_axes(ax, x, y, xlabel, ylabel, title)
        ax.margins(y=0.25 if log else 0.12)
    return ax
