"""One step size tuned on training data beside held-out data, and the searches at equal cost, at small sizes."""

from __future__ import annotations

import pytest

from theodolite.experiments.step_size import equal_cost as room
from theodolite.measures.stepsize import tune_step_size


def splits(seed: int, **changed):
    job = {"part": "splits", "n": 150, "tasks": 10, "steps": 500, "noise": 0.2, "seed": seed, **changed}
    return next(row for row in room._splits(job) if row["rate"] == "chosen")


def test_the_rates_are_twelve_from_a_thousandth_to_three():
    assert len(room.RATES) == 12
    assert room.RATES[0] == 1e-3
    assert room.RATES[-1] == 3.0
    ratios = [b / a for a, b in zip(room.RATES, room.RATES[1:], strict=False)]
    assert max(ratios) / min(ratios) < 1.01


@pytest.mark.long
def test_training_data_ask_for_a_larger_rate_that_does_worse():
    """The fall-back of D3-small (AC26) on fewer tasks."""
    found = splits(0, tasks=3, steps=300)
    assert found["by_train"] >= found["by_valid"]
    assert found["gap"] > 0.01
    assert found["overfits"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_fall_back_of_learned_optimizers(seed):
    """AC26: the optimum by training data is at least that by held-out data, and its accuracy on clean labels lower."""
    found = splits(seed)
    assert found["by_train"] >= found["by_valid"]
    assert found["clean_train"] < found["clean_valid"]


def test_steps_that_follow_an_unsound_gradient_are_counted():
    """The count of the claim can fail: a trace that goes on from an exploding gradient is caught."""
    data = {"steps": 3, "loss": lambda output, target: (output - target).square().mean()}
    x = room.torch.ones(4, 1)
    line = lambda seed: room.nn.Linear(1, 1, bias=False)  # noqa: E731
    found = tune_step_size(line, "sgd", (x, 0 * x), **data, seeds=1, budget=30, search="gradient", compare=False, progress=False)
    assert room._unsound(found) == 0
    first, second, *rest = found.trace
    forged = ({**first, "health": "explodes"}, {**second, "lr": 2 * first["lr"]}, *rest)
    object.__setattr__(found, "trace", forged)
    assert room._unsound(found) == 1
