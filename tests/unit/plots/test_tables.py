"""Reading rows: columns, groups, repeats; what is missing is named, what is not finite is counted."""

from __future__ import annotations

import math

import numpy as np
import pandas
import pytest
import torch

import theodolite as th
from theodolite.plots.tables import groups, label_of, numbers, read, summarise

ROWS = [{"step": 1, "loss": 0.5, "model": "b"}, {"step": 2, "loss": 0.25, "model": "a"}]


def test_rows_come_as_dicts_frames_and_results():
    assert read(ROWS, "step") == ROWS
    assert read(pandas.DataFrame(ROWS), "step") == ROWS
    assert read(iter(ROWS), "step") == ROWS
    pairs = th.top_eigenpairs(torch.diag(torch.tensor([1.0, 2.0, 3.0]).double()), k=1)
    assert read(pairs, "eigenvalue")[0]["eigenvalue"] == pytest.approx(3.0)


def test_a_missing_column_is_named_with_its_neighbours():
    with pytest.raises(ValueError, match=r"no column 'los'. Nearest: loss"):
        read(ROWS, "step", "los")
    with pytest.raises(ValueError, match=r"no column 'seed'"):
        read(ROWS, "step", ("model", "seed"))


@pytest.mark.parametrize("rows", [[], iter(()), pandas.DataFrame({"step": []})])
def test_no_rows_is_an_error(rows):
    with pytest.raises(ValueError, match="rows is empty"):
        read(rows, "step")


@pytest.mark.parametrize("rows", [{"step": [1, 2]}, "step", 3, [[1, 2]]])
def test_what_is_not_rows_is_refused(rows):
    with pytest.raises(ValueError, match=r"rows must be|Each row must be"):
        read(rows, "step")


def test_numbers():
    rows = [{"v": torch.tensor(1.5)}, {"v": None}, {}, {"v": np.float32(2)}, {"v": "nan"}, {"v": True}, {"v": pandas.NA}]
    np.testing.assert_array_equal(numbers(rows, "v"), [1.5, math.nan, math.nan, 2.0, math.nan, 1.0, math.nan])
    for bad in ("high", "3.5", [1, 2], 1j):
        with pytest.raises(ValueError, match="Column 'v' must hold numbers"):
            numbers([{"v": bad}], "v")


def test_groups_are_in_a_stable_order():
    rows = [{"b": np.int64(50), "m": "z"}, {"b": 5, "m": "y"}, {"b": 50, "m": "z"}]
    assert [g.key for g in groups(rows, "b")] == [5, 50]
    assert [g.key for g in groups(rows, "m")] == ["z", "y"]
    assert [g.label for g in groups(rows, ("m", "b"))] == ["z, 50", "y, 5"]
    assert [g.key for g in groups(rows, "m", ["y", "z"])] == ["y", "z"]
    assert [len(g.rows) for g in groups(rows, None)] == [3]
    with pytest.raises(ValueError, match=r"'x', which 'm' does not hold. It holds 'z', 'y'"):
        groups(rows, "m", ["x"])


def test_labels_are_safe():
    assert label_of("$\\frac{$") == "\\$\\frac{\\$"
    assert label_of("_private") == " _private"
    assert label_of("two\nlines") == "two lines"
    assert len(label_of("x" * 200)) == 40
    assert [g.label for g in groups([{"a": math.nan}, {"a": None}, {"a": [1, 2]}], "a")] == ["nan", "none", "1, 2"]


def test_repeats_are_summarised_whatever_their_order():
    rng = np.random.default_rng(0)
    x, y = np.repeat([1.0, 2.0, 5.0], 7), rng.normal(size=21)
    shuffle = rng.permutation(21)
    for band in ("stderr", "std", "quantiles", "range"):
        a, b = summarise(x, y, band), summarise(x[shuffle], y[shuffle], band)
        np.testing.assert_array_equal(np.array([a.y, a.low, a.high]), np.array([b.y, b.low, b.high]))
    block = y[:7]
    s = summarise(x, y, "stderr")
    assert s.y[0] == pytest.approx(block.mean())
    assert s.high[0] - s.y[0] == pytest.approx(block.std(ddof=1) / math.sqrt(7))
    q = summarise(x, y, "quantiles", (0.1, 0.9))
    assert (q.low[0], q.y[0], q.high[0]) == pytest.approx(tuple(np.quantile(block, [0.1, 0.5, 0.9])))
    assert s.repeats.tolist() == [7, 7, 7]


def test_a_mean_with_an_infinite_value_is_left_out_not_replaced():
    s = summarise(np.array([1, 1, 2, 2, 3, math.nan]), np.array([1, math.inf, 2, 4, -math.inf, 7]))
    np.testing.assert_array_equal(s.y, [math.nan, 3, math.nan])
    assert (s.bad, s.total) == (3, 6)
    assert s.above.tolist() == [1.0]
    assert s.below.tolist() == [3.0]


def test_huge_values_do_not_crash():
    s = summarise(np.array([1.0, 1.0, 2.0]), np.array([1e308, 1e308, 1.0]))
    assert s.bad == 2
    assert summarise(np.array([1.0, 1.0]), np.array([9e139, -9e139])).y.tolist() == [0.0]


def test_bad_bands():
    with pytest.raises(ValueError, match="band must be"):
        summarise(np.ones(2), np.ones(2), "sem")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="quantiles must be"):
        summarise(np.ones(2), np.ones(2), "quantiles", (0.9, 0.1))
