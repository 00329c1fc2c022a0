"""The bound of Feldman and Vondrák: its shape in β, m and δ."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from theodolite.measures.stability.bounds import fv_bound


@given(st.floats(0, 10), st.floats(1e-6, 1), st.integers(2, 10**6), st.floats(1e-6, 0.98))
def test_theorem_1_grows_with_beta_and_falls_with_delta(beta, more, m, delta):
    assert fv_bound(beta + more, m, delta) > fv_bound(beta, m, delta)
    assert fv_bound(beta, m, delta + 0.01) < fv_bound(beta, m, delta)


def test_theorem_1_slope_of_one_over_m_tends_to_minus_one_half():
    ms = np.geomspace(1e3, 1e6, 60)
    slopes = np.diff(np.log(fv_bound(1 / ms, ms, 0.05))) / np.diff(np.log(ms))
    assert ((slopes > -0.65) & (slopes < -0.5)).all()
    assert (np.diff(slopes[ms[1:] > 2e3]) > 0).all()  # from the steeper first term towards the second
    assert slopes[0] < slopes[-1] < -0.5
    assert slopes[-1] > -0.55  # measured −0.544
    far = np.geomspace(1e12, 1e13, 2)
    assert np.diff(np.log(fv_bound(1 / far, far, 0.05)))[0] / np.log(10) == pytest.approx(-0.5, abs=1e-3)


def test_theorem_1_a_stability_that_stays_gives_a_bound_that_grows():
    ms = np.geomspace(1e3, 1e6, 60)
    assert (np.diff(fv_bound(0.1, ms, 0.05)) > 0).all()


def test_floats_arrays_and_tensors_agree():
    by_hand = 2.0 * (0.01 * math.log(500) * math.log(5000) + math.sqrt(math.log(10) / 500))
    assert fv_bound(0.01, 500, 0.1, c=2.0) == pytest.approx(by_hand)
    assert isinstance(fv_bound(0.01, 500, 0.1), float)
    beta = [0.0, 0.01, 0.1]
    array = fv_bound(np.array(beta), 500, 0.1)
    tensor = fv_bound(torch.tensor(beta, dtype=torch.float64), torch.tensor(500), 0.1)
    assert tensor.dtype == torch.float64
    np.testing.assert_allclose(tensor.numpy(), array, rtol=1e-12)
    leaf = torch.tensor(0.01, dtype=torch.float64, requires_grad=True)
    fv_bound(leaf, 500, 0.1).backward()
    assert float(leaf.grad) == pytest.approx(math.log(500) * math.log(5000))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-0.1, 10, 0.1), "beta must (be a number|hold numbers) of at least 0"),
        ((0.1, 0.5, 0.1), "m must be a number of at least 1"),
        ((0.1, 10, 0.0), "delta must be a number above 0 and below 1"),
        ((0.1, 10, 1.0), "delta must be a number above 0 and below 1"),
        ((torch.tensor([0.1, math.nan]), 10, 0.1), "beta must (be a number|hold numbers) of at least 0"),
        ((0.1, 10, 0.1, -1.0), "c must be a positive number"),
    ],
)
def test_what_lies_outside_is_told(arguments, message):
    with pytest.raises(ValueError, match=message):
        fv_bound(*arguments)
