"""Meta-gradients on a quadratic: 50 digits of mpmath, the tables of R0, differences, products, and the theorems."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import theodolite as th
from theodolite.measures.stepsize import descend_rate, optimal_rate, stable_meta_gradient
from theodolite.operators import DenseOperator
from theodolite.testing import ResultContract

from .cases import BEST, EVEN, RATES, SLOPES, in_eigenvectors, reference


def exact(values, coefficients, rate, steps):
    """log f, F' and F'' to 80 digits."""
    with mpmath.workdps(80):
        terms = [
            (mpmath.mpf(c) ** 2, mpmath.mpf(v), 1 - mpmath.mpf(rate) * mpmath.mpf(v))
            for v, c in zip(values, coefficients, strict=True)
        ]
        d = sum(c * v * z ** (2 * steps) for c, v, z in terms)
        n = sum(c * v**2 * z ** (2 * steps - 1) for c, v, z in terms)
        m = sum(c * v**3 * z ** (2 * steps - 2) for c, v, z in terms)
        return mpmath.log(d / 2), -2 * n / d, 2 * (2 * steps - 1) * m / d - 4 * steps * n**2 / d**2


def relative(found, truth):
    return float(abs(mpmath.mpf(float(found)) - truth) / max(abs(truth), mpmath.mpf(10) ** -200))


# The closed form


@settings(max_examples=60)
@given(
    values=st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=5, unique=True),
    rate=st.one_of(st.just(0.0), st.floats(1e-6, 1e3)),
    steps=st.sampled_from([1, 2, 7, 100, 20_000]),
    seed=st.integers(0, 99),
)
def test_the_closed_form_has_the_digits_of_mpmath(values, rate, steps, seed):
    c = np.random.default_rng(seed).standard_normal(len(values)) + 0.01
    found = stable_meta_gradient(torch.tensor(values).double(), torch.from_numpy(c), rate, steps)
    log_loss, slope, curvature = exact([float(v) for v in torch.tensor(values).double()], c, rate, steps)
    nearest = min(abs(1 - rate * v) for v in values)
    if nearest < 1e-4:  # 1 − ηλ has lost its digits, and so has λ/z
        return
    assert abs(float(found.log_value) - float(log_loss)) < 1e-9 * max(1, abs(float(log_loss)))
    assert relative(found.gradient, slope) < 1e-9 or abs(float(found.gradient) - float(slope)) < 1e-8 * max(values)
    scale = float(4 * steps * (max(values) / nearest) ** 2)
    assert abs(float(found.second) - float(curvature)) < 1e-9 * scale


def test_check_01_gradients_are_central_differences_of_values():
    hessian, w0 = reference()
    h = 1e-7
    for steps in (10, 80):
        for rate in (0.005, 0.02, 0.03, 0.05, 0.3):
            found = stable_meta_gradient(hessian, w0, [rate - h, rate, rate + h], steps)
            slope = float(found.value[2] - found.value[0]) / (2 * h)
            assert abs(slope / float(found.gradient[1]) - 1) < 1e-6


def test_second_derivatives_are_central_differences_of_gradients():
    hessian, w0 = reference()
    h = 1e-7
    for objective in ("log_last", "last"):
        for rate in (0.005, 0.0314, 0.3):
            found = stable_meta_gradient(hessian, w0, [rate - h, rate, rate + h], 10, objective=objective)
            slope = float(found.gradient[2] - found.gradient[0]) / (2 * h)
            assert abs(slope / float(found.second[1]) - 1) < 1e-5


def test_check_02_the_table_of_slopes():
    hessian, w0 = reference()
    for steps, slopes in SLOPES.items():
        found = stable_meta_gradient(hessian, w0, RATES, steps)
        assert float((found.gradient - torch.tensor(slopes)).abs().max()) < 1e-5
    start = stable_meta_gradient(hessian, w0, 0.0, 80)
    values, c = in_eigenvectors(hessian, w0)
    assert abs(float(start.gradient) + 2 * float((c**2 * values**2).sum() / (c**2 * values).sum())) < 1e-9


def test_check_03_the_table_of_best_rates():
    hessian, w0 = reference()
    for steps, rate in BEST.items():
        assert abs(optimal_rate(hessian, w0, steps).value - rate) < 1e-6
    found = optimal_rate(hessian, w0, 10**6)
    assert abs(found.value - found.limit) < 1e-6
    assert abs(found.limit - 0.031895) < 1e-6


def test_the_best_rate_is_that_of_both_objectives():
    hessian, w0 = reference()
    found = optimal_rate(hessian, w0, 40)
    for objective in ("log_last", "last"):
        around = stable_meta_gradient(
            hessian, w0, found.value * torch.tensor([1 - 1e-9, 1, 1 + 1e-9], dtype=torch.float64), 40, objective=objective
        )
        assert around.sign.tolist()[0] == -1
        assert around.sign.tolist()[2] == 1
    assert abs(found.curvature - float(around.second[1] / around.value[1] / 40)) < 1e-6 * found.curvature


@pytest.mark.parametrize("steps", [10, 80, 2000])
def test_check_04_products_give_the_same(steps):
    """To 1e-9 (the check asks for 1e-6); the longer horizons are in the long test below."""
    compare_with_products(steps)


@pytest.mark.parametrize("steps", [pytest.param(20_000, marks=pytest.mark.long), pytest.param(100_000, marks=pytest.mark.slow)])
def test_check_04_products_give_the_same_for_many_steps(steps):
    compare_with_products(steps)


def compare_with_products(steps):
    hessian, w0 = reference()
    rates = [0.01, 0.03, 0.1, 1.0]
    closed = stable_meta_gradient(hessian, w0, rates, steps)
    found = stable_meta_gradient(DenseOperator(hessian), w0, rates, steps)
    assert float((found.gradient / closed.gradient - 1).abs().max()) < 1e-9
    assert float((found.value / closed.value - 1).abs().max()) < 1e-9
    assert found.products == 4 * (steps + 1)
    assert found.second is None


def test_products_are_made_for_all_rates_at_once():
    hessian, w0 = reference()
    widths = []

    class Counted(DenseOperator):
        def _matmat(self, x):
            widths.append(x.shape[1])
            return super()._matmat(x)

    stable_meta_gradient(Counted(hessian).trusted(), w0, torch.logspace(-3, 0, 7), 12)
    assert widths == [1, *[7] * 13]  # the first is the check of the start


def test_check_05_finite_for_a_million_steps():
    hessian, w0 = reference()
    largest = float(torch.linalg.eigvalsh(hessian)[-1])
    rates = [0.0, 1e-6, 1 / largest, 2 / largest, 1.0, 1e3, 1e300]
    for steps in (1, 10**6):
        found = stable_meta_gradient(hessian, w0, rates, steps)
        for part in (found.value, found.gradient, found.second, found.log_value, found.log_gradient):
            assert bool(torch.isfinite(part).all())
    assert bool(torch.isfinite(stable_meta_gradient(DenseOperator(hessian), w0, rates, 50).gradient).all())
    assert abs(float(found.gradient[5]) - 2 * largest / (1e3 * largest - 1)) < 1e-12


def test_the_last_loss_agrees_with_gradient_descent():
    hessian, w0 = reference()
    rate = torch.tensor(0.02, dtype=torch.float64, requires_grad=True)
    w = w0
    for _ in range(7):
        w = w - rate * (hessian @ w)
    loss = 0.5 * w @ hessian @ w
    (gradient,) = torch.autograd.grad(loss, rate)
    for form in (hessian, DenseOperator(hessian), hessian.numpy()):
        found = stable_meta_gradient(form, w0, 0.02, 7, objective="last")
        torch.testing.assert_close((found.value, found.gradient), (loss.detach(), gradient), rtol=1e-10, atol=0)
        assert abs(float(found.sign * found.log_gradient.exp()) / float(gradient) - 1) < 1e-10


def test_the_last_loss_may_leave_the_range():
    hessian, w0 = reference()
    found = stable_meta_gradient(hessian, w0, 1.0, 320, objective="last")
    assert (float(found.value), float(found.gradient), float(found.sign)) == (math.inf, math.inf, 1.0)
    assert abs(float(found.log10_loss) - 1143.4) < 0.05
    assert "10^1143.4" in found.sentence()


@given(scale=st.floats(1e-100, 1e100), rate=st.floats(0, 2))
def test_the_scale_of_the_start_does_not_matter(scale, rate):
    values, c = EVEN
    a, b = (stable_meta_gradient(values, w, rate, 30).gradient for w in (c, scale * c))
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_what_a_quadratic_may_be_given_as():
    hessian, w0 = reference()
    truth = stable_meta_gradient(*in_eigenvectors(hessian, w0), [0.01, 0.3], 9).gradient
    model = nn.Linear(20, 1, bias=False).double()
    root = torch.linalg.cholesky(hessian).T  # ½ Σ (Lᵀw)² has the Hessian L Lᵀ
    problem = th.Problem(model, lambda out, y: 0.5 * (out - y).square().sum(), (root, torch.zeros(20, 1).double()))
    forms = (hessian, hessian.numpy(), hessian.to_sparse(), scipy.sparse.csr_matrix(hessian.numpy()),
             scipy.sparse.linalg.aslinearoperator(hessian.numpy()), th.hessian(problem), th.gauss_newton(problem))  # fmt: skip
    for form in forms:
        torch.testing.assert_close(stable_meta_gradient(form, w0, [0.01, 0.3], 9).gradient, truth, rtol=1e-9, atol=0)
    found = stable_meta_gradient(hessian.float(), w0.float().numpy(), torch.tensor([[0.01], [0.3]]), 9)
    assert found.gradient.shape == (2, 1)
    assert found.gradient.dtype == torch.float64
    torch.testing.assert_close(found.gradient[:, 0], truth, rtol=1e-4, atol=0)
    assert float(stable_meta_gradient(hessian, w0, lr=0.01, steps=9).gradient) == pytest.approx(float(truth[0]), rel=1e-9)


def test_directions_without_curvature_are_left_out():
    hessian, w0 = reference(columns=10)  # rank 10
    values, c = in_eigenvectors(hessian, w0)
    found = stable_meta_gradient(hessian, w0, 0.01, 500).gradient
    torch.testing.assert_close(found, stable_meta_gradient(values[10:], c[10:], 0.01, 500).gradient, rtol=1e-8, atol=0)


def test_a_loss_that_is_lost_in_rounding_is_said():
    """With products a large part of the start along which nothing curves hides a small loss."""
    hessian = torch.diag(torch.tensor([0.0, 1.0, 1.01], dtype=torch.float64))
    turn = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    w0 = turn @ torch.tensor([1.0, 1.0, 1.0]).double()
    op, matrix = DenseOperator(turn @ hessian @ turn.T, symmetric=True), turn @ hessian @ turn.T
    truth = stable_meta_gradient(matrix, w0, 0.9, 30)
    assert abs(float(truth.value) / (2 * math.log(0.1)) - 1) < 0.02
    with pytest.raises(ValueError, match=r"no large part along which the loss is flat: after 30 steps at rate 0\.9"):
        stable_meta_gradient(op, w0, [0.1, 0.9], 30)
    both = (stable_meta_gradient(form, w0, 0.9, 3).gradient for form in (op, matrix))
    torch.testing.assert_close(*both, rtol=1e-6, atol=0)


# The planted cases


def test_a_rate_above_the_critical_one_grows_by_the_largest_eigenvalue():
    """(1/t) log f → 2 log(ηL − 1), to 1 %."""
    hessian, w0 = reference(columns=40)
    largest = float(torch.linalg.eigvalsh(hessian)[-1])
    found = stable_meta_gradient(hessian, w0, 2.5 / largest, 2000)
    assert abs(float(found.value) / (2 * math.log(1.5)) - 1) < 0.01
    assert abs(float(found.gradient) / (2 * largest / 1.5) - 1) < 1e-9


def test_check_11_the_gradient_of_the_last_loss_vanishes_or_explodes():
    """T1: the slope of log|f'| − log t in 2t − 1 is log max|1 − ηλ|."""
    for (values, c), horizons in ((EVEN, range(50, 501, 50)), (in_eigenvectors(*reference(columns=40)), range(5000, 9001, 500))):
        for ratio in (0.5, 2.5):
            rate = ratio / float(values.max())
            found = [
                float(stable_meta_gradient(values, c, rate, t, objective="last").log_gradient) - math.log(t) for t in horizons
            ]
            slope = np.polyfit([2 * t - 1 for t in horizons], found, 1)[0]
            assert abs(slope / math.log(float((1 - rate * values).abs().max())) - 1) < 0.01
            assert (slope < 0) == (ratio < 2)


# The theorems


def test_check_06_one_change_of_sign_in_the_bracket():
    for seed in range(50):
        values, c = in_eigenvectors(*reference(seed))
        low, high = float(values[0]), float(values[-1])
        slopes = stable_meta_gradient(values, c, torch.linspace(0, 2 / low, 2000), 40).gradient
        rises = slopes > 0
        assert int((rises[1:] != rises[:-1]).sum()) == 1
        assert 1 / high <= optimal_rate(values, c, 40).value <= 1 / low


def test_check_07_gradients_are_bounded_from_both_sides():
    for seed in range(50):
        values, c = in_eigenvectors(*reference(seed))
        low, high = float(values[0]), float(values[-1])
        along = float(c[[0, -1]].square().min())
        rates = torch.cat([torch.logspace(-6, 1, 300), torch.linspace(0, 2 / low, 300)]).double()
        best = optimal_rate(values, c, 20).value
        slopes = stable_meta_gradient(values, c, rates, 20).gradient.abs()
        assert float(slopes.max()) <= 4 * high**3 / (along * low * (high - low))
        margin = 0.5 / high
        away = ((rates - best).abs() >= margin) & (rates <= 2 / low)
        assert float(slopes[away].min()) >= 2 * margin * along * min(low**3 / high, (low / 2) ** 2)


# Descending on the rate


def test_check_08_the_descent_on_the_reference():
    """Beyond some hundred updates the last bits of every sum decide where a ripple is, so only ranges are asked for there."""
    found = descend_rate(*reference(), 0.1, 80)
    path = found.rates[:, 0]
    assert float(path[1]) == 0
    assert abs(float(path[2]) - 0.506596) < 1e-5
    assert float((path[[3, 10, 20, 100]] - torch.tensor([0.483062, 0.349548, 0.131041, 0.036325])).abs().max()) < 1e-5
    assert abs(float(path[300]) / found.optimum - 1) < 0.06
    assert 0.0311 < float(path[1000]) < 0.0318
    assert found.outside(1e-2) == [111]
    assert 290 < found.outside(1e-3)[0] < 360
    assert found.converged == [True]


@pytest.mark.long
def test_check_08_when_the_descent_settles():
    """T5: until F'' μ falls below 2 the rate jumps over the best one; both starts end up in the same cycle."""
    found = descend_rate(*EVEN, [0.05, 2.0], 2, updates=8500, meta_rate=1.0)
    assert abs(found.optimum - 0.33141) < 1e-5
    assert all(abs(last - 7744) <= 10 for last in found.outside(0.01 * found.optimum))
    assert abs(found.settles - 7739) < 2


def test_a_descent_follows_its_formula_and_works_with_products():
    hessian, w0 = reference()
    found = descend_rate(hessian, w0, [0.1, 0.01], 10, updates=5)
    for k in range(1, 6):
        expected = (found.rates[k - 1] - 0.01 / math.sqrt(k) * found.gradients[k - 1]).clamp(min=0)
        torch.testing.assert_close(found.rates[k], expected)
    torch.testing.assert_close(found.gradients[3], stable_meta_gradient(hessian, w0, found.rates[3], 10).gradient)
    products = descend_rate(DenseOperator(hessian), w0, [0.1, 0.01], 10, updates=5)
    torch.testing.assert_close(products.rates, found.rates, rtol=1e-8, atol=1e-12)
    assert abs(products.optimum - found.optimum) < 1e-10
    assert abs(products.settles / found.settles - 1) < 1e-4
    assert [row["update"] for row in found.rows()] == [*range(6), *range(6)]


# Bad input

WRONG = {
    "a negative rate": ({"rate": -0.1}, "rate must be a number of at least 0"),
    "rates that are NaN": ({"rate": torch.tensor([0.1, math.nan])}, "rate must hold numbers"),
    "no steps": ({"steps": 0}, "steps must be a positive integer"),
    "an unknown objective": ({"objective": "log"}, "objective must be"),
    "a matrix that is not symmetric": ({"hessian": torch.tensor([[1.0, 2.0], [0.0, 1.0]])}, "hessian must be symmetric"),
    "a matrix that is not square": ({"hessian": torch.ones(2, 3)}, "hessian must be square"),
    "negative curvature": ({"hessian": torch.tensor([1.0, -1.0])}, "hessian must have no negative eigenvalues"),
    "negative curvature of products": (
        {"hessian": DenseOperator(torch.diag(torch.tensor([1.0, -3.0]).double())), "w0": torch.tensor([1.0, 0.1])},
        "hessian must have no negative eigenvalues",
    ),
    "a start of another length": ({"w0": torch.ones(3)}, "w0 must be a vector of 2"),
    "a start at the minimum": ({"w0": torch.zeros(2)}, "w0 must have a part along which the loss is curved"),
    "a start without curvature": ({"hessian": torch.tensor([1.0, 0.0]), "w0": torch.tensor([0.0, 1.0])}, "w0 must have a part"),
    "a model": ({"hessian": nn.Linear(2, 2)}, "hessian"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_refused_in_one_line(case):
    changes, words = WRONG[case]
    arguments = {"hessian": torch.tensor([2.0, 1.0]), "w0": torch.ones(2), "rate": 0.1, "steps": 30, **changes}
    with pytest.raises((ValueError, TypeError), match=words) as caught:
        stable_meta_gradient(**arguments)
    assert "\n" not in str(caught.value)


class TestMetaGradient(ResultContract):
    def make(self):
        return stable_meta_gradient(*reference(), [0.01, 0.03, 0.1], 80)


class TestOneMetaGradientByProducts(ResultContract):
    def make(self):
        hessian, w0 = reference()
        return stable_meta_gradient(DenseOperator(hessian), w0, 1.0, 320, objective="last")


class TestOptimalRate(ResultContract):
    def make(self):
        return optimal_rate(*reference(), 80)


class TestRateDescent(ResultContract):
    def make(self):
        return descend_rate(*reference(), [0.1, 0.01], 80, updates=5)
