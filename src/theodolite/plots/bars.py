"""One line of the picture per row, with its name: scales of columns, sizes of classes, scores of models, ratios of layers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Unpack

import numpy as np
from matplotlib.axes import Axes

from theodolite.arguments import a_mapping, integer
from theodolite.plots.axes_style import legend, note
from theodolite.plots.chart import Labels, chart, drawing
from theodolite.plots.figures import panels
from theodolite.plots.style import look
from theodolite.plots.tables import finite, label_of, numbers, positive, read
from theodolite.results import Row

#: Bars that can still be told apart.
MOST = 24
_LONG = 24  # characters of a name
#: Layers up to which each one is named.
_NAMED = 40


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
        name_rows(ax, [row[name] for row in table])
        if len(drawn.table) > len(table):
            note(ax, f"the {most // 2} largest and smallest of {len(drawn.table)}")
    return ax


@drawing("name", "value", "error")
def intervals(rows: Any, name: str, value: str, error: str, **given: Unpack[Labels]) -> Axes:
    """Column `value` as dots named by column `name`, the first on top, with bars of twice the standard `error` to both sides.

    >>> ax = intervals([{"model": "a", "loss": 0.5, "spread": 0.1}, {"model": "b", "loss": 0.7}], "model", "loss", "spread")
    >>> [text.get_text() for text in ax.get_yticklabels()]
    ['a', 'b']
    """
    labels: Labels = {"ylabel": "", "xlabel": value, **given}
    with chart(rows, value, name, own_legend=True, **labels) as drawn:
        ax, table = drawn.ax, drawn.table
        values, errors = numbers(table, value), numbers(table, error)
        for i in np.flatnonzero(finite(values)):
            reach = 2 * errors[i] if finite(errors[i : i + 1]).all() else None
            shape = look(int(i))
            ax.errorbar(values[i], i, xerr=reach, fmt=shape.marker, color=shape.colour, markersize=7, capsize=4, linewidth=1.8)
        name_rows(ax, [row[name] for row in table])
        ax.margins(x=0.15)
    return ax


def name_rows(ax: Axes, names: list[Any]) -> None:
    """One name per row at the left, the first on top."""
    texts = [label_of(name) for name in names]
    ax.set_yticks(range(len(texts)), [text if len(text) <= _LONG else f"{text[: _LONG - 1]}…" for text in texts])
    ax.set_ylim(len(texts) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)


#: What the scores of a model are called: the column, whose error stands in `<column>_error`, and the title over it.
_SCORES = {
    "loss": "Loss, lower is better",
    "accuracy": "Accuracy, higher is better",
    "critical_lr": "Critical lr, higher is flatter",
}


def model_scores(rows: Any) -> dict[str, Axes]:
    """Loss, accuracy and critical learning rate of each model as a picture of its own, those that the rows have.

    >>> found = model_scores([{"model": "a", "loss": 0.5, "loss_error": 0.1, "accuracy": None, "critical_lr": 0.2}])
    >>> list(found)
    ['loss', 'critical_lr']
    """
    table = [{**{f"{column}_error": None for column in _SCORES}, **row} for row in read(rows, "model")]
    known = [column for column in _SCORES if any(row.get(column) is not None for row in table)]
    size = (4.6, 1.15 + 0.38 * len(table))
    return {column: _score(table, column, panels(1, size=size, letters=False)[1][0]) for column in known}


def _score(table: list[Row], column: str, ax: Axes) -> Axes:
    note(ax, "bars: two standard errors over samples")
    return intervals(table, "model", column, f"{column}_error", xlabel="", title=_SCORES[column], ax=ax)


@drawing("layer", columns=a_mapping)
def layer_ratios(rows: Any, columns: Mapping[str, str], *, layer: str = "layer", **labels: Unpack[Labels]) -> Axes:
    """Columns of `rows` on a logarithmic axis, one line of names for each row, the first on top; `columns` gives their names.

    >>> rows = [{"layer": "a", "ratio": 0.1}, {"layer": "b", "ratio": 0.01}]
    >>> ax = layer_ratios(rows, {"ratio": "gradient over weights"})
    >>> [label.get_text() for label in ax.get_yticklabels()]
    ['a', 'b']
    """
    given: Labels = {"ylabel": "", "xlabel": "", **labels}
    height = 1.4 + 0.24 * min(_NAMED, len(rows))
    with chart(rows, *columns, layer, log="x", size=(6.4, max(2.4, height)), own_legend=True, **given) as drawn:
        ax, drawn.total = drawn.ax, 0
        for i, (column, name) in enumerate(columns.items()):
            values = numbers(drawn.table, column)
            shown = finite(values) & positive(values)
            drawn.total += len(values)
            drawn.count(finite(values), shown)
            places = np.arange(len(values))
            ax.plot(values[shown], places[shown], color=look(i).colour, marker=look(i).marker, linestyle="-", label=name)
        every = max(1, -(-len(drawn.table) // _NAMED))
        ax.set_yticks(range(0, len(drawn.table), every), [str(row[layer]) for row in drawn.table[::every]])
        ax.invert_yaxis()
        legend(ax)
    return ax
