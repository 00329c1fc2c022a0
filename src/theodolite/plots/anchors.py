"""Anchors of language models: what a probe found, histograms that come as counts, bars of several models side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from theodolite.measures.anchors import AnchorProbe, AtomGeometry
from theodolite.plots.axes_style import label_axes, legend, make_headroom, note, reference, span
from theodolite.plots.chart import Grouping, Labels, chart
from theodolite.plots.figures import panels
from theodolite.plots.spectra import draw_stairs, eigenvalues, histogram
from theodolite.plots.style import GREY, PALETTE, look, looks, new_axes, style, write
from theodolite.plots.tables import finite, groups, label_of, numbers, positive

#: Curves of the error panel: column, name, whether it is a yardstick.
_ERRORS = (
    ("held_out_mse", "anchor, held out", False),
    ("mse", "anchor, in sample", False),
    ("intercept_mse", "with intercept, in sample", False),
    ("variance", "the mean", True),
    ("constant_mse", "all words alike", True),
)
_ALIKE = 1e-9  # a fit with intercept that is nearer than this to the one without is not drawn


def plot_anchor_probe(probe: AnchorProbe, *, title: str | None = None, figure: Figure | None = None) -> Figure:
    """Errors per number of words removed, histograms of the log partition functions, and the geometry of the atoms.

    >>> import torch
    >>> from theodolite.measures.anchors import probe_states
    >>> states = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    >>> figure = plot_anchor_probe(probe_states(states, torch.eye(4)[[0, 1, 2, 3, 0]], top=(0, 1)))
    >>> len(figure.axes)
    5
    """
    count = 2 if probe.geometry is None else 5
    figure, axes = panels(count, columns=min(3, count), size=(3.9, 3.2), title=title, figure=figure)
    plot_anchor_errors(probe.rows(), ax=axes[0])
    plot_log_partitions(probe, ax=axes[1])
    if probe.geometry is not None:
        _draw_geometry(probe.geometry, axes[2:])
    return figure


def plot_atom_geometry(geometry: AtomGeometry, *, title: str | None = None, figure: Figure | None = None) -> Figure:
    """Singular values, norms and cosines of the atoms, beside those of a uniform sphere."""
    figure, axes = panels(3, size=(3.9, 3.2), title=title, figure=figure)
    _draw_geometry(geometry, axes)
    return figure


def _draw_geometry(geometry: AtomGeometry, axes: Sequence[Axes]) -> None:
    for plot, ax in zip((plot_singular_values, plot_atom_norms, plot_atom_cosines), axes, strict=True):
        plot(geometry, ax=ax)


def plot_anchor_errors(rows: Any, *, title: str | None = None, ax: Axes | None = None) -> Axes:
    """Mean square errors (rows of an `AnchorProbe`) against the number of words removed, which are evenly spaced.

    Dashed are the yardsticks: predicting the mean of the log bulk partition function, which is its variance, and the logarithm of
    the number of bulk words.
    """
    labels: Labels = {"xlabel": "most probable words removed", "ylabel": "mean square error", "ax": ax}
    labels["title"] = title or "Error of the anchor"
    with chart(rows, "top", *(name for name, _, _ in _ERRORS), log="y", own_legend=True, **labels) as drawn:
        ax, tops, drawn.total = drawn.ax, numbers(drawn.table, "top"), 0
        columns = {name: numbers(drawn.table, name) for name, _, _ in _ERRORS}
        at = np.arange(len(tops))
        for i, (name, label, yardstick) in enumerate(_ERRORS):
            values = columns[name]
            if name == "intercept_mse" and np.allclose(values, columns["mse"], rtol=_ALIKE, atol=0):
                continue
            usable = finite(values) & positive(values)
            drawn.negative += int((finite(values) & ~positive(values)).sum())
            drawn.total += len(values)
            colour = GREY if yardstick else PALETTE[i]
            line: Any = look(i).line if not yardstick else (0, (4, 2)) if name == "variance" else (0, (1, 2))
            marker = "" if yardstick else look(i).marker
            ax.plot(at[usable], values[usable], color=colour, linestyle=line, marker=marker, label=label)
        ax.set_xticks(at, [f"{int(k)}" for k in tops])
        ax.margins(x=0.08)
        make_headroom(ax, without=1)
        ax.legend(fontsize=8, loc="upper right")
    return ax


def plot_log_partitions(probe: AnchorProbe, *, top: int | None = None, title: str | None = None, ax: Axes | None = None) -> Axes:
    """Histograms over positions of log Z and of the log bulk partition function without the `top` most probable words.

    By default it is the number that is nearest 0.2 % of the vocabulary.
    """
    chosen = probe.top[probe.spoken] if top is None else top
    values = {"log Z, all words": probe.sampled_log_z}
    if chosen or probe.excluded:
        removed = [f"top {chosen}"] * bool(chosen) + [f"{probe.excluded} excluded"] * bool(probe.excluded)
        values[f"bulk, without {' and '.join(removed)}"] = probe.sampled_values[:, probe.top.index(chosen)]
    rows = [{"value": float(v), "of": name} for name, column in values.items() for v in column]
    ax = histogram(
        rows, "value", by="of", bins=60, xlabel="logarithm of the partition function", ylabel="density",
        title=title or "How much it varies", ax=ax,
    )  # fmt: skip
    ax.legend(fontsize=8, loc="best")
    if not probe.exact:
        note(ax, f"a sample of {probe.sample} of {probe.positions} positions")
    return ax


def plot_singular_values(geometry: AtomGeometry, *, title: str | None = None, ax: Axes | None = None) -> Axes:
    """Singular values of the dictionary by rank, and the range they would have for atoms uniform on a sphere."""
    rows = [{"singular value": value} for value in geometry.singular_values.tolist()]
    ax = eigenvalues(
        rows, value="singular value", log=True, ylabel="singular value", title=title or "Spectrum of the atoms", ax=ax
    )
    # The theory is for unit atoms: here with the mean square norm that these have.
    scale = float(geometry.norms.square().mean().sqrt())
    low, high = (scale * value for value in geometry.sphere_singular_values)
    if 0 < low < high:
        bottom, up = ax.get_ylim()
        ax.set_ylim(min(bottom, low / 1.3), max(up, high * 1.3))
        span(ax, y=(low, high), colour=PALETTE[1])
        ax.plot([], [], color=PALETTE[1], alpha=0.25, linewidth=7, label="uniform on a sphere")
        legend(ax)
    return ax


def plot_atom_norms(geometry: AtomGeometry, *, title: str | None = None, ax: Axes | None = None) -> Axes:
    """Histogram of the norms of the atoms."""
    rows = [{"norm": value} for value in geometry.norms.tolist()]
    ax = histogram(
        rows, "norm", density=False, bins=60, xlabel="norm of an atom", ylabel="atoms", title=title or "Norms of the atoms", ax=ax
    )
    ax.set_xlim(left=0)
    return ax


def plot_atom_cosines(geometry: AtomGeometry, *, title: str | None = None, ax: Axes | None = None) -> Axes:
    """Histogram of the cosines of random pairs of atoms beside the density for a uniform sphere."""
    counts, edges = geometry.cosine_counts.double().numpy(), geometry.cosine_edges.numpy()
    with style():
        ax = new_axes(ax)
        heights = counts / max(counts.sum(), 1.0) / np.diff(edges)
        draw_stairs(ax, heights, edges, look(0), "these atoms")
        grid = np.linspace(-1, 1, 401)[1:-1]
        ax.plot(grid, _sphere_density(grid, geometry.dim), color=PALETTE[1], linestyle=look(1).line, label="uniform on a sphere")
        reference(ax, x=0.0)
        ax.set_xlim(-1, 1)
        label_axes(ax, "", "", "cosine of two atoms", "density", title or "Directions of the atoms")
        ax.legend(fontsize=8, loc="upper left")
        note(ax, f"{geometry.pairs} random pairs, mean {geometry.cosine_mean:.2g}")
    return ax


def _sphere_density(cosines: Sequence[float] | np.ndarray, dim: int) -> np.ndarray:
    """Density of the cosine of two independent uniform directions: c (1 − x²)^((d − 3)/2)."""
    x = np.asarray(cosines, dtype=np.float64)
    if dim < 2:
        return np.zeros_like(x)
    constant = math.lgamma(dim / 2) - math.lgamma((dim - 1) / 2) - 0.5 * math.log(math.pi)
    return np.asarray(np.exp(constant + (dim - 3) / 2 * np.log1p(-(x**2))))


def counted_histogram(
    rows: Any,
    *,
    low: str = "low",
    high: str = "high",
    density: str = "density",
    **given: Unpack[Grouping],
) -> Axes:
    """Histograms whose bars are the rows: their edges and the density between them, one outline per value of `by`.

    >>> ax = counted_histogram([{"low": 0.0, "high": 1.0, "density": 0.25}, {"low": 1.0, "high": 2.0, "density": 0.75}])
    >>> ax.patches[0].get_data().values.tolist()
    [0.25, 0.75]
    """
    grouped = given.get("by") is not None
    with chart(rows, low, density, high, own_legend=not grouped, **given) as drawn:
        for group, look in drawn:
            left, right, heights = (numbers(group.rows, name) for name in (low, high, density))
            draw_stairs(drawn.ax, heights, np.append(left, right[-1:]), look, group.label)
        if grouped:
            drawn.ax.set_ylim(top=drawn.ax.get_ylim()[1] * (1 + 0.13 * len(drawn.groups)))  # room for the key
    return drawn.ax


def grouped_bars(
    rows: Any,
    x: str,
    y: str,
    *,
    by: str,
    mark: str | None = None,
    log: bool = False,
    **given: Unpack[Labels],
) -> Axes:
    """Column `y` as bars, those of the same `x` side by side and named by `by`; a black line across each marks column `mark`.

    >>> ax = grouped_bars([{"model": "a", "error": 1.0, "of": "all"}, {"model": "a", "error": 0.5, "of": "bulk"}],
    ...                   "model", "error", by="of")
    >>> [float(bar.get_height()) for bar in ax.patches]
    [1.0, 0.5]
    """
    labels: Labels = {"xlabel": "", **given}
    with chart(rows, x, y, by, mark, log="y" if log else "", own_legend=True, **labels) as drawn:
        ax, found = drawn.ax, groups(drawn.table, x)
        for place, group in enumerate(found):
            width = 0.8 / len(group.rows)
            heights = numbers(group.rows, y)
            marks = heights if mark is None else numbers(group.rows, mark)
            for i, look in enumerate(looks(range(len(heights)))):
                at = place - 0.4 + (i + 0.5) * width
                ax.bar(at, heights[i], 0.92 * width, color=look.colour, alpha=0.75)
                if mark is not None:
                    ax.plot([at - 0.46 * width, at + 0.46 * width], [marks[i]] * 2, color="#222222", linewidth=1.6)
                text = label_of(group.rows[i][by]).replace(" (", "\n(")
                over = (at, float(max(heights[i], marks[i])))
                write(ax, text, over, (0, 4), ha="center", fontsize=7.5)
        ax.set_xticks(range(len(found)), [group.label for group in found])
        ax.margins(y=0.25 if log else 0.12)
    return ax
