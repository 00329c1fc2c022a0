"""Scatter plots by group, with the diagonal and a correlation where asked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes

from theodolite.plots.axes_style import (
    check_log,
    label_axes,
    labelled,
    legend,
    legend_title,
    note,
    note_left_out,
    note_not_positive,
    set_scales,
)
from theodolite.plots.style import GREY, looks, new_axes, style
from theodolite.plots.tables import Array, By, finite, groups, label_of, numbers, positive, read


def scatter(
    rows: Any,
    x: str,
    y: str,
    *,
    by: By = None,
    text: str | None = None,
    identity: bool = False,
    correlation: Literal["pearson", "spearman"] | None = None,
    log: str = "",
    order: Sequence[Any] | None = None,
    label: str = "",
    xlabel: str | None = None,
    ylabel: str | None = None,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Column `y` against column `x` as points, one look per value of `by`.

    `text` names a column written beside each point, `identity` draws the line y = x, `correlation` writes the
    coefficient over all points with its 95 % interval (of the logarithms on log axes).

    >>> ax = scatter([{"a": 1, "b": 2}, {"a": 2, "b": 4}], "a", "b", identity=True)
    >>> ax.collections[0].get_offsets().tolist()
    [[1.0, 2.0], [2.0, 4.0]]
    """
    check_log(log)
    if identity and log not in ("", "xy"):
        raise ValueError('The line y = x needs both axes alike: log="" or log="xy".')
    table = read(rows, x, y, by, text)
    found = groups(table, by, order)
    kept: list[Array] = []
    bad = negative = 0
    with style():
        ax = new_axes(ax, size=(4.6, 4.2) if identity else None)
        set_scales(ax, log)
        for group, look in zip(found, looks([g.key for g in found], start=labelled(ax)), strict=True):
            points = np.column_stack([numbers(group.rows, x), numbers(group.rows, y)])
            usable = finite(points).all(axis=1)
            hidden = usable & (_not_positive(points, log))
            bad, negative = bad + int((~usable).sum()), negative + int(hidden.sum())
            shown = np.flatnonzero(usable & ~hidden)
            points = points[shown]
            kept.append(points)
            _draw(ax, points, look, group.label or label)
            if text is not None:
                _write(ax, points, [label_of(group.rows[i].get(text)) for i in shown])
        if identity:
            _diagonal(ax, np.concatenate(kept))
        label_axes(ax, x, y, xlabel, ylabel, title)
        legend(ax, legend_title(by, found))
        if correlation is not None:
            note(ax, _correlation_sentence(np.concatenate(kept), correlation, log))
        note_left_out(ax, bad, len(table))
        note_not_positive(ax, negative, len(table))
    return ax


def correlation_of(x: Any, y: Any, kind: Literal["pearson", "spearman"] = "pearson") -> float:
    """The correlation coefficient; NaN if there are fewer than two points or one side is constant.

    >>> round(correlation_of([1, 2, 3], [1, 4, 9], "spearman"), 9)
    1.0
    """
    if kind not in ("pearson", "spearman"):
        raise ValueError(f'correlation must be "pearson" or "spearman". Got {kind!r}.')
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if kind == "spearman":
        from scipy.stats import rankdata

        x, y = rankdata(x), rankdata(y)
    if len(x) < 2 or not (np.ptp(x) > 0 and np.ptp(y) > 0):
        return math.nan
    dx, dy = x - x.mean(), y - y.mean()
    dx, dy = dx / np.abs(dx).max(), dy / np.abs(dy).max()
    return float(np.clip(dx @ dy / math.sqrt((dx @ dx) * (dy @ dy)), -1.0, 1.0))


def _correlation_sentence(points: Array, kind: Literal["pearson", "spearman"], log: str) -> str:
    points = points.copy()
    for column, axis in enumerate("xy"):
        if axis in log:
            points[:, column] = np.log(points[:, column])
    r, n = correlation_of(points[:, 0], points[:, 1], kind), len(points)
    name = kind.capitalize() + (" correlation of logs" if log and kind == "pearson" else " correlation")
    if math.isnan(r):
        return f"{name} undefined ({n} points, or a constant side)"
    if n <= 3 or abs(r) == 1.0:
        return f"{name} {r:.2f} ({n} points)".replace("-", "−")
    half = 1.96 * (1.03 if kind == "spearman" else 1.0) / math.sqrt(n - 3)  # Fisher's z
    low, high = math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half)
    return f"{name} {r:.2f}, 95 % interval {low:.2f} to {high:.2f} ({n} points)".replace("-", "−")


def _not_positive(points: Array, log: str) -> Any:
    lost = np.zeros(len(points), dtype=bool)
    for column, axis in enumerate("xy"):
        if axis in log:
            lost |= ~positive(points[:, column])
    return lost


def _draw(ax: Axes, points: Array, look: Any, label: str) -> None:
    """Many points are drawn smaller and fainter, so that density shows."""
    crowd = len(points)
    size, alpha = (30.0, 0.9) if crowd <= 60 else (16.0, 0.7) if crowd <= 600 else (7.0, 0.4)
    ax.scatter(
        points[:, 0],
        points[:, 1],
        s=size,
        alpha=alpha,
        color=look.colour,
        marker=look.marker,
        linewidths=0.4,
        edgecolors="white",
        label=label,
        rasterized=crowd > 5000,
        zorder=2.2,
    )


def _write(ax: Axes, points: Array, names: list[str]) -> None:
    for point, name in zip(points, names, strict=True):
        ax.annotate(name, (point[0], point[1]), xytext=(5, 4), textcoords="offset points", fontsize=8.5, color=GREY)


def _diagonal(ax: Axes, points: Array) -> None:
    """y = x over the range of the data, behind the points, both axes alike."""
    if not len(points):
        return
    ax.autoscale_view()
    low = min(ax.get_xlim()[0], ax.get_ylim()[0])
    high = max(ax.get_xlim()[1], ax.get_ylim()[1])
    ax.plot([low, high], [low, high], color=GREY, linestyle=(0, (4, 2)), linewidth=1.1, zorder=1.5, label="y = x")
    ax.set_xlim(low, high)
    ax.set_ylim(low, high)
    ax.set_aspect("equal", adjustable="box")
