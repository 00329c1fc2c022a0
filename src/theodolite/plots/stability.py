"""Stability studies as pictures: pairs, their maxima per training size, and the power law through them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from textwrap import fill
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from theodolite.measures.stability.power_law import PowerFit, fit_power_law, of_one_checkpoint, signed, slope_windows
from theodolite.plots.axes_style import make_headroom, note, span
from theodolite.plots.chart import chart
from theodolite.plots.figures import panels
from theodolite.plots.style import PALETTE, dots
from theodolite.plots.tables import finite, groups, numbers, positive, read, words

#: Colour and marker; the shapes tell them apart without colour.
PAIRS = (PALETTE[0], "o")
MAXIMA = (PALETTE[1], "D")
FIT = PALETTE[2]

LABELS = {
    "gap_loss": "gap (loss)",
    "gap_01": "gap (0-1 loss)",
    "stab": "stability",
    "stab_excl_z": "stability without z",
    "dist": "parameter distance",
    "ndist": "normalised distance",
    "norm_S": "parameter norm",
}
_REDUCED = {"max": "maximum", "mean": "mean", "median": "median"}
_WIDTH = 58  # characters of a note that fit under a panel


def stability_panels(
    rows: Any,
    quantities: Sequence[str] = ("gap_loss", "stab", "dist"),
    *,
    by: str | None = None,
    title: str | None = None,
    figure: Figure | None = None,
    **options: Any,
) -> Figure:
    """A panel per quantity, a line of panels per seed-trial: all pairs, their maxima, and the law fitted to these.

    Args:
        rows: of a stability study, a DataFrame or a result: `m`, the quantities, and where there are several `trial` and `step`.
        by: a column of configurations; they become the columns of panels, and each trial gets a line per quantity.
        figure: drawn into where given, `plt.figure(layout="constrained")` say.
        options: of each panel, those of `pairs_and_maxima`.

    >>> rows = [{"m": m, "pair": k, "stab": (2 - k) / m} for m in (100, 200, 400) for k in (0, 1)]
    >>> figure = stability_panels(rows, ["stab"])
    >>> figure.axes[0].get_ylabel()
    'stability'
    """
    if not quantities:
        raise ValueError("stability_panels needs at least one quantity, such as 'stab'.")
    table = read(rows, "m", *quantities, by)
    trials, columns = groups(table, "trial"), groups(table, by)
    places = list(product(trials, quantities, columns))
    wide = len(columns) if by else len(quantities)
    figure, axes = panels(len(places), columns=wide, size=(3.7, 3.0), title=title, figure=figure)
    for ax, (trial, quantity, column) in zip(axes, places, strict=True):
        chosen = {group.key: group.rows for group in groups(trial.rows, by)}.get(column.key)
        if chosen is None:  # a configuration without this trial
            ax.set_axis_off()
            continue
        heading = ", ".join(filter(None, [column.label, f"trial {trial.label}" if len(trials) > 1 else ""])) or None
        pairs_and_maxima(chosen, quantity, title=heading, key=ax is axes[0], ax=ax, **options)
    return figure


def pairs_and_maxima(
    rows: Any,
    quantity: str,
    *,
    step: int | None = None,
    reduce: Literal["max", "mean", "median"] = "max",
    log: bool = True,
    window: bool = False,
    resamples: int = 1000,
    seed: int = 0,
    title: str | None = None,
    key: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """One quantity of one trial against the size of the training set.

    Args:
        rows: as for `stability_panels`.
        step: the checkpoint; None means the last of each size.
        log: both axes logarithmic; otherwise linear.
        window: shade the widest range of m in which the local slope is roughly constant.
        reduce, resamples, seed: as for `fit_power_law`.
        key: whether the legend names pairs and maxima beside the law.

    >>> ax = pairs_and_maxima([{"m": m, "stab": (2 - k) / m} for m in (100, 200, 400) for k in (0, 1)], "stab")
    >>> [text.get_text().split(" ")[0] for text in ax.get_legend().get_texts()]
    ['pairs', 'maximum', '$m^{-1.00}$']
    """
    table, _, notes = of_one_checkpoint(read(rows, "m", quantity), None, step)
    x, y = numbers(table, "m"), numbers(table, quantity)
    usable = finite(x) & finite(y) & positive(x)
    shown = usable & (positive(y) | (not log))
    ms = np.unique(x[usable])
    fit = fit_power_law(ms, [y[usable & (x == m)] for m in ms], reduce=reduce, resamples=resamples, seed=seed)
    label = LABELS.get(quantity, words(quantity))
    with chart(
        table, "m", quantity, log="xy" if log else "", xlabel="training examples m", ylabel=label, title=title, ax=ax
    ) as drawn:
        ax = drawn.ax
        hide = "" if key else "_"  # matplotlib leaves such labels out of legends
        dots(ax, x[shown], y[shown], *PAIRS, markersize=3.5, alpha=0.45, label=hide + "pairs")
        _draw_reduced(ax, fit, hide, log)
        _draw_fit(ax, fit)
        if window:
            _shade(ax, fit)
        if log:
            make_headroom(ax)
        for text in filter(None, [*notes, fit.reason, fit.note]):
            note(ax, fill(text, _WIDTH))
        drawn.bad, drawn.negative = int((~(finite(x) & finite(y))).sum()), int((usable & ~shown).sum())
    return ax


def _draw_reduced(ax: Axes, fit: PowerFit, hide: str, log: bool) -> None:
    """The maxima, on top of the pairs."""
    points = [(m, g) for m, g in zip(fit.ms, fit.g, strict=True) if g > 0 or not log]
    ms, heights = np.array(points).reshape(-1, 2).T
    edge: dict[str, Any] = {"markeredgecolor": "white", "markeredgewidth": 0.6}
    dots(ax, ms, heights, *MAXIMA, markersize=6, zorder=3, label=hide + _REDUCED[fit.reduce], **edge)


def _draw_fit(ax: Axes, fit: PowerFit) -> None:
    if fit.reason:
        return
    grid = np.geomspace(fit.ms[0], fit.ms[-1], 80)
    with np.errstate(over="ignore"):
        curve = fit.curve(grid)
    inside = finite(curve)
    ax.plot(grid[inside], curve[inside], color=FIT, linewidth=1.8, zorder=2.5, label=_law(fit))


def _law(fit: PowerFit) -> str:
    """The exponent with its interval, as a legend shows it."""
    interval = f" [{signed(fit.b_low)}, {signed(fit.b_high)}]" if np.isfinite(fit.b_low) else ""
    return f"$m^{{{fit.b:.2f}}}${interval}"


def _shade(ax: Axes, fit: PowerFit) -> None:
    """The widest window of nearly constant slope; two sizes alone are none."""
    found = slope_windows(fit.ms, fit.g)
    if found.widest is None or sum(row["in_widest"] for row in found.rows()) < 2:
        note(ax, "no three sizes with a constant slope")
        return
    span(ax, x=found.widest)
    note(ax, f"slope constant within {100 * found.spread:g} % from {found.widest[0]:g} to {found.widest[1]:g} (shaded)")
