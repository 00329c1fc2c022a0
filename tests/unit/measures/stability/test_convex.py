"""The convex bound against logistic regression trained by a plain loop in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from theodolite.measures.stability.bounds import ConvexBounds, convex_bounds, largest_norm, largest_smoothness


def with_ones(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)


def loss_of(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Per example; w (outputs, d + 1), y in {0, 1} or class numbers."""
    f = with_ones(x) @ w.T
    if len(w) == 1:
        return F.binary_cross_entropy_with_logits(f[:, 0], y.double(), reduction="none")
    return F.cross_entropy(f, y, reduction="none")


def descend(w: Tensor, x: Tensor, y: Tensor, rate: float) -> Tensor:
    w = w.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(w, x, y).mean(), w)
    return (w - rate * gradient).detach()


def two_runs(outputs: int, seed: int, rates: list[float], m: int = 24, batch: int = 6):
    """Lock-step training on S and S'; distances and stabilities after each step, and everything the bound needs."""
    g = torch.Generator().manual_seed(seed)
    classes = max(outputs, 2)
    x, test = (2 * torch.randn(n, 3, generator=g, dtype=torch.float64) for n in (m, 40))
    y, test_y = (torch.randint(classes, (n,), generator=g) for n in (m, 40))
    i = int(torch.randint(m, (), generator=g))
    x2, y2 = x.clone(), y.clone()
    x2[i], y2[i] = test[0], test_y[0]
    order = torch.cat([torch.randperm(m, generator=g) for _ in range(-(-len(rates) * batch // m))])
    batches = order[: len(rates) * batch].reshape(len(rates), batch)
    w = w2 = torch.zeros(outputs, 4, dtype=torch.float64)
    distances, stabilities = [], []
    for rate, index in zip(rates, batches, strict=True):
        w, w2 = descend(w, x[index], y[index], rate), descend(w2, x2[index], y2[index], rate)
        distances.append(float((w - w2).norm()))
        stabilities.append(float((loss_of(w, test, test_y) - loss_of(w2, test, test_y)).abs().max()))
    constants = {
        "largest_input": max(largest_norm(x), largest_norm(x2)),
        "largest_test_input": largest_norm(test),
        "batch": batch,
        "smoothness": max(largest_smoothness(data, batches, outputs=outputs) for data in (x, x2)),
        "outputs": outputs,
    }
    return distances, stabilities, (batches == i).any(1), constants


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_check_10_the_convex_inequalities_hold_at_every_step(outputs, seed):
    distances, stabilities, seen, constants = two_runs(outputs, seed, [0.1] * 60)
    found = convex_bounds(rate=0.1, visits=seen.cumsum(0), **constants)
    assert found.non_expansive
    assert found.hold(distances, stabilities)
    assert max(distances) > 0
    unvisited = seen.cumsum(0) == 0
    assert (torch.tensor(distances)[unvisited] == 0).all()
    assert not found.hold([2 * float(found.distance_bound.max()) + 1] * 60, stabilities)


@pytest.mark.parametrize("seed", range(3))
def test_rates_may_differ_between_steps(seed):
    rates = [0.1] * 20 + [0.05] * 20 + [0.01] * 20
    distances, stabilities, seen, constants = two_runs(1, seed, rates)
    found = convex_bounds(rate=rates, visits=seen, **constants)
    assert found.hold(distances, stabilities)
    constant = convex_bounds(rate=0.1, visits=seen.cumsum(0), **constants)
    assert float(found.distance_bound[-1]) < float(constant.distance_bound[-1])
    torch.testing.assert_close(found.visits, seen.cumsum(0))


def test_the_first_visit_can_reach_its_bound_up_to_the_slope_at_zero():
    """At w = 0 a gradient is ‖x̃‖/2: opposite labels at one long input come within a factor of two of the bound."""
    x = torch.tensor([[3.0]], dtype=torch.float64)
    w, w2 = (descend(torch.zeros(1, 2, dtype=torch.float64), x, torch.tensor([label]), 0.1) for label in (0, 1))
    bounds = convex_bounds(
        largest_input=largest_norm(x),
        largest_test_input=1.0,
        rate=0.1,
        batch=1,
        visits=1,
        smoothness=largest_smoothness(x, [[0]]),
    )
    assert float((w - w2).norm()) == pytest.approx(0.5 * float(bounds.distance_bound))


@pytest.mark.parametrize("outputs", [1, 3])
def test_the_constants_bound_gradient_and_hessian(outputs):
    """Against autograd at random points: gradients of single examples, and the Hessian of a batch."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(8, 3, generator=g, dtype=torch.float64)
    y = torch.randint(max(outputs, 2), (8,), generator=g)
    slope = 1.0 if outputs == 1 else math.sqrt(2.0)
    smooth = largest_smoothness(x, torch.arange(8)[None], outputs=outputs)
    for scale in (0.0, 0.3, 3.0):
        w = scale * torch.randn(outputs, 4, generator=g, dtype=torch.float64)
        for k in range(8):
            gradient = torch.func.grad(lambda v, k=k: loss_of(v, x[k : k + 1], y[k : k + 1]).mean())(w)
            assert float(gradient.norm()) <= slope * float(with_ones(x)[k].norm()) * (1 + 1e-12)
        full = torch.func.hessian(lambda v: loss_of(v, x, y).mean())(w).reshape(w.numel(), w.numel())
        assert float(torch.linalg.eigvalsh(full)[-1]) <= smooth * (1 + 1e-12)
    if outputs == 1:  # at w = 0 the bound on the Hessian is reached
        full = torch.func.hessian(lambda v: loss_of(v, x, y).mean())(torch.zeros(1, 4, dtype=torch.float64)).reshape(4, 4)
        assert float(torch.linalg.eigvalsh(full)[-1]) == pytest.approx(smooth)


@pytest.mark.parametrize("shape", [(5, 3), (3, 12)])
@pytest.mark.parametrize("bias", [True, False])
def test_the_largest_smoothness_is_that_of_the_worst_batch(shape, bias, monkeypatch):
    monkeypatch.setattr("theodolite.measures.stability.bounds._NUMBERS", 200)  # several parts
    g = torch.Generator().manual_seed(1)
    size, width = shape
    x = torch.randn(50, width, generator=g).exp()
    batches = torch.stack([torch.randperm(50, generator=g)[:size] for _ in range(30)])
    ones = with_ones(x.double()) if bias else x.double()
    exact = [float(torch.linalg.svdvals(ones[b])[0] ** 2) / size for b in batches]
    found = largest_smoothness(x, batches, bias=bias)
    assert found == pytest.approx(max(exact) / 4, rel=1e-12)
    assert largest_smoothness(x, batches, bias=bias, outputs=3) == pytest.approx(2 * found, rel=1e-12)
    for enough in (0.5 * found, 1.01 * found, 100 * found):
        bound = largest_smoothness(x, batches, bias=bias, enough=enough)
        assert found * (1 - 1e-12) <= bound <= max(enough, found * (1 + 1e-12))


def test_batches_of_different_lengths_and_images():
    x = torch.randn(9, 2, 2, 2, generator=torch.Generator().manual_seed(2))
    batches = [torch.arange(4), torch.arange(4, 8), torch.tensor([8])]
    flat = with_ones(x.flatten(1).double())
    exact = max(float(torch.linalg.matrix_norm(flat[b], 2) ** 2) / len(b) for b in batches)
    assert largest_smoothness(x, batches) == pytest.approx(exact / 4)
    assert largest_norm(x) == pytest.approx(float(flat.norm(dim=1).max()))
    for nothing in (torch.empty(0, 4, dtype=torch.long), []):
        with pytest.raises(ValueError, match="at least one batch"):
            largest_smoothness(x, nothing)


def test_a_rate_above_the_edge_is_said_and_results_are_saved(tmp_path):
    good = {"largest_input": 2.0, "largest_test_input": 3.0, "batch": 4, "visits": [0, 2], "smoothness": 4.0}
    wild = convex_bounds(rate=1.0, **good)
    assert not wild.non_expansive
    assert "does not apply" in wild.sentence()
    calm = convex_bounds(rate=0.5, **good)
    assert calm.non_expansive
    assert calm.rows()[1] == pytest.approx({
        "visits": 2, "distance_bound": 1.0, "stability_bound": 3.0, "non_expansive": True, "rate": 0.5, "largest_rate": 0.5,
    })  # fmt: skip
    assert "After 2 differing batches" in calm.sentence()
    calm.save(tmp_path / "bounds")
    assert ConvexBounds.load(tmp_path / "bounds").rows() == calm.rows()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 0}, "batch must be a positive integer"),
        ({"smoothness": math.inf}, "smoothness must be a positive number"),
        ({"rate": -0.1}, "rate must be a number above 0"),
        ({"visits": -1}, "at least 0"),
        ({"rate": [0.1, 0.1], "visits": 2}, "zeros and ones"),
        ({"outputs": 0}, "outputs must be a positive integer"),
    ],
)
def test_wrong_arguments_are_told(change, message):
    good = {"largest_input": 2.0, "largest_test_input": 3.0, "rate": 0.1, "batch": 4, "visits": 5, "smoothness": 1.0}
    with pytest.raises(ValueError, match=message):
        convex_bounds(**{**good, **change})
