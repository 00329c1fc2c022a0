"""The first rows and columns of square matrices side by side, each on a scale from 0 to 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from theodolite.plots.heatmaps import as_array, matrix
from theodolite.plots.panels import panels
from theodolite.plots.tables import Array


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
    if size < 1:
        raise ValueError(f"size must be at least 1. Got {size}.")
    named = dict(matrices) if isinstance(matrices, Mapping) else {"": matrices}
    if not named:
        raise ValueError("leading_blocks needs at least one matrix. Got an empty mapping.")
    figure, axes = panels(len(named), columns=columns, letters=len(named) > 1, title=title)
    last = len(named) - 1
    for i, (ax, (name, values)) in enumerate(zip(axes, named.items(), strict=True)):
        block = _scaled(as_array(values), size)
        names = list(range(1, len(block) + 1))
        matrix(
            block,
            row_names=names,
            column_names=names,
            limits=(0.0, 1.0),
            annotate=annotate,
            label=label if i == last else "",
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
