"""Planted causes of a spike are told apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import theodolite as th
from theodolite.models.ntk import ntk_fcn
from theodolite.monitors import Cause

Batch = tuple[Tensor, Tensor]
PLANTED = 200


def classes(seed: int, batch: int = 64) -> Callable[[int], Batch]:
    """Ten noisy clusters in 20 dimensions, a fresh batch per step."""
    generator = torch.Generator().manual_seed(seed)
    centres = 2.0 * torch.randn(10, 20, generator=generator)

    def draw(step: int) -> Batch:
        y = torch.randint(0, 10, (batch,), generator=generator)
        return centres[y] + 1.5 * torch.randn(batch, 20, generator=generator), y

    return draw


def classifier(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 10))


def run(
    model: nn.Module,
    loss: nn.Module,
    draw: Callable[[int], Batch],
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    before_step: Callable[[int], None] = lambda step: None,
    budget: float | None = 0.25,
    **monitor: Any,
) -> th.monitors.MonitorReport:
    with th.Monitor(loss, budget=budget, **monitor) as watching:
        for step in range(steps):
            x, y = draw(step)
            optimizer.zero_grad()
            loss(model(x), y).backward()
            before_step(step)
            watching.observe(step, model, (x, y), optimizer)
            optimizer.step()
    return watching.report()


def spikes_near(report: th.monitors.MonitorReport, step: int, within: int = 6) -> list[Cause]:
    return [spike.cause for spike in report.spikes if step <= spike.start <= step + within]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("seed", [0, 1])
def test_calm_training_has_no_spikes(optimizer: str, seed: int) -> None:
    model = classifier(seed)
    report = run(model, nn.CrossEntropyLoss(), classes(seed), OPTIMIZERS[optimizer](model.parameters()), 300)
    assert report.spikes == ()
    assert "no spikes" in {finding.label for finding in report.findings}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["mislabelled", "scaled"])
def test_a_bad_batch(optimizer: str, kind: str) -> None:
    clean = classes(0)

    def draw(step: int) -> Batch:
        x, y = clean(step)
        if step != PLANTED:
            return x, y
        return (x, (y + 5) % 10) if kind == "mislabelled" else (40.0 * x, y)

    model = classifier(0)
    report = run(model, nn.CrossEntropyLoss(), draw, OPTIMIZERS[optimizer](model.parameters()), PLANTED + 40)
    [cause, *_] = spikes_near(report, PLANTED)
    assert cause is Cause.BAD_BATCH
    [finding] = [f for f in report.findings if f.label == "spike: bad batch" and f"batch {PLANTED}" in f.advice]
    assert "not a catapult" in finding.sentence


def test_data_that_shifts_for_good() -> None:
    clean = classes(0)

    def draw(step: int) -> Batch:
        x, y = clean(step)
        return (x, y) if step < PLANTED else (x.flip(1), (y + 5) % 10)

    model = classifier(0)
    report = run(model, nn.CrossEntropyLoss(), draw, OPTIMIZERS["sgd"](model.parameters()), PLANTED + 40)
    assert spikes_near(report, PLANTED) == [Cause.DATA_SHIFT]


@pytest.mark.parametrize("where", ["input", "gradient"])
def test_a_number_that_is_not_finite(where: str) -> None:
    clean, model = classes(0), classifier(0)

    def draw(step: int) -> Batch:
        x, y = clean(step)
        if where == "input" and step == 50:
            x[3, 4] = math.nan
        return x, y

    def spoil(step: int) -> None:
        if where == "gradient" and step == 50:
            weight = model[2].weight
            assert weight.grad is not None
            weight.grad[0, 0] = math.nan

    report = run(model, nn.CrossEntropyLoss(), draw, OPTIMIZERS["sgd"](model.parameters()), 60, before_step=spoil)
    [spike] = report.spikes
    assert spike.cause is Cause.NON_FINITE
    assert (spike.start, spike.batch) == (50, 50)
    [finding] = [f for f in report.findings if f.label == "spike: non-finite"]
    assert finding.severity is th.results.Severity.CRITICAL
    assert ("input" if where == "input" else "2.weight") in finding.sentence
    assert "batch 50" in finding.advice


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_a_jump_of_the_learning_rate(optimizer: str) -> None:
    model = classifier(0)
    opt = OPTIMIZERS[optimizer](model.parameters())

    def jump(step: int) -> None:
        if step == PLANTED:
            opt.param_groups[0]["lr"] *= 60

    report = run(model, nn.CrossEntropyLoss(), classes(0), opt, PLANTED + 20, before_step=jump)
    [cause, *_] = spikes_near(report, PLANTED)
    assert cause is Cause.RATE_JUMP
    spike = next(s for s in report.spikes if s.start >= PLANTED)
    assert spike.ratio is not None
    assert spike.ratio > 1
    [finding, *_] = [f for f in report.findings if f.label == "spike: learning-rate jump"]
    assert "jumped 60 times" in finding.sentence


def two_classes(n: int = 64) -> Batch:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 20, generator=generator)
    return x, torch.sign(x[:, :1] + 0.3 * torch.randn(n, 1, generator=generator))


@pytest.mark.parametrize("budget", [0.25, None])
def test_a_catapult_of_gradient_descent(budget: float | None) -> None:
    x, y = two_classes()
    model, loss = ntk_fcn(20, 256, 3, seed=0), nn.MSELoss()
    critical = th.critical_learning_rate(th.Problem(model, loss, (x, y)), by="kernel").value
    optimizer = torch.optim.SGD(model.parameters(), lr=1.7 * critical)
    report = run(model, loss, lambda step: (x, y), optimizer, 60, budget=budget)
    [spike] = report.spikes
    assert spike.cause is Cause.CATAPULT
    assert spike.recovered
    assert spike.ratio == pytest.approx(1.7, rel=0.1)
    assert spike.top_share is not None
    assert spike.top_share > 0.9
    assert spike.fall is not None
    assert spike.fall > 0.1
    [finding] = [f for f in report.findings if f.label == "spike: catapult"]
    assert "harmless" in finding.sentence
    assert "kernel norm fell" in finding.sentence


@pytest.mark.parametrize("ratio", [0.3, 0.6])  # at 0.9 the kernel grows, and a late catapult is real
def test_below_the_edge_there_is_no_spike(ratio: float) -> None:
    x, y = two_classes()
    model, loss = ntk_fcn(20, 256, 3, seed=0), nn.MSELoss()
    critical = th.critical_learning_rate(th.Problem(model, loss, (x, y)), by="kernel").value
    report = run(model, loss, lambda step: (x, y), torch.optim.SGD(model.parameters(), lr=ratio * critical), 60, budget=None)
    assert report.spikes == ()
    assert report.exceeded == 0
    assert report.looks[0]["ratio"] == pytest.approx(ratio, rel=1e-3)


def test_a_catapult_that_begins_in_mid_training() -> None:
    """A rate below the edge at first, left behind as cross-entropy training sharpens: momentum, mini-batches."""
    model = classifier(0)
    draw = classes(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    def ramp(step: int) -> None:
        optimizer.param_groups[0]["lr"] = min(0.02 * 1.03**step, 20.0)  # no single jump

    report = run(model, nn.CrossEntropyLoss(), draw, optimizer, 300, before_step=ramp)
    assert report.spikes
    assert report.spikes[0].cause is Cause.CATAPULT
    assert report.spikes[0].ratio is not None
    assert report.spikes[0].ratio > 1


@pytest.mark.parametrize("quiet", ["zero", "weighted"])
def test_the_second_moment_collapses_in_a_quiet_stretch(quiet: str) -> None:
    """Gradients all but vanish for a while, Adam forgets their size, and the first normal batches move the weights too far."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    loss = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    w = torch.randn(10, 1)
    calm_until, back = 300, 3300
    with th.Monitor(loss) as monitor:
        for step in range(back + 30):
            x = torch.randn(64, 10)
            y = torch.tanh(x @ w) + 0.1 * torch.randn(64, 1)
            still = calm_until <= step < back
            if still and quiet == "zero":
                x, y = 0 * x, model(0 * x).detach()
            optimizer.zero_grad()
            value = loss(model(x), y)
            (value * (1e-6 if still and quiet == "weighted" else 1.0)).backward()
            monitor.observe(step, model, (x, y), optimizer)
            optimizer.step()
    report = monitor.report()
    near = spikes_near(report, back, within=12)
    assert near, [s.start for s in report.spikes]
    assert near[0] is Cause.MOMENT_COLLAPSE
    [finding, *_] = [f for f in report.findings if f.label == "spike: second-moment collapse"]
    assert "second moment" in finding.sentence
