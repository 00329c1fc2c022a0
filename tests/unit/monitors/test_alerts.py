"""Alerts: none in healthy trainings, the right ones in spoilt ones, once each, and never in the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import theodolite as th
from tests.unit.monitors.alert_runs import HEALTHY, PLANTED, Run, digits, mlp, sgd
from theodolite.monitors import Alert, read_log
from theodolite.results import CAUSES, Severity

QUICK_HEALTHY = ("mlp, AdamW, warm-up and cosine", "regression, SGD")
QUICK_PLANTED = (
    "rate 10 times too high, regression", "dead layer from the start", "NaN in a batch", "vanishing, sigmoid", "shuffled labels",
    "schedule at 0", "weight decay, SGD", "only the last layer in the optimizer",
)  # fmt: skip


def cases(all_of: dict[str, Run], quick: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in all_of]


def serious(report: th.monitors.MonitorReport) -> list[Any]:
    return [finding for finding in report.findings if finding.severity.rank >= Severity.WARNING.rank]


@pytest.mark.parametrize("name", cases(HEALTHY, QUICK_HEALTHY))
def test_a_healthy_training_gets_no_alert_and_a_good_verdict(name: str) -> None:
    report = HEALTHY[name].play()
    assert report.alerts == ()
    assert serious(report) == []
    assert report.state in ("learning", "flat"), report.verdict
    assert report.lr is None
    assert {finding.label for finding in report.findings if finding.severity is Severity.GOOD} & {"learning", "flat"}


@pytest.mark.parametrize("name", cases(PLANTED, QUICK_PLANTED))
def test_a_planted_fault_is_alerted_and_named(name: str) -> None:
    run = PLANTED[name]
    report = run.play()
    assert {alert.kind for alert in report.alerts} & set(run.alert), report.alerts
    first = report.findings[0]
    assert first.cause in run.causes, (report.verdict, report.findings)
    assert first.sentence in report.verdict
    assert str(report).splitlines()[0] == report.verdict
    assert all(finding.cause in CAUSES for finding in serious(report))
    assert all(finding.severity is not Severity.GOOD for finding in report.findings) or report.state in ("learning", "flat")
    kinds = [alert.kind for alert in report.alerts]
    assert len(kinds) == len(set(kinds))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_training_of_other_seeds(name: str, seed: int) -> None:
    report = HEALTHY[name].play(seed)
    assert (report.alerts, serious(report)) == ((), [])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rate 100 times too low", "rate 10 times too high, mlp"])
def test_the_rate_it_names_is_better(name: str) -> None:
    run = PLANTED[name]
    report = run.play()
    assert report.lr is not None
    mended = Run(run.model, run.data, sgd(report.lr), steps=run.steps).play()
    assert mended.progress[-1]["level"] < 0.97 * report.progress[-1]["level"]


# How they are told


def spoilt(**monitor: Any) -> tuple[th.Monitor, list[Alert]]:
    """A model whose learning rate is 0, watched for a while."""
    torch.manual_seed(0)
    model, loss, heard = mlp()(), nn.CrossEntropyLoss(), []
    optimizer, data = sgd(0.0)(model), digits(16, 0)
    watching = th.Monitor(loss, on_alert=heard.append, **monitor)
    for step in range(150):
        x, y = next(data)
        optimizer.zero_grad()
        loss(model(x), y).backward()
        watching.observe(step, model, (x, y), optimizer)
        optimizer.step()
    watching.close()
    return watching, heard


def test_one_line_on_stderr_and_a_record(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    watching, heard = spoilt(log=tmp_path)
    out, err = capsys.readouterr()
    [alert] = heard
    assert out == ""
    assert err == f"theodolite: {alert}\n"
    assert watching.report().alerts == (alert,)
    [record] = read_log(tmp_path).alerts
    assert (record["alert"], record["cause"], record["step"]) == ("not learning", "frozen model", alert.step)
    end = read_log(tmp_path).end
    assert end is not None
    assert end["verdict"].startswith("Not learning")


def test_it_can_be_turned_off_or_shown_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    _, quiet = spoilt(alerts=False)
    _, shown = spoilt(alerts=lines.append)
    assert lines == [str(alert) for alert in shown]
    assert len(quiet) == len(shown) == 1
    assert capsys.readouterr() == ("", "")
    for bad in ({"alerts": "yes"}, {"on_alert": True}):
        with pytest.raises(ValueError, match="must be"):
            th.Monitor(nn.MSELoss(), **bad)


def test_a_callback_that_fails_ends_nothing() -> None:
    def fail(line: str) -> None:
        raise RuntimeError("no mail today")

    with pytest.warns(RuntimeWarning, match="no mail today"):
        watching, heard = spoilt(alerts=fail)
    assert len(watching.report().steps) == 150
    assert len(heard) == 1
