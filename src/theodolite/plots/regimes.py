"""What runs at many learning rates did: losses over the rate, on bands coloured by regime."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from theodolite.plots.axes_style import note, reference
from theodolite.plots.curves import curves
from theodolite.plots.style import PALETTE, new_axes, style
from theodolite.results import Row

#: Calm to wild, told apart in grey print by their lightness too.
COLOURS = {
    "monotone": "#009E73",
    "uneven": "#56B4E9",
    "spike": "#CC79A7",
    "catapult": "#E69F00",
    "unsettled": "#999999",
    "other": "#999999",
    "divergent": "#D55E00",
}
TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)


def regime_diagram(
    rows: Any,
    *,
    own: float | None = None,
    steps: int | None = None,
    optimizer: str = "",
    title: str = "Regimes of the learning rate",
    ax: Axes | None = None,
) -> Axes:
    """Loss in the end and at its peak against the rate in units of the critical one, on bands coloured by the network's regime.

    Rows hold `model`, `ratio`, `regime`, `final_loss` and `peak_loss`; `own` marks the user's rate in the same units.

    >>> run = {"model": "network", "first_loss": 1.0}
    >>> ax = regime_diagram([{**run, "ratio": 0.5, "regime": "monotone", "final_loss": 0.1, "peak_loss": 1.0},
    ...                      {**run, "ratio": 2.0, "regime": "catapult", "final_loss": 0.2, "peak_loss": 9.0}])
    >>> ax.get_xlabel()
    'learning rate over the critical one'
    """
    table = [dict(row) for row in rows]
    if not table:
        raise ValueError("regime_diagram needs at least one row.")
    end = "loss in the end" if steps is None else f"loss after {steps} steps"
    shown = [line for row in table for line in _lines(row, end)]
    with style():
        ax = new_axes(ax)
    low = "" if all(row["loss"] > 0 for row in shown) else "x"
    if shown:
        curves(shown, "ratio", "loss", by="line", log=low or "xy", labels="none", title=title, ax=ax)
    else:
        ax.set_xscale("log")
        ax.set_title(title)
    ax.set_xlabel("learning rate over the critical one" + (f" of {optimizer}" if optimizer else ""))
    ax.set_ylabel("loss")
    used = _bands(ax, [row for row in table if row["model"] == "network"])
    _make_headroom(ax)
    reference(ax, x=1.0, label="critical")
    if own is not None:
        _mark_own(ax, own)
    with style():
        lines, names = ax.get_legend_handles_labels()
        patches = [Patch(color=COLOURS[word], alpha=0.3, label=word) for word in COLOURS if word in used]
        ax.legend(
            handles=[*lines, *patches], labels=[*names, *used], loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0
        )
    if any(row["regime"] == "divergent" for row in table):
        note(ax, "runs that diverged are not drawn, only their band")
    return ax


def _lines(row: Row, end: str) -> list[Row]:
    """The two points of a run that did not diverge; the twin shows its end only."""
    if row["regime"] == "divergent" or not math.isfinite(row["final_loss"]):
        return []
    if row["model"] != "network":
        return [{"ratio": row["ratio"], "loss": row["final_loss"], "line": f"{row['model']} twin in the end"}]
    return [
        {"ratio": row["ratio"], "loss": row["final_loss"], "line": end},
        {"ratio": row["ratio"], "loss": row["peak_loss"], "line": "highest loss"},
    ]


def _bands(ax: Axes, rows: list[Row]) -> list[str]:
    """A shade behind each stretch of rates with one regime; the border lies half-way between two rates."""
    rows = sorted(rows, key=lambda row: row["ratio"])
    ratios = np.array([row["ratio"] for row in rows])
    middles = np.sqrt(ratios[1:] * ratios[:-1])
    margin = 1.15
    edges = [ratios[0] / margin, *middles, ratios[-1] * margin]
    used = []
    place = 0
    for word, run in groupby(rows, key=lambda row: row["regime"]):
        count = len(list(run))
        ax.axvspan(edges[place], edges[place + count], color=COLOURS[word], alpha=0.18, linewidth=0, zorder=0.4)
        place += count
        used.append(word)
    ax.set_xlim(edges[0], edges[-1])
    shown = [tick for tick in TICKS if edges[0] <= tick <= edges[-1]]
    ax.set_xticks(shown, [f"{tick:g}" for tick in shown])
    ax.set_xticks([], minor=True)
    return [word for word in COLOURS if word in used]


def _make_headroom(ax: Axes) -> None:
    """Room above the data for the names of the lines."""
    low, high = ax.get_ylim()
    ax.set_ylim(low, high * (high / low) ** 0.1 if ax.get_yscale() == "log" else high + 0.1 * (high - low))


def _mark_own(ax: Axes, own: float) -> None:
    low, high = ax.get_xlim()
    if low <= own <= high:
        reference(ax, x=own, label="yours", colour=PALETTE[0])
    else:
        note(ax, f"your rate, {own:.2g} times the critical one, lies outside")
