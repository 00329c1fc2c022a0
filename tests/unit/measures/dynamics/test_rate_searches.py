"""Learning rates: objectives that many runs cannot have, words of linear models, operators, edges that are not sharp."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.measures.dynamics.optimizers import descend, run_trial
from theodolite.measures.dynamics.sweep import whole_data


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, Y = normal(12, 3), normal(12, 2, seed=1)


def network(seed: int = 0, width: int = 8) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2)).double()


def half_sum(output, target):
    return 0.5 * (output - target).square().sum()


def problem(model: nn.Module | None = None, loss=None, **options) -> th.Problem:
    return th.Problem(model or network(), loss or nn.MSELoss(), (X, Y), **options)


# The objective of many runs


def searches():
    return [
        lambda p: th.catapult_sweep(p, ratios=[0.5], steps=2, models=["network"], by="hessian", progress=False),
        lambda p: th.find_max_learning_rate(p, steps=5, progress=False),
    ]


UNEVEN = [(X[:5], Y[:5]), (X[5:], Y[5:])]


@pytest.mark.parametrize("search", searches())
def test_weights_of_batches_are_refused_where_batches_are_joined(search):
    for weight in ([1.0, 1.0], lambda batch: 1.0):
        weighted = th.Problem(network(), nn.MSELoss(), UNEVEN, batch_weight=weight)
        with pytest.raises(ValueError, match=r"2 batches joined into one.*batch_weight of its own.*one batch"):
            search(weighted)


@pytest.mark.parametrize("search", searches())
def test_an_objective_that_is_not_the_loss_of_the_joined_batches_is_refused(search):
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).double()
    coupled = th.Problem(model, nn.MSELoss(), UNEVEN, mode="train")
    with pytest.raises(ValueError, match="that of the joined batches"):
        search(coupled)


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.MSELoss(reduction="sum"), half_sum])
def test_batches_of_any_size_are_joined(loss):
    uneven = th.Problem(network(), loss, UNEVEN)
    inputs, targets = whole_data(uneven)
    assert torch.equal(inputs, X)
    assert torch.equal(targets, Y)


def test_the_weight_of_one_batch_says_nothing():
    one = th.Problem(network(), nn.MSELoss(), (X, Y), batch_weight=[3.0])
    assert torch.equal(whole_data(one)[0], X)


# Words


def test_a_linear_model_never_catapults():
    """Under cross-entropy its loss may rise to twenty times the start and fall again; its kernel never changes."""
    torch.manual_seed(1)
    x, labels = torch.randn(12, 3).double(), torch.randint(0, 2, (12,))
    outer = th.Problem(network(), nn.CrossEntropyLoss(), (x, labels))
    found = th.catapult_sweep(outer, ratios=[3.0, 3.5, 4.0, 6.0, 8.0, 24.0], models=["linear"], steps=200, progress=False)
    risen = [row for row in found.runs if row["peak_loss"] > 2 * row["first_loss"] and row["final_loss"] < row["first_loss"]]
    assert risen
    assert {row["regime"] for row in risen} == {"other"}


# The kernel as an operator


def test_by_kernel_takes_the_tangent_kernel_and_nothing_else():
    outer = problem()
    alone = th.critical_learning_rate(outer, by="kernel", progress=False)
    given = th.critical_learning_rate(outer, by="kernel", operator=th.tangent_kernel_operator(outer), progress=False)
    assert given.value == pytest.approx(alone.value, rel=1e-6)
    formed = th.operators.DenseOperator(th.tangent_kernel(outer))
    assert th.critical_learning_rate(outer, by="kernel", operator=formed, progress=False).value == pytest.approx(
        alone.value, rel=1e-6
    )
    square = th.Problem(nn.Linear(3, 2).double(), nn.MSELoss(), (X[:4], Y[:4]))  # as many outputs as parameters
    with pytest.raises(ValueError, match="8 outputs"):
        th.critical_learning_rate(square, by="kernel", operator=th.hessian(square), progress=False)
    for operator in (th.hessian(outer), th.gauss_newton(outer)):
        with pytest.raises(ValueError, match=r"tangent_kernel_operator\(problem\).*Got"):
            th.critical_learning_rate(outer, by="kernel", operator=operator, progress=False)
    adam = torch.optim.Adam(outer.parameters, lr=0.1)
    with pytest.raises(ValueError, match="preconditioner of the optimizer"):
        th.critical_learning_rate(outer, by="kernel", optimizer=adam, operator=th.tangent_kernel_operator(outer), progress=False)


# Above the edge


def test_a_window_by_theory_says_that_it_is_theory_and_a_trial_measures_it():
    """A narrow quadratic twin, which diverges at all rates above its edge: theory of wide models allows twice that."""
    torch.manual_seed(0)
    x, y = torch.randn(7, 3).double(), torch.randn(7, 2).double()
    twin = th.Problem(th.quadratize(network(0, 16)), nn.MSELoss(), (x, y))
    theory = th.critical_learning_rate(twin, progress=False)
    assert theory.window == (theory.value, 2 * theory.value)
    assert theory.window_by == "theory"
    assert "Theory for wide models" in str(theory)
    tried = th.critical_learning_rate(twin, trial=True, progress=False)
    assert tried.window_by == "trial"
    assert tried.window == () or tried.window[1] < theory.window[1]
    assert "In trial runs" in str(tried)
    last = run_trial(twin, 2.0 * tried.value, steps=60)[-1]
    assert not last < run_trial(twin, 2.0 * tried.value, steps=1)[0]
    assert th.critical_learning_rate(problem(nn.Linear(3, 2).double()), progress=False).window_by == "exact"


def test_an_edge_that_is_not_sharp_has_a_wide_error():
    """Cross-entropy on twelve points: two brackets end at rates apart, and the errors say so."""
    torch.manual_seed(0)
    x, labels = torch.randn(12, 3).double(), torch.randint(0, 2, (12,))
    outer = th.Problem(network(), nn.CrossEntropyLoss(), (x, labels))
    critical = th.critical_learning_rate(outer, progress=False).value
    found = [th.find_max_learning_rate(outer, high=h * critical, steps=100, progress=False) for h in (8, 32)]
    for each in found:
        assert not each.sharp
        assert "not sharp" in str(each)
        wrong = [row["rate"] for row in each.runs if row["converged"] != (row["rate"] <= each.value)]
        assert each.error == pytest.approx(max(abs(rate - each.value) for rate in wrong))
    apart = abs(found[0].value - found[1].value)
    assert apart > 0.01 * found[0].value
    assert apart <= sum(each.error for each in found)


def test_a_sharp_edge_has_neighbours_that_agree():
    found = th.find_max_learning_rate(problem(nn.Linear(3, 2).double()), steps=200, progress=False)
    assert found.sharp
    assert found.error <= 0.01 * found.value
    rates = {round(row["rate"] / found.value, 6): row["converged"] for row in found.runs}
    assert all(rates[1 + share] == (share < 0) for share in (-0.15, -0.02, 0.02, 0.15))


# Refusals


def test_a_minimum_is_no_place_to_search_from():
    model = network()
    at_minimum = th.Problem(model, nn.MSELoss(), (X, model(X).detach()))
    with pytest.raises(ValueError, match="already at its minimum"):
        th.find_max_learning_rate(at_minimum, steps=5, progress=False)


def test_rates_are_lists():
    for name in ("rates", "ratios"):
        with pytest.raises(ValueError, match=rf"{name} must be a list of positive numbers\. Got 0\.1; one rate is {name}="):
            th.catapult_sweep(problem(), **{name: 0.1}, steps=2)


@pytest.mark.parametrize("measure", [th.catapult_sweep, th.find_max_learning_rate, th.critical_learning_rate])
def test_a_module_is_no_problem(measure):
    with pytest.raises(TypeError, match=r"takes a theodolite\.Problem.*Got Sequential"):
        measure(network())


class OwnLoss(nn.Module):
    """A model that returns its loss, as those of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, inputs, labels):
        logits = self.inner(inputs)
        return {"loss": (logits - labels).square().mean(), "logits": logits}


def test_twins_need_a_loss_function():
    own = th.Problem(OwnLoss(), None, {"inputs": X, "labels": Y})
    with pytest.raises(ValueError, match=r"return no loss.*models=\['network'\]"):
        th.catapult_sweep(own, ratios=[0.5], steps=2, progress=False)
    found = th.catapult_sweep(own, ratios=[0.5], steps=2, models=["network"], progress=False)
    assert found.runs[0]["first_loss"] == pytest.approx(own.loss())


# Trial runs


def test_a_trial_and_a_descent_are_one_loop():
    outer = problem()
    optimizer = torch.optim.SGD(outer.parameters, lr=0.1, momentum=0.9)
    losses = run_trial(outer, 0.05, optimizer=optimizer, steps=6)
    steps, found, copies = zip(*descend(outer, 0.05, 6, optimizer), strict=True)
    assert steps == tuple(range(7))
    assert found == losses
    assert copies[0].model is not outer.model
    model = network()
    own = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for loss in losses:
        value = nn.functional.mse_loss(model(X), Y)
        assert float(value.detach()) == pytest.approx(loss, rel=1e-12)
        own.zero_grad()
        value.backward()
        own.step()


def test_a_diverging_trial_ends_in_infinity_and_decoupled_decay_is_left_out():
    assert math.isinf(run_trial(problem(nn.Linear(3, 2).double()), 1e3, steps=200)[-1])
    assert math.isinf(run_trial(problem(nn.Linear(3, 2).double()), 1e200, steps=200)[-1])
    outer = problem()
    plain, decayed = (
        run_trial(outer, 1e-2, optimizer=torch.optim.AdamW(outer.parameters, lr=1e-2, weight_decay=decay), steps=5)
        for decay in (0.0, 0.5)
    )
    assert plain == decayed
    *_, (_, last, _) = descend(outer, 1e-2, 5, torch.optim.AdamW(outer.parameters, lr=1e-2, weight_decay=0.5))
    assert last != plain[-1]


def test_weight_linearity_is_public():
    found = th.measures.dynamics.weight_linearity(problem(), 0.05, steps=5)
    assert isinstance(found, th.measures.dynamics.WeightLinearity)
