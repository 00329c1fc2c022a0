"""Leading blocks of square matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from theodolite import plots


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
    with pytest.raises(ValueError, match="square matrices"):
        plots.leading_blocks(np.ones((2, 3)))
    with pytest.raises(ValueError, match="at least 1"):
        plots.leading_blocks(np.eye(2), size=0)
    with pytest.raises(ValueError, match="empty mapping"):
        plots.leading_blocks({})
