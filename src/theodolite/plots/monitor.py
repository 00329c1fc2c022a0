"""A monitored training in one figure: loss and spikes, units and steps, rate against the critical one, curvature, features."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from theodolite.arguments import a_mapping, checked, shown
from theodolite.plots.axes_style import legend, note, reference
from theodolite.plots.curves import curves
from theodolite.plots.figures import panels
from theodolite.plots.style import GREY, PALETTE, a_figure, dots, style
from theodolite.plots.tables import finite, label_of, numbers, positive
from theodolite.results import Row

#: Colour and marker of each cause of a spike.
CAUSES = {
    "catapult": ("#E69F00", "o"),
    "learning-rate jump": (PALETTE[0], "s"),
    "bad batch": (PALETTE[1], "^"),
    "data shift": (PALETTE[3], "D"),
    "second-moment collapse": (PALETTE[2], "v"),
    "non-finite": ("#B00020", "X"),
    "unexplained": (GREY, "P"),
}
_OTHER = (GREY, "P")
RATIO = "Learning rate over critical rate"
_LOWEST = 3e-3  # of the rate over the critical one
_PARTS = 800  # of a long run, of which the extremes are drawn: about what a printed panel resolves

_KINDS = ("step", "look", "spike", "progress", "validation")

# title, logarithmic, lines as (table, column, label)
_PANELS: list[tuple[str, bool, list[tuple[str, str, str]]]] = [
    (
        "Loss",
        True,
        [
            ("steps", "loss", "batch"),
            ("probe", "loss", "probe"),
            ("validation", "loss", "validation"),
            ("progress", "trivial", "best constant prediction"),
        ],
    ),
    ("Share of the hidden units that get gradients", False, [("progress", "alive", "")]),
    ("Length of a step over that of the weights", True, [("progress", "update_ratio", "median of the layers")]),
    (RATIO, True, [("batch", "ratio", "batch"), ("probe", "ratio", "probe")]),
    (
        "Sharpness and kernel norm",
        True,
        [
            ("batch", "sharpness", "sharpness, batch"),
            ("probe", "sharpness", "sharpness, probe"),
            ("probe", "kernel_norm", "kernel norm"),
        ],
    ),
    ("Share of the loss in the top eigenspace", False, [("probe", "top_share", "")]),
    ("Gradient and update", True, [("steps", "gradient_norm", "gradient norm"), ("steps", "update_norm", "update norm")]),
    ("AGOP alignment", False, [("probe", "agop_alignment", "")]),
]


@checked(figure=a_figure)
def plot_monitor(log: Any, *, title: str | None = None, figure: Figure | None = None) -> Figure:
    """The figures of a monitor's log: a `MonitorReport`, a `MonitorLog`, or its records as a list of dicts.

    `figure` is drawn into where it is given, `plt.figure(layout="constrained")` say, which pyplot then shows.

    >>> steps = [{"kind": "step", "step": t, "loss": 2.0 / (t + 1), "gradient_norm": 1.0, "rate": 0.1} for t in range(5)]
    >>> figure = plot_monitor(steps)
    >>> figure.axes[0].get_title(loc="left"), figure.axes[0].lines[0].get_ydata().tolist()[:2]
    ('Loss', [2.0, 1.0])
    """
    tables, spikes = _tables(log)
    filled = [
        (name, log_axis, [(_thinned(tables[table], column), column, label) for table, column, label in lines])
        for name, log_axis, lines in _PANELS
    ]
    filled = [panel for panel in filled if any(rows for rows, _, _ in panel[2])]  # what was not measured has no panel
    if not filled:
        raise ValueError("log holds no step and no look yet, so there is nothing to draw.")
    figure, axes = panels(len(filled), columns=2, size=(4.7, 2.8), title=title, figure=figure)
    for ax, (name, log_axis, lines) in zip(axes, filled, strict=True):
        _panel(ax, name, log_axis, lines)
        if name == _PANELS[0][0]:
            _mark_spikes(ax, spikes, tables["steps"])
        elif name == RATIO:
            _mark_exceeded(ax, tables["batch"])
    widest = max((ax.get_xlim() for ax in axes), key=lambda ends: ends[1] - ends[0])
    for ax in axes:  # one axis of time for all
        ax.set_xlim(widest)
    return figure


def plot_runs(comparison: Any) -> Figure:
    """The losses of two runs by steps and, where it is known, by time; a line where they part.

    `comparison` is what `compare_runs` returns.
    """
    if not hasattr(comparison, "points") or not hasattr(comparison, "parted"):
        raise TypeError(f"comparison must be what compare_runs returns. Got {shown(comparison)}.")
    points = [dict(row) for row in comparison.points]
    if not points:
        raise ValueError("Neither run has a step yet, so there is nothing to draw.")
    wide = min(row["loss"] for row in points) > 0
    timed = [row for row in points if row["seconds"] is not None]
    figure, axes = panels(1 + bool(timed), size=(4.7, 3.2))
    for ax, rows, x in zip(axes, (points, timed), ("step", "seconds"), strict=False):
        xlabel = "step" if x == "step" else "seconds of training"
        log = "y" if wide else ""
        curves(rows, x, "loss", by="run", band=None, log=log, markers=False, labels="legend", xlabel=xlabel, ax=ax)
    if comparison.parted is not None:
        reference(axes[0], x=comparison.parted, label="they part")
    return figure


def _tables(log: Any) -> tuple[dict[str, list[Row]], list[Row]]:
    """Steps, looks at batches and at the probe, progress, validations; and spikes. The last record about a place stays."""
    if hasattr(log, "records"):
        log = log.records()
    if all(hasattr(log, name) for name in ("steps", "looks", "spikes")):
        steps, looks, spikes = log.steps, log.looks, log.spikes
        progress, validation = getattr(log, "progress", ()), getattr(log, "validation", ())
    elif isinstance(log, Iterable) and not isinstance(log, str | bytes | dict):
        records = [a_mapping("log: a record", row) for row in log]
        steps, looks, spikes, progress, validation = ([row for row in records if row.get("kind") == kind] for kind in _KINDS)
    else:
        raise TypeError(f"log must be a MonitorReport, a MonitorLog or a list of its records. Got {type(log).__name__}.")
    by_place = {on: _last([look for look in looks if look.get("on") == on], "step") for on in ("batch", "probe")}
    more = {"progress": _last(progress, "step"), "validation": _last(validation, "step")}
    return {"steps": _last(steps, "step"), **by_place, **more}, _last(spikes, "start")


def _last(rows: Iterable[Row], place: str) -> list[Row]:
    found = {row[place]: row for row in rows}
    return [found[at] for at in sorted(found)]


def _thinned(rows: Sequence[Row], column: str) -> list[Row]:
    """Rows that hold a value; of a long run the smallest, the largest and what is not finite in each of many parts."""
    there = [{"step": row["step"], column: row[column]} for row in rows if row.get(column) is not None]
    if len(there) <= 2 * _PARTS:
        return there
    values = numbers(there, column)
    kept: set[int] = {0, len(there) - 1}
    for part in np.array_split(np.arange(len(there)), _PARTS):
        good = part[finite(values[part])]
        if len(good):
            kept |= {int(good[values[good].argmin()]), int(good[values[good].argmax()])}
        if len(good) < len(part):
            kept.add(int(part[~finite(values[part])][0]))
    return [there[i] for i in sorted(kept)]


def _panel(ax: Axes, name: str, log_axis: bool, lines: list[tuple[list[Row], str, str]]) -> None:
    shown = [(rows, column, label) for rows, column, label in lines if rows]
    with style():
        ax.set(title=name, xlabel="step")
    values = np.concatenate([numbers(rows, column) for rows, column, _ in shown])
    values = values[finite(values)]
    mostly_positive = len(values) > 0 and positive(values).mean() >= 0.9
    scale = "y" if log_axis and mostly_positive else ""
    for rows, column, label in shown:
        drawn = len(ax.lines)
        markers = len(rows) <= 40 and column != "trivial"
        curves(rows, "step", column, log=scale, label=label, labels="none", markers=markers, ylabel="", ax=ax)
        if len(rows) > _PARTS // 2:  # a noisy line: thin, or it is a band
            for line in ax.lines[drawn:]:
                line.set_linewidth(0.9)
    if not log_axis:
        low, high = ax.get_ylim()
        ax.set_ylim(min(low, 0.0), max(high, 1.0))
    with style():
        legend(ax)


def _mark_spikes(ax: Axes, spikes: Sequence[Row], steps: Sequence[Row]) -> None:
    """A mark at the peak of each spike, named by its cause."""
    losses = {row["step"]: row.get("loss") for row in steps}
    bottom, top = ax.get_ylim()
    named: dict[str, Any] = {}
    for cause in dict.fromkeys(str(spike.get("cause")) for spike in spikes):
        peaks = [
            spike["start"] if spike.get("peak") is None else spike["peak"] for spike in spikes if str(spike.get("cause")) == cause
        ]
        heights = numbers([{"loss": losses.get(peak)} for peak in peaks], "loss")
        good = positive(heights) & finite(heights) if ax.get_yscale() == "log" else finite(heights)
        look: dict[str, Any] = {"markeredgecolor": "white", "markersize": 7.5, "zorder": 5, "clip_on": False}
        marks = dots(ax, peaks, np.where(good, heights, top), *CAUSES.get(cause, _OTHER), label=f"_{cause}", **look)
        named[f"{label_of(cause)} ({len(peaks)})"] = marks
    ax.set_ylim(bottom, top)
    figure = ax.get_figure()
    if named and figure is not None:
        with style():
            handles, names = list(named.values()), list(named)
            figure.legend(
                handles, names, loc="outside lower center", ncols=4, title="spikes in (a)", columnspacing=1.4, handlelength=1.2
            )


def _mark_exceeded(ax: Axes, looks: Sequence[Row]) -> None:
    """The line where the rate is the critical one, and the batches above it."""
    if not ax.lines:
        return
    above = [look for look in looks if look.get("exceeded") and look.get("ratio") is not None]
    shown = _thinned(above, "ratio")
    if shown:
        place, ratio = numbers(shown, "step"), numbers(shown, "ratio")
        dots(ax, place, ratio, PALETTE[1], "o", markersize=3.5, zorder=4, label="_above")
        note(ax, f"dots: {len(above)} of {len(looks)} batches above their critical rate")
    bottom, top = ax.get_ylim()
    if ax.get_yscale() == "log" and bottom < _LOWEST < top:  # a schedule that ends at zero would flatten the rest
        ax.set_ylim(bottom=_LOWEST)
        note(ax, "the lowest values lie below the axis")
    reference(ax, y=1.0, label="edge of stability")
