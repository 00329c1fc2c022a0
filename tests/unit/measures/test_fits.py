"""The log-log fit: against SciPy's regression, with weights, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import linregress

from theodolite.measures.fits import log_log_fit

RNG = np.random.default_rng(0)
X = np.exp(RNG.uniform(0, 5, 12))
Y = 3.0 * X**-0.5 * np.exp(0.1 * RNG.standard_normal(12))


def test_slope_error_and_intercept_are_those_of_a_regression():
    fit, known = log_log_fit(X, Y), linregress(np.log(X), np.log(Y))
    assert (fit.slope, fit.stderr, fit.intercept) == pytest.approx((known.slope, known.stderr, known.intercept), rel=1e-10)
    assert fit.points == 12


def test_a_weight_is_a_number_of_copies_and_its_scale_does_not_matter():
    weights = np.arange(12) % 3
    copies = log_log_fit(np.repeat(X, weights), np.repeat(Y, weights))
    fit, scaled = log_log_fit(X, Y, weights=weights), log_log_fit(X, Y, weights=7.5 * weights)
    assert (fit.slope, fit.intercept) == pytest.approx((copies.slope, copies.intercept), rel=1e-10)
    assert scaled == pytest.approx(fit, rel=1e-10)
    assert fit.points == 8


def test_two_points_have_a_slope_without_error():
    fit = log_log_fit([1.0, 10.0], [1.0, 100.0])
    assert fit.slope == pytest.approx(2.0)
    assert math.isnan(fit.stderr)


def test_a_value_that_is_not_finite_makes_the_fit_nan():
    assert math.isnan(log_log_fit([1, 2, 3], [1.0, math.nan, 2.0]).slope)
    assert math.isnan(log_log_fit([1, 2, 3], [1.0, math.inf, 2.0]).slope)


@pytest.mark.parametrize(
    ("x", "y", "weights", "message"),
    [
        ([1, 2], [1, 2, 3], None, "same length"),
        ([1, 2], [1, 0], None, "positive"),
        ([-1, 2], [1, 2], None, "positive"),
        ([2, 2], [1, 2], None, "two different x"),
        ([1, 2], [1, 2], [1, -1], "weights"),
        ([1, 2], [1, 2], [1, 0], "two different x"),
    ],
)
def test_what_is_refused(x, y, weights, message):
    with pytest.raises(ValueError, match=message):
        log_log_fit(x, y, weights=weights)
