"""Power laws through maxima: exact on exact data, the minimum of SciPy's fit, and intervals that know what they do not know."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import curve_fit

from theodolite.measures.stability.power_law import (
    PowerFit,
    fit_power_law,
    percentile_interval,
    resampled_exponents,
    slope_windows,
)

DEEP = np.arange(15_000.0, 50_001.0, 5_000.0)
SMALL = np.array([200.0, 400.0, 800.0, 1600.0, 3200.0])


def pairs(ms: np.ndarray, b: float, count: int, seed: int, spread: float = 0.3) -> np.ndarray:
    """(sizes, pairs) values about m^b."""
    noise = np.random.default_rng(seed).normal(size=(len(ms), count))
    return (ms**b)[:, None] * np.exp(spread * noise)


@pytest.mark.parametrize(("a", "b"), [(3.0, -1.1), (0.2, 0.05), (5e4, -0.48), (1e-6, -0.9), (1e6, -0.9)])
def test_check_06_noiseless_laws_are_recovered(a, b):
    fit = fit_power_law(DEEP, a * DEEP**b)
    assert abs(fit.b - b) <= 1e-6
    assert fit.b_loglog == pytest.approx(b, abs=1e-9)
    assert fit.a == pytest.approx(a, rel=1e-6)
    assert fit.r2 == pytest.approx(1.0)
    np.testing.assert_allclose(fit.curve(DEEP), a * DEEP**b, rtol=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_check_07_raw_and_log_log_exponents_agree_on_little_noise(seed):
    noise = np.random.default_rng(seed).normal(size=len(DEEP))
    fit = fit_power_law(DEEP, 5e4 * DEEP**-0.48 * (1 + 0.01 * noise))
    assert abs(fit.b - fit.b_loglog) <= 0.02


@settings(max_examples=60, deadline=None)
@given(st.floats(-2, 1), st.floats(-6, 6), st.integers(3, 8), st.integers(0, 10_000))
def test_the_minimum_is_that_of_scipy(b, log_a, count, seed):
    """Started next to ours, MINPACK finds nothing better; in m over its geometric mean both are well scaled."""
    rng = np.random.default_rng(seed)
    ms = np.sort(rng.choice(np.geomspace(100, 50_000, 40), count, replace=False))
    g = 10**log_a * ms**b * np.exp(rng.normal(0, 0.3, count))
    fit = fit_power_law(ms, g)
    middle, scale = np.exp(np.log(ms).mean()), np.exp(np.log(g).mean())
    start = (fit.curve(middle) / scale * 1.01, fit.b + 0.01)
    found, _ = curve_fit(lambda m, c, d: c * m**d, ms / middle, g / scale, p0=start, ftol=1e-14, xtol=1e-14)
    ours, theirs = np.square(fit.curve(ms) - g).sum(), np.square(scale * found[0] * (ms / middle) ** found[1] - g).sum()
    assert ours <= theirs * (1 + 1e-9)
    assert fit.b == pytest.approx(found[1], abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["max", "mean", "median"]), st.integers(2, 12), st.integers(0, 10_000))
def test_check_15_the_interval_contains_the_point(reduce, count, seed):
    fit = fit_power_law(SMALL, pairs(SMALL, -0.5, count, seed), reduce=reduce, resamples=50, seed=seed)
    assert fit.b_low <= fit.b <= fit.b_high


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 10_000))
def test_check_15_the_envelope_never_falls_with_further_pairs(few, more, seed):
    values = pairs(SMALL, -0.5, few + more, seed)
    fewer = fit_power_law(SMALL, values[:, :few], resamples=0)
    all_of_them = fit_power_law(SMALL, values, resamples=0)
    assert all(x <= y for x, y in zip(fewer.g, all_of_them.g, strict=True))


def test_the_interval_covers_as_often_as_is_said():
    """The module states 0.82 ± 0.02 for 12 log-normal pairs at 5 sizes and 0.90 for their mean; 150 other draws agree."""
    for reduce, said in (("max", 0.82), ("mean", 0.90)):
        fits = [fit_power_law(SMALL, pairs(SMALL, -0.5, 12, 5000 + s), reduce=reduce, resamples=300, seed=s) for s in range(150)]
        inside = np.mean([fit.b_low <= -0.5 <= fit.b_high for fit in fits])
        assert abs(inside - said) <= 3 * math.sqrt(said * (1 - said) / 150)


def test_quantities_of_the_same_pairs_are_resampled_together():
    values = pairs(SMALL, -0.5, 10, 0)
    one = resampled_exponents(SMALL, values, resamples=200, seed=3)
    np.testing.assert_allclose(resampled_exponents(SMALL, 7 * values, resamples=200, seed=3), one, atol=1e-8)
    fit = fit_power_law(SMALL, values, resamples=200, seed=3)
    assert (fit.b_low, fit.b_high) == percentile_interval(one, fit.b, 0.95)
    assert resampled_exponents(SMALL, values, resamples=200, seed=4).tolist() != one.tolist()


def test_resamples_without_a_positive_value_leave_the_size_out():
    """A size whose maximum is positive in one pair only: resamples that miss it fit the other sizes."""
    values = [[1.0, 0.9], [0.5, 0.4], [0.25, -1.0]]
    drawn = resampled_exponents([100, 200, 400], values, resamples=400)
    assert np.isfinite(drawn).all()
    assert fit_power_law([100, 200, 400], values).b == pytest.approx(-1.0)
    one = resampled_exponents([100, 200], [[1.0, -1.0], [0.5, -0.5]], resamples=400)
    assert 0.3 < np.isnan(one).mean() < 0.6  # 1 − (3/4)² = 0.44


def test_two_sizes_give_the_line_through_both():
    fit = fit_power_law([100, 400], [2.0, 1.0])
    assert fit.b == pytest.approx(-0.5)
    assert fit.b == pytest.approx(fit.b_loglog)
    assert fit.reason == ""
    assert math.isnan(fit.b_low)
    assert "no interval" in fit.note


def test_maxima_that_are_not_positive_are_left_out_and_said():
    fit = fit_power_law([100, 200, 400, 800], [1.0, 0.5, -0.1, 0.125])
    assert fit.b == pytest.approx(-1.0)
    assert fit.left_out == 1
    assert "1 of 4 sizes left out" in fit.note
    none = fit_power_law([100, 200, 400], [[0.5, -1.0], [-0.2, -0.1], [0.0, 0.0]])
    assert math.isnan(none.b)
    assert math.isnan(none.a)
    assert math.isnan(none.b_low)
    assert "3 sizes, of which 1 with a positive maximum" in none.reason
    assert "no power law" in none.sentence()
    assert math.isnan(fit_power_law([], []).b)
    assert "1 sizes, of which 1" in fit_power_law([100], [[1.0, 2.0]]).reason


def test_what_came_is_read_as_it_is():
    values = torch.tensor([[1.0, 0.8], [0.5, 0.4]], dtype=torch.float64)
    fit = fit_power_law(torch.tensor([200, 100]), values)
    assert fit.ms == (100.0, 200.0)
    assert fit.g == (0.5, 1.0)
    ragged = fit_power_law([100, 200, 400], [[1.0, 0.9, 0.8], [0.5, 0.4], [0.25, math.nan, 0.2]])
    assert ragged.pairs == (3, 2, 2)
    assert "between 2 and 3 pairs per size" in ragged.note
    assert "1 of 8 values are not finite" in ragged.note
    assert fit_power_law([100, 200], [[1.0, 3.0], [0.5, 1.5]], reduce="mean").g == (2.0, 1.0)
    assert fit_power_law([100, 200], [[1.0, 2.0, 9.0], [1.0, 1.0, 7.0]], reduce="median").g == (2.0, 1.0)
    assert math.isnan(fit_power_law([100, 200, 400], [3.0, 3.0, 3.0]).r2)


@pytest.mark.parametrize(
    ("ms", "values", "options", "message"),
    [
        ([100, 100], [1.0, 2.0], {}, "each once"),
        ([100, -1], [1.0, 2.0], {}, "positive sizes"),
        ([100, 200], [1.0], {}, "an entry per size"),
        ([100], [[[1.0]]], {}, "not deeper"),
        ([100, 200], [1.0, 2.0], {"reduce": "sum"}, "'max', 'mean', 'median'"),
        ([100, 200], [1.0, 2.0], {"level": 1.5}, "above 0 and below 1"),
        ([100, 200], ["a", "b"], {}, "must hold numbers"),
    ],
)
def test_wrong_arguments_are_told(ms, values, options, message):
    with pytest.raises(ValueError, match=message):
        fit_power_law(ms, values, **options)


def test_a_fit_is_a_result(tmp_path):
    fit = fit_power_law(SMALL, pairs(SMALL, -1.0, 8, 0), seed=5)
    assert fit.rows()[0]["b"] == fit.b
    assert f"m^{fit.exponent()}" in fit.sentence()
    fit.save(tmp_path / "fit")
    again = PowerFit.load(tmp_path / "fit")
    assert (again.b, again.b_low, again.g, again.seed) == (fit.b, fit.b_low, fit.g, 5)
    assert fit_power_law(SMALL, pairs(SMALL, -1.0, 8, 0), seed=5).rows() == fit.rows()


# Slope windows


def test_slopes_of_a_broken_law_and_its_widest_window():
    """m^−1 up to 800, then m^−0.2: two windows of constant slope, of which the one over more octaves is found."""
    ms = np.array([100.0, 200.0, 400.0, 800.0, 1600.0, 3200.0])
    g = np.where(ms <= 800, ms**-1.0, 800.0**-0.8 * ms**-0.2)
    found = slope_windows(ms, g)
    np.testing.assert_allclose(found.slopes, [-1, -1, -1, -0.2, -0.2], atol=1e-12)
    assert found.widest == (100.0, 800.0)
    assert [row["in_widest"] for row in found.rows()] == [True, True, True, False, False]
    assert "from m = 100 to 800" in found.sentence()
    assert slope_windows(ms, g, spread=10.0).widest == (100.0, 3200.0)


def test_one_law_is_one_window_and_a_slow_bend_is_cut():
    assert slope_windows(DEEP, 3 * DEEP**-0.18).widest == (15_000.0, 50_000.0)
    ms = np.geomspace(10, 10_000, 13)
    bent = np.exp(-0.05 * np.log(ms) ** 2)  # slope −0.1 log m
    low, high = slope_windows(ms, bent).widest
    inside = [row["slope"] for row in slope_windows(ms, bent).rows() if row["in_widest"]]
    assert max(inside) - min(inside) <= 0.2 * abs(np.mean(inside))
    assert 10 < low < high
    assert len(inside) >= 2


def test_ties_go_to_more_sizes_and_gaps_break_windows():
    ms = [1, 2, 4, 16, 64]
    g = [16.0, 8.0, 4.0, 4.0, 64.0]  # slopes −1, −1, 0, 2: the widest are (1, 4), (4, 16) and (16, 64)
    assert slope_windows(ms, g).widest == (1.0, 4.0)
    broken = slope_windows([1, 2, 4, 8], [8.0, -4.0, 2.0, 1.0])
    assert [math.isnan(s) for s in broken.slopes] == [True, True, False]
    assert broken.widest == (4.0, 8.0)
    nothing = slope_windows([1, 2], [-1.0, 1.0])
    assert nothing.widest is None
    assert "no local slope" in nothing.sentence()
    with pytest.raises(ValueError, match="must be a number"):
        slope_windows([1, 2], [[1.0, 2.0], [1.0, 2.0]])
    with pytest.raises(ValueError, match="spread must be"):
        slope_windows([1, 2], [1.0, 2.0], spread=-1)
