"""Autograd through an unrolled quadratic: where it is right, and what becomes of it elsewhere."""

from __future__ import annotations

import math

import pytest
import torch

from theodolite.measures.stepsize import (
    descend_rate,
    descend_unrolled,
    meta_gradient_health,
    optimal_rate,
    stable_meta_gradient,
    unrolled_meta_gradient,
)
from theodolite.operators import DenseOperator
from theodolite.testing import ResultContract

from .cases import EVEN, in_eigenvectors, reference

HORIZONS = [10, 20, 40, 80]
#: By rate, for 10, 20, 40 and 80 steps in float32.
CLASSES = {0.001: "ok ok ok ok", 0.01: "ok ok ok ok", 0.1: "ok ok zero nan", 1.0: "ok zero nan nan"}


def classes(found, rate):
    return " ".join(row["health"] for row in found.table if row["rate"] == rate)


def test_check_09_what_float32_makes_of_the_reference():
    """Exact classes in the eigenvectors; of the matrix itself, whose overflow has mixed signs, right or not."""
    hessian, w0 = reference()
    inside = meta_gradient_health(*in_eigenvectors(hessian, w0), list(CLASSES), HORIZONS, dtype=torch.float32)
    dense = meta_gradient_health(hessian, w0, list(CLASSES), HORIZONS, dtype=torch.float32)
    for rate, expected in CLASSES.items():
        assert classes(inside, rate) == expected
        assert [health == "ok" for health in classes(dense, rate).split()] == [word == "ok" for word in expected.split()]
    assert inside.horizons[("float32", 0.1)] == 20
    assert inside.foretold == dense.foretold == 1.0


def test_float64_only_moves_the_failure():
    found = meta_gradient_health(*in_eigenvectors(*reference()), [0.1, 1.0], [80, 160, 320], dtype=torch.float64)
    assert (classes(found, 0.1), classes(found, 1.0)) == ("ok ok zero", "ok zero nan")
    sizes = {(row["rate"], row["steps"]): row["log10_loss"] for row in found.table}
    assert abs(sizes[0.1, 320] - 459.6) < 0.1
    assert abs(sizes[1.0, 320] - 1143.4) < 0.1


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.5])
def test_a_stable_quadratic_underflows_in_float32_and_the_stable_form_is_right(ratio):
    """X of d × 2d, 2000 steps: autograd gives NaN; the truth is that of float64, which holds the loss."""
    hessian, w0 = reference(2, columns=40)
    rate = ratio / float(torch.linalg.eigvalsh(hessian)[-1])
    found = meta_gradient_health(hessian, w0, rate, 2000)
    assert [row["health"] for row in found.table] == ["nan", "ok"]
    truth = float(unrolled_meta_gradient(hessian, w0, rate, 2000, dtype=torch.float64, divide_by_t=True))
    for form in (hessian.float(), DenseOperator(hessian)):
        single = stable_meta_gradient(form, w0.float(), rate, 2000)
        assert abs(float(single.gradient) / truth - 1) < 2e-5
    assert found.foretold == 1.0


def test_a_stable_quadratic_is_ok():
    found = meta_gradient_health(*EVEN, 0.3, [1, 5, 20])
    assert {row["health"] for row in found.table} == {"ok"}
    assert found.horizons == {("float32", 0.3): 20, ("float64", 0.3): 20}
    assert found.sentence() == "Meta-gradients by autograd that are right: 3 of 3 in float32, 3 of 3 in float64."


def test_unrolling_is_right_where_it_can_be():
    hessian, w0 = reference()
    rates = torch.tensor([[0.001, 0.01], [0.03, 0.1]])
    truth = stable_meta_gradient(hessian, w0, rates, 20).gradient
    found = unrolled_meta_gradient(hessian, w0, rates, 20, dtype=torch.float64, divide_by_t=True)
    torch.testing.assert_close(found, truth, rtol=1e-9, atol=0)
    whole = unrolled_meta_gradient(hessian, w0, rates, 20, dtype=torch.float64)
    torch.testing.assert_close(whole, 20 * truth, rtol=1e-9, atol=0)
    with torch.inference_mode():
        torch.testing.assert_close(unrolled_meta_gradient(hessian, w0, rates, 20, dtype=torch.float64), whole)


def test_detached_gradients_are_another_number():
    """⟨H w_t, (w_t − w₀)/η⟩ / f(w_t): on the reference it vanishes at 0.0359 and not at the best rate."""
    hessian, w0 = reference()
    rate, steps = 0.02, 10
    w = torch.linalg.matrix_power(torch.eye(20).double() - rate * hessian, steps) @ w0
    expected = (hessian @ w) @ (w - w0) / rate / (0.5 * w @ hessian @ w)
    found = unrolled_meta_gradient(hessian, w0, rate, steps, dtype=torch.float64, detach_inner_grad=True)
    torch.testing.assert_close(found, expected)
    around = unrolled_meta_gradient(hessian, w0, [0.0357, 0.0361], steps, dtype=torch.float64, detach_inner_grad=True)
    assert around.sign().tolist() == [-1, 1]


def test_check_10_which_implementations_converge():
    """150 updates are enough for RMSProp; a rate whose first gradient is 0 or NaN never moves."""
    hessian, w0 = reference()
    settings = [(10, [0.1]), (20, [0.1]), (40, [0.001, 0.01, 0.1, 1.0]), (80, [0.1])]
    rmsprop = [descend_unrolled(hessian, w0, starts, t, updates=150, meta_optimizer="rmsprop") for t, starts in settings]
    sgd = [descend_unrolled(hessian, w0, starts, t, updates=150) for t, starts in settings]
    ours = [descend_rate(hessian, w0, starts, t) for t, starts in settings]
    assert [found.converged for found in rmsprop] == [[True], [True], [True, True, False, False], [False]]
    assert [found.converged for found in sgd[1:]] == [[False], [False] * 4, [False]]
    assert [found.converged for found in ours] == [[True], [True], [True] * 4, [True]]
    assert max(abs(end / found.optimum - 1) for found in ours for end in found.ends) < 1e-3
    stuck = rmsprop[2]
    assert float((stuck.rates[:, 2:] - torch.tensor([0.1, 1.0])).abs().max()) < 1e-7
    assert stuck.gradients[0, 3].isnan()


@pytest.mark.slow
def test_check_10_with_all_thousand_updates():
    hessian, w0 = reference()
    ends = []
    for steps, starts in ((10, [0.1]), (20, [0.1]), (40, [0.001, 0.01, 0.1, 1.0]), (80, [0.1])):
        found = descend_unrolled(hessian, w0, starts, steps, meta_optimizer="rmsprop")
        ends += found.ends
        assert abs(found.optimum - optimal_rate(hessian, w0, steps).value) < 1e-12
    best = torch.tensor([0.03055, 0.03091, 0.03118, 0.03118])
    assert float((torch.tensor(ends[:4]) / best - 1).abs().max()) < 0.02
    assert [round(end, 6) for end in ends[4:]] == [0.1, 1.0, 0.1]


def test_options_of_the_unrolled_descent():
    values, c = EVEN
    once = {"updates": 1, "dtype": torch.float64}
    slope = float(unrolled_meta_gradient(values, c, 0.1, 5, dtype=torch.float64))
    moved = {
        "sgd": descend_unrolled(values, c, 0.1, 5, **once),
        "divided": descend_unrolled(values, c, 0.1, 5, divide_by_t=True, **once),
        "clipped": descend_unrolled(values, c, 0.1, 5, clip=0.5, **once),
        "rmsprop": descend_unrolled(values, c, 0.1, 5, meta_optimizer="rmsprop", **once),
    }
    steps = {name: float(found.rates[1, 0] - found.rates[0, 0]) for name, found in moved.items()}
    expected = {"sgd": -slope, "divided": -slope / 5, "clipped": 0.5, "rmsprop": -slope / math.sqrt(0.9 + 0.1 * slope**2)}
    assert all(abs(steps[name] / (1e-3 * value) - 1) < 1e-9 for name, value in expected.items())
    kept = descend_unrolled(values, c, 2.0, 500, updates=3, nonfinite_to_zero=False)
    assert kept.rates[1:].isnan().all()
    assert "no number" in kept.sentence()
    assert float(descend_unrolled(values, c, 2.0, 500, updates=3).rates[-1]) == 2.0


def test_bad_input_is_refused():
    hessian, w0 = reference()
    with pytest.raises(TypeError, match="hessian must be a matrix or a vector of eigenvalues"):
        meta_gradient_health(DenseOperator(hessian), w0, 0.1, 5)
    with pytest.raises(ValueError, match="dtype must be"):
        meta_gradient_health(hessian, w0, 0.1, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match="one dtype"):
        unrolled_meta_gradient(hessian, w0, 0.1, 5, dtype=[torch.float32])
    with pytest.raises(ValueError, match=r"steps\[1\] must be a positive integer"):
        meta_gradient_health(hessian, w0, 0.1, [5, 0])
    with pytest.raises(ValueError, match="'sgd' or 'rmsprop'"):
        descend_unrolled(hessian, w0, 0.1, 5, meta_optimizer="adam")


class TestMetaGradientHealth(ResultContract):
    def make(self):
        return meta_gradient_health(*reference(), [0.01, 0.1, 1.0], [10, 40])


class TestUnrolledDescent(ResultContract):
    def make(self):
        return descend_unrolled(*reference(), [0.1, 0.01], 40, updates=3)


class TestOneUnrolledDescent(ResultContract):
    def make(self):
        return descend_unrolled(*reference(), 0.1, 40, updates=3)
