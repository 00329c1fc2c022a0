"""Loops of every kind: what a monitor hears in them, and that it never ends one."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import theodolite as th
from theodolite.models.transformers import gpt
from theodolite.monitors import Cause, read_log
from theodolite.monitors.measuring.scheduler import TimeBudget


def batch(n: int = 16, seed: int | None = None) -> tuple[Tensor, Tensor]:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=generator)
    return 2.0 * nn.functional.one_hot(y, 6).float() + 0.7 * torch.randn(n, 6, generator=generator), y


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def step(model: nn.Module, loss: Any, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    optimizer.zero_grad()
    value = loss(model(x), y)
    value.backward()
    return float(value.detach())


@pytest.mark.parametrize("how", ["function", "other instance", "value", "keyword", "validation", "measured inside"])
def test_the_loss_of_a_step_is_what_the_loop_computed(how: str) -> None:
    model, known = network(), nn.CrossEntropyLoss()
    known = cross_entropy if how == "function" else known  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    with th.Monitor(known) as monitor:
        for t in range(6):
            x, y = batch()
            used = nn.CrossEntropyLoss() if how == "other instance" else known
            optimizer.zero_grad()
            value = used(input=model(x), target=y) if how == "keyword" else used(model(x), y)
            value.backward()
            expected.append(float(value.detach()))
            if how == "validation":
                model.eval()
                known(model(10 * x), y)
                model.train()
            if how == "measured inside":
                th.Problem(model, known, (10 * x, y)).gradient()
            monitor.observe(t, model, (x, y), optimizer, value=value.detach() if how == "value" else None)
            optimizer.step()
    assert [row["loss"] for row in monitor.report().steps] == pytest.approx(expected, rel=1e-5)


def test_attach_with_a_closure_says_so_and_lets_training_go_on() -> None:
    model, loss, (x, y) = network(), nn.CrossEntropyLoss(), batch()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    monitor = th.Monitor(loss).attach(model, optimizer)
    before = float(loss(model(x), y).detach())

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        return value

    for _ in range(3):
        optimizer.step(closure)
    monitor.close()
    assert float(loss(model(x), y).detach()) < before
    assert any("closure" in note for note in monitor.report().notes)
    with pytest.warns(RuntimeWarning, match="closed"):
        monitor.observe(0, model, (x, y), optimizer)


@pytest.mark.parametrize("way", ["attach", "observe"])
def test_a_language_model_whose_loop_flattens_its_logits(way: str) -> None:
    model, loss = gpt(vocabulary=7, context=5, dim=8, depth=1, heads=2, seed=0), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = th.Monitor(loss, budget=None)
    if way == "attach":
        monitor.attach(model, optimizer).attach(model, optimizer)  # twice is once
    for t in range(3):
        ids = torch.randint(0, 7, (4, 6), generator=torch.Generator().manual_seed(t))
        x, y = ids[:, :-1], ids[:, 1:]
        optimizer.zero_grad()
        loss(model(x).view(-1, 7), y.reshape(-1)).backward()
        if way == "observe":
            monitor.observe(t, model, (x, y), optimizer)
        optimizer.step()
    monitor.close()
    report = monitor.report()
    assert not report.notes
    assert len(report.steps) == 3
    assert {row["on"] for row in report.looks} == {"batch", "probe"}


def test_a_bad_batch_right_after_a_restart_of_the_rate() -> None:
    model, loss = network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    with th.Monitor(loss) as monitor:
        for t in range(140):
            if t == 100:
                optimizer.param_groups[0]["lr"] = 0.1
            x, y = batch()
            y = (y + 1) % 3 if t == 108 else y
            step(model, loss, optimizer, x, y)
            monitor.observe(t, model, (x, y), optimizer)
            optimizer.step()
    assert [(s.start, s.cause) for s in monitor.report().spikes] == [(108, Cause.BAD_BATCH)]


def test_negative_losses_have_spikes_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def likelihood(output: Tensor, target: Tensor) -> Tensor:
        return 50.0 * (output - target).square().mean() - 5.0

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with th.Monitor(likelihood) as monitor:
        for t in range(330):
            x = torch.randn(32, 4)
            y = x[:, :1] + (5.0 if t == 300 else 0.0) + 0.1 * torch.randn(32, 1)
            step(model, likelihood, optimizer, x, y)
            monitor.observe(t, model, (x, y), optimizer)
            optimizer.step()
    report = monitor.report()
    spike = next(s for s in report.spikes if s.start == 300)
    assert spike.cause is Cause.BAD_BATCH
    assert math.isnan(spike.height)
    [finding] = [f for f in report.findings if "Step 300" in f.sentence]
    assert "loss up by" in finding.sentence
    assert "above that of the probe" in finding.sentence
    assert len(report.spikes) <= 5  # of 330 steps: ratios say nothing here, and the noise has a tail


def test_two_optimizers_of_one_model(tmp_path: Path) -> None:
    model, loss = network(), nn.CrossEntropyLoss()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.AdamW(model[2].parameters(), lr=1e-3)
    with th.Monitor(loss, budget=None, log=tmp_path) as monitor:
        for t in range(6):
            x, y = batch(seed=t)
            first.zero_grad()
            second.zero_grad()
            loss(model(x), y).backward()
            monitor.observe(2 * t, model, (x, y), first)
            first.step()
            monitor.observe(2 * t + 1, model, (x, y), second)
            second.step()
    log = read_log(tmp_path)
    assert len(log.runs) == 2
    assert sum(row["update_norm"] is None for row in log.steps) == 2
    assert monitor.report().match.steps == 10


def test_numbers_of_steps_need_not_count_steps() -> None:
    model, loss = network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with th.Monitor(loss) as monitor:
        for t in range(120):
            x, y = batch()
            y = (y + 1) % 3 if t == 100 else y
            step(model, loss, optimizer, x, y)
            monitor.observe(64 * t, model, (x, y), optimizer)
            optimizer.step()
    [spike] = monitor.report().spikes
    assert (spike.start, spike.batch, spike.cause) == (6400, 6400, Cause.BAD_BATCH)
    assert spike.recovered
    assert spike.took is not None
    assert spike.took < 10


def test_adam_with_a_parameter_that_is_never_used() -> None:
    model, loss = network(), nn.CrossEntropyLoss()
    model.register_parameter("spare", nn.Parameter(torch.zeros(4)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with th.Monitor(loss, budget=None) as monitor:
        for t in range(4):
            x, y = batch()
            step(model, loss, optimizer, x, y)
            monitor.observe(t, model, (x, y), optimizer)
            optimizer.step()
    assert not monitor.report().notes
    assert all(row["critical_rate"] > 0 for row in monitor.report().looks)


def test_adam_is_judged_by_the_moment_its_step_divides_by() -> None:
    """A gradient that comes for the first time enters the second moment of that very step."""
    model, loss, (x, y) = network().double(), nn.CrossEntropyLoss(), batch()
    x = x.double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-12)
    with th.Monitor(loss, budget=None) as monitor:
        step(model, loss, optimizer, x, y)
        monitor.observe(0, model, (x, y), optimizer)
        optimizer.step()
        moments = torch.cat([optimizer.state[p]["exp_avg_sq"].reshape(-1) for p in model.parameters()]) / (1 - 0.999)
    seen = monitor.report().looks[0]
    fresh = network().double()
    matrix = th.gauss_newton(th.Problem(fresh, loss, (x, y))).to_dense()
    scale = moments.sqrt().add(1e-12).rsqrt()
    sharpness = float(torch.linalg.eigvalsh(scale[:, None] * matrix * scale)[-1])
    assert seen["critical_rate"] == pytest.approx(2 * 1.9 / (0.1 * sharpness) * (1 - 0.9), rel=1e-2)


def test_a_pause_is_no_training_time() -> None:
    budget = TimeBudget(0.25)
    for gap in (0.01, 0.01, 0.01, 0.3):
        budget.leave()
        time.sleep(gap)
        budget.enter()
    assert budget.training < 0.2


def test_an_exception_in_the_loop_is_told_by_the_log(tmp_path: Path) -> None:
    model, loss, (x, y) = network(), nn.CrossEntropyLoss(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop() -> None:
        with th.Monitor(loss, log=tmp_path) as monitor:
            step(model, loss, optimizer, x, y)
            monitor.observe(0, model, (x, y), optimizer)
            raise KeyError("the loop's own")

    with pytest.raises(KeyError):
        loop()
    end = read_log(tmp_path).end
    assert end is not None
    assert end["reason"] == "KeyError"
    assert not model._forward_hooks


def test_what_is_wrong_from_the_start_is_said_at_once() -> None:
    model, loss, (x, y) = network(), nn.CrossEntropyLoss(), batch()
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    with pytest.warns(RuntimeWarning, match="none of the model's parameters"):
        th.Monitor(loss).observe(0, model, (x, y), optimizer)
    with pytest.raises(ValueError, match="optimizer must be a torch optimizer"):
        th.Monitor(loss).observe(0, model, (x, y), None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="budget must be a positive number"):
        th.Monitor(loss, budget=0)
    with pytest.warns(RuntimeWarning, match="batch must be a pair"):
        th.Monitor(loss).observe(0, model, x, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_spike_that_grows_is_judged_anew() -> None:
    """A slight rise that nothing explains, then a jump of the rate before it is over."""
    torch.manual_seed(0)
    model, loss = nn.Linear(4, 1), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(64, 4)
    y = x.sum(1, keepdim=True) + 0.3 * torch.randn(64, 1)
    with th.Monitor(loss) as monitor:
        for t in range(70):
            if t == 40:  # somebody moves the weights
                with torch.no_grad():
                    model.weight.add_(0.35)
                optimizer.param_groups[0]["lr"] = 1e-4
            if t == 50:
                optimizer.param_groups[0]["lr"] = 4.0
            step(model, loss, optimizer, x, y)
            monitor.observe(t, model, (x, y), optimizer)
            optimizer.step()
    spike = monitor.report().spikes[0]
    assert (spike.start, spike.cause) == (40, Cause.RATE_JUMP)
    assert spike.ratio is not None
    assert spike.ratio > 1


def test_a_bad_batch_in_the_middle_of_another_spike() -> None:
    model, loss = network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    with th.Monitor(loss) as monitor:
        for t in range(130):
            if t == 100:  # the weights are shaken, and learn slowly from then on
                with torch.no_grad():
                    for p in model.parameters():
                        p.add_(0.4 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
                optimizer.param_groups[0]["lr"] = 1e-3
            x, y = batch(64)
            y = (y + 1) % 3 if t == 110 else y
            step(model, loss, optimizer, x, y)
            monitor.observe(t, model, (x, y), optimizer)
            optimizer.step()
    spikes = monitor.report().spikes
    assert 100 <= spikes[0].start < 110
    assert (110, Cause.BAD_BATCH) in [(spike.start, spike.cause) for spike in spikes]
