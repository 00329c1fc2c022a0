"""Scatter plots and power laws."""

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


def test_a_known_law_is_recovered():
    x = np.array([1.0, 3.0, 10.0, 50.0])
    fit = plots.power_law(x, 2.5 * x**-0.7)
    assert fit.exponent == pytest.approx(-0.7)
    assert fit.prefactor == pytest.approx(2.5)
    assert fit.stderr < 1e-12
    np.testing.assert_allclose(fit(x), 2.5 * x**-0.7)
    with pytest.raises(AttributeError):
        fit.exponent = 1.0  # type: ignore[misc]


def test_the_standard_error_is_honest():
    """Over 200 seeds the errors in units of the claimed standard error spread like one."""
    x = np.geomspace(100, 10_000, 12)
    scores, inside = [], 0
    for seed in range(200):
        noise = np.random.default_rng(seed).normal(0, 0.2, len(x))
        fit = plots.power_law(x, 3 * x**-0.5 * np.exp(noise))
        scores.append((fit.exponent + 0.5) / fit.stderr)
        low, high = fit.interval(0.9)
        inside += low <= -0.5 <= high
    assert 0.75 <= np.std(scores) <= 1.35
    assert abs(np.mean(scores)) < 0.25
    assert 165 <= inside <= 195


def test_it_is_the_regression_of_scipy():
    x = np.geomspace(1, 100, 9)
    y = x**1.3 * np.exp(np.random.default_rng(0).normal(0, 0.3, 9))
    line = stats.linregress(np.log(x), np.log(y))
    fit = plots.power_law(x, y)
    assert (fit.exponent, fit.stderr, math.log(fit.prefactor)) == pytest.approx((line.slope, line.stderr, line.intercept))


def test_points_that_cannot_be_used():
    fit = plots.power_law([1, 2, 4, 0, -1, 8, math.nan], [1, 2, 4, 1, 1, math.inf, 1])
    assert (fit.points, fit.left_out) == (3, 4)
    assert fit.exponent == pytest.approx(1.0)
    two = plots.power_law([1, 2], [1, 4])
    assert math.isnan(two.stderr)
    assert str(two) == "slope 2.00 (no error from two points)"
    for x, y in (([1], [1]), ([2, 2], [1, 3]), ([1, -2], [1, 2])):
        with pytest.raises(ValueError, match="two different positive x"):
            plots.power_law(x, y)
    with pytest.raises(ValueError, match="same length"):
        plots.power_law([1, 2], [1])


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [(-1.05321, 0.021, "−1.053 ± 0.021"), (12.3, 4.0, "12.3 ± 4.0"), (1234.0, 250.0, "1234 ± 250"), (0.5, 0.0, "0.50 ± 0.00")],
)
def test_numbers_are_written_to_their_error(value, error, text):
    assert plots.with_error(value, error) == text


def test_slopes_stand_in_the_picture():
    rng = np.random.default_rng(0)
    rows = [
        {"m": m, "gap": m**-b * float(np.exp(rng.normal(0, 0.05))), "kind": kind}
        for kind, b in (("gap", 1.0), ("stability", 0.1))
        for m in (100, 200, 400, 800, 1600)
    ]
    ax = plots.log_log(rows, "m", "gap", by="kind", guides=[-1])
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    fit = plots.power_law([r["m"] for r in rows[:5]], [r["gap"] for r in rows[:5]])
    labels = [t.get_text() for t in ax.get_legend().get_texts()]
    assert labels[0] == f"gap: {fit}"
    assert labels[1].startswith("stability: slope −0.")
    assert labels[2] == "slope −1 for comparison"
    np.testing.assert_allclose(ax.lines[0].get_ydata(), fit(np.array([100, 1600])))


def test_windows_and_left_out_points():
    rows = [{"x": x, "y": y} for x, y in ((1, 1.0), (2, 2.0), (4, 4.0), (8, 100.0), (16, 0.0), (32, math.nan))]
    ax = plots.log_log(rows, "x", "y", window=(1, 4))
    assert ax.get_legend().get_texts()[0].get_text() == "slope 1.00 ± 0.00"
    assert len(ax.lines[1].get_xdata()) == 4
    assert notes(ax) == [
        "fitted from 1 to 4",
        "1 of 6 values not finite",
        "1 of 6 values not positive, not on the log axis",
    ]
    ax = plots.log_log([{"x": 1, "y": math.nan}], "x", "y", guides=[-1])
    assert ax.get_legend().get_texts()[0].get_text() == "too few points to fit"
