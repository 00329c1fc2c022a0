"""Spectra: eigenvalues with their residuals, densities with their error bands, histograms."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal, Unpack

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from theodolite.arguments import each, either, series, shown, up_to
from theodolite.arguments import finite as finite_number
from theodolite.arguments import positive as positive_number
from theodolite.plots.axes_style import check_log, note, set_scales
from theodolite.plots.chart import Grouping, chart, drawing
from theodolite.plots.style import GREY, Look, dots
from theodolite.plots.tables import Array, finite, numbers, positive, read

_BINS = 120  # no more, whatever the rule says: heavy tails would ask for millions


def _some_bins(name: str, value: Any) -> int | list[float]:
    """How many bins, at most a million, or their edges."""
    if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str):
        return up_to(name, value, 1_000_000, of="bins that a picture resolves")
    edges = each(finite_number)(name, value)
    if len(edges) < 2 or any(low >= high for low, high in itertools.pairwise(edges)):
        raise ValueError(f"{name} must be a number or ascending edges. Got {shown(value)}.")
    return edges


@drawing("value", "index", "error", "by")
def eigenvalues(
    rows: Any,
    *,
    value: str = "eigenvalue",
    index: str | None = None,
    error: str | None = None,
    kind: Literal["points", "stems"] = "points",
    log: bool = False,
    **given: Unpack[Grouping],
) -> Axes:
    """Eigenvalues by rank (1, 2, ... in the order of the rows) or by the column `index`.

    `error` is a column of half widths; by default the column "residual" where the rows have one. With `log` the
    magnitudes are drawn, negative eigenvalues hollow.

    >>> ax = eigenvalues([{"eigenvalue": 3.0, "residual": 0.1}, {"eigenvalue": 1.0, "residual": 0.1}])
    >>> ax.get_xlabel(), ax.get_ylabel()
    ('rank', 'eigenvalue ± residual')
    """
    either("kind", kind, ("points", "stems"))
    with chart(rows, value, index, error, log="y" if log else "", **given) as drawn:
        if error is None and any("residual" in row for row in drawn.table):
            error = "residual"
        for group, look in drawn:
            values = numbers(group.rows, value)
            at = np.arange(1.0, len(values) + 1) if index is None else numbers(group.rows, index)
            errors = np.full(len(values), np.nan) if error is None else numbers(group.rows, error)
            if (errors < 0).any():
                raise ValueError(f"Column {error!r} must not be negative: it is an error.")
            usable = finite(values) & finite(at)
            shown = usable & positive(np.abs(values)) if log else usable
            drawn.count(usable, shown)
            _draw_values(drawn.ax, at[shown], values[shown], errors[shown], look, group.label, kind, log)
        errored = "" if error is None else f" ± {error}"
        drawn.names = (index or "rank", ("magnitude of " if log else "") + value + errored)
        if index is None:
            drawn.ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        if not log and kind == "stems":
            drawn.ax.axhline(0, color="#444444", linewidth=0.8, zorder=1.5)
    return drawn.ax


@drawing("x", "y", "error", "by", width=positive_number, nodes=series, floor=positive_number)
def density(
    rows: Any,
    *,
    x: str = "eigenvalue",
    y: str = "density",
    error: str | None = None,
    width: float = 2.0,
    nodes: Any = None,
    log: bool = True,
    floor: float = 1e-6,
    **given: Unpack[Grouping],
) -> Axes:
    """A density curve with a band of `width` standard errors (column `error`, by default "stderr" if there is one).

    `nodes` are values (or a tensor) marked by ticks at the bottom: quadrature nodes, or eigenvalues. On the log
    axis the picture ends at `floor` times the peak.

    >>> ax = density([{"eigenvalue": 0.0, "density": 1.0}, {"eigenvalue": 1.0, "density": 0.5}], nodes=[0.2])
    >>> ax.get_yscale()
    'log'
    """
    table = read(rows, x, y, error)
    if error is None and any("stderr" in row for row in table):
        error = "stderr"
    values = numbers(table, y)
    peak = float(np.max(values[finite(values)], initial=0.0))
    lowest = peak * floor if log and peak > 0 else -np.inf
    with chart(table, x, y, log="y" if log and peak > 0 else "", **given) as drawn:
        ax = drawn.ax
        for group, look in drawn:
            columns = [numbers(group.rows, name) for name in (x, y, error or y)]
            ordering = np.argsort(columns[0], kind="stable")
            at, curve, errors = (column[ordering] for column in columns)
            usable = finite(at) & finite(curve)
            drawn.count(usable, usable)
            if error is not None:
                low, high = (np.maximum(curve + side * width * errors, lowest / 10) for side in (-1, 1))
                ax.fill_between(at, low, high, where=usable & finite(errors), color=look.colour, alpha=0.22, linewidth=0)
            shown = np.where(usable, np.maximum(curve, lowest / 10), np.nan)
            ax.plot(at, shown, color=look.colour, linestyle=look.line, linewidth=1.5, label=group.label)
        if np.isfinite(lowest):
            ax.set_ylim(bottom=lowest)
        _rug(ax, nodes)
        if error is not None:
            note(ax, f"band: ± {width:g} standard errors")
    return ax


@drawing("value", "by", bins=_some_bins)
def histogram(
    rows: Any,
    value: str,
    *,
    bins: int | Sequence[float] | None = None,
    density: bool = True,
    log: str = "",
    **given: Unpack[Grouping],
) -> Axes:
    """Histogram of a column, the same bins for each value of `by`; with eigenvalues, the empirical spectral density.

    `bins` is a number or the edges; on a log x axis they are spaced evenly in the logarithm and the
    density is per decade, so that the area seen is one.

    >>> ax = histogram([{"v": 0.0}, {"v": 1.0}, {"v": 1.0}], "v", bins=[0, 0.5, 1.5], density=False)
    >>> ax.patches[0].get_data().values.tolist()
    [1, 2]
    """
    check_log(log)
    with chart(rows, value, **given) as drawn:
        samples = []
        for group in drawn.groups:
            values = numbers(group.rows, value)
            usable = finite(values)
            shown = usable & positive(values) if "x" in log else usable
            drawn.count(usable, shown)
            samples.append(values[shown])
        edges = _edges(np.concatenate(samples), bins, "x" in log)
        widths = np.diff(np.log10(edges)) if "x" in log else np.diff(edges)
        set_scales(drawn.ax, log if any(map(len, samples)) else log.replace("y", ""))
        for (group, look), sample in zip(drawn, samples, strict=True):
            counts, _ = np.histogram(sample, edges)
            heights = counts / (max(len(sample), 1) * widths) if density else counts
            draw_stairs(drawn.ax, heights, edges, look, group.label)
        height = "density per decade" if "x" in log else "density"
        drawn.names = (value, height if density else "count")
        drawn.outside = sum(int(((s < edges[0]) | (s > edges[-1])).sum()) for s in samples)
    return drawn.ax


def _draw_values(ax: Axes, at: Array, values: Array, errors: Array, look: Look, label: str, kind: str, log: bool) -> None:
    heights = np.abs(values) if log else values
    if kind == "stems":
        bottom = np.zeros(len(at)) if not log else np.full(len(at), np.min(heights, initial=np.inf) / 10)
        ax.vlines(at, bottom, heights, color=look.colour, linewidth=1.2, alpha=0.5)
    known = np.where(finite(errors), errors, 0.0)
    if known.any():
        bars = np.vstack([np.minimum(known, 0.9 * heights) if log else known, known])
        ax.errorbar(at, heights, yerr=bars, fmt="none", ecolor=look.colour, elinewidth=1.1, capsize=2.5)
    hollow = values < 0 if log else np.zeros(len(at), bool)
    if (~hollow).any() or not hollow.any():
        dots(ax, at[~hollow], heights[~hollow], look.colour, look.marker, markersize=5, label=label)
    if hollow.any():
        name = f"{label}, negative" if label else "negative"
        dots(ax, at[hollow], heights[hollow], look.colour, look.marker, markersize=5, label=name, markerfacecolor="white")


def draw_stairs(ax: Axes, heights: Array, edges: Array, look: Look, label: str) -> None:
    """A histogram, shaded below its outline."""
    ax.stairs(heights, edges, fill=True, color=look.colour, alpha=0.22)
    ax.stairs(heights, edges, color=look.colour, linestyle=look.line, linewidth=1.4, label=label)


def _rug(ax: Axes, nodes: Any) -> None:
    if nodes is None:
        return
    places = np.asarray(list(nodes), dtype=np.float64)
    good = finite(places)
    at_the_edge = {"transform": ax.get_xaxis_transform(), "clip_on": False}
    heights = np.full(int(good.sum()), 0.02)
    dots(ax, places[good], heights, GREY, "|", markersize=9, markeredgewidth=1.1, label="nodes", **at_the_edge)
    if not good.all():
        note(ax, f"{int((~good).sum())} of {len(places)} nodes not finite")


def _edges(sample: Array, bins: int | Sequence[float] | None, log: bool) -> Array:
    if bins is not None and not isinstance(bins, int):
        edges = np.asarray(bins, dtype=np.float64)
        if log and edges[0] <= 0:
            raise ValueError("bins must be a number or ascending edges, positive ones on a log axis.")
        return edges
    if not len(sample):
        return np.array([1.0, 10.0]) if log else np.array([0.0, 1.0])
    sample = np.log10(sample) if log else sample
    low, high = float(sample.min()), float(sample.max())
    if not high > low:
        half = 0.5 if log else 0.5 * max(abs(low), 1.0)
        low, high = low - half, high + half
    edges = np.linspace(low, high, (bins or _bin_count(sample)) + 1)
    return 10.0**edges if log else edges


def _bin_count(sample: Array) -> int:
    """Freedman and Diaconis where the quartiles differ, else Sturges; between 5 and 120."""
    n = len(sample)
    quartiles = np.quantile(sample, [0.25, 0.75])
    step = 2 * float(quartiles[1] - quartiles[0]) / n ** (1 / 3)
    span = float(np.ptp(sample))
    count = span / step if step > span / _BINS else (_BINS if step > 0 else np.log2(n) + 1)
    return int(np.clip(np.ceil(count), 5, _BINS))
