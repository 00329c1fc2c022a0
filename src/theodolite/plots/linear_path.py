"""Loss and accuracy on the straight line through two solutions, with the barrier between them."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from theodolite.arguments import either, shown
from theodolite.measures.mode_connectivity import Barrier, accuracy_barrier, loss_barrier
from theodolite.plots.axes_style import BOX, note, reference, span
from theodolite.plots.chart import drawing
from theodolite.plots.curves import curves
from theodolite.plots.figures import panels
from theodolite.plots.style import GREY, look, new_axes, style, write
from theodolite.plots.tables import Array, Group, finite, groups, numbers, positive, read
from theodolite.results import Row

Quantity = Literal["accuracy", "loss"]

_WIDE = 20.0  # largest loss over the smallest from which the axis is logarithmic


def _two_names(name: str, value: Any) -> tuple[Any, Any]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"{name} must be the names of alpha = 1 and alpha = 0. Got {shown(value)}.")
    return value[0], value[1]


@drawing(ends=_two_names)
def linear_path(
    rows: Any,
    y: Quantity | None = None,
    *,
    ends: tuple[str, str] = ("A", "B"),
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Accuracy or loss against alpha on training and test data, the stretch between the ends shaded, the barrier measured.

    Rows are those of a `LinearPath`; a column `pair` tells several paths apart, which are drawn thin under their median. `y` is
    accuracy where the rows have it. `ends` names alpha = 1 and alpha = 0.

    >>> profile = [{"alpha": a, "train_accuracy": p} for a, p in ((0.0, 0.9), (0.5, 0.6), (1.0, 0.8))]
    >>> ax = linear_path(profile)
    >>> [text.get_text() for text in ax.texts][-1]
    'train barrier: 20 points'
    """
    table = read(rows, "alpha")
    y = ("accuracy" if _sets(table, "accuracy") else "loss") if y is None else y
    either("y", y, ("accuracy", "loss"))
    drawn = _sets(table, y)
    if not drawn:
        raise ValueError(f"The rows have no column train_{y} or test_{y} with numbers in it.")
    pairs = groups(table, "pair" if any("pair" in row for row in table) else None)
    with style():
        ax = new_axes(ax)
        if len(pairs) > 1:
            _thin(ax, pairs, drawn, y)
    curves(
        [row for data in drawn for row in _median(pairs, data, y)],
        "alpha",
        y,
        by="data",
        log=_scale(table, drawn, y),
        labels="direct",
        markers=False,
        ylabel=y if len(pairs) == 1 else f"{y}, median of {len(pairs)} pairs",
        title=title,
        ax=ax,
    )
    ax.margins(x=0.02)
    low, high = ax.get_xlim()
    ax.set_xlim(min(low, -0.05), max(high, 1.05))  # the ends are in view, also of a profile that lacks them
    span(ax, x=(0.0, 1.0))
    for alpha, name in zip((1.0, 0.0), ends, strict=True):
        reference(ax, x=alpha, label=name)
    _barriers(ax, pairs, drawn, y)
    return ax


@drawing(ends=_two_names)
def linear_path_panels(rows: Any, *, ends: tuple[str, str] = ("A", "B"), title: str | None = None) -> Figure:
    """Accuracy, where the rows have it, and loss side by side."""
    table = read(rows, "alpha")
    quantities: list[Quantity] = ["accuracy", "loss"] if _sets(table, "accuracy") else ["loss"]
    figure, axes = panels(len(quantities), size=(4.6, 3.3), letters=len(quantities) > 1, title=title)
    for ax, y in zip(axes, quantities, strict=True):
        linear_path(table, y, ends=ends, ax=ax)
    return figure


def _sets(table: list[Row], y: str) -> list[str]:
    """The data sets that the rows have numbers for."""
    return [data for data in ("train", "test") if any(row.get(f"{data}_{y}") is not None for row in table)]


def _scale(table: list[Row], drawn: list[str], y: str) -> str:
    values = np.concatenate([numbers(table, f"{data}_{y}") for data in drawn])
    values = values[finite(values)]
    wide = y == "loss" and len(values) and positive(values).all() and values.max() > _WIDE * values.min()
    return "y" if wide else ""


def _profile(rows: list[Row], data: str, y: str) -> tuple[Array, Array]:
    at = numbers(rows, "alpha")
    order = np.argsort(at, kind="stable")
    return at[order], numbers(rows, f"{data}_{y}")[order]


def _thin(ax: Axes, pairs: list[Group], drawn: list[str], y: str) -> None:
    for i, data in enumerate(drawn):
        for pair in pairs:
            at, values = _profile(pair.rows, data, y)
            shown = np.where(finite(values), values, np.nan)
            ax.plot(at, shown, color=look(i).colour, linestyle=look(i).line, linewidth=0.6, alpha=0.45, label="_pair")


def _median(pairs: list[Group], data: str, y: str) -> list[Row]:
    """One row per alpha: the median over the pairs."""
    found: dict[float, list[float]] = {}
    for pair in pairs:
        for alpha, value in zip(*_profile(pair.rows, data, y), strict=True):
            found.setdefault(round(float(alpha), 9), []).append(float(value))
    return [{"alpha": alpha, y: float(np.median(values)), "data": data} for alpha, values in sorted(found.items())]


def _barriers(ax: Axes, pairs: list[Group], drawn: list[str], y: str) -> None:
    """The barrier of a single path as a measured height; of several the median as a note."""
    for data in drawn:
        found = [_barrier(pair.rows, data, y) for pair in pairs]
        known = [barrier for barrier in found if barrier is not None]
        if not known:
            continue
        if len(pairs) > 1:
            middle = float(np.median([barrier.value for barrier in known]))
            note(ax, f"median {data} barrier: {_height(middle, y)}")
        elif data == drawn[0] and known[0].value > 0 and math.isfinite(known[0].value):
            _measure(ax, pairs[0].rows, data, y, known[0])
        else:
            note(ax, f"{data} barrier: {_height(known[0].value, y)}")


def _barrier(rows: list[Row], data: str, y: str) -> Barrier | None:
    at, values = _profile(rows, data, y)
    if np.isnan(values).any() or not {0.0, 1.0} <= set(np.round(at, 9).tolist()):
        return None
    return accuracy_barrier(at, values) if y == "accuracy" else loss_barrier(at, values)


def _height(value: float, y: str) -> str:
    if value <= 0:
        return "none"
    return f"{100 * value:.2g} points" if y == "accuracy" else f"{value:.2g}"


def _measure(ax: Axes, rows: list[Row], data: str, y: str, barrier: Barrier) -> None:
    """An arrow from the level of the end to the deepest (highest) point, with the height beside it."""
    at, values = _profile(rows, data, y)
    there = float(values[np.abs(at - barrier.alpha).argmin()])
    level = there + barrier.value if y == "accuracy" else there - barrier.value
    with style():
        ax.annotate(
            "", (barrier.alpha, level), xytext=(barrier.alpha, there), arrowprops={"arrowstyle": "<->", "color": GREY, "lw": 1.2}
        )
        offset, va = (-4, "top") if y == "accuracy" else (4, "bottom")
        text = f"{data} barrier: {_height(barrier.value, y)}"
        write(ax, text, (barrier.alpha, there), (0, offset), ha="center", va=va, fontsize=8.5, color=GREY, bbox=BOX)
