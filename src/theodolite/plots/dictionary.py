"""Dictionaries as pictures: their atoms, how they were learned, how their size was chosen, and what the atoms are used for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from theodolite.plots.axes_style import label_axes, note
from theodolite.plots.chart import Grouping, chart
from theodolite.plots.curves import curves
from theodolite.plots.figures import panels
from theodolite.plots.heatmaps import as_array
from theodolite.plots.spectra import histogram
from theodolite.plots.style import DIVERGING, GREY, PALETTE, Look, dots, new_axes, style
from theodolite.plots.tables import Group, finite, groups, numbers, read

_IMAGES, _CURVES = 100, 12  # atoms shown at most, unless asked for more
_NAMED = 24  # coordinates up to which each gets its name
_GAP = 1  # pixels between images


def plot_atoms(
    atoms: Any,
    patch_shape: Sequence[int] | None = None,
    *,
    order: Sequence[int] | None = None,
    count: int | None = None,
    columns: int | None = None,
    feature_names: Sequence[str] | None = None,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """The rows of a dictionary (p, d): images of `patch_shape` (height, width or height, width, 3) in a mosaic, else curves.

    Each atom is scaled by its largest entry; white is zero, blue and red are the two signs, which an atom may exchange.
    `order` names the atoms to show and in which order, `count` how many of them at most.

    >>> plot_atoms(np.eye(4), (2, 2)).images[0].get_array().shape
    (5, 8)
    >>> len(plot_atoms(np.eye(4)).lines)
    4
    """
    array = as_array(atoms)
    shape = None if patch_shape is None else tuple(int(side) for side in patch_shape)
    if shape is not None and (len(shape) not in (2, 3) or math.prod(shape) != array.shape[1] or shape[2:] not in ((), (3,))):
        wanted = "(height, width) or (height, width, 3)"
        raise ValueError(f"patch_shape must be {wanted} with {array.shape[1]} numbers in all. Got {shape}.")
    if columns is not None and columns < 1:
        raise ValueError(f"columns must be at least 1. Got {columns}.")
    chosen = list(range(len(array)) if order is None else order)
    chosen = chosen[: (_CURVES if shape is None else _IMAGES) if count is None else count]
    if not chosen:
        raise ValueError("There is no atom to show.")
    shown = array[chosen]
    with np.errstate(invalid="ignore"):
        shown = shown / np.maximum(np.nanmax(np.abs(shown), axis=1, keepdims=True), np.finfo(float).tiny)
    with style():
        ax = _stacked(shown, chosen, feature_names, ax) if shape is None else _mosaic(shown, shape, columns, ax)
        if title is not None:
            ax.set_title(title)
        if len(chosen) < len(array):
            note(ax, f"{len(chosen)} of {len(array)} atoms")
    return ax


def _mosaic(shown: NDArray[np.float64], shape: tuple[int, ...], columns: int | None, ax: Axes | None) -> Axes:
    """Atoms from left to right and from top to bottom, in one image."""
    wide = min(columns or math.ceil(math.sqrt(len(shown) * 1.6)), len(shown))
    lines = math.ceil(len(shown) / wide)
    height, width = shape[0] + _GAP, shape[1] + _GAP
    coloured = len(shape) == 3
    whole = np.full((lines * height - _GAP, wide * width - _GAP, *shape[2:]), 1.0 if coloured else np.nan)
    for place, atom in enumerate(shown):
        top, left = place // wide * height, place % wide * width
        # colours have no sign: grey stands for zero
        whole[top : top + shape[0], left : left + shape[1]] = (atom / 2 + 0.5 if coloured else atom).reshape(shape)
    ax = new_axes(ax, size=(6.4, max(0.7, 6.4 * whole.shape[0] / whole.shape[1] + 0.3)))
    ax.grid(False)
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    colours: dict[str, Any] = {} if coloured else {"cmap": DIVERGING, "vmin": -1.0, "vmax": 1.0}
    ax.imshow(whole, interpolation="nearest", **colours)
    return ax


def _stacked(shown: NDArray[np.float64], chosen: Sequence[int], names: Sequence[str] | None, ax: Axes | None) -> Axes:
    """Curves one above the other, the first at the top, each around its own zero."""
    dim = shown.shape[1]
    ax = new_axes(ax, size=(6.4, 0.9 + 0.36 * max(len(shown), 4)))
    few = dim <= _NAMED
    zeros = -np.arange(len(shown), dtype=np.float64)
    ax.hlines(zeros, -0.5, dim - 0.5, color=GREY, linewidth=0.5, zorder=1)
    for zero, atom in zip(zeros, shown, strict=True):
        ax.plot(zero + 0.45 * atom, color=PALETTE[0], linewidth=1.2, marker="o" if few else "", markersize=3)
    ax.set_yticks(zeros, [str(i) for i in chosen])
    ax.grid(False, axis="y")
    named = names is not None and few
    label_axes(ax, "", "", "feature" if named else "coordinate", "atom", None)
    if names is not None and few:
        ax.set_xticks(range(dim), [_short(str(name)) for name in names], rotation=40, ha="right", rotation_mode="anchor")
    return ax


def _short(name: str) -> str:
    """A name as it fits under an axis; dollars stand for themselves."""
    return (name if len(name) <= 16 else name[:15] + "…").replace("$", r"\$")


def plot_learning_curve(rows: Any, *, by: str | None = None, title: str | None = None, ax: Axes | None = None) -> Axes:
    """The loss of each pass, `epoch` against `loss`, a line per value of `by`.

    >>> plot_learning_curve([{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": 0.4}]).get_yscale()
    'log'
    """
    return curves(rows, "epoch", "loss", by=by, log="y", xlabel="pass over the data", ylabel="loss", title=title, ax=ax)


def plot_dictionary_choice(rows: Any, *, title: str | None = None, figure: Figure | None = None) -> Figure:
    """What `choose_dictionary` tried: error on hidden coordinates, with its standard error, beside that of reconstruction.

    One line per sparsity against the number of atoms; the lowest hidden error, a ring, is the one to take.

    >>> rows = [{"n_components": 10, "sparsity": 2, "hidden_error": 0.5, "stderr": 0.1, "reconstruction": 0.2}]
    >>> [ax.get_ylabel() for ax in plot_dictionary_choice(rows).axes]
    ['error on hidden coordinates', 'error of reconstruction']
    """
    table = read(rows, "n_components", "sparsity", "hidden_error", "stderr", "reconstruction")
    figure, (left, right) = panels(2, size=(3.9, 3.2), title=title, figure=figure)
    for ax, value, error, says, name in (
        (left, "hidden_error", "stderr", "error on hidden coordinates", "decides: lowest is best"),
        (right, "reconstruction", None, "error of reconstruction", "cannot decide"),
    ):
        words: Grouping = {"by": "sparsity", "xlabel": "atoms", "ylabel": says, "title": name, "ax": ax}
        with chart(table, "n_components", value, log="x", own_legend=ax is left, **words) as drawn:
            for group, look in drawn:
                _choice_line(ax, group, look, value, error)
            drawn.bad = int((~finite(numbers(table, value))).sum())
    best = min((row for row in table if math.isfinite(row["hidden_error"])), key=lambda r: r["hidden_error"], default=None)
    with style():
        if best is not None:
            ring = {"markersize": 12, "markerfacecolor": "none", "zorder": 4}
            dots(left, [best["n_components"]], [best["hidden_error"]], "black", "o", label="_chosen", **ring)
        note(left, "bars: ± standard error; ring: lowest")
    return figure


def _choice_line(ax: Axes, group: Group, look: Look, value: str, error: str | None) -> None:
    at, values = numbers(group.rows, "n_components"), numbers(group.rows, value)
    order = np.argsort(at, kind="stable")
    order = order[finite(values)[order]]
    bars = None if error is None else np.nan_to_num(numbers(group.rows, error)[order])
    ax.errorbar(
        at[order],
        values[order],
        yerr=bars,
        color=look.colour,
        linestyle=look.line,
        marker=look.marker,
        capsize=2.5,
        elinewidth=1.1,
        label=group.label,
    )


def plot_atom_usage(rows: Any, *, by: str | None = None, title: str | None = None, ax: Axes | None = None) -> Axes:
    """How many atoms are used by how large a `share` of the signals, a histogram; says how many are used by none.

    >>> ax = plot_atom_usage([{"share": 0.0}, {"share": 0.25}, {"share": 0.5}])
    >>> ax.get_xlabel()
    'share of the signals that use an atom'
    """
    table = read(rows, "share", by)
    ax = histogram(
        table,
        "share",
        by=by,
        density=False,
        xlabel="share of the signals that use an atom",
        ylabel="atoms",
        title=title,
        ax=ax,
    )
    for group in groups(table, by):
        dead = int((numbers(group.rows, "share") == 0).sum())
        note(ax, (f"{group.label}: " if by else "") + f"{dead} of {len(group.rows)} atoms used by no signal")
    return ax
