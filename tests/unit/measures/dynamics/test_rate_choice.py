"""`choose_rate` on a quadratic loss: each run is a closed form, and which rates are too low or too high is known."""

from __future__ import annotations

import math

import pytest
import torch

from tests.unit.measures.dynamics.quadratic import after, quadratic
from theodolite.measures.dynamics import choose_rate
from theodolite.measures.dynamics.rate_choice import COOLDOWN, FAR


def held_then_falling(rate: float, steps: int) -> list[float]:
    cooldown = int(COOLDOWN * steps)
    return [rate] * (steps - cooldown) + [rate * (cooldown - i) / cooldown for i in range(cooldown)]


@pytest.mark.parametrize("sharpness", [0.02, 300.0])
def test_every_run_ends_at_the_closed_form(sharpness):
    found = choose_rate(quadratic(sharpness), 0.01 / sharpness, steps=20)
    assert len(found.runs) > 4
    for run in found.runs:
        if run["diverged"]:
            assert run["rate"] > 2.0 / sharpness
            continue
        rates = held_then_falling(run["rate"], run["steps"])
        ends = after(sharpness, rates[: -int(COOLDOWN * run["steps"])]), after(sharpness, rates)
        assert (run["held"], run["final"]) == pytest.approx(ends, rel=1e-6, abs=1e-12 * sharpness)
        assert run["start"] == pytest.approx(sharpness / 2)
    assert {run["rate"] > 2.0 / sharpness for run in found.runs if not run["diverged"]} == {False}


@pytest.mark.parametrize("sharpness", [0.02, 300.0])
def test_a_rate_a_hundred_times_too_low_is_named_so(sharpness):
    best = 1.0 / sharpness  # it reaches the minimum in one step
    found = choose_rate(quadratic(sharpness), best / 100, steps=20)
    assert found.verdict == "too low"
    assert FAR * best / 100 <= found.recommended < 2 * best
    assert found.own_final == pytest.approx(after(sharpness, held_then_falling(best / 100, found.steps)))
    assert found.best_final == pytest.approx(after(sharpness, held_then_falling(found.recommended, found.steps)), abs=1e-12)
    assert found.gain == pytest.approx(found.own_final - found.best_final)


@pytest.mark.parametrize("ratio", [1.05, 1.1, 1.2, 2.0, 30.0])
def test_a_rate_above_two_over_the_sharpness_is_too_high(ratio):
    """Also where a cool-down at the end brings the loss back from a millionfold rise."""
    sharpness = 4.0
    found = choose_rate(quadratic(sharpness, noise=0.1), ratio * 2.0 / sharpness)
    assert found.verdict == "too high"
    assert found.diverged
    assert found.gain == math.inf
    assert 0 < found.recommended < 2.0 / sharpness


@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.9])
def test_a_rate_below_it_that_learns_everything_is_kept(ratio):
    found = choose_rate(quadratic(4.0), ratio * 2.0 / 4.0)
    assert (found.verdict, found.recommended, found.best, found.gain) == ("keep", found.own, found.own, 0.0)


def test_a_loss_far_below_that_of_knowing_nothing_has_converged():
    assert choose_rate(quadratic(4.0, start=0.9), 0.1, trivial=after(4.0, [])).verdict == "converged"
    assert choose_rate(quadratic(4.0, start=0.5), 0.1, trivial=after(4.0, [])).verdict == "keep"


def test_without_a_rate_the_one_that_ends_lowest_is_taken():
    found = choose_rate(quadratic(4.0), others=[0.001, 0.2, 5.0], steps=8)
    assert (found.own, found.verdict, found.recommended) == (None, "unknown", 0.2)
    blown = choose_rate(quadratic(4.0), others=[5.0], steps=8)  # with a third and three times of it: all above 1/2
    assert (blown.recommended, blown.sentence()) == (None, "No rate that was tried lowers the loss.")


def test_the_model_and_the_optimizer_are_left_as_found():
    problem = quadratic(4.0, start=0.25)
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=0.1, momentum=0.5)
    found = choose_rate(problem, 0.1, optimizer, steps=8)
    assert found.optimizer == "SGD"
    assert problem.model.weight.item() == 0.25
    assert not optimizer.state
