"""What of all that a model returns is measured: mappings, dataclasses, named and nested tuples, several tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import theodolite as th
from theodolite.errors import OutputLossError
from theodolite.problem.tensors import map_tensors, named_tensors
from theodolite.testing import dense_gauss_newton, dense_hessian


@dataclass
class Found:
    hidden: Tensor
    scores: Tensor
    name: str = ""


@dataclass(frozen=True)
class Fixed:
    hidden: Tensor
    scores: Tensor


class Named(NamedTuple):
    hidden: Tensor
    scores: Tensor


#: How a model returns two tensors, and how a loss takes the second one out.
FORMS = {
    "mapping": (lambda h, s: {"hidden": h, "scores": s}, lambda out: out["scores"]),
    "dataclass": (Found, lambda out: out.scores),
    "frozen dataclass": (Fixed, lambda out: out.scores),
    "named tuple": (Named, lambda out: out.scores),
    "nested": (lambda h, s: (h, ({"scores": [s, None]},)), lambda out: out[1][0]["scores"][0]),
    "list": (lambda h, s: [h, s], lambda out: out[1]),
}


class Heads(nn.Module):
    def __init__(self, form: Any) -> None:
        super().__init__()
        self.body, self.scores, self.hidden, self.form = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 2), form

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.body(x))
        return self.form(self.hidden(h), self.scores(h))


def data(n: int = 7) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(n, 4, dtype=torch.float64), torch.arange(n) % 3


@pytest.fixture(params=FORMS)
def case(request):
    """A problem whose loss reads the second output, and the same model with that output alone."""
    build, take = FORMS[request.param]
    x, y = data()
    model = Heads(build).double()
    plain = nn.Sequential(model.body, nn.Tanh(), model.scores)
    own = ["body.*", "scores.*"]
    return th.Problem(model, lambda out, t: F.cross_entropy(take(out), t), (x, y), params=own), th.Problem(
        plain, F.cross_entropy, (x, y)
    )


def test_the_second_of_two_outputs_is_measured_where_the_loss_reads_it(case):
    found, plain = case
    assert torch.allclose(th.tangent_kernel(found), th.tangent_kernel(plain))
    assert torch.allclose(th.gauss_newton(found).to_dense(), th.gauss_newton(plain).to_dense())
    assert torch.allclose(th.agop(found), th.agop(plain))
    assert torch.allclose(th.kronecker_factors(found)["scores"].output, th.kronecker_factors(plain)["2"].output)
    assert torch.allclose(th.linearize(found)(data()[0]), plain.model(data()[0]))


def test_uneven_batches_of_structured_outputs_weigh_what_they_hold(case):
    found, plain = case
    x, y = data()
    parts = [(x[:2], y[:2]), (x[2:], y[2:])]
    assert th.Problem(found.model, found.loss_function, parts).loss() == pytest.approx(plain.loss(), rel=1e-12)


def test_a_squared_loss_of_one_entry_has_its_kernel_rate():
    x, _ = data()
    y = torch.randn(7, 3, dtype=torch.float64)
    model = Heads(FORMS["mapping"][0]).double()
    found = th.Problem(model, lambda out, t: (out["scores"] - t).square().mean(), (x, y), params=["body.*", "scores.*"])
    plain = th.Problem(nn.Sequential(model.body, nn.Tanh(), model.scores), nn.MSELoss(), (x, y))
    rates = [th.critical_learning_rate(p, by="kernel", progress=False).value for p in (found, plain)]
    assert rates[0] == pytest.approx(rates[1])
    with pytest.raises(ValueError, match=r"loss function of one tensor.*models=\['network'\]"):
        th.catapult_sweep(found, models=["linear"], progress=False)


class Pair(nn.Module):
    """Two outputs of different shape, the second computed from the first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = torch.tanh(self.a(x))
        return {"first": first, "second": self.b(first).reshape(-1, 2, 1)}


def of_both(out: dict[str, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(out["first"], target) + out["second"].square().mean() * 3


def test_several_outputs_are_measured_as_one_also_where_one_is_made_of_another():
    x, y = data()
    torch.manual_seed(1)
    model = Pair().double()
    problem = th.Problem(model, of_both, (x, y))
    assert problem.notes == ("the loss reads 2 of the model's outputs (first, second): they are measured as one",)

    def joined() -> Tensor:
        out = model(x)
        return torch.cat([out["first"], out["second"].flatten(1)], dim=1)

    def loss(z: Tensor) -> Tensor:
        return of_both({"first": z[:, :3], "second": z[:, 3:]}, y)

    parameters = list(model.parameters())
    assert torch.allclose(th.gauss_newton(problem).to_dense(), dense_gauss_newton(joined, loss, parameters))
    assert torch.allclose(th.hessian(problem).to_dense(), dense_hessian(lambda: of_both(model(x), y), parameters))
    assert th.tangent_kernel(problem).shape == (35, 35)


class OwnLoss(nn.Module):
    """Returns its own loss, of some of the tensors beside it; `aux` is no function of any of them."""

    def __init__(self, *, aux: bool = False, made_of: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 3), nn.Linear(4, 2), nn.Linear(4, 1)
        self.aux, self.made_of = aux, made_of

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        unread, first = self.c(x), self.a(x)
        second = first[:, :2] ** 2 if self.made_of else self.b(x)
        loss = F.cross_entropy(first, labels) + second.square().mean()
        loss = loss + self.c(x).tanh().mean() if self.aux else loss
        return {"loss": loss, "unread": unread, "first": first, "second": second}


def test_what_a_models_own_loss_reads_is_found_from_its_graph():
    x, y = data()
    torch.manual_seed(1)
    model = OwnLoss().double()
    batch = {"x": x, "labels": y}
    problem = th.Problem(model, None, batch)
    assert "2 of the model's outputs (first, second)" in problem.notes[0]

    def joined() -> Tensor:
        return torch.cat([model.a(x), model.b(x)], dim=1)

    def loss(z: Tensor) -> Tensor:
        return F.cross_entropy(z[:, :3], y) + z[:, 3:].square().mean()

    dense = dense_gauss_newton(joined, loss, list(model.parameters()))
    assert torch.allclose(th.gauss_newton(problem).to_dense(), dense)
    assert torch.allclose(th.gauss_newton(th.Problem(model, None, batch, check=False)).to_dense(), dense)
    kernel = th.tangent_kernel(th.Problem(model, None, batch, check=False, params=["a.*", "b.*"]))
    assert torch.allclose(kernel, th.tangent_kernel(problem))


def test_other_ways_of_a_models_own_loss_are_refused_and_still_train():
    x, y = data()
    hidden = th.Problem(OwnLoss(aux=True).double(), None, {"x": x, "labels": y})
    with pytest.raises(OutputLossError, match="a tensor that is not returned"):
        th.gauss_newton(hidden).to_dense()
    assert th.measures.audit.audit_parameters(hidden).unreached == ()
    entangled = th.Problem(OwnLoss(made_of=True).double(), None, {"x": x, "labels": y})
    with pytest.raises(OutputLossError, match="one is computed from another"):
        th.gauss_newton(entangled).to_dense()
    assert th.measures.audit.audit_parameters(entangled).unreached == ("b.weight", "b.bias", "c.weight", "c.bias")


def test_structures_keep_their_kind():
    transformers = pytest.importorskip("transformers")
    whole = transformers.modeling_outputs.CausalLMOutput(loss=torch.tensor(1.0), logits=torch.ones(2))
    doubled = map_tensors(lambda t: 2 * t, whole)
    assert type(doubled) is type(whole)
    assert doubled.logits is doubled["logits"]
    assert whole.logits.tolist() == [1.0, 1.0]
    assert doubled.logits.tolist() == [2.0, 2.0]
    tree = {"a": Named(torch.zeros(1), torch.ones(1)), "b": [Fixed(torch.zeros(1), torch.ones(1))]}
    assert [name for name, _ in named_tensors(tree)] == ["a.hidden", "a.scores", "b[0].hidden", "b[0].scores"]
    again = map_tensors(lambda t: t + 1, tree)
    assert isinstance(again["a"], Named)
    assert again["b"][0].scores.tolist() == [2.0]


# Mappings as inputs


class OfMapping(nn.Module):
    def __init__(self, own_loss: bool = False) -> None:
        super().__init__()
        self.linear, self.own_loss = nn.Linear(4, 3), own_loss

    def forward(self, batch: dict[str, Tensor], scale: float = 1.0) -> Any:
        scores = self.linear(batch["x"]) * scale
        return {"loss": F.cross_entropy(scores, batch["labels"]), "logits": scores} if self.own_loss else scores


def test_a_mapping_is_the_one_argument_of_a_model_that_takes_one():
    x, y = data()
    model, plain = OfMapping().double(), nn.Linear(4, 3).double()
    plain.load_state_dict(model.linear.state_dict())
    truth = th.Problem(plain, nn.CrossEntropyLoss(), (x, y))
    kernel = th.tangent_kernel(truth)
    for given in (({"x": x}, y), {"x": x, "labels": y}, [({"x": x}, y)], (({"x": x},), y)):
        problem = th.Problem(model, nn.CrossEntropyLoss(), given)
        assert problem.loss() == pytest.approx(truth.loss(), rel=1e-12)
        assert torch.allclose(th.tangent_kernel(problem, {"x": x}), kernel)
    own = th.Problem(OfMapping(own_loss=True).double(), None, {"x": x, "labels": y})
    assert own.samples == 7
    assert torch.allclose(th.tangent_kernel(model, {"x": x}), kernel)
    assert torch.allclose(th.agop(model, {"x": x}), th.agop(plain, x))
    assert th.linearize(model)({"x": x}).shape == (7, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert th.train(model, nn.CrossEntropyLoss(), [({"x": x}, y)], optimizer, steps=2).loss[0] == pytest.approx(truth.loss())
    monitor = th.Monitor(nn.CrossEntropyLoss(), budget=None)
    for step in range(2):
        monitor.observe(step, model, ({"x": x}, y), optimizer)
    assert len(monitor.report().looks) == 4  # on the batch and on the probe


def test_inputs_and_targets_may_both_be_mappings():
    x, y = data()
    model = Heads(FORMS["mapping"][0]).double()
    loss = lambda out, t: F.cross_entropy(out["scores"], t["label"])  # noqa: E731
    assert th.Problem(model, loss, ({"x": x}, {"label": y})).samples == 7


def test_a_mapping_of_keywords_that_the_model_does_not_know_is_named():
    x, y = data()
    with pytest.raises(ValueError, match="unexpected keyword argument 'other'"):
        th.Problem(Optional().double(), nn.CrossEntropyLoss(), {"x": x, "other": x, "labels": y})


class Optional(nn.Module):
    """Like Hugging Face models, it has no argument that must be given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        return self.linear(x)
