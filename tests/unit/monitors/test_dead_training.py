"""The training that was called harmless: a CNN whose last hidden layer dies in a spike, and what the monitor says of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import theodolite as th
from tests.unit.monitors.alert_runs import cnn, digit_images
from theodolite.monitors import Alert, MonitorReport
from theodolite.results import Severity

STEPS = 330


def train(seed: int, lr: float, monitor: th.Monitor | None = None, steps: int = STEPS) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(seed)
    model, loss, losses = cnn(8)(), nn.CrossEntropyLoss(), []
    optimizer, data = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), digit_images(64, seed)
    for step in range(steps):
        x, y = next(data)
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        if monitor is not None:
            monitor.observe(step, model, (x, y), optimizer)
        optimizer.step()
        losses.append(float(value.detach()))
    return model, losses


def dead_since(model: nn.Module, losses: list[float]) -> bool:
    """Whether the model died after it had learned: no unit of the last hidden layer answers to anything."""
    x, _ = next(digit_images(1000, 0))
    with torch.no_grad():
        return not bool((model[:-1](x) > 0).any()) and min(losses) < 1.5  # type: ignore[index]


@pytest.fixture(scope="module")
def story() -> tuple[MonitorReport, list[Alert], int]:
    """The first seed that dies, with rounding of this machine, trained again with a monitor."""
    seed = next(s for s in range(100) if dead_since(*train(s, 0.25)))
    heard: list[Alert] = []
    with th.Monitor(nn.CrossEntropyLoss(), alerts=False, on_alert=heard.append) as monitor:
        model, losses = train(seed, 0.25, monitor)
    assert dead_since(model, losses)  # the monitor has changed nothing
    return monitor.report(), heard, seed


def test_it_is_said_that_it_does_not_learn_and_why(story: tuple[MonitorReport, list[Alert], int]) -> None:
    report, _, _ = story
    assert report.state == "not learning"
    assert report.verdict.startswith("Not learning: ")
    assert "All 32 units of layer 7 have had no gradient since step" in report.verdict
    assert report.findings[0].cause == "dead layer"
    assert report.findings[0].severity is Severity.CRITICAL
    assert all(finding.severity is not Severity.GOOD for finding in report.findings)
    assert "room above" not in str(report)


def test_no_unit_is_counted_as_alive_once_the_layer_is_dead(story: tuple[MonitorReport, list[Alert], int]) -> None:
    report, _, _ = story
    assert report.progress[-1]["alive"] == 0.0
    assert (report.progress[-1]["least_alive"], report.progress[-1]["least_alive_share"]) == ("7", 0.0)
    died = next(row for row in report.layers if row["layer"] == "7")
    assert (died["alive"], died["units"]) == (0, 32)
    assert all(row["alive"] == 0.0 for row in report.progress if row["low_gradient"] == 0.0)


def test_units_alive_are_those_that_answer_to_the_batch() -> None:
    """At every look, layer by layer, against a forward pass over the batch of the step; while one dies, and afterwards."""
    torch.manual_seed(0)
    model, loss, answers, counted = cnn(8)(), nn.CrossEntropyLoss(), {}, []
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), digit_images(64, 0)
    for name in ("1", "4", "8"):  # the activations behind layers 0, 3 and 7
        model.get_submodule(name).register_forward_hook(
            lambda module, args, out, name=name: answers.update({name: int((out.transpose(0, 1).flatten(1) > 0).any(1).sum())})
        )
    with th.Monitor(loss, alerts=False) as monitor:
        for step in range(161):
            x, y = next(data)
            if step >= 70:  # one unit after the other falls silent
                model.get_submodule("7").bias.data[: (step - 70) // 2] = -100.0
            optimizer.zero_grad()
            loss(model(x), y).backward()
            here = dict(answers)  # those of the training's own pass
            monitor.observe(step, model, (x, y), optimizer)
            if step % 20 == 0:
                rows = {row["layer"]: row["alive"] for row in monitor.report().layers}
                counted.append(rows["7"])
                dead = here["8"] == 0  # then no gradient comes through it
                assert (rows["0"], rows["3"], rows["7"]) == ((0, 0, 0) if dead else (here["1"], here["4"], here["8"])), step
            optimizer.step()
    assert counted[0] > 20
    assert counted[-1] == 0
    assert sorted(set(counted), reverse=True)[1] > 0  # it was seen while it died


def test_no_spike_after_which_it_died_is_harmless(story: tuple[MonitorReport, list[Alert], int]) -> None:
    report, _, _ = story
    assert all(not spike.recovered or spike.aftermath == "settled" for spike in report.spikes)
    for spike in report.spikes:
        level = [row["loss"] for row in report.steps if spike.start + 60 < row["step"] < spike.start + 120]
        if level and min(level) > 2.2:
            assert spike.harmed, spike


def test_it_is_told_while_it_runs(story: tuple[MonitorReport, list[Alert], int]) -> None:
    report, heard, _ = story
    assert tuple(heard) == report.alerts
    [alert] = [alert for alert in heard if alert.kind == "dying units"]
    dead = next(row["step"] for row in report.progress if row["low_gradient"] == 0.0)
    assert alert.step <= dead + 60
    assert alert.cause == "dead layer"


def test_the_rate_it_names_trains(story: tuple[MonitorReport, list[Alert], int]) -> None:
    report, _, seed = story
    assert report.lr is not None
    model, losses = train(seed, report.lr, steps=200)
    assert not dead_since(model, losses)
    assert sum(losses[-20:]) / 20 < 0.5
