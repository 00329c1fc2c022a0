"""Lines and ranges to read a curve against, named in the picture."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.text import Text

from theodolite.plots.style import GREY, style

_KIND = "_reference"


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
    low, high = map(float, x if x is not None else y)  # type: ignore[arg-type]
    if math.isnan(low) or math.isnan(high) or not low < high:
        raise ValueError(f"A span needs two places, the lower first. Got {low} and {high}.")
    left, right = ax.get_xlim() if x is not None else ax.get_ylim()
    low, high = (min(left, right) if math.isinf(low) else low), (max(left, right) if math.isinf(high) else high)
    with style():
        (ax.axvspan if x is not None else ax.axhspan)(low, high, color=colour, alpha=0.12, linewidth=0, zorder=0.5)
        if x is not None:
            ax.set_xlim(left, right)
        else:
            ax.set_ylim(left, right)
        if label:
            _name(ax, "x" if x is not None else "y", low, label, colour, box=False)
    return ax


def _name(ax: Axes, axis: str, place: float, label: str, colour: str, *, box: bool = True) -> None:
    """The text beside a line: on its other side near the edge, one line lower where another name is close."""
    share = _share(ax, axis, place)
    same = [text for text in _names_on(ax) if text.get_label() == f"{_KIND}-{axis}"]
    near = sum(abs(_share(ax, axis, _place(text, axis)) - share) < (0.3 if axis == "x" else 0.06) for text in same)
    backwards = share > 0.72
    if axis == "x":
        where, transform = (place, 1.0), ax.get_xaxis_transform()
        offset, ha, va = (-4.0 if backwards else 4.0, -3.0 - 13.0 * near), "right" if backwards else "left", "top"
    else:
        where, transform = (0.0 if near % 2 else 1.0, place), ax.get_yaxis_transform()
        ha, va = ("left" if near % 2 else "right"), ("top" if share > 0.9 else "bottom")
        offset = (3.0 if near % 2 else -3.0, -3.0 if share > 0.9 else 2.0)
    ax.annotate(
        label,
        where,
        xycoords=transform,
        xytext=offset,
        textcoords="offset points",
        ha=ha,
        va=va,
        fontsize=8.5,
        color=colour,
        zorder=5,
        label=f"{_KIND}-{axis}",
        bbox={"boxstyle": "square,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.75 if box else 0.0},
    )


def _names_on(ax: Axes) -> list[Text]:
    return [text for text in ax.texts if str(text.get_label()).startswith(_KIND)]


def _place(text: Text, axis: str) -> float:
    return float(text.xy[0 if axis == "x" else 1])  # type: ignore[attr-defined]


def _share(ax: Axes, axis: str, place: float) -> float:
    """Where `place` lies between the limits of the axis, 0 to 1."""
    scale = (ax.xaxis if axis == "x" else ax.yaxis).get_transform()
    low, high = ax.get_xlim() if axis == "x" else ax.get_ylim()
    a, b, c = (float(scale.transform([value])[0]) for value in (low, high, place))
    return (c - a) / (b - a)
