"""Rates that follow the critical one, and rates that cycle."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.models.ntk import ntk_fcn
from theodolite.monitors.rates.critical_rate import CriticalRateLR, EdgeProbe, cyclical_rate


def small(outputs: int = 1) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 4, generator=generator, dtype=torch.float64)
    return ntk_fcn(4, 16, 2, outputs, seed=0).double(), (x, torch.randn(12, outputs, generator=generator, dtype=torch.float64))


def steps_of(model, data, optimizer, scheduler, count: int) -> list[float]:
    rates = []
    for _ in range(count):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(data[0]), data[1]).backward()
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.SGD(p, lr=0.1),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.2),
    lambda p: torch.optim.Adam(p, lr=1e-3),
])  # fmt: skip
def test_the_rate_is_a_multiple_of_the_critical_one_whenever_it_was_looked_at(make):
    model, data = small(2)
    optimizer = make(model.parameters())
    problem = th.Problem(model, nn.MSELoss(), data)
    follow = CriticalRateLR(optimizer, problem, multiple=0.7, every=3)
    for step in range(7):
        if step % 3 == 0:
            edge = th.critical_learning_rate(problem, by="gauss_newton", optimizer=optimizer).value
            assert optimizer.param_groups[0]["lr"] == pytest.approx(0.7 * edge, rel=0.02)
            kept = optimizer.param_groups[0]["lr"]
        assert optimizer.param_groups[0]["lr"] == kept
        steps_of(model, data, optimizer, follow, 1)


def test_matrix_is_another_name_for_by():
    model, data = small()
    loss, sgd = nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1)
    assert EdgeProbe(th.Problem(model, loss, data), matrix="hessian").by == "hessian"
    assert th.monitors.MultiCatapult(model, loss, data, sgd, matrix="gauss_newton").probe.by == "gauss_newton"
    with th.Monitor(loss, budget=None, matrix="hessian") as monitor:
        loss(model(data[0]), data[1]).backward()
        monitor.observe(0, model, data, sgd)
    assert {row["by"] for row in monitor.report().looks} == {"hessian"}
    for make in (lambda **by: th.Monitor(loss, **by), lambda **by: EdgeProbe(th.Problem(model, loss, data), **by)):
        with pytest.raises(ValueError, match="by must be 'kernel', 'gauss_newton', 'hessian' or None"):
            make(matrix="fisher")
        with pytest.raises(TypeError, match="two names of one argument"):
            make(matrix="hessian", by="hessian")


def test_the_kernel_and_the_gauss_newton_matrix_give_the_same_edge():
    model, data = small(2)
    problem = th.Problem(model, nn.MSELoss(), data)
    found = {by: EdgeProbe(problem, by=by, tol=1e-9).measure() for by in ("kernel", "gauss_newton", "hessian")}
    assert found["kernel"] == pytest.approx(found["gauss_newton"], rel=1e-9)
    assert found["hessian"] == pytest.approx(th.critical_learning_rate(problem).value, rel=1e-6)
    assert EdgeProbe(problem).by == "kernel"
    labels = (data[0], torch.arange(12) % 2)
    assert EdgeProbe(th.Problem(model, nn.CrossEntropyLoss(), labels)).by == "gauss_newton"
    with pytest.raises(ValueError, match="squared loss"):
        EdgeProbe(th.Problem(model, nn.CrossEntropyLoss(), labels), by="kernel")


def test_a_second_look_starts_from_the_first():
    model, data = small()
    probe = EdgeProbe(th.Problem(model, nn.MSELoss(), data), by="gauss_newton", tol=1e-8)
    probe.measure()
    cold = probe.matvecs
    probe.measure()
    assert probe.matvecs - cold < cold


def test_looking_leaves_random_state_weights_and_gradients_alone():
    model, data = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nn.functional.mse_loss(model(data[0]), data[1]).backward()
    before = [(p.detach().clone(), p.grad.clone()) for p in model.parameters()]
    state = torch.get_rng_state()
    CriticalRateLR(optimizer, EdgeProbe(th.Problem(model, nn.MSELoss(), data), optimizer, by="gauss_newton"))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, w) and torch.equal(p.grad, g) for p, (w, g) in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("by", ["kernel", "gauss_newton"])
def test_a_scheduler_goes_on_from_its_state(by):
    model, data = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)

    def follower(model: nn.Module, optimizer: torch.optim.Optimizer) -> CriticalRateLR:
        return CriticalRateLR(optimizer, EdgeProbe(th.Problem(model, nn.MSELoss(), data), optimizer, by=by), every=4)

    scheduler = follower(model, optimizer)
    steps_of(model, data, optimizer, scheduler, 6)
    twin = copy.deepcopy(model)
    other = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.5)
    resumed = follower(twin, other)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    state = scheduler.state_dict()
    assert all(v is None or isinstance(v, int | float | bool | list | torch.Tensor) for v in state.values())
    resumed.load_state_dict(copy.deepcopy(state))
    assert steps_of(model, data, optimizer, scheduler, 8) == steps_of(twin, data, other, resumed, 8)


def test_a_training_run_with_a_follower_resumes_as_if_undisturbed(tmp_path):
    def run(steps: int, **kwargs):
        model, data = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        probe = EdgeProbe(th.Problem(model, nn.MSELoss(), data), optimizer, by="gauss_newton")
        follow = CriticalRateLR(optimizer, probe, every=5)
        return th.train(model, nn.MSELoss(), data, optimizer, schedule=follow, steps=steps, batch_size=6, **kwargs)

    whole = run(24)
    run(13, checkpoint=tmp_path)
    assert run(24, checkpoint=tmp_path, resume=True).rate == whole.rate


def test_groups_keep_their_ratio_and_a_flat_loss_its_rate():
    model, data = small()
    sgd = torch.optim.SGD([{"params": model.fc1.parameters(), "lr": 0.3}, {"params": model.fc2.parameters(), "lr": 0.1}], lr=0.3)
    CriticalRateLR(sgd, th.Problem(model, nn.MSELoss(), data))
    assert sgd.param_groups[0]["lr"] == pytest.approx(3 * sgd.param_groups[1]["lr"])
    flat = nn.Linear(1, 1, bias=False)
    still = torch.optim.SGD(flat.parameters(), lr=0.3)
    x = torch.ones(2, 1)
    CriticalRateLR(still, EdgeProbe(th.Problem(flat, lambda out, y: (out * y).sum(), (x, x)), by="hessian"))
    assert still.param_groups[0]["lr"] == 0.3


@pytest.mark.parametrize("wrong", [{"multiple": 0.0}, {"every": 0}, {"every": 1.5}])
def test_wrong_followers_are_refused(wrong):
    model, data = small()
    with pytest.raises(ValueError, match="Got"):
        CriticalRateLR(torch.optim.SGD(model.parameters(), lr=0.1), th.Problem(model, nn.MSELoss(), data), **wrong)


def test_an_optimizer_without_a_law_is_refused_before_training():
    model, data = small()
    with pytest.raises(ValueError, match="No stability law is known for Adadelta"):
        CriticalRateLR(torch.optim.Adadelta(model.parameters()), th.Problem(model, nn.MSELoss(), data))


def test_a_cycle_is_a_triangle():
    rate = cyclical_rate(0.5, 2.0, 40)
    values = [rate(t) for t in range(81)]
    assert (values[0], values[20], values[40], values[60]) == (0.5, 2.0, 0.5, 2.0)
    assert all(b > a for a, b in itertools.pairwise(values[:21]))
    assert values[:40] == values[40:80]
    model, data = small()
    trace = th.train(model, nn.MSELoss(), data, torch.optim.SGD(model.parameters(), lr=1.0), schedule=rate, steps=3)
    assert trace.rate == tuple(values[:3])
    assert math.isclose(sum(values[:40]) / 40, 1.25)


@pytest.mark.parametrize(("wrong", "name"), [((1.0, 0.5, 10), "low"), ((-1.0, 1.0, 10), "low"), ((0.1, 1.0, 1), "period")])
def test_wrong_cycles_are_refused(wrong, name):
    with pytest.raises(ValueError, match=f"{name} must be"):
        cyclical_rate(*wrong)
