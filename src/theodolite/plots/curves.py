"""Curves with bands, and reference lines to read them against."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, Unpack

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from theodolite.plots.axes_style import check_log, label_ends, legend, mark_missing, note, note_not_positive, room_at_the_end
from theodolite.plots.chart import Chart, Grouping, chart
from theodolite.plots.style import Look, dots
from theodolite.plots.tables import Array, Band, Group, Summary, finite, numbers, on_axes, positive, summarise

_FEW = 25  # points per line up to which each one gets a marker
_NAMES = {
    "stderr": "line: mean, band: ± standard error",
    "std": "line: mean, band: ± standard deviation",
    "range": "line: mean, band: smallest to largest",
    None: "line: mean",
}


def curves(
    rows: Any,
    x: str,
    y: str,
    *,
    band: Band | None = "stderr",
    quantiles: tuple[float, float] = (0.25, 0.75),
    lower: str | None = None,
    upper: str | None = None,
    error: str | None = None,
    log: str = "",
    labels: Literal["auto", "direct", "legend", "none"] = "auto",
    markers: bool | None = None,
    **given: Unpack[Grouping],
) -> Axes:
    """Column `y` against column `x`, one line per value of `by`.

    Rows with the same x (seeds, say) are averaged and `band` shows their spread; a note under the axes says which.
    A band may also be given by columns: `lower` and `upper`, or `error` (half its width), with one row per x.
    `log` is "", "x", "y" or "xy". Values that are not finite are left out, marked at the edge and counted.

    >>> ax = curves([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}], "step", "loss")
    >>> ax.get_xlabel(), ax.lines[0].get_ydata().tolist()
    ('step', [2.0, 1.0])
    """
    check_log(log)
    if labels not in ("auto", "direct", "legend", "none"):
        raise ValueError(f'labels must be "auto", "direct", "legend" or "none". Got {labels!r}.')
    if (lower is None) != (upper is None) or (lower is not None and error is not None):
        raise ValueError("A band by columns is either lower= and upper=, or error=.")
    by_columns = error is not None or lower is not None
    with chart(rows, x, y, lower, upper, error, log=log, own_legend=True, **given) as drawn:
        ax = drawn.ax
        lines = [
            _by_columns(group, x, y, lower, upper, error)
            if by_columns
            else summarise(numbers(group.rows, x), numbers(group.rows, y), band, quantiles)
            for group in drawn.groups
        ]
        lines = _off_the_scale(ax, lines, log)
        for (group, look), line in zip(drawn, lines, strict=True):
            _draw(ax, line, look, group.label, log, markers)
        for row, (line, look) in enumerate(zip(lines, drawn.looks, strict=True)):
            mark_missing(ax, _on_axis(line.above, log), _on_axis(line.below, log), look, row)
        _name_lines(drawn, lines, labels)
        if not by_columns:
            _say_what_the_band_is(ax, lines, band, quantiles)
        drawn.marked = any(len(line.above) + len(line.below) for line in lines)
        drawn.bad, drawn.total = sum(line.bad for line in lines), sum(line.total for line in lines)
    return ax


def _by_columns(group: Group, x: str, y: str, lower: str | None, upper: str | None, error: str | None) -> Summary:
    at, values = numbers(group.rows, x), numbers(group.rows, y)
    line = summarise(at, values, None)
    if (line.repeats > 1).any():
        twice = line.x[line.repeats > 1][0]
        raise ValueError(f"A band by columns needs one row per {x!r} and group; {twice:g} appears more than once.")
    keep = finite(at)
    order = np.argsort(at[keep], kind="stable")
    if error is not None:
        width = numbers(group.rows, error)[keep][order]
        low, high = line.y - width, line.y + width
    else:
        low, high = (numbers(group.rows, str(name))[keep][order] for name in (lower, upper))
    gaps = int((finite(line.y) & ~(finite(low) & finite(high))).sum())
    return replace(line, low=low, high=high, bad=line.bad + gaps, total=line.total)


def _off_the_scale(ax: Axes, lines: list[Summary], log: str) -> list[Summary]:
    """Take out what a logarithmic axis cannot show, and say so."""
    out = []
    lost = 0
    for line in lines:
        hidden = ~on_axes(line.x, line.y, log)
        lost += int((hidden & finite(line.y)).sum())
        shown = np.where(hidden, np.nan, line.y)
        out.append(replace(line, y=shown, x=np.where(positive(line.x), line.x, np.nan) if "x" in log else line.x))
    note_not_positive(ax, lost, sum(len(line.x) for line in lines))
    return out


def _on_axis(places: Array, log: str) -> Array:
    return places[positive(places)] if "x" in log else places


def _draw(ax: Axes, line: Summary, look: Look, label: str, log: str, markers: bool | None) -> None:
    banded = finite(line.y) & finite(line.low) & finite(line.high)
    if banded.any():
        low = line.low
        if "y" in log:  # a band that reaches below zero goes down to the lowest thing drawn
            above = positive(low)
            low = np.where(above, low, np.min([line.y[banded].min(), low[banded & above].min(initial=np.inf)]))
        ax.fill_between(line.x, low, line.high, where=banded, color=look.colour, alpha=0.2, linewidth=0)
    few = len(line.x) <= _FEW if markers is None else markers
    ax.plot(line.x, line.y, color=look.colour, linestyle=look.line, marker=look.marker if few else "", label=label)
    if not few:
        alone = _isolated(line.y)
        dots(ax, line.x[alone], line.y[alone], look.colour, look.marker)


def _isolated(y: Array) -> NDArray[np.bool_]:
    """Points whose neighbours are both missing: no line would show them."""
    here = np.concatenate([[False], np.isfinite(y), [False]])
    return np.asarray(here[1:-1] & ~here[:-2] & ~here[2:])


def _name_lines(drawn: Chart, lines: list[Summary], labels: str) -> None:
    ax, found, title = drawn.ax, drawn.groups, drawn.legend_title
    named = [i for i, group in enumerate(found) if group.label]
    if labels == "none" or not named:
        return
    seen = [i for i in named if np.isfinite(lines[i].y).any()]
    ends = [_end(lines[i]) for i in seen]
    texts = [f"{title} {found[i].label}" if title else found[i].label for i in seen]
    if labels == "direct" or (labels == "auto" and len(seen) == len(found) and room_at_the_end(ax, ends, texts)):
        if ends:
            label_ends(ax, ends, texts, [drawn.looks[i] for i in seen])
    else:
        legend(ax, title)


def _end(line: Summary) -> tuple[float, float]:
    last = np.flatnonzero(np.isfinite(line.y))[-1]
    return float(line.x[last]), float(line.y[last])


def _say_what_the_band_is(ax: Axes, lines: list[Summary], band: Band | None, quantiles: tuple[float, float]) -> None:
    repeats = np.concatenate([line.repeats for line in lines])
    if not len(repeats) or repeats.max() < 2:
        return
    low, high = (f"{100 * share:g} %" for share in quantiles)
    text = f"line: median, band: {low} to {high}" if band == "quantiles" else _NAMES[band]
    few, many = int(repeats.min()), int(repeats.max())
    note(ax, f"{text} of {few}" + (f" to {many}" if many > few else "") + " repeats")
