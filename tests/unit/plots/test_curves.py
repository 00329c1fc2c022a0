"""Curves, bands, labels and reference lines: what is drawn, not how it looks."""

from __future__ import annotations

import math

import numpy as np
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from theodolite import plots
from theodolite.plots.axes_style import notes, spread


def runs(values: dict[str, list[list[float]]]) -> list[dict]:
    """Rows of (name, seed, step) from nested lists."""
    return [
        {"model": name, "seed": seed, "step": step, "loss": loss}
        for name, seeds in values.items()
        for seed, losses in enumerate(seeds)
        for step, loss in enumerate(losses, 1)
    ]


TWO = runs({"f": [[4.0, 2.0, 1.0], [6.0, 4.0, 3.0]], "lin": [[4.0, 8.0, 20.0], [6.0, 10.0, 40.0]]})


def band_of(ax, i=0) -> np.ndarray:
    return np.concatenate([path.vertices for path in ax.collections[i].get_paths()])


def drawn(ax) -> dict[str, list[float]]:
    return {line.get_label(): line.get_ydata().tolist() for line in ax.lines if not line.get_label().startswith("_")}


def texts(ax) -> list[str]:
    return [t.get_text() for t in ax.texts]


@pytest.mark.parametrize("rows", [TWO, pandas.DataFrame(TWO)])
def test_lines_are_means_and_bands_standard_errors(rows):
    ax = plots.curves(rows, "step", "loss", by="model")
    assert drawn(ax) == {"f": [5.0, 3.0, 2.0], "lin": [5.0, 9.0, 30.0]}
    band = band_of(ax)
    assert sorted(set(band[band[:, 0] == 2, 1].round(9))) == [2.0, 4.0]
    assert sorted(set(band_of(ax, 1)[band_of(ax, 1)[:, 0] == 3, 1].round(9))) == [20.0, 40.0]
    assert notes(ax) == ["line: mean, band: ± standard error of 2 repeats"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "loss")


def test_lines_differ_without_colour():
    ax = plots.curves(TWO, "step", "loss", by="model")
    a, b = ax.lines[:2]
    assert a.get_marker() != b.get_marker()
    assert a.is_dashed() != b.is_dashed()


def test_quantile_bands():
    rows = runs({"f": [[float(s)] * 2 for s in range(5)]})
    ax = plots.curves(rows, "step", "loss", band="quantiles", quantiles=(0.0, 1.0))
    assert ax.lines[0].get_ydata().tolist() == [2.0, 2.0]
    assert {0.0, 4.0} <= set(band_of(ax)[:, 1])
    assert notes(ax) == ["line: median, band: 0 % to 100 % of 5 repeats"]


def test_bands_by_columns():
    rows = [{"x": 2, "y": 5.0, "e": 1.0, "lo": 1.0, "hi": 6.0}, {"x": 1, "y": 3.0, "e": 0.5, "lo": 2.0, "hi": 9.0}]
    by_error, by_ends = plots.curves(rows, "x", "y", error="e"), plots.curves(rows, "x", "y", lower="lo", upper="hi")
    assert by_error.lines[0].get_ydata().tolist() == [3.0, 5.0]
    assert set(band_of(by_error)[:, 1]) == {2.5, 3.5, 4.0, 6.0}
    assert set(band_of(by_ends)[:, 1]) == {1.0, 2.0, 6.0, 9.0}
    with pytest.raises(ValueError, match="1 appears more than once"):
        plots.curves([*rows, rows[1]], "x", "y", error="e")
    with pytest.raises(ValueError, match="lower= and upper="):
        plots.curves(rows, "x", "y", lower="lo")


def test_one_run_has_no_band_and_no_note():
    ax = plots.curves(TWO[:3], "step", "loss")
    assert not ax.collections
    assert notes(ax) == []
    assert ax.get_legend() is None


def test_log_axes_and_what_they_cannot_show():
    rows = runs({"f": [[1.0, 0.0, 10.0], [3.0, 0.0, 0.1]]})
    ax = plots.curves(rows, "step", "loss", log="xy", band="std")
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), [2.0, math.nan, 5.05])
    assert "1 of 3 values not positive, not on the log axis" in notes(ax)
    assert (band_of(ax)[:, 1] > 0).all()
    with pytest.raises(ValueError, match="log must be"):
        plots.curves(rows, "step", "loss", log="z")


@pytest.mark.parametrize(
    ("limits", "major", "minor"),
    [
        ((0.3, 4.0), ["1"], ["0.5", "2"]),
        ((1e-8, 1e2), ["$10^{-8}$"], []),
        ((1.1, 1.9), [], ["1.2"]),
        ((2e6, 9e6), [], [r"$3\times10^{6}$"]),
    ],
)
def test_numbers_on_log_axes_are_readable(limits, major, minor):
    ax = plots.curves(TWO, "step", "loss", log="y")
    ax.set_ylim(*limits)
    for which, wanted in (("major", major), ("minor", minor)):
        ticks = getattr(ax.yaxis, f"get_{which}ticklocs")()
        inside = [t for t in ticks if limits[0] <= t <= limits[1]]
        labels = [label for label in getattr(ax.yaxis, f"get_{which}_formatter")().format_ticks(inside) if label]
        assert set(wanted) <= set(labels)
        assert len(labels) == len(set(labels)) <= 12


def test_what_is_not_finite_is_marked_and_counted():
    rows = runs({"f": [[1.0, 2.0, 3.0]], "lin": [[1.0, math.inf, math.nan]], "sgd": [[1.0, -math.inf, 2.0]]})
    ax = plots.curves(rows, "step", "loss", by="model")
    np.testing.assert_array_equal(drawn(ax)["lin"], [1.0, math.nan, math.nan])
    marks = [(line.get_xdata().tolist(), line.get_marker()) for line in ax.lines if line.get_label() == "_missing"]
    assert marks == [([2.0, 3.0], "^"), ([2.0], "v")]
    assert notes(ax) == ["3 of 9 values not finite (hollow triangles)"]
    plots.to_svg(ax)


def test_nothing_finite_still_draws():
    ax = plots.curves(runs({"f": [[math.nan, math.inf]]}), "step", "loss", by="model", log="y")
    assert notes(ax) == ["2 of 2 values not finite (hollow triangles)"]
    plots.to_svg(ax)


def test_a_point_between_gaps_stays_visible():
    losses = [1.0] * 30 + [math.nan, 5.0, math.nan] + [1.0] * 30
    ax = plots.curves(runs({"f": [losses]}), "step", "loss")
    assert ax.lines[1].get_ydata().tolist() == [5.0]
    assert ax.lines[1].get_marker() == "o"


def test_labels_direct_or_in_a_legend():
    assert {"f", "lin"} <= set(texts(plots.curves(TWO, "step", "loss", by="model")))  # ends far apart: beside the lines
    close = runs({"f": [[1.0, 2.0]], "g": [[1.0, 2.0, 3.0]], "h": [[1.0, 2.0]]})  # they end at different steps
    ax = plots.curves(close, "step", "loss", by="model")
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["f", "g", "h"]
    assert plots.curves(TWO, "step", "loss", by="model", labels="none").get_legend() is None
    many = runs({f"m{i}": [[float(i), 1.0]] for i in range(9)})
    assert plots.curves(many, "step", "loss", by="model").get_legend()._get_loc() == 2  # beside the axes
    numbered = plots.curves(TWO, "step", "loss", by="seed", labels="legend")
    assert numbered.get_legend().get_title().get_text() == "seed"
    with pytest.raises(ValueError, match="labels must be"):
        plots.curves(TWO, "step", "loss", labels="inside")  # type: ignore[arg-type]


def test_a_second_call_goes_on_with_the_next_look():
    ax = plots.curves(TWO[:3], "step", "loss", label="ours")
    plots.curves(TWO[3:6], "step", "loss", label="theirs", ax=ax)
    assert [line.get_color() for line in ax.lines] == list(plots.PALETTE[:2])
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["ours", "theirs"]


def test_labels_from_the_rows_are_plain_text():
    ax = plots.curves(runs({"$\\frac{$": [[1.0, 2.0]], "_hidden": [[2.0, 1.0]]}), "step", "loss", by="model", labels="legend")
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["\\$\\frac{\\$", " _hidden"]
    plots.to_svg(ax)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=8), st.floats(0.1, 20))
@settings(max_examples=60, deadline=None)
def test_spread_keeps_order_and_distance(places, gap):
    moved = spread(places, gap)
    order = np.argsort(places, kind="stable")
    assert (np.diff(np.array(moved)[order]) >= gap - 1e-6).all()
    assert np.mean(moved) == pytest.approx(np.mean(places), abs=1e-6)


def test_reference_lines():
    ax = plots.curves(TWO, "step", "loss", by="model", log="y")
    plots.reference(ax, x=2.0, label="critical rate")
    plots.reference(ax, x=2.1, label="edge")
    plots.reference(ax, y=5.0, label="reported")
    assert ax.lines[-3].get_xdata() == [2.0, 2.0]
    assert ax.lines[-1].get_ydata() == [5.0, 5.0]
    found = {t.get_text(): t for t in ax.texts}
    assert found["edge"].xyann[1] < found["critical rate"].xyann[1]  # names of near lines do not overlap
    for bad in ({}, {"x": 1.0, "y": 2.0}, {"x": math.inf}):
        with pytest.raises(ValueError, match=r"reference line|x must be|y must be"):
            plots.reference(ax, **bad)


def test_spans():
    ax = plots.curves(TWO, "step", "loss", by="model")
    limits = ax.get_xlim()
    plots.span(ax, x=(2.0, math.inf), label="catapult")
    assert ax.patches[0].get_x() == 2.0
    assert ax.patches[0].get_width() == pytest.approx(limits[1] - 2.0)
    assert ax.get_xlim() == limits
    plots.span(ax, y=(0.0, 10.0))
    assert ax.patches[1].get_height() == pytest.approx(10.0)
    for bad in ({}, {"x": (2, 1)}, {"y": (math.nan, 1)}):
        with pytest.raises(ValueError, match=r"span|must be two numbers, the smaller first"):
            plots.span(ax, **bad)
