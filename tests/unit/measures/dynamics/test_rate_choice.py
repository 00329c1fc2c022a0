"""`choose_rate` on a quadratic loss: each run is a closed form, and which rates are too low or too high is known."""

from __future__ import annotations

import math

import pytest
import torch

from tests.unit.measures.dynamics.quadratic import after, quadratic
from theodolite.measures.dynamics import choose_rate
from theodolite.measures.dynamics.rate_choice import COOLDOWN, FAR, Pair, Run, _Decision


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


class Known:
    """Runs whose ends are known: what each rate comes to in runs of the usual length and in longer ones."""

    can_restart, steps, batch_size, optimizer, fresh_start = False, 60, 32, None, math.nan

    def __init__(self, start: float, ends: dict[float, tuple[float, float]], seconds: float = math.inf) -> None:
        self.start, self.ends, self.seconds, self.runs = start, ends, seconds, {}

    def run(self, rate: float, *, longer: int = 1, other: bool = False, **_: object) -> Run:
        final = self.ends.get(rate, (9.0, 9.0))[longer > 1]
        return self.runs.setdefault((rate, longer, other), Run(rate, final, final, longer * self.steps, seed=int(other)))

    def pair(self, rate: float, **_: object) -> Pair:
        return Pair(self.run(rate), self.run(rate, other=True))

    def affords(self, runs: int) -> bool:
        return runs <= self.seconds


#: A small GPT by AdamW at twenty times its rate: 60 steps hide it by their cool-down, 300 do not.
GPT = {0.04: (2.414, 2.439), 0.013: (2.397, 2.31), 0.004: (2.409, 2.35)}


def test_far_along_a_rate_that_is_too_high_shows_in_longer_runs():
    found = _Decision(Known(2.482, GPT), 0.04, (), 3.29).made()
    assert (found.verdict, found.recommended, found.steps, found.seen_late) == ("too high", 0.013, 300, True)


@pytest.mark.parametrize(("at_a_third", "longer"), [(2.41, True), (2.36, True)])
def test_what_is_only_a_little_better_in_longer_runs_alarms_nobody(at_a_third, longer):
    """A third must leave yours more than what counts behind, and with less than a third of the progress."""
    ends = {0.04: (2.414, 2.40), 0.013: (2.397, at_a_third), 0.004: (2.409, 2.40)}
    found = _Decision(Known(2.482, ends), 0.04, (), 3.29).made()
    assert (found.verdict, found.compared_longer) == ("keep", longer)


def test_without_the_time_for_longer_runs_none_is_made_and_that_is_known():
    found = _Decision(Known(2.482, GPT, seconds=5), 0.04, (), 3.29).made()
    assert (found.verdict, found.compared_longer) == ("keep", False)


def test_where_the_loss_ended_at_your_rate():
    found = _Decision(Known(2.482, GPT, seconds=5), 0.04, (), 3.29).made()
    assert found.own_run == (pytest.approx(2.414), 60)
    assert (found.falls_to(2.414), found.falls_to(2.47)) == (True, False)


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
