"""Several axes in one figure, with letters."""

from __future__ import annotations

import math
from string import ascii_lowercase

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from theodolite.plots.style import new_figure, style


def panels(
    count: int,
    *,
    columns: int | None = None,
    size: tuple[float, float] = (3.6, 2.9),
    letters: bool = True,
    share_x: bool = False,
    share_y: bool = False,
    title: str | None = None,
    figure: Figure | None = None,
) -> tuple[Figure, list[Axes]]:
    """A figure with `count` axes, left to right and top to bottom, lettered (a), (b), ...

    `size` is that of one panel in inches; unless `columns` says otherwise at most three stand side by side. They are drawn into
    `figure` where one is given, `plt.figure(layout="constrained")` say, which pyplot then shows.

    >>> figure, (left, right) = panels(2)
    >>> [float(inches) for inches in figure.get_size_inches()]
    [7.2, 2.9]
    """
    if count < 1 or (columns is not None and columns < 1):
        raise ValueError(f"panels needs at least one panel and one column. Got {count} and {columns}.")
    if columns is None:
        columns = count if count <= 3 else 2 if count == 4 else 3
    columns = min(columns, count)
    lines = math.ceil(count / columns)
    with style():
        whole = (columns * size[0], lines * size[1])
        if figure is None:
            figure = new_figure(whole)
        else:
            figure.set_size_inches(whole)
        grid = figure.subplots(lines, columns, sharex=share_x, sharey=share_y, squeeze=False)
        axes = [ax for line in grid for ax in line]
        for ax in axes[count:]:
            ax.remove()
        axes = axes[:count]
        if share_x:  # a panel with nothing below it keeps its tick labels
            for ax in axes[max(count - columns, 0) :]:
                ax.xaxis.set_tick_params(labelbottom=True)
        if letters:
            for i, ax in enumerate(axes):
                _letter(ax, f"({_name(i)})")
        if title is not None:
            figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    return figure, axes


def _letter(ax: Axes, text: str) -> None:
    ax.annotate(
        text,
        (0, 1),
        xycoords="axes fraction",
        xytext=(-8, 8),
        textcoords="offset points",
        ha="right",
        va="baseline",
        fontsize=11,
        fontweight="bold",
        annotation_clip=False,
        label="_letter",
    )


def _name(i: int) -> str:
    """a, b, ..., z, aa, ab, ..."""
    return (_name(i // 26 - 1) if i >= 26 else "") + ascii_lowercase[i % 26]
