"""The best constant guess, as the monitor learns it from targets that pass by."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.measures.progress import trivial as of_problem
from theodolite.monitors.progress.trivial import TrivialPredictor


@pytest.mark.parametrize("weight", [None, 9.0, 2000.0])
def test_the_guess_of_a_binary_cross_entropy_knows_its_pos_weight(weight):
    y = (torch.arange(400).reshape(100, 4) % 10 == 0).float()
    loss = nn.BCEWithLogitsLoss(pos_weight=None if weight is None else torch.full((4,), weight))
    guess = TrivialPredictor(loss)
    guess.update(y, torch.zeros(100, 4), loss)
    assert guess.name == "always predicting the base rate of each output"
    problem = th.Problem(nn.Linear(1, 4), loss, (y[:, :1], y))
    kind, found, _ = of_problem.first_loss(problem, 100)
    output = of_problem.trivial_prediction(problem, kind, found).outputs[0](torch.zeros(100, 4))
    assert guess.value == pytest.approx(float(loss(output, y)), rel=1e-4)
