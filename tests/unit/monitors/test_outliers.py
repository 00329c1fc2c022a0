"""A few targets far outside the others: the data is named, and not the learning rate."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.monitors.spikes.diagnosis import Cause, Evidence, cause_of, few_carry


@pytest.fixture(scope="module")
def monitor() -> th.Monitor:
    """One target in a hundred is a thousand times too large: every other batch has one."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1600, 8, generator=generator)
    y = x[:, :1] * x[:, 1:2] + x[:, 2:3]
    y[torch.randperm(1600, generator=generator)[:16]] *= 1000
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with th.Monitor(nn.MSELoss(), alerts=False, budget=None) as found:
        for step in range(250):
            rows = torch.randint(1600, (50,), generator=generator) if step > 1 else torch.arange(step, 1600, 40)[:50]
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
            found.observe(step, model, (x[rows], y[rows]), optimizer)
            optimizer.step()
    return found


def test_the_rate_is_not_blamed(monitor):
    report = monitor.report()
    assert not [alert for alert in report.alerts if alert.cause == "rate too high"]
    assert not [spike for spike in report.spikes if spike.cause is Cause.DATA_SHIFT]


def test_the_verdict_names_the_samples_and_is_not_too_early(monitor):
    report = monitor.report()
    assert "Too early" not in report.verdict
    assert "a few samples carry" in report.verdict.lower()
    assert "outliers" in [finding.cause for finding in report.findings]


@pytest.mark.parametrize(
    ("changed", "few"),
    [
        ({}, True),
        ({"typical_loss": 400.0}, False),  # most of the batch
        ({"probe_loss": 400.0}, False),  # the weights
        ({"began": 5000.0}, False),  # less than the beginning lost
        ({"typical_loss": None}, False),
        ({"batch_loss": math.inf}, False),
    ],
)
def test_a_few_samples_carry_a_loss_where_neither_the_others_nor_the_probe_have_it(changed, few):
    given = {"start": 9, "batch_loss": 1000.0, "before": 3.0, "probe_loss": 2.0, "typical_loss": 3.0, "began": 4.0} | changed
    assert few_carry(Evidence(**given)) is few
    if few:
        assert cause_of(Evidence(**given)) is Cause.BAD_BATCH
