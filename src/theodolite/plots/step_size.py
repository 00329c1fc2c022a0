"""Loss over the learning rate: the range test as people know it, and every setting that a tuning tried."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from theodolite.arguments import checked, instance, positive
from theodolite.measures.stepsize import StepSizeChoice
from theodolite.plots.axes_style import label_axes, legend, note, reference, span
from theodolite.plots.chart import drawing
from theodolite.plots.curves import curves
from theodolite.plots.style import GREY, PALETTE, an_axes, new_axes, style
from theodolite.plots.tables import ascending_pair, numbers, read
from theodolite.results import Row

# The range test

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


# The choice of a setting

#: What the losses are taken on.
WORDS = {"valid": "held-out data", "train": "data trained on"}


@checked(choice=instance(StepSizeChoice), ax=an_axes)
def plot_step_size(choice: StepSizeChoice, *, title: str | None = None, ax: Axes | None = None) -> Axes:
    """The loss after the last step over the learning rate, by both losses where both are known; blown-up runs are shaded.

    The band is the standard error of the difference to the best rate, which is what the choice rests on. Where two
    hyperparameters were swept there is a line for each value of the second. The setting that was chosen is marked.
    """
    names = list(choice.best)
    if not choice.curve or len({row[names[0]] for row in choice.curve}) < 2:
        raise ValueError("A single setting was tried, so there is no picture. Its numbers are in rows().")
    rows = sorted(choice.curve, key=lambda row: row[names[0]])
    other = next((name for name in names[1:] if _moves_alone(rows, name, names[0])), None)
    swept = {row["search"] for row in choice.compared} & {"sweep"} or choice.search == "sweep"
    if other is not None and swept:
        return _by_second(choice, rows, names[0], other, title, ax)
    with style():
        ax = new_axes(ax, size=(5.6, 3.6))
        ax.set_xscale("log")
        for colour, split in zip(PALETTE, ("valid", "train"), strict=False):
            if rows[0][split] is not None:
                _line(ax, rows, names[0], split, colour, banded=split == choice.split)
        limits = _room_for(rows)
        ax.set_yscale("log")
        ax.set_ylim(*limits)
        _shade(ax, rows, names[0])
        label_axes(ax, "", "", _called(names[0]), f"loss after {choice.steps} steps", title)
        reference(ax, x=choice.best[names[0]], label="chosen")
        legend(ax)
    return ax


def _moves_alone(rows: list[Row], name: str, first: str) -> bool:
    """Whether a hyperparameter was varied, and not as one with the first."""
    return len({row[name] for row in rows}) > 1 and any(row[name] != row[first] for row in rows)


def _line(ax: Axes, rows: list[Row], name: str, split: str, colour: str, *, banded: bool) -> None:
    """One loss over the rates, where not all runs blew up."""
    x, y = (np.array(numbers(rows, column), dtype=float) for column in (name, split))
    ax.plot(x, y, color=colour, marker="o", markersize=3, label=WORDS[split])
    if banded:
        error = np.array([0.0 if math.isnan(row["difference_error"]) else row["difference_error"] for row in rows])
        ax.fill_between(x, np.maximum(y - error, 1e-300), y + error, color=colour, alpha=0.2, linewidth=0)


def _room_for(rows: list[Row]) -> tuple[float, float]:
    """Room for the losses of rates at which no run blew up; of all where there are none."""
    calm = [row for row in rows if not row["truncated"]] or rows
    losses = [row[split] for row in calm for split in ("train", "valid") if row[split]]
    return 0.7 * min(losses), 1.5 * max(losses)


def _shade(ax: Axes, rows: list[Row], name: str) -> None:
    """The rates at which runs blew up, from halfway between the last calm one and the first that is not."""
    lost = [row[name] for row in rows if row["truncated"]]
    if not lost:
        return
    calm = [row[name] for row in rows if not row["truncated"] and row[name] < min(lost)]
    first = math.sqrt(max(calm) * min(lost)) if calm else min(lost)
    ax.axvspan(first, max(lost), color=GREY, alpha=0.15, linewidth=0, zorder=0.5, label="runs blow up")


def _by_second(choice: StepSizeChoice, rows: list[Row], name: str, other: str, title: str | None, ax: Axes | None) -> Axes:
    """A line over the rate for each value of the second hyperparameter."""
    shown = [{**row, other: f"{other} {row[other]:.3g}"} for row in rows if row["truncated"] < 1]
    labels: dict[str, Any] = {"xlabel": _called(name), "ylabel": f"loss after {choice.steps} steps", "title": title, "ax": ax}
    ax = curves(shown, name, "score", by=other, log="xy", **labels)
    return reference(ax, x=choice.best[name], label="chosen")


def _called(name: str) -> str:
    return "learning rate" if name == "lr" else name
