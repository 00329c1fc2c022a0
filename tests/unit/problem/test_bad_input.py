"""Input that would give a wrong number, or torch's own words, is refused or accepted in plain ones."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import theodolite as th
from theodolite.errors import NotRepeatableError, ParameterSelectionError
from theodolite.testing.dense import dense_hessian

GENERATOR = torch.Generator().manual_seed(5)
X = torch.randn(6, 3, generator=GENERATOR, dtype=torch.float64)
Y = torch.randint(3, (6,), generator=GENERATOR)
VALUES = torch.randn(6, generator=GENERATOR, dtype=torch.float64)
CE = nn.CrossEntropyLoss()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def ones(problem: th.Problem) -> Tensor:
    return torch.ones(problem.size, dtype=torch.float64)


# Shapes that broadcast


class Plain(nn.MSELoss):
    """A subclass that adds nothing."""


class Reshaping(nn.MSELoss):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return super().forward(output.squeeze(1), target)


@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.poisson_nll_loss, Plain(),
        lambda z, y: F.mse_loss(z, y), lambda z, y: F.mse_loss(input=z, target=y),
    ],
)  # fmt: skip
def test_a_column_against_a_vector_is_refused_in_every_form_of_the_loss(loss):
    with pytest.raises(ValueError, match=r"compares element by element.*\(6, 1\).*\(6,\).*y\.view\(-1, 1\)"):
        th.Problem(nn.Linear(3, 1).double(), loss, (X, VALUES))


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("loss", [Reshaping(), lambda z, y: F.mse_loss(z, torch.zeros(()).to(z)) + 0 * y.sum()])
def test_losses_that_bring_the_shapes_together_are_accepted(loss):
    model = nn.Linear(3, 1).double()
    problem = th.Problem(model, loss, (X, VALUES))
    assert problem.loss() == pytest.approx(loss(model(X), VALUES).item())
    th.hessian(problem) @ ones(problem)


# Objectives that autograd does not see


class NoGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    @torch.no_grad()
    def forward(self, x):
        return self.body(x)


class FrozenBody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()

    def forward(self, x):
        with torch.no_grad():
            hidden = self.body(x)
        return self.head(hidden)


class OwnTemperature(nn.Module):
    """A loss with a parameter of its own: it requires grad although the output is detached."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, z, y):
        return F.cross_entropy(z.detach() * self.temperature, y)


UNSEEN = {
    "detached output": lambda: th.Problem(network(), lambda z, y: F.cross_entropy(z.detach(), y), (X, Y)),
    "detached output, parameters in the loss": lambda: th.Problem(network(), OwnTemperature(), (X, Y)),
    "no_grad in forward": lambda: th.Problem(NoGrad(), CE, (X, Y)),
    "no_grad around the measured part": lambda: th.Problem(FrozenBody(), CE, (X, Y), params="body*"),
}


@pytest.mark.parametrize("case", UNSEEN)
def test_an_objective_that_autograd_does_not_see_is_refused(case):
    problem = UNSEEN[case]()
    for measure in (problem.gradient, lambda: th.hessian(problem) @ ones(problem)):
        with pytest.raises(ValueError, match=r"through autograd.*\.detach\(\).*no_grad.*Remedy.*the loss moves from"):
            measure()


def test_gauss_newton_and_closed_forms_say_the_same():
    problem = UNSEEN["detached output"]()
    with pytest.raises(ValueError, match=r"through autograd.*\.detach\(\)"):
        th.gauss_newton(problem) @ ones(problem)
    with pytest.raises(ValueError, match=r"through autograd.*\.detach\(\)"):
        th.top_eigenpairs(th.layer_hessians(problem), 1)


class TwoHeads(nn.Module):
    """Each batch uses one head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()

    def forward(self, x):
        return (self.first if len(x) == 4 else self.second)(x)


def test_true_zeros_stay_zeros():
    model = TwoHeads()
    unused = th.Problem(model, CE, (X[:4], Y[:4]), params="second*")
    assert not unused.gradient().any()
    assert not (th.hessian(unused) @ ones(unused)).any()
    mixed = th.Problem(model, CE, [(X[:4], Y[:4]), (X[4:], Y[4:])], params="second*")
    alone = th.Problem(model, CE, (X[4:], Y[4:]), params="second*")
    torch.testing.assert_close(th.hessian(mixed).to_dense(), th.hessian(alone).to_dense() / 3)
    torch.testing.assert_close(mixed.gradient(), alone.gradient() / 3)
    constant = th.Problem(network(), lambda z, y: torch.tensor(2.0), (X, Y))
    assert not constant.gradient().any()
    assert not (th.hessian(constant) @ ones(constant)).any()


# Several outputs


class HiddenFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x):
        return self.net[:2](x), self.net(x)


def test_which_of_several_outputs_is_measured_is_said():
    problem = th.Problem(HiddenFirst(), CE, (X, Y))
    assert any("returns 2 tensors" in note and "(6, 4)" in note for note in problem.notes)
    assert any("the first" in note for note in th.top_eigenpairs(th.hessian(problem), 1).cost.notes)
    assert th.Problem(HiddenFirst(), lambda out, y: CE(out[1], y), (X, Y)).notes == ()
    assert th.Problem(network(), CE, (X, Y)).notes == ()


# Models and losses


class Embedded(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 3, **options), nn.Linear(3, 3)

    def forward(self, i):
        return self.head(self.table(i).mean(1))


@pytest.mark.parametrize("option", ["sparse", "scale_grad_by_freq"])
def test_embeddings_with_gradients_of_their_own_name_the_remedy(option):
    data = (torch.randint(5, (6, 2)), Y)
    model = Embedded(**{option: True}).double()
    with pytest.raises(ValueError, match=rf"table is an embedding with {option}=True.*{option} = False.*params="):
        th.Problem(model, CE, data)
    head = th.Problem(model, CE, data, params="head*")
    th.hessian(head) @ ones(head)
    setattr(model.table, option, False)
    whole = th.Problem(model, CE, data)
    th.hessian(whole) @ ones(whole)


def test_compiled_models_and_classes_of_losses_are_named():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer versions of torch discourage scripts
        script = torch.jit.script(network())
    with pytest.raises(ValueError, match=r"torch\.jit.*nn\.Module it was made from"):
        th.Problem(script, CE, (X, Y))
    with pytest.raises(ValueError, match=r"the class CrossEntropyLoss: pass an instance of it, CrossEntropyLoss\(\)"):
        th.Problem(network(), nn.CrossEntropyLoss, (X, Y))


# Selections


def test_parameters_are_accepted_themselves():
    model = network()
    assert th.Problem(model, CE, (X, Y), params=model.parameters()).size == 31
    assert th.Problem(model, CE, (X, Y), params=[model[2].weight, "0.bias"]).names == ("0.bias", "2.weight")
    assert th.Problem(nn.DataParallel(model), CE, (X, Y), params=model[0].weight).names == ("0.weight",)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (3, r"params must be None, a glob .* Got 3\. Names: 0\.weight"),
        ([None], r"params must be .* Got None"),
        (torch.nn.Linear(2, 2), r"Got Linear: pass its \.parameters\(\)"),
        ([torch.zeros(2, 2)], r"a tensor of shape \(2, 2\) that is no parameter of the model.*0\.weight"),
    ],
)
def test_other_selections_are_explained(params, message):
    with pytest.raises(ParameterSelectionError, match=message):
        th.Problem(network(), CE, (X, Y), params=params)


@pytest.mark.parametrize("layers", [[0], 0])
def test_layers_are_chosen_by_name(layers):
    with pytest.raises(ParameterSelectionError, match=r"layers must be .* Got 0\. Layers: '0', '2'"):
        th.layer_hessians(th.Problem(network(), CE, (X, Y)), layers)


# Data


def test_arrays_become_tensors_in_the_precision_of_the_model():
    expected = th.Problem(network(), CE, (X, Y)).loss()
    for data in ((X.numpy(), Y.numpy()), (X, Y.numpy()), [(X.numpy(), Y.numpy())]):
        assert th.Problem(network(), CE, data).loss() == expected
    assert th.Problem(network().float(), CE, (X.numpy(), Y.numpy())).loss() == pytest.approx(expected)


def test_an_empty_batch_at_the_end_is_passed_over():
    expected = th.Problem(network(), CE, (X, Y)).loss()
    assert th.Problem(network(), CE, [(X, Y), (X[:0], Y[:0])]).loss() == expected


def test_endless_data_is_refused():
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            while True:
                yield X[0], Y[0]

    loader = torch.utils.data.DataLoader(Endless(), batch_size=4)
    with pytest.raises(NotRepeatableError, match=r"endless.*islice"):
        th.Problem(network(), CE, loader, hold_bytes=10_000)


def test_complex_and_absent_parameters_are_named():
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.turn = network(), nn.Parameter(torch.ones(3, dtype=torch.complex128))

        def forward(self, x):
            return self.body((x * self.turn).real)

    with pytest.raises(ValueError, match=r"turn is complex.*view_as_complex.*params="):
        th.Problem(Complex(), CE, (X, Y))
    assert th.Problem(Complex(), CE, (X, Y), params="body*").size == th.Problem(network(), CE, (X, Y)).size
    with pytest.raises(ValueError, match="meta device"):
        th.Problem(network().to("meta"), CE, (X, Y))


def test_a_loss_that_differentiates_the_inputs():
    x = X.clone().requires_grad_()

    def residual(z, y):
        (slope,) = torch.autograd.grad(z.sum(), x, create_graph=True)
        return (slope.square() - 1).square().mean()

    def objective():
        return residual(model(x), Y)

    model = network()
    expected = dense_hessian(objective, list(model.parameters()))
    torch.testing.assert_close(th.hessian(th.Problem(model, residual, (x, Y))).to_dense(), expected)


def test_sparse_buffers():
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = network()
            self.register_buffer("neighbours", torch.eye(len(X), dtype=torch.float64).to_sparse())

        def forward(self, x):
            return self.body(torch.sparse.mm(self.neighbours, x))

    model = Graph()
    expected = th.hessian(th.Problem(model.body, CE, (X, Y))).to_dense()
    torch.testing.assert_close(th.hessian(th.Problem(model, CE, (X, Y)), keep="never").to_dense(), expected)


@pytest.mark.parametrize(
    ("target", "pick"), [((Y, VALUES), lambda t: t[0]), ({"class": Y, "value": VALUES}, lambda t: t["class"])]
)
def test_targets_of_several_parts_need_no_list_around_them(target, pick):
    def loss(z, t):
        return F.cross_entropy(z, pick(t))

    for data in ((X, target), [X, target]):
        assert th.Problem(network(), loss, data).loss() == th.Problem(network(), loss, [(X, target)]).loss()
