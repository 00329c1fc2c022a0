"""Scatter plots and correlations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from theodolite import plots
from theodolite.plots.axes_style import notes

RNG = np.random.default_rng(1)
ROWS = [{"a": float(a), "b": float(a + 0.3 * e), "kind": "xy"[i % 2]} for i, (a, e) in enumerate(RNG.normal(size=(40, 2)))]


def test_points_by_group():
    ax = plots.scatter(ROWS, "a", "b", by="kind")
    assert [len(c.get_offsets()) for c in ax.collections] == [20, 20]
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["x", "y"]
    first, second = (c.get_paths()[0].vertices for c in ax.collections)
    assert first.shape != second.shape  # another marker


def test_identity_line_makes_both_axes_alike():
    ax = plots.scatter(ROWS, "a", "b", identity=True)
    assert ax.get_xlim() == ax.get_ylim()
    assert list(ax.lines[0].get_xdata()) == list(ax.lines[0].get_ydata())
    assert ax.get_aspect() == 1.0
    with pytest.raises(ValueError, match="both axes alike"):
        plots.scatter(ROWS, "a", "b", identity=True, log="x")


@pytest.mark.parametrize("kind", ["pearson", "spearman"])
def test_correlation_is_that_of_scipy(kind):
    a, b = [r["a"] for r in ROWS], [r["b"] for r in ROWS]
    reference = (stats.pearsonr if kind == "pearson" else stats.spearmanr)(a, b).statistic
    assert plots.correlation_of(a, b, kind) == pytest.approx(reference)
    (text,) = notes(plots.scatter(ROWS, "a", "b", correlation=kind))
    assert text.startswith(f"{kind.capitalize()} correlation {reference:.2f}, 95 % interval")
    if kind == "pearson":
        low, high = stats.pearsonr(a, b).confidence_interval()
        assert f"{low:.2f} to {high:.2f} (40 points)" in text


def test_correlation_of_logs_and_undefined_ones():
    rows = [{"a": 10.0**i, "b": 10.0 ** (2 * i)} for i in range(5)]
    assert notes(plots.scatter(rows, "a", "b", log="xy", correlation="pearson")) == [
        "Pearson correlation of logs 1.00 (5 points)"
    ]
    assert math.isnan(plots.correlation_of([1, 1], [1, 2]))
    assert "undefined" in notes(plots.scatter(rows[:1], "a", "b", correlation="pearson"))[0]
    with pytest.raises(ValueError, match="correlation must be"):
        plots.scatter(rows, "a", "b", correlation="kendall")  # type: ignore[arg-type]


def test_left_out_points_are_counted_and_names_written():
    rows = [{"a": 1.0, "b": math.inf, "n": "lost"}, {"a": 2.0, "b": 1.0, "n": "Adam"}, {"a": -1.0, "b": 1.0, "n": "off"}]
    ax = plots.scatter(rows, "a", "b", text="n", log="x")
    assert ax.collections[0].get_offsets().tolist() == [[2.0, 1.0]]
    assert ax.texts[0].get_text() == "Adam"
    assert notes(ax) == ["1 of 3 values not finite", "1 of 3 values not positive, not on the log axis"]


def test_nothing_to_show_does_not_crash():
    ax = plots.scatter([{"a": math.nan, "b": 1.0}], "a", "b", identity=True, correlation="pearson", text="a")
    assert "1 of 1 values not finite" in notes(ax)
    plots.to_svg(ax)
