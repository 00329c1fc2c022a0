"""One look for every figure: colours safe for colour-blind readers, shapes that also differ in grey print."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import matplotlib.style
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import is_color_like, to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from theodolite.arguments import checked, sequence, shown, whole
from theodolite.interrupts import unbroken_context
from theodolite.plots.tables import is_number

#: Okabe and Ito's colours without the yellow (too pale for a line), the blackest one softened.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
LINES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.2, 1.4)), (0, (6, 1.6, 1.2, 1.6)), (0, (3, 1.2, 1, 1.2, 1, 1.2)))

#: For notes, reference lines and everything that is not data.
GREY = "#595959"
PALE = "#E4E4E4"

#: Ordered quantities: even steps of lightness, so it also reads in grey.
SEQUENTIAL = "viridis"
#: Signed quantities: blue below, white at the centre, red above; told apart in all common colour blindness.
DIVERGING = "RdBu_r"

_STYLE: dict[str, Any] = {
    "figure.figsize": (6.4, 3.9),
    "figure.dpi": 100,
    "savefig.dpi": 150,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "axes.labelsize": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#444444",
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.prop_cycle": cycler(color=PALETTE),
    "axes.formatter.limits": (-4, 5),
    "grid.color": PALE,
    "grid.linewidth": 0.7,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "xtick.labelcolor": "black",
    "ytick.labelcolor": "black",
    "lines.linewidth": 1.7,
    "lines.markersize": 4.5,
    "legend.fontsize": 9,
    "legend.title_fontsize": 9,
    "legend.frameon": True,
    "legend.framealpha": 0.7,
    "legend.edgecolor": "none",
    "legend.facecolor": "white",
    "legend.handlelength": 2.6,
    "image.cmap": SEQUENTIAL,
    "text.usetex": False,
}


@dataclass(frozen=True)
class Look:
    """How one group is drawn."""

    colour: Any
    marker: str
    line: Any


@unbroken_context
def style() -> Iterator[None]:
    """The house style inside the `with` block; matplotlib's settings are as before afterwards.

    It starts from matplotlib's own defaults, so a user's matplotlibrc does not change our figures.
    """
    with matplotlib.style.context(["default", _STYLE]):
        yield


@checked(i=whole)
def look(i: int) -> Look:
    """The i-th look; colour, marker and line have different periods, so 280 looks differ."""
    return Look(PALETTE[i % len(PALETTE)], MARKERS[i % len(MARKERS)], LINES[i % len(LINES)])


@checked(keys=sequence, start=whole)
def looks(keys: Sequence[Any], start: int = 0) -> list[Look]:
    """One look per group; more than four numbers in order get a sequential colour map instead of separate hues."""
    plain = [look(start + i) for i in range(len(keys))]
    if len(keys) <= 4 or not all(is_number(key) for key in keys):
        return plain
    colours = matplotlib.colormaps[SEQUENTIAL]
    return [Look(to_hex(colours(0.88 * i / (len(keys) - 1))), p.marker, p.line) for i, p in enumerate(plain)]


def an_axes(name: str, value: Any) -> Axes:
    """Axes of matplotlib."""
    if not isinstance(value, Axes):
        raise TypeError(f"{name} must be matplotlib Axes, such as plots.panels(1)[1][0]. Got {shown(value)}.")
    return value


def a_figure(name: str, value: Any) -> Figure:
    """A figure of matplotlib, to draw into."""
    if not isinstance(value, Figure):
        raise TypeError(f"{name} must be a matplotlib Figure, such as plt.figure(layout='constrained'). Got {shown(value)}.")
    return value


def a_colour(name: str, value: Any) -> Any:
    """What matplotlib takes for a colour."""
    if not is_color_like(value):
        raise ValueError(f"{name} must be a colour, such as 'red' or '#595959'. Got {shown(value)}.")
    return value


def write(ax: Axes, text: str, at: tuple[Any, Any], offset: tuple[float, float], **look: Any) -> None:
    """A text beside a place, so many points away from it."""
    ax.annotate(text, at, xytext=offset, textcoords="offset points", **look)


def dots(ax: Axes, x: Any, y: Any, colour: Any, marker: str, **look: Any) -> Line2D:
    """Points without a line."""
    return ax.plot(x, y, linestyle="none", marker=marker, color=colour, **look)[0]


def new_axes(ax: Axes | None = None, *, size: tuple[float, float] | None = None) -> Axes:
    """The given Axes, untouched, or one in a new figure that pyplot does not know of."""
    if ax is not None:
        return ax
    with style():
        return new_figure(size or _STYLE["figure.figsize"]).add_subplot()


def new_figure(size: tuple[float, float]) -> Figure:
    """An empty figure that nothing pops up and nothing keeps alive."""
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
