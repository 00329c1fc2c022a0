"""Quantities of layers, one line each, in the order of the forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import numpy as np
from matplotlib.axes import Axes

from theodolite.arguments import a_mapping
from theodolite.plots.axes_style import legend
from theodolite.plots.chart import Labels, chart, drawing
from theodolite.plots.style import look
from theodolite.plots.tables import finite, numbers, positive

#: Layers up to which each one is named.
_NAMED = 40


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
