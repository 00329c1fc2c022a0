"""Learning rates on planted cases: each regime is found by its name, with the right ratio, and running it agrees."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import nn

import theodolite as th
from tests.unit.instruments.cases import bowl
from theodolite.instruments.rates.learning_rate import _said
from theodolite.measures.dynamics import RateChoice
from theodolite.measures.dynamics.rate_choice import Run
from theodolite.results import Severity


def wide_relu(width: int = 256) -> th.Problem:
    """Two layers of ReLU units in the kernel parameterisation, squared loss, eight samples."""
    model = th.models.ntk_fcn(4, width=width, depth=2, seed=0).double()
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 4, generator=generator).double(), torch.randn(8, 1, generator=generator).double()
    return th.Problem(model, nn.MSELoss(), (x, y))


def own_run(problem: th.Problem, rate: float, steps: int) -> list[float]:
    """Plain gradient descent in the plainest way, independent of the package's trial runs."""
    model = copy.deepcopy(problem.model)
    (batch,) = problem.data
    losses = []
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(*batch.args), batch.target)
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]) or losses[-1] > 1e12:
            break
        for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            p.data -= rate * g
    return losses


def rate_finding(problem: th.Problem, **arguments) -> th.Finding:
    (found,) = th.survey(problem, only=["rate"], progress=False, **arguments).of("rate")
    return found


@pytest.mark.parametrize(
    ("factor", "label", "severity"), [(0.5, "monotone", Severity.NOTE), (1.5, "divergence expected", Severity.CRITICAL)]
)
def test_a_quadratic_loss_below_and_above_its_edge(factor, label, severity):
    found = rate_finding(bowl([4.0, 1.0, 0.3]), lr=factor * 0.5)
    assert (found.label, found.severity) == (label, severity)
    assert label in found.sentence
    assert found.value == pytest.approx(factor, rel=1e-3)
    assert found.error <= 1e-3


@pytest.mark.parametrize("factor", [0.5, 1.5, 5.0])
def test_a_wide_relu_network_in_its_three_regimes_and_running_it_agrees(factor):
    problem = wide_relu()
    edge = th.critical_learning_rate(problem).value
    found = rate_finding(problem, lr=factor * edge)
    losses = own_run(problem, factor * edge, 60)
    expected = {0.5: "monotone", 1.5: "catapult", 5.0: "divergence expected"}[factor]
    assert found.label == expected
    assert expected.split()[0] in found.sentence
    if factor == 0.5:
        assert all(b <= a for a, b in itertools.pairwise(losses))
    elif factor == 1.5:
        assert max(losses) > 1.05 * losses[0]
        assert losses[-1] < 0.5 * losses[0]
    else:
        assert not losses[-1] < 1e6 * losses[0]


OPTIMIZERS = {
    "heavy ball": (lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9), 2 * 1.9 / 4.0),
    "nesterov": (lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True), 2 * 1.9 / (2.8 * 4.0)),
    "weight decay": (lambda p, lr: torch.optim.SGD(p, lr=lr, weight_decay=1.0), 2 / 5.0),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("factor", [0.95, 1.05])
def test_momentum_and_decay_on_both_sides_of_their_edge(name, factor):
    """The edges themselves are confirmed by bisection in tests/unit/measures/test_critical.py."""
    make, edge = OPTIMIZERS[name]
    problem = bowl([4.0, 1.0, 0.3])
    found = rate_finding(problem, optimizer=make(problem.parameters, factor * edge))
    assert found.value == pytest.approx(factor, rel=1e-3)
    if factor > 1:
        assert found.label == "divergence expected"
    else:
        assert found.label == ("monotone" if name == "weight decay" else "stable")


@pytest.mark.parametrize("steps", [0, 5])
def test_adam_on_a_badly_scaled_bowl_says_that_live_adam_adapts(steps):
    problem = bowl([1000.0, 1.0, 0.01])
    adam = torch.optim.Adam(problem.parameters, lr=1e-3)
    (w,) = problem.parameters
    for _ in range(steps):
        adam.zero_grad()
        (0.5 * (torch.tensor([1000.0, 1.0, 0.01]).double() * w.square()).sum()).backward()
        adam.step()
    found = rate_finding(problem, optimizer=adam)
    assert found.value == pytest.approx(1e-3 / th.critical_learning_rate(problem, optimizer=adam).value)
    assert "live Adam adapts" in found.sentence
    assert found.label == "monotone"  # what sixty live steps do


@pytest.mark.parametrize("factor", [0.5, 2.0, 20.0])
def test_adam_on_a_quadratic_is_judged_by_what_live_steps_do(factor):
    """Its frozen edge is exact for frozen steps only: far above it live Adam may well converge."""
    torch.manual_seed(0)
    model = nn.Linear(10, 1).double()
    x = torch.randn(64, 10).double()
    problem = th.Problem(model, nn.MSELoss(), (x, torch.randn(64, 1).double()))
    edge = th.critical_learning_rate(problem, optimizer=torch.optim.Adam(model.parameters(), lr=1.0)).value
    found = rate_finding(problem, optimizer=torch.optim.Adam(model.parameters(), lr=factor * edge))
    copied = copy.deepcopy(model)
    adam = torch.optim.Adam(copied.parameters(), lr=factor * edge)
    losses = []
    for _ in range(61):
        adam.zero_grad()
        loss = nn.functional.mse_loss(copied(x), problem_targets(problem))
        losses.append(float(loss.detach()))
        loss.backward()
        adam.step()
    assert found.label != "divergence expected"
    assert f"{losses[-1]:.3g}" in found.sentence


def problem_targets(problem: th.Problem) -> torch.Tensor:
    (batch,) = problem.data
    return batch.target


def test_weight_decay_from_a_minimum_descends_its_own_objective():
    """The bare loss must rise when decay begins at a minimum; that is no instability."""
    torch.manual_seed(0)
    model = nn.Linear(6, 1, bias=False).double()
    x = torch.randn(40, 6).double()
    y = (x @ torch.ones(6, 1).double()) + 0.1 * torch.randn(40, 1).double()
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(x, y).solution.T)
    network = nn.Sequential(model, nn.Tanh(), nn.Linear(1, 1).double())
    problem = th.Problem(network, nn.MSELoss(), (x, torch.tanh(y)))
    edge = th.critical_learning_rate(problem).value
    for p in network[2].parameters():
        p.data.fill_(1.0 if p.ndim == 2 else 0.0)
    found = rate_finding(problem, optimizer=torch.optim.SGD(network.parameters(), lr=0.3 * edge, weight_decay=0.05))
    assert found.label == "monotone"


def test_decay_by_groups_as_transformers_use_it():
    """The edge of AdamW with decay on some parameters only, against frozen steps written out."""
    values = torch.tensor([1000.0, 1.0, 0.01, 5.0]).double()
    model = nn.Module()
    model.a, model.b = nn.Parameter(torch.ones(2).double()), nn.Parameter(torch.ones(2).double())
    model.forward = lambda x: torch.cat([model.a, model.b]) * x.sqrt()
    groups = [{"params": [model.a], "weight_decay": 0.3}, {"params": [model.b], "weight_decay": 0.0}]
    target = th.Problem(model, lambda z, y: 0.5 * z.square().sum(), (values[None], torch.zeros(1).double()))
    rate = th.critical_learning_rate(target, optimizer=torch.optim.AdamW(groups, lr=1e-3)).value
    root = (1 - 0.9) * (values.abs() + 1e-8)  # with the bias correction of a first step
    decay = torch.tensor([0.3, 0.3, 0.0, 0.0]).double()

    def diverges(eta: float) -> bool:
        state, moment, norms = torch.ones(4).double(), torch.zeros(4).double(), []
        for _ in range(800):
            moment = 0.9 * moment + 0.1 * values * state
            state = state - eta * (moment / root + decay * state)
            norms.append(float(state.norm()))
        return not math.isfinite(norms[-1]) or norms[-1] > norms[400]

    assert not diverges(0.98 * rate)
    assert diverges(1.02 * rate)


def choice_of(end: float, steps: tuple[int, ...]) -> RateChoice:
    """Yours, ended there from a loss of 1.8, and a lower rate that is no better, in runs of these lengths."""
    runs = [Run(rate, end, end, n).row(1.8) for rate in (0.003, 0.001) for n in steps]
    ends = {"gain": 0.0, "margin": 0.04, "start": 1.8, "own_final": end, "best_final": end, "steps": steps[0]}
    more = {"own": 0.003, "best": 0.003, "recommended": 0.003, "runs": tuple(runs), "batch_size": 32, "optimizer": "SGD"}
    return RateChoice(verdict="keep", **ends, **more)


@pytest.mark.parametrize(
    ("end", "steps", "label", "said"),
    [
        (1.5, (60, 300), "rate fits", "Your learning rate 0.003 fits: 60 steps on a copy bring the loss from 1.8 to 1.5"),
        (1.5, (60,), "rate fits", "no other is clearly better in so many steps."),
        (1.79, (60, 300), "rate fits", "60 steps on a copy leave the loss at 1.79 (start 1.8)"),
        (2.77, (60, 300), "no rate helps", "60 steps on a copy take the loss up from 1.8 to 2.77"),
    ],
)
def test_a_rate_fits_only_where_the_loss_falls_and_longer_runs_agree(end, steps, label, said):
    severity, found, text, _ = _said(choice_of(end, steps))
    assert (found, said in text) == (label, True), text
    assert ("fits" in text) == (end == 1.5 and len(steps) > 1)
    assert (severity is Severity.GOOD) == (end == 1.5)
