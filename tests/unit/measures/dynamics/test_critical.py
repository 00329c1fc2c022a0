"""Critical learning rates: each rule against the edge found by bisection on a quadratic, and against closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import theodolite as th

EIGENVALUES = torch.tensor([4.0, 1.0, 0.3]).double()


def bowl(values: torch.Tensor = EIGENVALUES) -> th.Problem:
    """`½ Σ λ_i w_i²`, as a linear model: its Hessian is diag(λ)."""
    model = nn.Linear(len(values), 1, bias=False).double()
    nn.init.constant_(model.weight, 1.0)
    x = torch.diag(values.sqrt())
    return th.Problem(model, lambda z, y: 0.5 * z.square().sum(), (x, torch.zeros(len(values), 1).double()))


OPTIMIZERS = {
    "plain": lambda p, lr: torch.optim.SGD(p, lr=lr),
    "heavy ball": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "damped": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, dampening=0.5),
    "nesterov": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True),
    "weight decay": lambda p, lr: torch.optim.SGD(p, lr=lr, weight_decay=0.5),
    "all": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True, weight_decay=0.5),
}


def diverges(make, rate: float, steps: int = 400) -> bool:
    problem = bowl()
    (w,) = problem.parameters
    optimizer = make([w], rate)
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        (0.5 * (EIGENVALUES * w.square()).sum()).backward()
        optimizer.step()
        norms.append(float(w.detach().norm()))
    return not math.isfinite(norms[-1]) or norms[-1] > max(norms[steps // 2 - 20 : steps // 2])


def bisected(make, low: float, high: float) -> float:
    for _ in range(20):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if diverges(make, middle) else (middle, high)
    return math.sqrt(low * high)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_rule_is_the_edge_found_by_bisection(name):
    problem = bowl()
    rate = th.critical_learning_rate(problem, optimizer=OPTIMIZERS[name](problem.parameters, 0.01))
    assert rate.value == pytest.approx(bisected(OPTIMIZERS[name], rate.value / 5, rate.value * 5), rel=0.02)
    assert rate.window == ()
    assert rate.error <= 1e-3 * rate.value
    assert rate.outcome.good


def test_the_formulas():
    def value(**settings):
        problem = bowl()
        return th.critical_learning_rate(problem, optimizer=torch.optim.SGD(problem.parameters, lr=0.1, **settings)).value

    assert value() == pytest.approx(2 / 4)
    assert value(momentum=0.9) == pytest.approx(2 * 1.9 / 4)
    assert value(momentum=0.9, nesterov=True) == pytest.approx(2 * 1.9 / (2.8 * 4))
    assert value(weight_decay=1.0) == pytest.approx(2 / 5)


def frozen_adam_diverges(problem: th.Problem, rate: float, beta: float, root: torch.Tensor, wd: float = 0.0) -> bool:
    """Adam with its preconditioner held, its bias corrections too, and decoupled decay, written out."""
    w, m = torch.ones(3).double(), torch.zeros(3).double()
    norms = []
    for _ in range(600):
        m = beta * m + (1 - beta) * BAD * w
        w = w - rate * (m / root + wd * w)
        norms.append(float(w.norm()))
    return not math.isfinite(norms[-1]) or norms[-1] > norms[len(norms) // 2]


BAD = torch.tensor([1000.0, 1.0, 0.01]).double()


@pytest.mark.parametrize(("kind", "wd"), [(torch.optim.Adam, 0.0), (torch.optim.AdamW, 0.3)])
@pytest.mark.parametrize("steps", [0, 5, 100])
def test_adam_on_a_badly_scaled_bowl(kind, wd, steps):
    problem = bowl(BAD)
    (w,) = problem.parameters
    optimizer = kind([w], lr=1e-3, weight_decay=wd)
    for _ in range(steps):
        optimizer.zero_grad()
        (0.5 * (BAD * w.square()).sum()).backward()
        optimizer.step()
    rate = th.critical_learning_rate(problem, optimizer=optimizer)
    if steps:
        state = optimizer.state[w]
        root = (state["exp_avg_sq"] / (1 - 0.999**steps)).sqrt()[0] + 1e-8
    else:
        root = BAD * w.detach()[0].abs() + 1e-8
    root = root * (1 - 0.9 ** max(1, steps))
    low, high = rate.value / 5, rate.value * 5
    for _ in range(20):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if frozen_adam_diverges(problem, middle, 0.9, root, wd) else (middle, high)
    assert rate.value == pytest.approx(low, rel=0.05)
    assert ("live Adam adapts" in str(rate)) == bool(steps)
    assert ("1−β₁ᵗ" in rate.rule) == (steps < 100)  # said while it counts


def test_groups_are_measured_by_the_first_ones_rate():
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    for layer in model:
        nn.init.constant_(layer.weight, 1.0)
    problem = th.Problem(model, nn.MSELoss(), (torch.ones(1, 1).double(), torch.ones(1, 1).double()))
    groups = [{"params": model[0].parameters(), "lr": 0.2}, {"params": model[1].parameters(), "lr": 0.1}]
    rate = th.critical_learning_rate(problem, optimizer=torch.optim.SGD(groups, lr=0.2))
    hessian = th.hessian(problem).to_dense()
    truth = 2 / float(torch.linalg.eigvals(torch.diag(torch.tensor([1.0, 0.5]).double()) @ hessian).real.max())
    assert rate.value == pytest.approx(truth)


def test_gauss_newton_and_hessian_agree_where_the_model_is_linear_and_differ_elsewhere():
    problem = bowl()
    assert th.critical_learning_rate(problem, by="gauss_newton").value == pytest.approx(0.5)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    network = th.Problem(model, nn.MSELoss(), (torch.randn(20, 3).double(), torch.randn(20, 1).double()))
    assert th.critical_learning_rate(network, by="gauss_newton").value != pytest.approx(
        th.critical_learning_rate(network).value, rel=1e-3
    )
    assert th.critical_learning_rate(network).window is None


def test_a_wide_network_has_a_window_above_the_edge():
    """Two layers of NTK-parameterised ReLU units catapult above 2/λ and diverge far above; the trial finds both."""
    model = th.models.ntk_fcn(4, width=256, depth=2, seed=0).double()
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 4, generator=generator).double(), torch.randn(8, 1, generator=generator).double()
    problem = th.Problem(model, nn.MSELoss(), (x, y))
    before = [p.detach().clone() for p in model.parameters()]
    rate = th.critical_learning_rate(problem, trial=True)
    assert rate.window
    assert rate.window[0] == rate.value < rate.window[1] <= 6 * rate.value
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_no_upward_curvature_means_no_edge():
    model = nn.Linear(2, 1, bias=False).double()
    problem = th.Problem(model, lambda z, y: -0.5 * z.square().sum(), (torch.eye(2).double(), torch.zeros(2, 1).double()))
    rate = th.critical_learning_rate(problem)
    assert rate.value == math.inf
    assert "no learning rate is critical" in str(rate)


def test_a_population_adds_the_sampling_error():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 3, generator=generator).double(), torch.randn(60, 1, generator=generator).double()
    problem = th.Problem(nn.Linear(3, 1, bias=False).double(), nn.MSELoss(), (x, y))
    alone = th.critical_learning_rate(problem)
    assert th.critical_learning_rate(problem, population=10_000).error > 10 * alone.error
    assert th.critical_learning_rate(problem, population=60).error == pytest.approx(alone.error)


def test_results_save_and_become_rows(tmp_path):
    rate = th.critical_learning_rate(bowl())
    rate.save(tmp_path / "rate")
    assert th.load(tmp_path / "rate").value == rate.value
    assert rate.rows()[0]["rule"] == "2/λ"


def test_what_has_no_law_is_refused():
    problem = bowl()
    with pytest.raises(ValueError, match=r"Adadelta. .*trial=True.* Known: SGD, AdamW, Adam"):
        th.critical_learning_rate(problem, optimizer=torch.optim.Adadelta(problem.parameters))
    with pytest.raises(ValueError, match="maximizes"):
        th.critical_learning_rate(problem, optimizer=torch.optim.SGD(problem.parameters, lr=0.1, maximize=True))
    other = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="does not train weight"):
        th.critical_learning_rate(problem, optimizer=torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="'gauss_newton'"):
        th.critical_learning_rate(problem, by="nonsense")


def test_optimizers_by_name():
    """A name is a new optimizer of that kind; where its rate is compared with, a name alone has none."""
    problem = bowl()
    for name, rate in (("sgd", 0.5), ("momentum", 0.95), (None, 0.5)):
        assert th.critical_learning_rate(problem, optimizer=name).value == pytest.approx(rate, rel=1e-3)
    for name in ("adam", "adamw"):
        made = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name](problem.parameters, lr=0.01)
        by_name, by_instance = (th.critical_learning_rate(problem, optimizer=o).value for o in (name, made))
        assert by_name == pytest.approx(by_instance)
    assert th.measures.dynamics.expected_regime(problem, 0.6, optimizer="sgd").regime == "divergence expected"
    with pytest.raises(ValueError, match=r"optimizer must be a torch optimizer.* or one of 'sgd'.* Got 'sdg'"):
        th.critical_learning_rate(problem, optimizer="sdg")
    with pytest.raises(ValueError, match="has no learning rate"):
        th.measures.dynamics.batch_critical_rates(problem, optimizer="sgd", batch_size=1)
    with pytest.raises(ValueError, match="has no learning rate"):
        th.survey(problem, optimizer="sgd", only=["rate"])


@pytest.mark.parametrize(
    "change", [{"tol": 1.0}, {"tol": 2.5}, {"tol": math.nan}, {"population": -1}, {"population": 0}, {"seed": 0.5}]
)
def test_numbers_outside_their_range_are_refused(change):
    [name] = change
    with pytest.raises(ValueError, match=f"^{name} must"):
        th.critical_learning_rate(bowl(), **change)


def exponential(margin: float = 0.0) -> th.Problem:
    """`exp(−w)`: λ and the gradient are the loss itself, so that no rate ever raises it."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, margin)
    x = torch.ones(1, 1).double()
    return th.Problem(model, lambda out, t: torch.exp(-out).mean(), (x, x))


def test_where_the_edge_is_no_limit_a_trial_says_so():
    found = th.critical_learning_rate(exponential(), trial=True, progress=False)
    assert (found.value, found.never_rose) == (pytest.approx(2.0), pytest.approx(16.0))
    assert "never rises at rates up to 16, 8 times the edge: the edge is no limit here." in found.sentence()
    assert th.critical_learning_rate(exponential(), progress=False).never_rose is None
    survey = th.survey(exponential(), lr=6.0, only=["rate"], progress=False)
    assert "the trial says that the edge is no limit here: the loss never rose" in survey.of("rate")[0].sentence


def test_where_the_edge_is_a_limit_nothing_else_is_said():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    data = torch.randn(12, 3).double(), torch.randn(12, 1).double()
    found = th.critical_learning_rate(th.Problem(model, nn.MSELoss(), data), trial=True, progress=False)
    assert found.never_rose is None
    assert "no limit" not in found.sentence()
