"""Figures of several panels, written as a list of what each of them shows.

>>> table = [{"step": step, "loss": 2.0**-step, "width": width} for step in range(3) for width in (10, 20)]
>>> left = curves(table, "step", "loss", by="width", log="y").line(y=1.0, label="start")
>>> figure = draw_panels(left, scatter(table, "width", "loss").set(xlim=(0, 30)), size=(4.0, 3.0), ylabel="training loss")
>>> [ax.get_ylabel() for ax in figure.axes], float(figure.axes[1].get_xlim()[1])
(['training loss', 'training loss'], 30.0)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from theodolite.experiments.query import split as split  # one panel for each value
from theodolite.results import Row


class Panel:
    """A drawing that waits for its axes: a function of `plots` by name with its arguments, and what is done afterwards."""

    def __init__(self, plot: str, *given: Any, **look: Any) -> None:
        self.plot, self.given, self.look = plot, given, look
        self._afterwards: list[Callable[[Any], Any]] = []

    def then(self, act: Callable[[Any], Any]) -> Panel:
        """Anything else that is done with the axes."""
        self._afterwards.append(act)
        return self

    def line(self, **where: Any) -> Panel:
        """A reference line at `x=` or `y=`, with its `label=`."""
        from theodolite import plots

        return self.then(lambda ax: plots.reference(ax, **where))

    def set(self, **properties: Any) -> Panel:
        """Properties of the axes, as `ax.set` takes them: `ylim=(0, 1)`."""
        return self.then(lambda ax: ax.set(**properties))

    def legend(self, **look: Any) -> Panel:
        """The legend again, with another look."""
        return self.then(lambda ax: ax.legend(**look))

    def draw(self, ax: Any, **shared: Any) -> None:
        """Draw on these axes; `shared` is what the panel has not stated itself."""
        from theodolite import plots

        getattr(plots, self.plot)(*self.given, **{**shared, **self.look}, ax=ax)
        for act in self._afterwards:
            act(ax)


curves, log_log, scatter, heatmap, matrix = (
    partial(Panel, plot) for plot in ("curves", "log_log", "scatter", "heatmap", "matrix")
)


def draw_panels(
    *panels: Panel, columns: int | None = None, size: tuple[float, float] = (3.6, 2.9), share: bool | str = False, **shared: Any
) -> Any:
    """A figure of panels, left to right and top to bottom, lettered if there are several; `shared` holds for all of them.

    `size` is that of one panel; `share` gives all of them the same axes, "y" the same vertical one.
    """
    from theodolite import plots

    several = len(panels) > 1
    figure, axes = plots.panels(
        len(panels), columns=columns, size=size, letters=several, share_x=share is True, share_y=bool(share)
    )
    for panel, ax in zip(panels, axes, strict=True):
        panel.draw(ax, **shared)
    return figure


def draw_columns(*columns: Iterable[Panel], **look: Any) -> Any:
    """A figure of columns of panels that stand side by side, each from top to bottom."""
    lines = zip(*columns, strict=True)
    return draw_panels(*(panel for line in lines for panel in line), **{"columns": len(columns), **look})


# Rows as panels want them


def labelled(rows: Iterable[Row], **labels: str) -> list[Row]:
    """Rows with further columns that are texts of their values.

    >>> labelled([{"m": 1000}], width="m = {m:,}")
    [{'m': 1000, 'width': 'm = 1,000'}]
    """
    return [{**row, **{name: text.format(**row) for name, text in labels.items()}} for row in rows]


def reduced(rows: Iterable[Row], reduce: Callable[[list[Any]], Any], column: str, *by: str) -> list[Row]:
    """A row for each combination of the values of the columns `by`, with the values of another column reduced to one.

    >>> reduced([{"k": 1, "m": 5, "v": 2.0}, {"k": 1, "m": 5, "v": 3.0}], max, "v", "k", "m")
    [{'k': 1, 'm': 5, 'v': 3.0}]
    """
    groups = split(rows, *by).values()
    return [{**{name: group[0][name] for name in by}, column: reduce([row[column] for row in group])} for group in groups]


def melted(rows: Iterable[Row], names: Mapping[str, str], value: str = "value", by: str = "of") -> list[Row]:
    """A row for each of some columns, with its value and the column's name: one line each.

    >>> melted([{"step": 0, "all": 3.0, "top": 2.0}], {"all": "L", "top": "L≤1"}, "loss", "part")[1]
    {'step': 0, 'all': 3.0, 'top': 2.0, 'loss': 2.0, 'part': 'L≤1'}
    """
    rows = list(rows)
    return [{**row, value: row[column], by: name} for column, name in names.items() for row in rows]


def titled(title: str, rows: list[Row]) -> str:
    """A panel's title, with what stands in for its data where something does: stand-ins have names of several words."""
    origin = rows[0]["data"]
    return f"{title}\n({origin})" if " " in origin else title
