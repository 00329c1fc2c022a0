"""The arithmetic of bounds: closed forms, 50 digits of mpmath, and every row of the source's table."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from theodolite.measures.bounds import (
    all_bounds,
    bernoulli_kl,
    bound_from_summary,
    grid_index,
    grid_penalty,
    held_out_bound,
    kl_inverse,
    risk_certificate,
    rounded_variance,
)

from .table_9 import ROWS

RATES = st.one_of(st.sampled_from([0.0, 1.0, 1e-300, 1 - 1e-16]), st.floats(0, 1))
BUDGETS = st.one_of(st.sampled_from([0.0, 1e-300, 1e6]), st.floats(1e-12, 50))


def exact(q: float, budget: float) -> mpmath.mpf:
    """The root of kl(q‖p) = budget to 50 digits, by bisection."""
    with mpmath.workdps(50):
        q, budget = mpmath.mpf(q), mpmath.mpf(budget)
        if q == 1 or budget == 0:
            return q

        def kl(p):
            return (q * mpmath.log(q / p) if q else 0) + (1 - q) * mpmath.log((1 - q) / (1 - p))

        low, high = q, 1 - mpmath.mpf(10) ** -45
        if kl(high) < budget:
            return mpmath.mpf(1)
        for _ in range(170):
            middle = (low + high) / 2
            low, high = (middle, high) if kl(middle) < budget else (low, middle)
        return low


@given(q=RATES, budget=BUDGETS)
def test_check_04_the_inverse_agrees_with_fifty_digits(q, budget):
    assert abs(float(kl_inverse(q, budget)) - float(exact(q, budget))) <= 1e-12


@given(q=RATES, budget=BUDGETS)
def test_check_04_properties_of_the_inverse(q, budget):
    p = float(kl_inverse(q, budget))
    assert q <= p <= min(1.0, q + math.sqrt(budget / 2) + 1e-15)
    if p < 1 - 1e-6 and budget > 1e-6:  # closer to 1 it is rounded away
        assert float(bernoulli_kl(q, p)) == pytest.approx(budget, rel=1e-6, abs=1e-9)
    assert p <= float(kl_inverse(q, budget + 0.1)) + 1e-15


def test_check_04_the_ends_of_the_inverse():
    assert float(kl_inverse(0.0, 2.0)) == pytest.approx(-math.expm1(-2.0), rel=1e-15)
    assert float(kl_inverse(1.0, 0.5)) == float(kl_inverse(0.3, 1e6)) == float(kl_inverse(0.3, math.inf)) == 1.0
    assert float(kl_inverse(0.3, 0.0)) == 0.3
    assert float(bernoulli_kl(0.0, 0.0)) == float(bernoulli_kl(1.0, 1.0)) == 0.0
    assert float(bernoulli_kl(0.2, 0.0)) == float(bernoulli_kl(0.2, 1.0)) == math.inf
    assert float(kl_inverse(0.5, 1e-8)) == pytest.approx(0.5 + math.sqrt(0.5e-8), rel=1e-8)


def test_the_inverse_is_batched_and_its_gradient_is_that_of_differences():
    q = torch.tensor([0.02, 0.3, 0.9], dtype=torch.float64, requires_grad=True)
    budget = torch.tensor([[0.06], [1.0]], dtype=torch.float64, requires_grad=True)
    assert kl_inverse(q, budget).shape == (2, 3)
    assert torch.autograd.gradcheck(kl_inverse, (q, budget), eps=1e-7, rtol=1e-6)


def test_check_03_chance_after_fifty_thousand_draws():
    assert float(kl_inverse(0.4993, math.log(200) / 50_000)) == pytest.approx(0.5066, abs=1e-4)


@pytest.mark.parametrize(("network", "method", "bound", "kl", "ebar", "rho", "j", "valid", "drawn"), ROWS)
def test_checks_01_02_03_every_row_of_table_9(network, method, bound, kl, ebar, rho, j, valid, drawn):
    n = 60_000
    found = bound_from_summary(ebar, kl, rho, n)
    assert found == pytest.approx(valid, abs=1e-4)
    if j >= 1:
        assert found == pytest.approx(bound, abs=1.5e-4)  # printed with four digits from rounded numbers
    else:
        assert found > bound - 5e-5  # what is printed for j = 0 is not valid
    index = grid_index(math.exp(2 * rho))
    assert index == pytest.approx(j, abs=0.02)
    assert float(kl_inverse(drawn, math.log(200) / 50_000)) == pytest.approx(ebar, abs=1.5e-4)


def test_there_are_all_rows_of_table_9():
    assert len(ROWS) == 36
    assert sum(row[6] == 0 for row in ROWS) == 7


def test_check_11_the_grid_never_reaches_its_ceiling():
    assert sum(math.exp(-grid_penalty(j)) for j in range(1, 200_000)) == pytest.approx(1.0, abs=1e-5)
    for variance in (1e-9, 0.003, 0.0999, 0.1, 7.0):
        rounded, j = rounded_variance(variance)
        assert j >= 1
        assert rounded < 0.1
        assert grid_index(rounded) == pytest.approx(j, abs=1e-9)
    with pytest.raises(ValueError, match="j must be"):
        grid_penalty(0)


@given(ebar=st.floats(0.001, 0.5), kl=st.floats(0, 5000), n=st.integers(1000, 60_000))
def test_check_12_certificates_are_monotone(ebar, kl, n):
    here = bound_from_summary(ebar, kl, -1.5, n)
    assert here <= bound_from_summary(min(ebar + 0.05, 1.0), kl, -1.5, n) + 1e-12
    assert here <= bound_from_summary(ebar, kl + 50, -1.5, n) + 1e-12
    assert here <= bound_from_summary(ebar, kl, -1.5, n - 500) + 1e-12
    draws = 10 * n
    one = risk_certificate(round(ebar * draws), draws, kl, n)
    assert one.value <= risk_certificate(round(ebar * draws), draws, kl + 50, n).value + 1e-12
    assert one.value == one.bounds["maurer"] == min(v for k, v in one.bounds.items() if k in ("maurer", "pinsker", "quadratic"))


def test_all_forms_are_valid_relaxations():
    found = all_bounds(0.03, 3000.0, 60_000, penalty=20.0)
    assert found["maurer"] < found["langford"] < found["pinsker"]
    assert found["maurer"] < found["quadratic"]
    assert found["maurer"] < found["lambda"]
    assert found["maurer"] < found["catoni"] < 1.2 * found["maurer"]
    with pytest.raises(ValueError, match="8 or more"):
        all_bounds(0.1, 1.0, 7)


@pytest.mark.parametrize(("errors", "n"), [(0, 60), (3, 100), (295, 10_000), (99, 100)])
def test_the_held_out_bound_is_the_exact_binomial_one(errors, n):
    bound = held_out_bound(errors, n, 0.035)
    assert binom.cdf(errors, n, bound) == pytest.approx(0.035, rel=1e-9)
    assert held_out_bound(n, n) == 1.0
    with pytest.raises(ValueError, match="at most n"):
        held_out_bound(n + 1, n)
