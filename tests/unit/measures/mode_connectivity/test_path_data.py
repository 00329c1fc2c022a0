"""A path takes states, data and models in many forms."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.unit.measures.mode_connectivity.solutions import direct, permuted
from theodolite.measures.mode_connectivity import interpolate_states, linear_path
from theodolite.problem.accuracy import right_answers


def test_forms_of_states(tmp_path, solution, data):
    other = permuted(solution)
    save_file(other.state_dict(), tmp_path / "b.safetensors")
    torch.save({"state_dict": other.state_dict()}, tmp_path / "b.pt")
    vector = torch.cat([p.detach().flatten() for p in other.parameters()])
    forms = [other, other.state_dict(), str(tmp_path / "b.safetensors"), tmp_path / "b.pt", vector]
    found = [linear_path(solution, solution, form, data, alphas=[0.4]).train_loss for form in forms]
    assert all(torch.equal(one, found[0]) for one in found)


def test_forms_of_data(solution, data):
    x, y = data
    other = permuted(solution)
    uneven = [(x[:7], y[:7]), (x[7:200], y[7:200]), (x[200:], y[200:])]
    single = [(x[i : i + 1], y[i : i + 1]) for i in range(len(y))]
    forms = [data, uneven, TensorDataset(x, y), DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True), single]

    class Own(torch.utils.data.Dataset):
        def __len__(self):
            return len(y)

        def __getitem__(self, i):
            return x[i], y[i]

    for form in (*forms, Own()):
        path = linear_path(solution, solution, other, form, form, alphas=[0.4], batch_size=50)
        whole = linear_path(solution, solution, other, data, alphas=[0.4], batch_size=10_000)
        assert torch.allclose(path.train_loss, whole.train_loss, rtol=1e-12)
        assert torch.equal(path.train_accuracy, whole.train_accuracy)
        assert torch.allclose(path.test_loss, path.train_loss, rtol=1e-12)


class Tied(nn.Module):
    """An embedding used twice, a frozen layer, an integer and a complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6, bias=False)
        self.again = nn.Linear(6, 6, bias=False)
        self.again.weight = self.embed.weight
        self.head = nn.Linear(6, 4).requires_grad_(False)
        self.register_buffer("turn", torch.tensor([1 + 0.5j]))
        self.register_buffer("order", torch.arange(6))

    def forward(self, x):
        hidden = torch.tanh(self.again(torch.tanh(self.embed(x[:, self.order]))))
        return self.head(hidden * self.turn.abs().to(x.dtype))


def test_tied_frozen_integer_and_complex(tmp_path, data):
    torch.manual_seed(0)
    a, b = Tied().double(), Tied().double()
    b.turn.mul_(2)
    b.order.copy_(torch.arange(5, -1, -1))
    path = linear_path(Tied().double(), a, b.state_dict(), data, alphas=[0.5])
    for i, model in ((2, a), (0, b)):
        assert float(path.train_loss[i]) == pytest.approx(direct(model, data)[0], abs=1e-12)
    middle = Tied().double()
    middle.load_state_dict(interpolate_states(a.state_dict(), b.state_dict(), 0.5))
    assert float(path.train_loss[1]) == pytest.approx(direct(middle, data)[0], abs=1e-12)
    save_model(b.float(), str(tmp_path / "b.safetensors"))  # keeps one of the tied names; single precision
    stored = linear_path(Tied().double(), a, tmp_path / "b.safetensors", data, alphas=[0.5])
    assert torch.allclose(stored.train_loss, path.train_loss, atol=1e-5)


def test_half_precision_is_evaluated_in_float32(solution, data):
    x, y = data
    a, b = copy.deepcopy(solution).bfloat16(), permuted(solution).bfloat16()
    path = linear_path(copy.deepcopy(a), a, b, (x.float(), y), alphas=[0.5])
    assert float(path.train_accuracy[-1]) == direct(copy.deepcopy(a).float(), (x.float(), y))[1]


def test_regression_has_a_loss_profile_only(data):
    x, _ = data
    a, b = nn.Linear(6, 2).double(), nn.Linear(6, 2).double()
    path = linear_path(a, a, b, (x, x[:, :2]), (x, x[:, 2:4]), loss=nn.MSELoss())
    assert path.train_accuracy is path.barrier_train is path.barrier_test is path.accuracy_error() is None
    assert path.loss_barrier_train == pytest.approx(0.0, abs=1e-12)
    assert path.connected
    assert "judged by the loss" in path.sentence()
    assert float(path.train_loss[50]) == pytest.approx(functional.mse_loss(a(x), x[:, :2]).item(), abs=1e-12)
    with pytest.raises(ValueError, match=r"name a loss"):
        linear_path(a, a, b, (x, x[:, :2]))


def test_a_loss_barrier_where_there_is_no_accuracy(solution, data):
    path = linear_path(solution, solution, permuted(solution), data, accuracy=None)
    assert path.train_accuracy is None
    assert not path.connected
    assert "A loss barrier of" in path.sentence()


def test_own_accuracy(solution, data):
    path = linear_path(
        solution, solution, permuted(solution), data, accuracy=lambda out, y: (out.topk(2, dim=1).indices == y[:, None]).any(1)
    )
    plain = linear_path(solution, solution, permuted(solution), data)
    assert bool((path.train_accuracy >= plain.train_accuracy).all())


class Speaker(nn.Module):
    """Returns its own loss, as language models do: position t predicts the label at t + 1."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Embedding(5, 5)

    def forward(self, input_ids, labels=None):
        logits = self.body(input_ids)
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def test_models_with_their_own_loss():
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 5, (40, 6), generator=g)
    a, b = Speaker().double(), Speaker().double()
    path = linear_path(a, a, b, [{"input_ids": ids[:10], "labels": ids[:10]}, {"input_ids": ids[10:], "labels": ids[10:]}])
    logits = a.body(ids)
    assert float(path.train_loss[50]) == pytest.approx(a(ids, ids)["loss"].item(), abs=1e-12)
    assert float(path.train_accuracy[50]) == float((logits[:, :-1].argmax(-1) == ids[:, 1:]).double().mean())


def test_right_answers():
    assert right_answers(torch.tensor([[2.0], [-1.0]]), torch.tensor([[1.0], [1.0]])).tolist() == [True, False]
    assert right_answers(torch.tensor([2.0, -1.0]), torch.tensor([-1, -1])).tolist() == [False, True]
    assert right_answers(torch.tensor([2.0, -1.0]), torch.tensor([1.0, 0.0])) is None
    assert right_answers(torch.tensor([2.0, -1.0]), torch.tensor([1.0, 0.0]), nn.BCEWithLogitsLoss()).tolist() == [True, True]
    one_hot = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert right_answers(torch.tensor([[0.0, 3.0], [0.0, 3.0]]), one_hot).tolist() == [True, False]
    assert right_answers(torch.randn(2, 2), torch.randn(2, 2)) is None
    assert right_answers(torch.tensor([[0.0, math.nan], [0.0, 3.0]]), torch.tensor([1, 1])).tolist() == [False, True]
    pixels = torch.randn(3, 4, 5)  # (B, C, T)
    labels = pixels.argmax(1)
    labels[0, 0] = -100
    assert right_answers(pixels, labels, nn.CrossEntropyLoss()).tolist() == [True] * 14
    tokens = torch.randn(3, 5, 7)
    assert right_answers(tokens, tokens.argmax(-1)).all()


def test_the_loss_is_taken_in_float64():
    """A confident network in single precision: the loss of a right answer is e^-40, not 0."""
    model = nn.Linear(1, 2, bias=False)
    state = {"weight": torch.tensor([[40.0], [0.0]])}
    path = linear_path(model, state, state, (torch.ones(1, 1), torch.tensor([0])))
    assert float(path.train_loss[50]) == pytest.approx(math.exp(-40), rel=1e-4)


def test_ignored_labels_and_class_weights(solution, data):
    x, y = data
    some = torch.where(torch.arange(300) % 3 == 0, -100, y)
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]).double())
    path = linear_path(solution, solution, solution, (x, some), loss=loss, batch_size=70, alphas=[0.5])
    expected = functional.cross_entropy(solution(x), some, weight=loss.weight)
    assert float(path.train_loss[0]) == pytest.approx(expected.item(), rel=1e-12)
    assert path.train_samples == 200
