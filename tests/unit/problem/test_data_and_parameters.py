"""All forms of data and parameters, and what bad ones get."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import theodolite as th
from tests.unit.cases import MyDataParallel, make, mlp, tied
from theodolite.errors import NonFiniteError, NotRepeatableError, ParameterSelectionError


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


X = torch.randn(12, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randint(3, (12,), generator=torch.Generator().manual_seed(2))
LOSS = nn.CrossEntropyLoss()


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, a, b=None):
        return self.net(a if b is None else a + b)


def reference() -> float:
    with torch.no_grad():
        return float(LOSS(network()(X), Y))


FORMS = {
    "pair": (X, Y),
    "list pair": [X, Y],
    "one batch": [(X, Y)],
    "batches": [(X[:5], Y[:5]), (X[5:], Y[5:])],
    "tuple of batches": ((X[:5], Y[:5]), (X[5:], Y[5:])),
    "generator": ((X[i : i + 4], Y[i : i + 4]) for i in range(0, 12, 4)),
    "loader": DataLoader(TensorDataset(X, Y), batch_size=5),
    "two inputs": (X, torch.zeros_like(X), Y),
    "nested inputs": ((X, torch.zeros_like(X)), Y),
    "mapping of inputs": ({"a": X, "b": torch.zeros_like(X)}, Y),
    "mapping": {"a": X, "labels": Y},
    "mapping batches": [{"a": X[:5], "labels": Y[:5]}, {"a": X[5:], "labels": Y[5:]}],
}


@pytest.mark.parametrize("form", list(FORMS))
def test_every_form_of_data(form):
    model = TwoInputs()
    assert th.Problem(model, LOSS, FORMS[form]).loss() == pytest.approx(reference(), rel=1e-12)


def test_a_named_target():
    problem = th.Problem(TwoInputs(), LOSS, {"a": X, "answer": Y}, target="answer")
    assert problem.loss() == pytest.approx(reference())
    with pytest.raises(ValueError, match=r"labels.*answer"):
        th.Problem(TwoInputs(), LOSS, {"a": X, "answer": Y})


def test_a_loss_of_the_whole_output():
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x):
            z = self.net(x)
            return z, z.square()

    def loss(output, target):
        z, squares = output
        return F.cross_entropy(z, target) + squares.mean()

    assert th.Problem(Pair(), loss, (X, Y)).loss() > reference()


def test_data_too_large_to_hold_is_streamed_and_probed():
    ordered = DataLoader(TensorDataset(X, Y), batch_size=5)
    problem = th.Problem(network(), LOSS, ordered, hold_bytes=10)
    assert not problem.data.held
    assert problem.loss() == pytest.approx(reference(), rel=1e-12)
    dense = th.hessian(th.Problem(network(), LOSS, (X, Y))).to_dense()
    torch.testing.assert_close(th.hessian(problem, keep="never").to_dense(), dense, rtol=1e-10, atol=1e-12)
    with pytest.raises(NotRepeatableError, match="shuffle"):
        th.Problem(network(), LOSS, DataLoader(TensorDataset(X, Y), batch_size=5, shuffle=True), hold_bytes=10)
    with pytest.raises(NotRepeatableError, match="generator"):
        th.Problem(network(), LOSS, ((X, Y) for _ in range(3)), hold_bytes=10)


# Parameters


def test_selection_by_globs_and_predicates():
    model = network()
    whole = th.hessian(th.Problem(model, LOSS, (X, Y))).to_dense()
    for params, names in (
        ("2.*", ("2.weight", "2.bias")),
        (["0.weight", "2.bias"], ("0.weight", "2.bias")),
        (lambda name, p: p.ndim == 2, ("0.weight", "2.weight")),
    ):
        problem = th.Problem(model, LOSS, (X, Y), params=params)
        assert problem.names == names
        everything = th.Problem(model, LOSS, (X, Y))
        where = everything.selection.positions([everything.names.index(n) for n in names])
        torch.testing.assert_close(th.hessian(problem).to_dense(), whole[where][:, where], rtol=1e-10, atol=1e-12)


def test_frozen_parameters_can_be_named():
    model = network()
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(ParameterSelectionError, match=r"frozen.*0\.weight"):
        th.Problem(model, LOSS, (X, Y))
    problem = th.Problem(model, LOSS, (X, Y), params="0.weight")
    assert float(th.hessian(problem).to_dense().abs().max()) > 0
    assert not any(p.requires_grad for p in model.parameters())


def test_tied_weights_count_once():
    case = make(tied)
    problem = case.problem()
    assert problem.size == sum(p.numel() for p in case.model.parameters())
    assert problem.names == ("embedding.weight", "mix.weight", "mix.bias")
    assert list(problem.layers) == ["embedding", "mix"]


def test_wrappers_do_not_show_in_names():
    model = network()
    for wrapped in (MyDataParallel(model), torch.compile(model), nn.Sequential(model)[0]):
        assert th.Problem(wrapped, LOSS, (X, Y)).names[0] == "0.weight"


def test_vector_and_blocks():
    problem = make(mlp).problem()
    named = problem.split(problem.vector)
    for (name, p), got in zip(problem.model.named_parameters(), named.values(), strict=True):
        assert name in named
        torch.testing.assert_close(got, p.detach())
    with pytest.raises(ValueError, match="vector must have shape"):
        problem.split(torch.zeros(3))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ("0.wieght", r"Nearest names: 0\.weight"),
        (["2.*", "nosuch*"], "fits no parameter"),
        (lambda n, p: False, "available: 0.weight"),
    ],
)
def test_selecting_nothing_names_the_nearest(params, message):
    with pytest.raises(ValueError, match=message):
        th.Problem(network(), LOSS, (X, Y), params=params)


def test_half_precision_is_measured_through_a_copy():
    model = network()
    full = th.hessian(th.Problem(model.to(torch.bfloat16).float(), LOSS, (X.to(torch.bfloat16).float(), Y)))
    half = th.Problem(copy.deepcopy(model).to(torch.bfloat16), LOSS, (X.to(torch.bfloat16), Y))
    assert half.dtype == torch.float32
    op = th.hessian(half)
    v = torch.randn(half.size)
    torch.testing.assert_close(op @ v, full @ v, rtol=1e-4, atol=1e-5)
    assert "float32 copy" in op.cost().notes[0]
    assert "float32 copy" in th.top_eigenpairs(op, 1).cost.notes[0]
    assert all(p.dtype == torch.bfloat16 for p in half.model.parameters())


# Bad input


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ([], ValueError, "data is empty"),
        ((X[:0], Y[:0]), ValueError, "data is empty"),
        ((X[:, :3], Y), ValueError, r"model refused batch 0 .*\(12, 3\)"),
        ((X, Y[:7]), ValueError, r"loss refused batch 0"),
        ((X, Y + 1), ValueError, r"from 1 to 3: class labels must lie in 0"),
        ((X.float(), Y), ValueError, "float32"),
        (3, ValueError, "data must be"),
        ([X], ValueError, "Batch 0 is a Tensor"),
        ([(X, Y), (torch.full_like(X, float("nan")), Y)], NonFiniteError, r"input\[0\] of batch 1"),
        ((torch.full_like(X, float("inf")), Y), NonFiniteError, r"input\[0\] of batch 0 holds 48"),
    ],
)
def test_bad_data(data, error, message):
    with pytest.raises(error, match=message):
        th.Problem(network(), LOSS, data)


def test_bad_objects():
    with pytest.raises(ValueError, match=r"torch\.nn\.Module"):
        th.Problem(lambda x: x, LOSS, (X, Y))
    with pytest.raises(ValueError, match="loss must be"):
        th.Problem(network(), "mse", (X, Y))
    with pytest.raises(ValueError, match="mode must be"):
        th.Problem(network(), LOSS, (X, Y), mode="test")
    with pytest.raises(ValueError, match="returned none"):
        th.Problem(TwoInputs(), None, {"a": X})
    with pytest.raises(ValueError, match="one number"):
        th.Problem(network(), lambda z, y: z, (X, Y))


def test_labels_out_of_range_in_a_later_batch_are_named():
    problem = th.Problem(network(), LOSS, [(X, Y), (X, Y + 2)])
    with pytest.raises(ValueError, match="batch 1"):
        th.hessian(problem) @ torch.zeros(problem.size, dtype=torch.float64)


def test_non_finite_parameters_and_losses_are_named():
    model = network()
    with torch.no_grad():
        model[2].bias[1] = float("nan")
    with pytest.raises(NonFiniteError, match=r"batch 0 is nan: 2\.bias"):
        th.Problem(model, LOSS, (X, Y))
    with pytest.raises(NonFiniteError, match="although the output is finite"):
        th.Problem(network(), lambda z, y: z.sum() * float("inf"), (X, Y))


def test_inputs_that_all_samples_share_are_shared_by_parts_too():
    class WithTable(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3).double()

        def forward(self, x, table):
            return self.linear(x) + table.sum()

    table = torch.arange(5).double()
    problem = th.Problem(WithTable(), LOSS, [((X, table), Y)])
    plain = th.Problem(nn.Linear(4, 3).double(), LOSS, (X, Y))
    assert problem.samples == len(X)
    assert problem.sampling_error(lambda part: part.loss()) < 1.0
    assert plain.sampling_error(lambda part: part.loss()) > 0
    first = th.Problem(WithTable(), LOSS, [((torch.ones(1, 3).double(), X), Y)], check=False, params="linear*")
    assert first.samples == len(X)


class Jittered(torch.utils.data.Dataset):
    """A data set whose samples change at each reading, or do not."""

    def __init__(self, noise: float) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(2) + self.noise * torch.randn(2), torch.ones(1)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_samples_that_change_at_each_reading_are_noticed(noise):
    loader = DataLoader(Jittered(noise), batch_size=3)
    problem = th.Problem(nn.Linear(2, 1), nn.MSELoss(), loader)
    assert problem.data.varying == bool(noise)
    assert not problem.on((torch.ones(4, 2), torch.ones(4, 1))).data.varying
