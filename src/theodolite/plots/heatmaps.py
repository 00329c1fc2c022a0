"""Matrices as pictures: a colour bar, blocks, numbers in small ones; the leading corners of several side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from theodolite.arguments import at_least
from theodolite.plots.axes_style import label_axes, note, note_not_positive, set_log_labels
from theodolite.plots.figures import panels
from theodolite.plots.style import DIVERGING, SEQUENTIAL, new_axes, style
from theodolite.plots.tables import Array, finite, groups, is_number, label_of, numbers, positive, read, words

_TICKS = 12
_MISSING = "#BDBDBD"
_LETTER = 0.6  # width of a digit, in units of the font's size


def matrix(
    values: Any,
    *,
    row_names: Sequence[Any] | None = None,
    column_names: Sequence[Any] | None = None,
    center: float | Literal["auto"] | None = "auto",
    limits: tuple[float, float] | None = None,
    log: bool = False,
    annotate: bool | None = None,
    number: str = ".2g",
    blocks: Sequence[int] | None = None,
    block_names: Sequence[Any] | None = None,
    label: str = "",
    xlabel: str | None = None,
    ylabel: str | None = None,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """A matrix (tensor, array or nested lists), row 0 at the top.

    `center` puts the white of a diverging colour map at that value, with limits symmetric about it; "auto" means 0
    where both signs occur and a sequential map otherwise. `blocks` are the sizes of consecutive blocks, along each
    axis whose length they add up to. Entries that are not finite, or masked, are grey and counted.

    >>> ax = matrix([[1.0, -2.0], [0.5, 1.0]])
    >>> ax.images[0].get_clim()
    (-2.0, 2.0)
    """
    masked = np.ma.getmaskarray(values) if isinstance(values, np.ma.MaskedArray) else np.False_
    array = as_array(values)
    masked = np.broadcast_to(masked, array.shape)
    _check_names(array, row_names, column_names)
    good = finite(array) & ~masked
    shown = good & positive(array) if log else good
    with style():
        ax = new_axes(ax, size=_size(array))
        ax.grid(False)
        colours, norm = _colours(array[shown], center, limits, log)
        small = max(array.shape) <= 200
        image = ax.imshow(
            np.ma.masked_array(np.where(shown, array, 1.0), ~shown),  # what lies under the mask must not overflow
            cmap=colours,
            norm=norm,
            interpolation="nearest" if small else "auto",
            aspect=_aspect(array),
        )
        _colour_bar(ax, image, _extend(array[shown], norm), label, log)
        _ticks(ax, array.shape, row_names, column_names)
        if blocks is not None:
            _blocks(ax, array.shape, list(blocks), block_names)
        if annotate or (annotate is None and array.size <= 100 and max(array.shape) <= 10):
            _numbers(ax, array, shown, colours, norm, number)
        label_axes(ax, "", "", xlabel or "", ylabel or "", title)
        bad, empty = int((~good & ~masked).sum()), int(masked.sum())
        if bad:
            note(ax, f"{bad} of {array.size} entries not finite (grey)")
        if empty:
            note(ax, f"{empty} of {array.size} cells empty (grey)")
        note_not_positive(ax, int((good & ~shown).sum()), array.size)
    return ax


def heatmap(
    rows: Any,
    x: str,
    y: str,
    value: str,
    *,
    xlabel: str | None = None,
    ylabel: str | None = None,
    label: str | None = None,
    **options: Any,
) -> Axes:
    """Column `value` over a grid of the columns `x` and `y`; repeats are averaged, empty cells are grey and counted.

    Options are those of `matrix`. Numbers ascend to the right and upwards, names keep their order of appearance.

    >>> ax = heatmap([{"lr": 0.1, "width": 8, "loss": 1.0}, {"lr": 0.2, "width": 8, "loss": 3.0}], "lr", "width", "loss")
    >>> ax.images[0].get_array().tolist()
    [[1.0, 3.0]]
    """
    table = read(rows, x, y, value)
    across, down = groups(table, x), groups(table, y)
    grid, repeats = _pivot(table, x, y, value, [g.key for g in across], [g.key for g in down])
    if all(is_number(g.key) for g in down):  # upwards
        grid, down = grid[::-1], down[::-1]
    ax = matrix(
        grid,
        row_names=[g.key for g in down],
        column_names=[g.key for g in across],
        xlabel=words(x) if xlabel is None else xlabel,
        ylabel=words(y) if ylabel is None else ylabel,
        label=words(value) if label is None else label,
        **options,
    )
    with style():
        if repeats > 1:
            note(ax, f"mean of up to {repeats} repeats")
    return ax


def _pivot(table: Any, x: str, y: str, value: str, across: list[Any], down: list[Any]) -> tuple[Any, int]:
    cells = {group.key: sorted(numbers(group.rows, value).tolist()) for group in groups(table, (x, y))}
    shape = len(down), len(across)
    grid: Any = np.ma.masked_array(np.zeros(shape), np.ones(shape, dtype=bool))
    with np.errstate(over="ignore", invalid="ignore"):
        for (column, line), found in cells.items():
            grid[down.index(line), across.index(column)] = np.mean(found)
    return grid, max(map(len, cells.values()))


def as_array(values: Any) -> Array:
    """A matrix as float64: from a tensor, an array or nested lists."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().double()
    array = np.asarray(np.ma.getdata(values), dtype=np.float64)
    if array.ndim != 2 or not array.size:
        raise ValueError(f"A matrix with rows and columns is needed. Got shape {array.shape}.")
    return array


def _check_names(array: Array, row_names: Sequence[Any] | None, column_names: Sequence[Any] | None) -> None:
    for name, given, length in (("row_names", row_names, array.shape[0]), ("column_names", column_names, array.shape[1])):
        if given is not None and len(given) != length:
            raise ValueError(f"{name} must hold {length} names. Got {len(given)}.")


def _colours(
    values: Array, center: float | str | None, limits: tuple[float, float] | None, log: bool
) -> tuple[Colormap, Normalize]:
    if not len(values):
        values = np.array([1.0, 10.0]) if log else np.array([0.0, 1.0])
    low, high = (float(values.min()), float(values.max())) if limits is None else limits
    if center == "auto":
        center = 0.0 if low < 0 < high and not log else None
    if center is not None and limits is None:
        reach = max(abs(high - float(center)), abs(low - float(center))) or 1.0
        low, high = float(center) - reach, float(center) + reach
    if not high > low:
        low, high = (low / 2, high * 2) if log else (low - 0.5, high + 0.5)
    colours = matplotlib.colormaps[SEQUENTIAL if center is None else DIVERGING].with_extremes(bad=_MISSING)
    return colours, LogNorm(low, high) if log else Normalize(low, high)


def _colour_bar(ax: Axes, image: Any, extend: Literal["neither", "min", "max", "both"], label: str, log: bool) -> None:
    """As tall as the matrix itself, whatever room the layout leaves around it."""
    figure = ax.get_figure()
    assert figure is not None
    bar = figure.colorbar(image, cax=ax.inset_axes((1.03, 0.0, 0.045, 1.0)), label=label, extend=extend)
    bar.outline.set_visible(False)
    if log:
        set_log_labels(bar.ax.yaxis)


def _extend(values: Array, norm: Normalize) -> Literal["neither", "min", "max", "both"]:
    low, high = norm.vmin, norm.vmax
    below, above = bool((values < low).any()), bool((values > high).any())  # type: ignore[operator]
    return "both" if below and above else "min" if below else "max" if above else "neither"


def _size(array: Array) -> tuple[float, float]:
    rows, columns = array.shape
    if _aspect(array) == "auto":
        return 6.4, 3.9
    return (5.2, 0.9 + 4.0 * rows / columns) if columns >= rows else (1.6 + 3.6 * columns / rows, 4.4)


def _aspect(array: Array) -> Literal["equal", "auto"]:
    return "equal" if 1 / 2.5 <= array.shape[0] / array.shape[1] <= 2.5 else "auto"


def _ticks(ax: Axes, shape: tuple[int, ...], row_names: Sequence[Any] | None, column_names: Sequence[Any] | None) -> None:
    for axis, length, names in ((ax.yaxis, shape[0], row_names), (ax.xaxis, shape[1], column_names)):
        if names is None:
            axis.set_major_locator(MaxNLocator(nbins=min(length, 9), integer=True, min_n_ticks=1))
            continue
        every = -(-length // (_TICKS if axis is ax.xaxis else 20))
        shown = range(0, length, every)
        texts = [label_of(names[i]) for i in shown]
        turned = axis is ax.xaxis and sum(map(len, texts)) > 45
        axis.set_ticks(list(shown), texts)
        if turned:
            axis.set_tick_params(labelrotation=40)
            for tick in axis.get_ticklabels():
                tick.set(ha="right", rotation_mode="anchor")
    ax.tick_params(length=2)


def _blocks(ax: Axes, shape: tuple[int, ...], sizes: list[int], names: Sequence[Any] | None) -> None:
    if any(size < 1 for size in sizes) or sum(sizes) not in shape:
        raise ValueError(f"blocks must be positive sizes that add up to {shape[0]} or {shape[1]}. Got {sizes}.")
    if names is not None and len(names) != len(sizes):
        raise ValueError(f"block_names must hold {len(sizes)} names. Got {len(names)}.")
    ends = np.cumsum(sizes)
    for axis, length, draw in ((ax.yaxis, shape[0], ax.axhline), (ax.xaxis, shape[1], ax.axvline)):
        if length != ends[-1]:
            continue
        for end in ends[:-1]:
            draw(end - 0.5, color="black", linewidth=0.9)
        if names is not None:
            axis.set_ticks(list(ends - np.array(sizes) / 2 - 0.5), [label_of(name) for name in names])
            axis.set_tick_params(length=0)


def _numbers(ax: Axes, array: Array, shown: NDArray[np.bool_], colours: Colormap, norm: Normalize, number: str) -> None:
    """The entries as texts, small enough that neighbours do not touch."""
    places = list(zip(*np.nonzero(shown), strict=True))
    texts = [format(array[place], number).replace("-", "−") for place in places]
    figure = ax.get_figure(root=True)
    assert figure is not None
    cell = 72 * figure.get_figwidth() * ax.get_position().width / array.shape[1]  # points
    widest = max(map(len, texts), default=1)
    size = min(9 if max(array.shape) <= 6 else 7.5, cell / (_LETTER * (widest + 1)))
    for (i, j), text in zip(places, texts, strict=True):
        red, green, blue, _ = colours(norm(array[i, j]))
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
        ax.text(j, i, text, ha="center", va="center", fontsize=size, color="white" if dark else "black")


def leading_blocks(
    matrices: Mapping[str, Any] | Any,
    *,
    size: int = 10,
    columns: int | None = None,
    annotate: bool = False,
    label: str = "scaled to [0, 1]",
    title: str | None = None,
) -> Figure:
    """The top left `size` × `size` block of each matrix, shifted and scaled so that its entries run from 0 to 1.

    `matrices` is one matrix, or several by name. Made for average gradient outer products: what a model looks at, beside what
    it should look at. A block whose entries are all the same is drawn as 0.

    >>> figure = leading_blocks({"learned": [[3.0, 1.0], [1.0, 2.0]], "target": [[1.0, 0.0], [0.0, 1.0]]})
    >>> figure.axes[0].images[0].get_array().tolist()
    [[1.0, 0.0], [0.0, 0.5]]
    """
    at_least(1, size=size)
    named = dict(matrices) if isinstance(matrices, Mapping) else {"": matrices}
    if not named:
        raise ValueError("leading_blocks needs at least one matrix. Got an empty mapping.")
    figure, axes = panels(len(named), columns=columns, letters=len(named) > 1, title=title)
    for ax, (name, values) in zip(axes, named.items(), strict=True):
        block = _scaled(as_array(values), size)
        names = list(range(1, len(block) + 1))
        matrix(
            block,
            row_names=names,
            column_names=names,
            limits=(0.0, 1.0),
            annotate=annotate,
            label=label if ax is axes[-1] else "",
            title=name or None,
            ax=ax,
        )
    return figure


def _scaled(array: Array, size: int) -> Array:
    if array.shape[0] != array.shape[1]:
        raise ValueError(f"leading_blocks takes square matrices. Got shape {array.shape}.")
    block: Array = array[:size, :size]
    low, high = block.min(), block.max()
    scaled: Array = (block - low) / (high - low) if high > low else 0.0 * block
    return scaled
