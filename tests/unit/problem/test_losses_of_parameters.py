"""Losses and models that read the parameters by other ways than the model's output: no part of the objective is lost."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.problem.calling.stand_ins import users_own
from theodolite.testing.dense import dense_hessian


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()


def samples():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, 4, generator=generator).double(), torch.arange(16) % 2


def penalty(parameters):
    return 5 * sum(p.square().sum() for p in parameters)


class HoldsModel(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, output, target):
        return nn.functional.cross_entropy(output, target) + penalty(self.model.parameters())


def of_the_model(model):
    return lambda output, target: nn.functional.cross_entropy(output, target) + penalty(model.parameters())


def of_a_list(model):
    kept = list(model.parameters())
    return lambda output, target: nn.functional.cross_entropy(output, target) + penalty(kept)


def of_a_vector(model):
    def loss(output, target):
        flat = nn.utils.parameters_to_vector(model.parameters())
        return nn.functional.cross_entropy(output, target) + 5 * flat @ flat

    return loss


PENALTIES = [of_the_model, of_a_list, of_a_vector, HoldsModel]


@pytest.mark.parametrize("make", PENALTIES)
def test_a_penalty_adds_its_curvature(make):
    model = network()
    bare = th.hessian(th.Problem(model, nn.CrossEntropyLoss(), samples())).to_dense()
    problem = th.Problem(model, make(model), samples())
    added = th.hessian(problem).to_dense() - bare
    torch.testing.assert_close(added, 10 * torch.eye(problem.size).double())
    assert "reads the model's parameters" in problem.notes[0]


@pytest.mark.parametrize("make", PENALTIES)
def test_layers_gradient_and_loss_have_it_too(make):
    model = network()
    problem = th.Problem(model, make(model), samples())
    bare = th.Problem(model, nn.CrossEntropyLoss(), samples())
    torch.testing.assert_close(problem.gradient() - bare.gradient(), 10 * problem.vector)
    block = th.layer_hessians(problem, "0")["0"].to_dense() - th.layer_hessians(bare, "0")["0"].to_dense()
    torch.testing.assert_close(block, 10 * torch.eye(32).double())


@pytest.mark.parametrize("make", PENALTIES)
def test_other_weights_and_copies_are_penalised_for_their_own(make):
    model = network()
    problem = th.Problem(model, make(model), samples())
    doubled = problem.at({name: 2 * p.detach() for name, p in model.named_parameters()})
    by_hand = copy.deepcopy(model)
    with torch.no_grad():
        for p in by_hand.parameters():
            p.mul_(2)
    assert doubled.loss() == pytest.approx(th.Problem(by_hand, make(by_hand), samples()).loss())
    assert problem.with_model(by_hand).loss() == pytest.approx(doubled.loss())
    assert problem.copied().loss() == pytest.approx(problem.loss())


def test_a_loss_that_calls_the_model():
    model = network()
    inputs, targets = samples()

    def consistency(output, target):
        return nn.functional.cross_entropy(output, target) + (output - model(inputs + 0.1)).square().mean()

    problem = th.Problem(model, consistency, (inputs, targets))

    model.eval()
    expected = dense_hessian(lambda: consistency(model(inputs), targets), list(model.parameters()))
    torch.testing.assert_close(th.hessian(problem).to_dense(), expected)


def test_a_model_that_keeps_a_list_of_its_weights():
    class Decayed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 1).double()
            self.kept = [self.linear.weight]

        def forward(self, x, labels):
            return {"loss": (self.linear(x) - labels).square().mean() + 5 * self.kept[0].square().sum()}

    x, y = samples()[0][:, :3], samples()[1].double()[:, None]
    model = Decayed()
    bare = th.hessian(th.Problem(model.linear, nn.MSELoss(), (x, y))).to_dense()
    added = th.hessian(th.Problem(model, None, {"x": x, "labels": y})).to_dense() - bare
    torch.testing.assert_close(added, 10 * torch.diag(torch.tensor([1.0, 1.0, 1.0, 0.0])).double())


def test_the_stable_rate_of_a_trial_is_that_of_the_penalised_loss():
    model = network()
    rate = th.critical_learning_rate(th.Problem(model, of_a_list(model), samples()), trial=True)
    assert rate.value < 2 / 10
    assert rate.window == ()  # without the penalty's pull on the copy it would not diverge just above


def test_matrices_of_the_output_alone_refuse():
    model = network()
    problem = th.Problem(model, of_a_list(model), samples())
    with pytest.raises(ValueError, match="other ways than the model's output"):
        th.gauss_newton(problem) @ torch.ones(problem.size).double()
    with pytest.raises(ValueError, match="other ways than the model's output"):
        th.kronecker_factors(problem)


def test_a_tensor_that_no_stand_in_reaches_is_refused():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.square().sum()

        @staticmethod
        def backward(ctx, g):
            return 2 * g * ctx.saved_tensors[0]

    model = network()

    def loss(output, target):
        return nn.functional.cross_entropy(output, target) + Square.apply(model[0].weight)

    with pytest.raises(ValueError, match=r"0\.weight"):
        th.Problem(model, loss, samples())


def test_a_loss_without_parameters_is_kept_as_it_is():
    def loss(output, target):
        return nn.functional.cross_entropy(output, target)

    problem = th.Problem(network(), loss, samples())
    assert users_own(problem.loss_function) is loss
    assert problem.notes == ()
    assert repr(problem).count("function") == 1


def test_only_what_trains_is_penalised():
    model = network()
    model[0].bias.requires_grad_(False)

    def loss(output, target):
        return nn.functional.cross_entropy(output, target) + penalty(p for p in model.parameters() if p.requires_grad)

    problem = th.Problem(model, loss, samples(), params="3.*")
    truth = loss(model.eval()(samples()[0]), samples()[1]).item()
    assert problem.loss() == pytest.approx(truth)
    assert problem.loss_and_gradient()[0] == pytest.approx(truth)


def test_a_penalty_that_only_some_batches_have():
    model = network()

    def loss(output, target):
        extra = penalty(model.parameters()) if bool((target > 0).any()) else 0.0
        return nn.functional.cross_entropy(output, target) + extra

    x, y = samples()
    batches = [(x[y == 0], y[y == 0]), (x[y == 1], y[y == 1])]
    weights = {"batch_weight": lambda batch: batch.size}
    gradient = th.Problem(model, loss, batches, **weights).gradient()
    bare = th.Problem(model, nn.CrossEntropyLoss(), batches).gradient()
    torch.testing.assert_close(gradient - bare, 5 * th.Problem(model, loss, batches, **weights).vector)


def test_parameters_that_were_replaced_afterwards():
    model = network()
    problem = th.Problem(model, of_the_model(model), samples())
    model.load_state_dict({name: 2 * t.clone() for name, t in model.state_dict().items()}, assign=True)
    bare = th.Problem(model, nn.CrossEntropyLoss(), samples())
    torch.testing.assert_close(problem.gradient() - bare.gradient(), 10 * bare.vector)


def test_a_float64_copy_has_the_same_objective():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner(x), self.inner(x).tanh()

    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.full((2,), 3.0))

        def forward(self, output, target):
            return (self.scale * (output[0] - target)).square().mean() + (output[1] @ model.weight).square().mean()

    problem = th.Problem(Pair(), Weighted(), (torch.randn(6, 3), torch.randn(6, 2)))
    assert problem.in_float64().loss() == pytest.approx(problem.loss(), rel=1e-5)
    assert problem.notes[0] in problem.in_float64().notes  # of its two outputs the loss reads both
