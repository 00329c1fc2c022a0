"""Measurements of curvature against dense matrices in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import theodolite as th
from theodolite.measures.dynamics import match_table
from theodolite.measures.dynamics.optimizers import stability_law
from theodolite.monitors.measuring.curvature import CurvatureProbe
from theodolite.monitors.watching.watched_model import quiet_training_mode


def network(outputs: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, outputs)).double()


def dense_jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """(n · c, p), sample-major."""
    parameters = dict(model.named_parameters())
    found = jacrev(lambda p: functional_call(model, p, (x,)))(parameters)
    return torch.cat([found[name].detach().flatten(2).flatten(0, 1) for name in parameters], dim=1)


def look(problem: th.Problem, optimizer: torch.optim.Optimizer, **settings: Any) -> Any:
    return CurvatureProbe(**settings).measure(
        problem, optimizer, step=0, on="probe", why="test", rate=0.1, split=True, thorough=True
    )


@pytest.mark.parametrize("outputs", [1, 3])
def test_squared_loss_by_the_kernel(outputs: int) -> None:
    model, x = network(outputs), torch.randn(12, 5).double()
    y = torch.randn(12, outputs).double()
    seen = look(th.Problem(model, nn.MSELoss(), (x, y)), torch.optim.SGD(model.parameters(), lr=0.1))
    jacobian = dense_jacobian(model, x)
    values, vectors = torch.linalg.eigh(jacobian @ jacobian.T)
    residual = (model(x) - y).detach().reshape(-1)
    m = residual.numel()
    assert seen.by == "kernel"
    assert seen.kernel_norm == pytest.approx(float(values[-1]))
    assert seen.critical_rate == pytest.approx(m / float(values[-1]))
    expected = float((vectors[:, -5 * outputs :].T @ residual).square().sum()) / m
    assert seen.top_loss == pytest.approx(expected)
    assert seen.loss == pytest.approx(float(residual.detach().square().mean()))
    # The route for large models gives the same numbers, from products alone.
    other = look(th.Problem(model, nn.MSELoss(), (x, y)), torch.optim.SGD(model.parameters(), lr=0.1), by="gauss_newton", top=1)
    top_one = float((vectors[:, -1] @ residual).square()) / m
    assert other.by == "gauss_newton"
    assert other.critical_rate == pytest.approx(seen.critical_rate, rel=1e-3)
    assert other.top_loss == pytest.approx(top_one, rel=0.02)


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_cross_entropy_in_the_metric_of_the_optimizer(kind: str) -> None:
    model, x, y = network(3), torch.randn(20, 5).double(), torch.randint(0, 3, (20,))
    loss = nn.CrossEntropyLoss()
    optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if kind == "momentum"
        else torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    )
    for _ in range(3):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    problem = th.Problem(model, loss, (x, y))
    seen = look(problem, optimizer)
    jacobian = dense_jacobian(model, x).reshape(20, 3, -1)
    p = model(x).softmax(1).detach()
    curvature = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]) / 20
    matrix = torch.einsum("nap,nab,nbq->pq", jacobian, curvature, jacobian)
    law = stability_law(optimizer, problem, coming_step=True)
    scale = torch.ones(problem.size).double() if law.scale is None else law.scale
    values, vectors = torch.linalg.eigh(scale[:, None] * matrix * scale)
    assert seen.by == "gauss_newton"
    assert seen.sharpness == pytest.approx(float(values[-1]), rel=2e-3)
    factor = 2 * 1.9 / (1.0 if kind == "momentum" else 0.1)
    assert seen.critical_rate == pytest.approx(factor / float(values[-1]), rel=2e-3)
    top = float((vectors[:, -1] @ (scale * problem.gradient())).square() / (2 * values[-1]))
    assert seen.top_loss == pytest.approx(top, rel=0.05)


def test_what_has_not_converged_never_claims_too_much() -> None:
    """A Ritz value lies below the eigenvalue, so the critical rate is never too small."""
    model, x, y = network(3), torch.randn(20, 5).double(), torch.randint(0, 3, (20,))
    problem = th.Problem(model, nn.CrossEntropyLoss(), (x, y))
    exact = float(torch.linalg.eigvalsh(th.gauss_newton(problem).to_dense())[-1])
    probe = CurvatureProbe()
    for seed in range(5):
        torch.manual_seed(seed)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn_like(p))
        problem = th.Problem(model, nn.CrossEntropyLoss(), (x, y))
        exact = float(torch.linalg.eigvalsh(th.gauss_newton(problem).to_dense())[-1])
        seen = probe.measure(
            problem, torch.optim.SGD(model.parameters(), lr=0.1), step=seed, on="batch", why="test", rate=0.1, split=False
        )
        assert seen.sharpness <= exact * (1 + 1e-9)
        assert seen.sharpness >= 0.9 * exact
        assert seen.critical_rate is not None
        assert seen.critical_rate >= 2 / exact * (1 - 1e-9)


def test_the_match_table_of_a_monitor_is_that_of_a_hand_count() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(32, 6), torch.randn(32, 1)
    model, loss = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 1)), nn.MSELoss()
    critical = th.critical_learning_rate(th.Problem(model, loss, (x, y)), by="kernel").value
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8 * critical)
    exceeded, losses = [], []
    with th.Monitor(loss, probe=(x, y), budget=None) as monitor:
        for step in range(40):
            rows = torch.randint(0, 32, (4,))
            exceeded.append(bool(optimizer.param_groups[0]["lr"] > th.critical_learning_rate(
                th.Problem(model, loss, (x[rows], y[rows])), by="kernel").value))  # fmt: skip
            losses.append(float(loss(model(x), y).detach()))
            optimizer.zero_grad()
            loss(model(x[rows]), y[rows]).backward()
            monitor.observe(step, model, (x[rows], y[rows]), optimizer)
            optimizer.step()
    report = monitor.report()
    sampled = {row["step"]: row["exceeded"] for row in report.looks if row["on"] == "batch" and row["why"] == "schedule"}
    assert [sampled[t] for t in sampled] == [exceeded[t] for t in sampled]
    by_hand = match_table([exceeded[t] for t in sampled if t < 39], up=[losses[t + 1] > losses[t] for t in sampled if t < 39])
    assert 0 < by_hand.base_rate.hits < by_hand.steps
    counted = report.match
    assert (counted.both, counted.only_up, counted.only_exceeded, counted.neither) == (
        by_hand.both, by_hand.only_up, by_hand.only_exceeded, by_hand.neither,
    )  # fmt: skip
    assert len(sampled) == 40


@pytest.mark.parametrize("told", [None, "clipped", "to be clipped"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_the_factor_of_clipped_gradients(kind: Any, told: str | None) -> None:
    """Clipping makes the gradients smaller, and so the curvature that the optimizer meets."""
    model, x, y = network(3), torch.randn(20, 5).double(), torch.randint(0, 3, (20,))
    loss, optimizer, most = nn.CrossEntropyLoss(), kind(model.parameters(), lr=1e-3), 0.01
    factors, edges = [], []
    with th.Monitor(loss, budget=None) as monitor:
        for step in range(6):
            most = 0.01 if step < 5 else 1e6
            optimizer.zero_grad()
            loss(model(x), y).backward()
            if told != "to be clipped":
                norm = nn.utils.clip_grad_norm_(model.parameters(), most)
            else:
                norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            factors.append(min(1.0, most / float(norm)))
            clip = None if told is None else factors[-1]
            monitor.observe(step, model, (x, y), optimizer, clip=clip, clipped=told != "to be clipped")
            if told == "to be clipped":
                nn.utils.clip_grad_norm_(model.parameters(), most)
            problem = th.Problem(model, loss, (x, y))
            law = stability_law(optimizer, problem, coming_step=True).clipped(factors[-1])
            matrix = law.effective(th.gauss_newton(problem)).to_dense()
            edges.append(law.rate(float(torch.linalg.eigvalsh(matrix)[-1])))
            optimizer.step()
    known = slice(1, None) if told is None else slice(None)  # it takes two steps to see that norms agree
    looks = [row for row in monitor.report().looks if row["on"] == "batch"]
    assert [row["clip"] for row in looks][known] == pytest.approx(factors[known], rel=1e-3)
    assert [row["critical_rate"] for row in looks][known] == pytest.approx(edges[known], rel=5e-3)
    assert factors[1] < 0.1


def test_quiet_training_mode() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5)).train()
    with quiet_training_mode(model):
        assert [m.training for m in model] == [False, True, False]
    assert [m.training for m in model] == [True, True, True]
    model[1].eval()
    with quiet_training_mode(model):
        assert not model[1].training  # frozen statistics stay frozen
