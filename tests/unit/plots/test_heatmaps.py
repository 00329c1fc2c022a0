"""Matrices as colours: scales, names, missing values; leading blocks side by side."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from theodolite import plots
from theodolite.plots.axes_style import notes


def test_both_signs_get_a_symmetric_diverging_map():
    ax = plots.matrix(torch.tensor([[1.0, -3.0], [0.0, 2.0]], requires_grad=True))
    assert ax.images[0].get_clim() == (-3.0, 3.0)
    assert ax.images[0].get_cmap().name == plots.DIVERGING
    assert plots.matrix([[1.0, 3.0]]).images[0].get_cmap().name == plots.SEQUENTIAL
    centred = plots.matrix([[0.5, 1.2]], center=1.0)
    assert centred.images[0].get_clim() == (0.5, 1.5)
    assert plots.matrix([[1.0, -3.0]], center=None).images[0].get_clim() == (-3.0, 1.0)
    assert plots.matrix([[1.0, -3.0]], limits=(-1, 1)).images[0].get_clim() == (-1, 1)


def test_small_matrices_carry_their_numbers():
    ax = plots.matrix([[1.0, -0.25], [math.nan, 0.125]])
    assert [t.get_text() for t in ax.texts[:3]] == ["1", "−0.25", "0.12"]
    assert notes(ax) == ["1 of 4 entries not finite (grey)"]
    assert ax.images[0].get_array().mask.tolist() == [[False, False], [True, False]]
    dark, light = plots.matrix([[0.0, 1.0]]).texts
    assert (dark.get_color(), light.get_color()) == ("white", "black")
    assert not plots.matrix(np.eye(20)).texts
    assert len(plots.matrix(np.eye(12), annotate=True, number=".0f").texts) == 144


def test_long_numbers_do_not_touch_their_neighbours():
    ax = plots.matrix(np.full((10, 10), 0.000123))
    ax.figure.canvas.draw()
    boxes = [text.get_window_extent() for text in ax.texts[:10]]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


def test_blocks():
    ax = plots.matrix(np.eye(10), blocks=[3, 7], block_names=["fc1", "fc2"], annotate=False)
    assert sorted(line.get_xdata()[0] for line in ax.lines) == [0, 2.5]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["fc1", "fc2"]
    assert ax.get_yticks().tolist() == [1.0, 6.0]
    assert len(plots.matrix(np.ones((10, 4)), blocks=[5, 5]).lines) == 1
    with pytest.raises(ValueError, match="blocks must be"):
        plots.matrix(np.eye(10), blocks=[3, 3])
    with pytest.raises(ValueError, match="block_names must hold 2"):
        plots.matrix(np.eye(10), blocks=[5, 5], block_names=["a"])


def test_log_colours_and_awkward_values():
    ax = plots.matrix([[1.0, 100.0], [0.0, 10.0]], log=True)
    assert (ax.images[0].norm.vmin, ax.images[0].norm.vmax) == (1.0, 100.0)
    assert notes(ax) == ["1 of 4 values not positive, not on the log axis"]
    for values in (np.zeros((2, 2)), np.full((2, 2), np.nan), [[1e308, -1e308]], [[5.0]]):
        plots.matrix(values).figure.draw_without_rendering()
        plots.matrix(values, log=True).figure.draw_without_rendering()


def test_names_and_shapes_are_checked():
    ax = plots.matrix([[1.0, 2.0]], column_names=["a$", "b"], row_names=[0.5])
    assert [t.get_text() for t in ax.get_xticklabels()] == ["a\\$", "b"]
    with pytest.raises(ValueError, match=r"row_names must hold 1 names. Got 2"):
        plots.matrix([[1.0, 2.0]], row_names=["a", "b"])
    for bad in ([1.0, 2.0], np.zeros((0, 3)), np.zeros((2, 2, 2))):
        with pytest.raises(ValueError, match="rows and columns"):
            plots.matrix(bad)


def test_rows_become_a_grid():
    rows = [{"lr": lr, "width": w, "loss": lr * w} for w in (8, 4) for lr in (0.2, 0.1)]
    ax = plots.heatmap(rows, "lr", "width", "loss")
    np.testing.assert_allclose(ax.images[0].get_array(), [[0.8, 1.6], [0.4, 0.8]])  # width grows upwards
    assert [t.get_text() for t in ax.get_yticklabels()] == ["8", "4"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("lr", "width")
    ax = plots.heatmap([*rows, {"lr": 0.1, "width": 4, "loss": 1.4}, {"lr": 0.3, "width": 4, "loss": 1.0}], "lr", "width", "loss")
    assert ax.images[0].get_array()[1, 0] == pytest.approx(0.9)
    assert notes(ax) == ["1 of 6 cells empty (grey)", "mean of up to 2 repeats"]
    with pytest.raises(ValueError, match=r"no column 'widht'. Nearest: width"):
        plots.heatmap(rows, "lr", "widht", "loss")


def images(figure):
    return [ax.images[0].get_array() for ax in figure.axes if ax.images and ax.get_label() != "<colorbar>"]


def test_each_block_runs_from_0_to_1():
    several = {"learned": torch.diag(torch.arange(20.0)) - 3, "target": torch.eye(15, dtype=torch.float64)}
    first, second = images(plots.leading_blocks(several))[:2]
    assert first.shape == second.shape == (10, 10)
    for block in (first, second):
        assert (block.min(), block.max()) == (0.0, 1.0)
    np.testing.assert_allclose(np.diag(first), np.arange(10) / 9)


def test_small_and_flat_matrices():
    (block,) = images(plots.leading_blocks(torch.full((3, 3), 7.0), size=5))
    assert block.shape == (3, 3)
    assert not block.any()


def test_names_stand_above_and_count_from_one():
    figure = plots.leading_blocks({"a": np.eye(3), "b": np.eye(3)})
    titled = [ax for ax in figure.axes if ax.get_title(loc="left") or ax.get_title()]
    assert [ax.get_title(loc="left") or ax.get_title() for ax in titled] == ["a", "b"]
    assert [t.get_text() for t in titled[0].get_xticklabels()] == ["1", "2", "3"]


def test_errors_say_what_is_taken():
    with pytest.raises(ValueError, match="matrices must be square"):
        plots.leading_blocks(np.ones((2, 3)))
    with pytest.raises(ValueError, match="a positive integer"):
        plots.leading_blocks(np.eye(2), size=0)
    with pytest.raises(ValueError, match="empty mapping"):
        plots.leading_blocks({})
