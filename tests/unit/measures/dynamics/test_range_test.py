"""`lr_range_test` on a quadratic loss, where every point of the curve and the place where it blows up are known."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise

import pytest
import torch
from torch import nn

import theodolite as th
from tests.unit.measures.dynamics.quadratic import after, quadratic
from theodolite.measures.dynamics.range_test import BELOW_THE_RISE, FALLEN, OVER, SMOOTHING


def swept(sharpness: float, low: float, high: float, **options):
    """A sweep between rates in units of the critical one."""
    critical = 2.0 / sharpness
    given = {"steps": 40, "sweeps": 1, "critical": False, "progress": False, **options}
    return th.lr_range_test(quadratic(sharpness), low=low * critical, high=high * critical, **given)


@pytest.mark.parametrize("sharpness", [0.02, 1.0, 300.0])
def test_every_point_is_the_closed_form(sharpness):
    found = swept(sharpness, 1e-3, 10.0)
    rates = [row["rate"] for row in found.points]
    assert rates[:2] == pytest.approx([2e-3 / sharpness, 2e-3 / sharpness * 1e4 ** (1 / 39)])
    assert [row["loss"] for row in found.points] == pytest.approx([after(sharpness, rates[: i + 1]) for i in range(len(rates))])
    assert found.start == pytest.approx(sharpness / 2)


@pytest.mark.parametrize("sharpness", [0.02, 1.0, 300.0])
def test_the_loss_falls_just_below_two_over_the_sharpness_and_rises_just_above(sharpness):
    below, above = swept(sharpness, 0.98, 0.9999), swept(sharpness, 1.0001, 1.002)
    for found, signs in ((below, {-1.0}), (above, {1.0})):
        losses = [found.start, *(row["loss"] for row in found.points)]
        assert {math.copysign(1.0, later - earlier) for earlier, later in pairwise(losses)} == signs
    assert below.rises_at is None
    assert below.diverged_at is None
    assert below.minimum_at == below.points[-1]["rate"]
    assert above.minimum_at == above.points[0]["rate"]


def test_it_ends_at_the_first_rate_whose_loss_is_far_above_the_start():
    sharpness = 3.0
    found = swept(sharpness, 1.1, 4.0)
    rates = [2.2 / sharpness * (4.0 / 1.1) ** (i / 39) for i in range(40)]
    losses = [after(sharpness, rates[: i + 1]) for i in range(40)]
    over = next(i for i, loss in enumerate(losses) if loss - sharpness / 2 > OVER * sharpness / 2)
    assert found.diverged_at == pytest.approx(rates[over])
    assert len(found.points) == over + 1


def test_the_suggestion_is_the_rule_applied_to_the_closed_form():
    """Between where two thirds of the fall are reached and a quarter of where the smoothed loss rises."""
    sharpness = 5.0
    found = swept(sharpness, 1e-3, 10.0)
    rates = [row["rate"] for row in found.points]
    change = [after(sharpness, rates[: i + 1]) - sharpness / 2 for i in range(len(rates))]
    sums = accumulate(change, lambda past, now: SMOOTHING * past + (1 - SMOOTHING) * now, initial=0.0)
    smoothed = [total / (1 - SMOOTHING**n) for n, total in enumerate(sums) if n]
    assert [row["smoothed"] - found.start for row in found.points] == pytest.approx(smoothed)
    lowest = min(smoothed)
    fallen = next(rate for rate, value in zip(rates, smoothed, strict=True) if value <= FALLEN * lowest)
    assert found.suggestion == pytest.approx(math.sqrt(fallen * BELOW_THE_RISE * found.rises_at))
    assert found.suggestion < 2.0 / sharpness < found.rises_at


@pytest.mark.parametrize("sharpness", [0.02, 300.0])
def test_without_a_range_it_finds_the_scale_itself(sharpness):
    found = th.lr_range_test(quadratic(sharpness), steps=40, sweeps=2, progress=False)
    assert found.critical.value == pytest.approx(2.0 / sharpness)
    assert 0.01 < found.suggestion * sharpness / 2 < 1.0
    assert 1.0 < found.diverged_at * sharpness / 2 < 10.0
    assert found.error == pytest.approx(0.0, abs=1e-9 * found.suggestion)  # the batches are alike: sweeps do not differ


def test_the_model_and_the_optimizer_are_left_as_found_and_its_rate_is_drawn():
    problem = quadratic(1.0, start=0.25)
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=0.125, momentum=0.5)
    found = th.lr_range_test(problem, optimizer, steps=10, sweeps=1, progress=False)
    assert (found.lr, found.optimizer) == (0.125, "SGD")
    assert problem.model.weight.item() == 0.25
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_a_small_gradient_is_not_taken_for_none():
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    x = 0.01 * torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    found = th.lr_range_test(th.Problem(model, nn.MSELoss(), (x, torch.zeros(64, 1))), steps=20, sweeps=1, progress=False)
    assert 0.01 < found.suggestion / found.critical.value < 1.0


def test_what_cannot_be_swept_is_said():
    with pytest.raises(ValueError, match=r"low must lie below high. Got 1 and 0.5."):
        th.lr_range_test(quadratic(1.0), low=1.0, high=0.5)
    with pytest.raises(ValueError, match="the gradient is zero"):
        th.lr_range_test(quadratic(1.0, start=1.0))
    logarithm = th.Problem(nn.Linear(1, 1), lambda output, _: output.mean().log(), (-torch.ones(4, 1), torch.ones(4, 1)))
    logarithm.model.weight.data.fill_(-1.0)
    with pytest.raises(ValueError, match="Choose low="):
        th.lr_range_test(logarithm, low=1e3, high=1e4, progress=False)
