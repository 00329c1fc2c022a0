"""What the drawings share: scales, labels, legends, notes, marks for missing values, named lines and ranges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.text import Annotation
from matplotlib.ticker import Formatter

from theodolite.plots.style import GREY, Look, dots, style, write
from theodolite.plots.tables import Array, By, Group, is_number, words

_NOTE = "_note"  # as an artist label: hidden from legends, and unlike a gid never written into the SVG
_ROOM = 20_000  # points up to which matplotlib may search the best place of a legend

#: Behind a text that stands on data.
BOX = {"boxstyle": "square,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.75}


def check_log(log: str) -> None:
    """`log` is one of "", "x", "y", "xy"."""
    if log not in ("", "x", "y", "xy"):
        raise ValueError(f'log must be "", "x", "y" or "xy". Got {log!r}.')


class LogLabels(Formatter):
    """Plain numbers where they are short, else powers of ten; between the powers only on a short axis."""

    def __init__(self, *, minor: bool) -> None:
        self.minor = minor

    def __call__(self, x: float, pos: int | None = None) -> str:
        low, high = sorted(abs(end) for end in self.axis.get_view_interval())  # type: ignore[union-attr]
        if x <= 0 or low <= 0:
            return ""
        decades = math.log10(high) - math.log10(low)
        exponent = math.floor(math.log10(x) + 1e-9)
        digit = round(x / 10.0**exponent, 6)
        shown = (2, 3, 4, 6, 8) if decades < 0.8 else (2, 5) if decades < 1.7 else ()
        if self.minor and digit not in shown and decades >= 0.3:
            return ""
        if low >= 1e-4 and high < 1e5:
            return f"{x:.6g}"
        return rf"$10^{{{exponent}}}$" if digit == 1 else rf"${digit:g}\times10^{{{exponent}}}$"


def set_log_labels(axis: Axis) -> None:
    """Readable numbers on a logarithmic axis."""
    axis.set_major_formatter(LogLabels(minor=False))
    axis.set_minor_formatter(LogLabels(minor=True))


def set_scales(ax: Axes, log: str) -> None:
    """Logarithmic axes as named; the others stay as they are."""
    for axis in log:
        ax.set(**{f"{axis}scale": "log"})
        set_log_labels(ax.xaxis if axis == "x" else ax.yaxis)


def label_axes(ax: Axes, x: str, y: str, xlabel: str | None, ylabel: str | None, title: str | None) -> None:
    """Given labels, else the column names, unless the axes are labelled already."""
    if xlabel is not None or not ax.get_xlabel():
        ax.set_xlabel(words(x) if xlabel is None else xlabel)
    if ylabel is not None or not ax.get_ylabel():
        ax.set_ylabel(words(y) if ylabel is None else ylabel)
    if title is not None:
        ax.set_title(title)


def labelled(ax: Axes) -> int:
    """How many artists of these axes have a label: the next look starts there."""
    return len(ax.get_legend_handles_labels()[1])


def legend_title(by: By, found: Sequence[Group]) -> str | None:
    """Numbers in a legend need the name of their column."""
    keys = [part for group in found for part in (group.key if isinstance(group.key, tuple) else (group.key,))]
    if by is None or not any(is_number(key) for key in keys):
        return None
    return words(by) if isinstance(by, str) else ", ".join(map(words, by))


def legend(ax: Axes, title: str | None = None) -> None:
    """Inside where there is room, beside the axes where there are many entries."""
    count = labelled(ax)
    if not count:
        return
    if count > 5:
        ax.legend(title=title, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0, alignment="left")
        return
    points = sum(len(np.asarray(line.get_xydata())) for line in ax.lines)
    points += sum(len(np.asarray(marks.get_offsets())) for marks in ax.collections)
    ax.legend(title=title, loc="best" if points < _ROOM else "upper right", alignment="left")


def make_headroom(ax: Axes, without: int = 0) -> None:
    """Room for a legend above the data, where log axes are too small for it to find a gap; `without`: entries that need none."""
    figure = ax.get_figure()
    assert figure is not None
    width, height = (float(side) * 72.0 / figure.dpi for side in ax.get_window_extent().size)
    if width < 300 and height > 0:
        ax.autoscale_view()
        low, high = ax.get_ylim()
        ax.set_ylim(low, low * (high / low) ** (1 / (1 - min((15 * (labelled(ax) - without) + 4) / height, 0.45))))


def spread(positions: Sequence[float], gap: float) -> list[float]:
    """Positions moved as little as possible (least squares) so that neighbours stand at least `gap` apart.

    >>> spread([0.0, 0.0, 10.0], 2.0)
    [-1.0, 1.0, 10.0]
    """
    order = np.argsort(np.asarray(positions, dtype=float), kind="stable")
    pools: list[list[float]] = []  # [mean, members] of runs pushed together
    for rank, i in enumerate(order):
        pools.append([positions[i] - rank * gap, 1.0])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            mean, count = pools.pop()
            pools[-1] = [(pools[-1][0] * pools[-1][1] + mean * count) / (pools[-1][1] + count), pools[-1][1] + count]
    shifted = [mean for mean, count in pools for _ in range(int(count))]
    moved = [0.0] * len(positions)
    for rank, i in enumerate(order):
        moved[i] = float(shifted[rank] + rank * gap)
    return moved


def ends_in_points(ax: Axes, ends: Sequence[tuple[float, float]]) -> Array:
    """Data positions in points on the page, by the limits of this moment."""
    ax.autoscale_view()
    figure = ax.get_figure()
    assert figure is not None
    return np.asarray(ax.transData.transform(np.asarray(ends, dtype=float))) * 72.0 / figure.dpi


def label_ends(ax: Axes, ends: Sequence[tuple[float, float]], labels: Sequence[str], looks: Sequence[Look]) -> None:
    """Each line's name at its right end, moved apart where they would overlap."""
    heights = ends_in_points(ax, ends)[:, 1].tolist()
    for end, label, look, old, new in zip(ends, labels, looks, heights, spread(heights, 11.5), strict=True):
        write(ax, label, end, (7, new - old), color=look.colour, fontsize=9, va="center", annotation_clip=False)


def room_at_the_end(ax: Axes, ends: Sequence[tuple[float, float]], texts: Sequence[str]) -> bool:
    """Direct labels read better than a legend if there are few and the lines end side by side."""
    if not 2 <= len(ends) <= 7 or max(map(len, texts)) > 24 or labelled(ax) > len(ends):
        return False
    places = ends_in_points(ax, ends)
    moved = np.abs(np.array(spread(places[:, 1].tolist(), 11.5)) - places[:, 1])
    return bool(np.ptp(places[:, 0]) < 3.0 and moved.max() < 14.0)


def note(ax: Axes, text: str) -> None:
    """A small grey line under the axis label; several notes join."""
    for child in ax.texts:
        if isinstance(child, Annotation) and child.get_label() == _NOTE:
            if text not in child.get_text().split("\n"):
                child.set_text(f"{child.get_text()}\n{text}")
            return
    look: dict[str, Any] = {"ha": "right", "va": "top", "fontsize": 8, "color": GREY, "annotation_clip": False}
    write(ax, text, (1.0, 0.0), (0, -3), xycoords=("axes fraction", ax.xaxis.label), label=_NOTE, **look)


def notes(ax: Axes) -> list[str]:
    """The notes under the axes."""
    return [line for text in ax.texts if text.get_label() == _NOTE for line in text.get_text().split("\n")]


def note_left_out(ax: Axes, bad: int, total: int, *, negative: int = 0, marked: bool = False) -> None:
    """Say how many values are not in the picture because they are not finite, or `negative` on a logarithmic axis."""
    if bad:
        note(ax, f"{bad} of {total} values not finite" + (" (hollow triangles)" if marked else ""))
    note_not_positive(ax, negative, total)


def note_not_positive(ax: Axes, count: int, total: int) -> None:
    """Say how many values a logarithmic axis cannot show."""
    if count:
        note(ax, f"{count} of {total} values not positive, not on the log axis")


def mark_missing(ax: Axes, above: Array, below: Array, look: Look, row: int) -> None:
    """Hollow triangles at the edge of the axes where values are not finite; `row` keeps groups apart."""
    for places, marker, height in ((above, "^", 0.985 - 0.04 * row), (below, "v", 0.015 + 0.04 * row)):
        if len(places):
            at_the_edge = {"transform": ax.get_xaxis_transform(), "clip_on": False, "zorder": 4}
            heights = np.full(len(places), height)
            dots(ax, places, heights, look.colour, marker, markerfacecolor="white", label="_missing", **at_the_edge)


def reference(ax: Axes, *, x: float | None = None, y: float | None = None, label: str = "", colour: str = GREY) -> Axes:
    """A dashed line at `x` or at `y`, with its name beside it. Call it after the data are drawn."""
    if (x is None) == (y is None):
        raise ValueError("A reference line stands either at x= or at y=.")
    place = float(x if x is not None else y)  # type: ignore[arg-type]
    if not math.isfinite(place):
        raise ValueError(f"A reference line needs a finite place. Got {place}.")
    with style():
        draw = ax.axvline if x is not None else ax.axhline
        draw(place, color=colour, linestyle=(0, (4, 2)), linewidth=1.1, zorder=1.8)
        if label:
            _name(ax, "x" if x is not None else "y", place, label, colour)
    return ax


def span(
    ax: Axes,
    *,
    x: tuple[float, float] | None = None,
    y: tuple[float, float] | None = None,
    label: str = "",
    colour: str = GREY,
) -> Axes:
    """A shaded range of `x` or of `y`, with its name at its lower edge. Infinite ends reach the edge of the axes."""
    if (x is None) == (y is None):
        raise ValueError("A span covers either x= or y=.")
    axis, draw = ("x", ax.axvspan) if x is not None else ("y", ax.axhspan)
    low, high = map(float, x if x is not None else y)  # type: ignore[arg-type]
    if math.isnan(low) or math.isnan(high) or not low < high:
        raise ValueError(f"A span needs two places, the lower first. Got {low} and {high}.")
    left, right = ax.get_xlim() if axis == "x" else ax.get_ylim()
    low, high = (min(left, right) if math.isinf(low) else low), (max(left, right) if math.isinf(high) else high)
    with style():
        draw(low, high, color=colour, alpha=0.12, linewidth=0, zorder=0.5)
        ax.set(**{f"{axis}lim": (left, right)})
        if label:
            _name(ax, axis, low, label, colour, box=False)
    return ax


def _name(ax: Axes, axis: str, place: float, label: str, colour: str, *, box: bool = True) -> None:
    """The text beside a line: on its other side near the edge, one line lower where another name is close."""
    share, kind = _share(ax, axis, place), f"_reference-{axis}"
    others: list[Any] = [text for text in ax.texts if text.get_label() == kind]
    places = [float(text.xy["xy".index(axis)]) for text in others]
    near = sum(abs(_share(ax, axis, other) - share) < (0.3 if axis == "x" else 0.06) for other in places)
    backwards = share > 0.72
    if axis == "x":
        where, transform = (place, 1.0), ax.get_xaxis_transform()
        offset, ha, va = (-4.0 if backwards else 4.0, -3.0 - 13.0 * near), "right" if backwards else "left", "top"
    else:
        where, transform = (0.0 if near % 2 else 1.0, place), ax.get_yaxis_transform()
        ha, va = ("left" if near % 2 else "right"), ("top" if share > 0.9 else "bottom")
        offset = (3.0 if near % 2 else -3.0, -3.0 if share > 0.9 else 2.0)
    look: dict[str, Any] = {"ha": ha, "va": va, "fontsize": 8.5, "color": colour, "bbox": {**BOX, "alpha": 0.75 if box else 0.0}}
    write(ax, label, where, offset, xycoords=transform, zorder=5, label=kind, **look)


def _share(ax: Axes, axis: str, place: float) -> float:
    """Where `place` lies between the limits of the axis, 0 to 1."""
    scale = (ax.xaxis if axis == "x" else ax.yaxis).get_transform()
    low, high = ax.get_xlim() if axis == "x" else ax.get_ylim()
    a, b, c = (float(scale.transform([value])[0]) for value in (low, high, place))
    return (c - a) / (b - a)
