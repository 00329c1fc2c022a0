"""Grids of axes with letters."""

from __future__ import annotations

import pytest

from theodolite import plots
from theodolite.plots.figures import _name


@pytest.mark.parametrize(("count", "shape"), [(1, (1, 1)), (2, (1, 2)), (3, (1, 3)), (4, (2, 2)), (5, (2, 3)), (7, (3, 3))])
def test_grids(count, shape):
    figure, axes = plots.panels(count, size=(2.0, 1.0))
    assert len(axes) == len(figure.axes) == count
    assert figure.get_size_inches().tolist() == [2.0 * shape[1], 1.0 * shape[0]]
    assert [ax.texts[0].get_text() for ax in axes] == [f"({letter})" for letter in "abcdefg"[:count]]


def test_options():
    figure, axes = plots.panels(3, columns=2, letters=False, share_y=True, title="All")
    assert not any(ax.texts for ax in axes)
    assert figure.get_suptitle() == "All"
    axes[0].set_ylim(0, 7)
    assert axes[2].get_ylim() == (0, 7)
    assert [_name(i) for i in (25, 26, 27, 52)] == ["z", "aa", "ab", "ba"]
    for bad in ({"count": 0}, {"count": 2, "columns": 0}):
        with pytest.raises(ValueError, match="at least one"):
            plots.panels(**bad)


def test_drawings_go_into_panels():
    _, axes = plots.panels(2)
    rows = [{"x": 1, "y": 2}, {"x": 2, "y": 1}]
    assert plots.curves(rows, "x", "y", ax=axes[0]) is axes[0]
    plots.matrix([[1.0, 2.0]], ax=axes[1])
    assert plots.to_svg(axes[0]).startswith("<svg")
