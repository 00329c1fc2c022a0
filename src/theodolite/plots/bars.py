"""One bar per row, with its name: scales of columns, sizes of classes."""

from __future__ import annotations

from functools import partial
from typing import Any, Unpack

from matplotlib.axes import Axes

from theodolite.arguments import integer
from theodolite.plots.axes_style import note
from theodolite.plots.chart import Labels, chart, drawing
from theodolite.plots.style import look
from theodolite.plots.tables import finite, label_of, numbers

#: Bars that can still be told apart.
MOST = 24
_LONG = 24  # characters of a name


@drawing("name", "value", most=partial(integer, least=2))
def bars(rows: Any, name: str, value: str, *, log: bool = False, most: int = MOST, **given: Unpack[Labels]) -> Axes:
    """Column `value` as horizontal bars named by column `name`, in the order of the rows, the first on top.

    Of more than `most` rows the largest and the smallest are drawn, and how many were left out is noted.

    >>> ax = bars([{"class": "cat", "samples": 3}, {"class": "dog", "samples": 1}], "class", "samples")
    >>> [float(bar.get_width()) for bar in ax.patches]
    [3.0, 1.0]
    """
    labels: Labels = {"ylabel": "", "xlabel": value, **given}
    with chart(rows, value, name, log="x" if log else "", own_legend=True, **labels) as drawn:
        ax, table = drawn.ax, drawn.table
        if len(table) > most:
            ranked = sorted(range(len(table)), key=lambda i: -float(numbers([table[i]], value)[0]))
            table = [table[i] for i in (*ranked[: most // 2], *ranked[-(most // 2) :])]
        lengths = numbers(table, value)
        usable = finite(lengths) & ((lengths > 0) if log else True)
        places = [i for i in range(len(table)) if usable[i]]
        ax.barh(places, lengths[places], 0.8, color=look(0).colour, alpha=0.8)
        names = [label_of(row[name]) for row in table]
        ax.set_yticks(range(len(table)), [text if len(text) <= _LONG else f"{text[: _LONG - 1]}…" for text in names])
        ax.set_ylim(len(table) - 0.4, -0.6)
        ax.grid(axis="y", visible=False)
        if len(drawn.table) > len(table):
            note(ax, f"the {most // 2} largest and smallest of {len(drawn.table)}")
    return ax
