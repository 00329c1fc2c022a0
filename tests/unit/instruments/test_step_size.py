"""The gradient of a training in a survey: quadratics whose growth is known, kinks, and what it does not take."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.instruments import SurveyContext
from theodolite.instruments.rates.step_size import StepSize, usable_steps
from theodolite.results import Severity
from theodolite.testing import InstrumentContract


def bowl(lr: float, **more) -> SurveyContext:
    """½ (w₁² + 4 w₂²) as a linear model."""
    model = nn.Linear(2, 1, bias=False).double()
    nn.init.ones_(model.weight)
    x = torch.diag(torch.tensor([2.0, 8.0]).double().sqrt())
    problem = th.Problem(model, lambda output, target: (output - target).square().mean() / 2, (x, torch.zeros(2, 1).double()))
    return SurveyContext(problem, lr=lr, batch_size=2, **more)


def only(context: SurveyContext, **effort):
    result = StepSize().run(context, **(effort or {"steps": 60}))
    (finding,) = StepSize().findings(context, result)
    return result, finding


class TestStepSize(InstrumentContract):
    labels = frozenset(
        {
            "training gradient usable", "training gradient explodes", "training gradient kinked", "training gradient vanishes",
            "training has no derivative",
        }
    )  # fmt: skip

    def make(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        problem = th.Problem(model, nn.CrossEntropyLoss(), (torch.randn(40, 4), torch.arange(40) % 3))
        return StepSize(), SurveyContext(problem, lr=0.1, batch_size=10)


def test_a_stable_quadratic_is_usable():
    result, finding = only(bowl(0.3))
    assert result.health == "ok"
    assert result.growth <= 0
    assert finding.label == "training gradient usable"
    assert "does not grow" in finding.sentence


class Apart(nn.Module):
    """½ (a² + 4 b²), whatever the input."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(()).double()), nn.Parameter(torch.ones(()).double())

    def forward(self, x):
        return torch.stack([self.a, 2 * self.b]).expand(len(x), 2)


def test_groups_of_the_optimizer_keep_their_settings():
    model = Apart()
    data = (torch.zeros(2, 1).double(), torch.zeros(2, 1).double())
    problem = th.Problem(model, lambda output, target: output.square().sum(1).mean() / 2, data)
    groups = [{"params": [model.b], "lr": 0.05}, {"params": [model.a], "lr": 0.2, "weight_decay": 0.5}]
    context = SurveyContext(problem, lr=0.05, batch_size=2, optimizer=torch.optim.SGD(groups, lr=1.0))
    result, _ = only(context, steps=3)
    assert result.values == {"lr": 0.2}  # that of the first parameter
    assert result.loss == pytest.approx(((1 - 0.2 * 1.5) ** 6 + 4 * (1 - 0.05 * 4) ** 6) / 2, rel=1e-12)


def test_above_the_edge_it_explodes_with_the_known_growth():
    """2/λ = 0.5; at 0.7 a change along the sharp direction grows by ηL − 1 = 1.8 in each step."""
    result, finding = only(bowl(0.7))
    assert result.growth == pytest.approx(math.log(1.8), rel=0.01)
    assert finding.label == "training gradient explodes"
    assert finding.value == pytest.approx(1 / math.log(1.8), rel=0.01)
    assert f"up to some {usable_steps(math.log(1.8))} steps" in finding.sentence


def test_a_training_that_diverges_has_no_derivative():
    _, finding = only(bowl(500.0), steps=200)
    assert finding.label == "training has no derivative"
    assert finding.severity is Severity.WARNING


def test_what_it_does_not_take():
    assert "learning rate" in StepSize().applies(SurveyContext(bowl(0.1).problem))
    assert not StepSize().concerns(SurveyContext(bowl(0.1).problem))
    for layer, why in ((nn.Dropout(0.5), "dropout"), (nn.BatchNorm1d(2), "BatchNorm")):
        model = nn.Sequential(nn.Linear(2, 2), layer)
        problem = th.Problem(model, nn.MSELoss(), (torch.randn(8, 2), torch.randn(8, 2)))
        assert why in StepSize().applies(SurveyContext(problem, lr=0.1))
    context = bowl(0.1)
    lion = torch.optim.Adagrad(context.problem.model.parameters(), lr=0.1)
    assert "Adagrad" in StepSize().applies(SurveyContext(context.problem, optimizer=lion))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_the_optimizer_is_the_users_with_fresh_state(kind):
    context = bowl(0.01)
    mine = kind(context.problem.model.parameters(), lr=0.02, weight_decay=0.01)
    result, _ = only(SurveyContext(context.problem, optimizer=mine), steps=5)
    assert result.values == {"lr": 0.02}


def test_it_takes_part_in_surveys_when_asked():
    context = bowl(0.3)
    found = th.survey(context.problem, lr=0.3, batch_size=2, only=["step_size"], progress=False)
    assert found.of("step_size")[0].label == "training gradient usable"
