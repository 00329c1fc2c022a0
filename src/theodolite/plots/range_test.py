"""The learning-rate range test as people know it: loss over rate."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from theodolite.arguments import positive
from theodolite.plots.axes_style import note, reference, span
from theodolite.plots.chart import drawing
from theodolite.plots.style import GREY, PALETTE, new_axes, style
from theodolite.plots.tables import ascending_pair, read

#: Room above the curves for the names of the marks, as a share of the height of the curves: four lines of text.
NAMES = 0.3


def _window(name: str, value: Any) -> tuple[float, float] | None:
    """Two rates, or none, as a critical rate has them."""
    return None if isinstance(value, tuple | list) and not value else ascending_pair(name, value)


@drawing(suggestion=positive, own=positive, critical=positive, window=_window)
def range_test(
    rows: Any,
    *,
    suggestion: float | None = None,
    own: float | None = None,
    critical: float | None = None,
    window: Sequence[float] | None = None,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """The loss of each batch as a dot and the smoothed loss of each sweep as a line, over the rate.

    Rows hold `sweep`, `rate`, `loss` and `smoothed`. The suggested rate, the user's own, the critical one and the window above
    it in which training catapults are marked; one that lies outside is named below the axes.

    >>> ax = range_test([{"sweep": 0, "rate": 10.0**-i, "loss": 1.0, "smoothed": 1.0} for i in range(3)], own=0.02)
    >>> ax.get_xscale(), ax.get_xlabel()
    ('log', 'learning rate')
    """
    table = sorted(read(rows, "sweep", "rate", "loss", "smoothed"), key=lambda row: (row["sweep"], row["rate"]))
    rates = np.array([row["rate"] for row in table], dtype=float)
    losses = np.array([row["loss"] for row in table], dtype=float)
    with style():
        ax = new_axes(ax, size=(5.2, 3.4))  # so small that it can be read on a phone
        ax.set_xscale("log")
        low, high = _limits([row["smoothed"] for row in table])
        ax.plot(rates, np.where(losses <= high, losses, np.nan), ".", color=GREY, markersize=3, alpha=0.35, zorder=1.5)
        for _, sweep in groupby(table, key=lambda row: row["sweep"]):
            ax.plot(*_until(list(sweep), high), color=PALETTE[0], linewidth=1.5, alpha=0.8)
        ax.set_xlim(rates.min(), rates.max())
        ax.set_ylim(low, high + NAMES * (high - low))
        ax.set_xlabel("learning rate")
        ax.set_ylabel("loss of the batch")
        ax.set_title(title or "Loss while the learning rate rises")
    if window:
        low, high = max(window[0], rates.min()), min(window[1], rates.max())
        if low < high:
            span(ax, x=(low, high), label="catapults", colour=PALETTE[4])
    for place, label, colour in (
        (critical, "critical", GREY),
        (own, "yours", PALETTE[1]),
        (suggestion, "suggested", PALETTE[2]),
    ):
        _mark(ax, place, label, colour)
    return ax


def _limits(smoothed: Sequence[float]) -> tuple[float, float]:
    """From below the lowest smoothed loss to as far above the first one as it fell; a blow-up leaves at the top."""
    first, lowest = smoothed[0], min(smoothed)
    fall = max(first - lowest, 0.15 * abs(first), 1e-12)
    return lowest - 0.15 * fall, first + 0.8 * fall


def _until(sweep: Sequence[Any], high: float) -> tuple[list[float], list[float]]:
    """A sweep up to where it leaves at the top: what comes after a blow-up says nothing, and would run through the names."""
    end = next((i + 1 for i, row in enumerate(sweep) if not row["smoothed"] <= high), len(sweep))
    return [row["rate"] for row in sweep[:end]], [min(row["smoothed"], high) for row in sweep[:end]]


def _mark(ax: Axes, place: float | None, label: str, colour: str) -> None:
    if place is None:
        return
    low, high = ax.get_xlim()
    if low <= place <= high:
        reference(ax, x=place, label=f"{label} {place:.2g}", colour=colour)
    else:
        note(ax, f"{label}: {place:.2g}, outside the range")
