"""Findings on planted cases: what was put there is found, by its name, with the right number."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import theodolite as th
from tests.unit.instruments.cases import bowl
from theodolite.results import Severity


def classes(seed: int = 0, samples: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(samples) % 3
    return torch.randn(samples, 6, generator=generator) + 2 * nn.functional.one_hot(y, 6), y


def classifier(*, hidden: int = 12, steps: int = 0) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, 3))
    if steps:
        x, y = classes()
        th.train(model, nn.CrossEntropyLoss(), (x, y), torch.optim.SGD(model.parameters(), lr=0.2), steps=steps)
    return model


def test_a_classifier_is_seen_to_learn_and_its_numbers_are_those_of_the_dense_hessian():
    x, y = classes()
    model = classifier(steps=100).double()
    problem = th.Problem(model, nn.CrossEntropyLoss(), (x.double(), y))
    (batch,) = problem.data
    dense = th.testing.dense_hessian(lambda: nn.CrossEntropyLoss()(model(*batch.args), batch.target), list(model.parameters()))
    truth = torch.linalg.eigvalsh(dense)
    found = th.survey(problem, lr=1.0 / float(truth[-1]), progress=False)
    assert found.sound
    by = {f.label: f for f in found.findings}
    state = found.of("progress")[0]
    assert state.severity is Severity.GOOD
    assert f"{math.log(3):.3g}" in state.sentence
    assert state.value == pytest.approx(problem.loss(), rel=1e-6)
    assert by["sharpness"].value == pytest.approx(float(truth[-1]), rel=1e-3)
    assert by["monotone"].value == pytest.approx(0.5, rel=1e-3)
    assert abs(by["trace"].value - float(truth.sum())) <= 4 * by["trace"].error
    smallest = next(f for f in found.of("negative"))
    assert smallest.value == pytest.approx(float(truth[0]), abs=2e-3 * float(truth[-1]))
    flat = float((truth.abs() < 0.01 * truth[-1]).double().mean())
    assert abs(by["conditioning"].value - flat) <= 5 * by["conditioning"].error + 0.02
    untrained = th.survey(classifier(), nn.CrossEntropyLoss(), (x, y), only=["progress"], progress=False)
    assert "progress unknown" in untrained.labels()


def test_a_dead_layer_is_named():
    x, y = classes()
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    nn.init.constant_(model[2].bias, -1e4)
    found = th.survey(model, nn.CrossEntropyLoss(), (x, y), progress=False)
    dead = [f for f in found.findings if f.label == "dead layer"]
    (found_dead,) = dead  # one finding, in which what follows from it is named
    assert found_dead.sentence.startswith("Layer 2 is dead: none of its 8 units moves an output")
    assert "nothing comes back to layer 0 before it; layer 4 behind it sees only zeros" in found_dead.sentence
    assert found_dead.severity is Severity.CRITICAL
    assert found_dead.cause == "dead layer"
    assert found_dead.value == 16
    assert not found.sound
    healthy = th.survey(classifier(), nn.CrossEntropyLoss(), (x, y), only=["parameters"], progress=False)
    assert healthy.labels().count("dead layer") == 0
    assert "all can train" in healthy.labels()


def test_a_head_that_starts_at_zero_is_no_death():
    x, y = classes()
    model = classifier()
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    found = th.survey(model, nn.CrossEntropyLoss(), (x, y), only=["parameters"], progress=False)
    assert "dead layer" not in found.labels()
    assert found.sound
    (note,) = [f for f in found.findings if f.label == "zero initialisation"]
    assert note.sentence.startswith("No gradient reaches 0 yet, because 2.weight")
    stuck = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    nn.init.zeros_(stuck[2].weight)
    nn.init.zeros_(stuck[2].bias)  # zero in front of a ReLU: no gradient, now or ever
    assert th.survey(stuck, nn.CrossEntropyLoss(), (x, y), only=["parameters"]).labels().count("dead layer") == 1


def test_single_dead_units_are_counted():
    x, y = classes()
    model = classifier()
    with torch.no_grad():
        model[0].bias[:4] = -1e4
    (found,) = [
        f for f in th.survey(model, nn.CrossEntropyLoss(), (x, y), only=["parameters"]).findings if f.label == "dead units"
    ]
    assert found.value == 4
    assert found.severity is Severity.NOTE  # a third of a layer is often dead in trainings that do well
    with torch.no_grad():
        model[0].bias[:10] = -1e4
    (most,) = [
        f for f in th.survey(model, nn.CrossEntropyLoss(), (x, y), only=["parameters"]).findings if f.label == "dead units"
    ]
    assert (most.value, most.severity, most.cause) == (10, Severity.WARNING, "dead units")


@pytest.mark.parametrize("copied", ["as it is", "scaled and mirrored"])
def test_a_duplicated_input_feature(copied):
    x, y = classes()
    x = x + 300  # far from zero: the copy is only as exact as float32
    x = torch.cat([x, x[:, 2:3] if copied == "as it is" else 3 - 5 * x[:, 2:3]], dim=1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 3))
    survey = th.survey(model, nn.CrossEntropyLoss(), (x, y), only=["inputs"])
    (found,) = [f for f in survey.findings if f.label == "duplicated feature"]
    assert "2 = 6" in found.sentence
    assert found.value == 1
    assert "duplicated feature" not in th.survey(classifier(), nn.CrossEntropyLoss(), classes(), only=["inputs"]).labels()


def test_duplicated_hidden_units():
    model = classifier()
    with torch.no_grad():
        model[0].weight[5], model[0].bias[5] = model[0].weight[1], model[0].bias[1]
        model[0].weight[7], model[0].bias[7] = model[0].weight[1], model[0].bias[1]
    found = th.survey(model, nn.CrossEntropyLoss(), classes(), only=["parameters"])
    (twin,) = [f for f in found.findings if f.label == "duplicated units"]
    assert twin.value == 2


def test_a_frozen_model_and_a_partly_frozen_one():
    x, y = classes()
    model = classifier()
    for p in model.parameters():
        p.requires_grad_(False)
    found = th.survey(model, nn.CrossEntropyLoss(), (x, y), progress=False)
    assert found.findings[0].label == "frozen model"
    assert found.findings[0].severity is Severity.CRITICAL
    assert "sharpness" in found.labels()  # measured all the same
    assert not any(p.requires_grad for p in model.parameters())
    model[2].weight.requires_grad_(True)
    partly = th.survey(model, nn.CrossEntropyLoss(), (x, y), only=["parameters"])
    (note,) = [f for f in partly.findings if f.label == "frozen parameters"]
    assert note.value == pytest.approx((6 * 12 + 12 + 3) / sum(p.numel() for p in model.parameters()))


def test_nan_in_one_batch_is_named():
    x, y = classes()
    batches = [(x[i : i + 100].clone(), y[i : i + 100]) for i in (0, 100, 200)]
    batches[1][0][3, 2] = float("nan")
    found = th.survey(classifier(), nn.CrossEntropyLoss(), batches, progress=False)
    assert found.findings[0].label == "not finite"
    assert found.findings[0].severity is Severity.CRITICAL
    assert "batch 1" in found.findings[0].sentence
    assert not found.sound
    with pytest.raises(ArithmeticError, match="batch 1"):
        th.Problem(classifier(), nn.CrossEntropyLoss(), batches)


class Logarithm(nn.Module):
    """Finite data, infinite loss where an input is zero."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return torch.log(x * self.weight)


def test_a_loss_that_is_not_finite_in_one_batch_is_named_and_nothing_else_is_measured():
    x = torch.ones(30, 1)
    x[25] = 0.0
    batches = [(x[i : i + 10], torch.zeros(10, 1)) for i in (0, 10, 20)]
    problem = th.Problem(Logarithm(), nn.MSELoss(), batches)
    found = th.survey(problem, progress=False)
    assert [f.label for f in found.findings] == ["not finite"]
    assert "batch 2" in found.findings[0].sentence
    assert set(found.results) == {"batches"}
    assert all(row["reason"] for row in found.plan)


def test_nan_in_a_weight_is_named():
    model = classifier()
    with torch.no_grad():
        model[2].weight[0, 0] = float("nan")
    found = th.survey(model, nn.CrossEntropyLoss(), classes(), progress=False)
    assert found.findings[0].label == "not finite"
    assert "2.weight" in found.findings[0].sentence


class Product(nn.Module):
    """w₁ w₂ x: a saddle at the origin."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(1).double()), nn.Parameter(torch.zeros(1).double())

    def forward(self, x):
        return self.a * self.b * x


def test_a_saddle_with_negative_curvature():
    one = torch.ones(4, 1).double()
    problem = th.Problem(Product(), nn.MSELoss(), (one, one))  # Hessian [[0, −2], [−2, 0]]
    found = th.survey(problem, lr=0.1, progress=False)
    (saddle,) = found.of("negative")
    assert saddle.label == "saddle"
    assert saddle.value == pytest.approx(-2.0)
    assert saddle.severity is Severity.WARNING
    assert {"stationary", "no effect"} <= set(found.labels())
    assert "alignment" not in found.results  # a zero gradient has no direction
    assert "failed" not in {row["state"] for row in found.plan}  # skipped, not failed
    assert not found.learning
    minimum = th.survey(bowl([4.0, 1.0]), only=["negative"]).of("negative")
    assert [f.label for f in minimum] == ["no negative curvature"]


def test_a_small_negative_eigenvalue_is_not_denied():
    class Quadratic(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(6).double())

        def forward(self, x):
            return (x * self.w.square()).sum(1, keepdim=True)

    curvature = torch.tensor([[1000.0, 1.0, 1.0, -0.5, 2.0, 3.0]]).double()
    problem = th.Problem(Quadratic(), lambda z, y: 0.5 * z.mean(), (curvature, torch.zeros(1, 1).double()))
    (found,) = th.survey(problem, only=["negative"]).of("negative")
    assert found.label == "negative curvature"
    assert found.value == pytest.approx(-0.5, rel=1e-6)


def test_rare_features_that_fall_together_are_no_copies():
    generator = torch.Generator().manual_seed(0)
    x = torch.zeros(60, 80)
    x[torch.arange(60), torch.randint(0, 80, (60,), generator=generator)] = 1.0
    x[7, [3, 4]] = 1.0
    model = nn.Linear(80, 2)
    found = th.survey(model, nn.CrossEntropyLoss(), (x, torch.arange(60) % 2), only=["inputs"])
    assert "duplicated feature" not in found.labels()


def test_class_weights_and_class_frequencies():
    x, y = classes()
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 10.0, 0.1]))
    assert "class weights" in th.survey(classifier(), weighted, (x, y), only=["weighting"]).labels()
    rare = (torch.arange(300) % 20 == 0).long()
    prior = nn.Linear(6, 2)
    nn.init.zeros_(prior.weight)
    with torch.no_grad():
        prior.bias.copy_(torch.tensor([0.95, 0.05]).log())
    for reduction in ("mean", "sum"):
        loss = nn.CrossEntropyLoss(reduction=reduction)
        result = th.survey(prior, loss, (x, rare), only=["progress"]).results["progress"]
        assert result.trivial == pytest.approx(th.Problem(prior, loss, (x, rare)).loss(), rel=1e-5)


@pytest.mark.parametrize(("normalised", "label"), [(False, "rank-one inputs"), (True, "normalised inputs")])
def test_what_a_normalisation_layer_does_to_the_inputs(normalised, label):
    """Behind a ReLU inputs are nearly their mean; a batch norm without scale and shift takes it away."""
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(30, affine=False)] if normalised else []
    model = nn.Sequential(nn.Linear(6, 30), nn.ReLU(), *middle, nn.Linear(30, 3)).double()
    x, y = classes()
    model.train()(x.double())
    for _ in range(60):  # running statistics
        model(x.double())
    problem = th.Problem(model, nn.CrossEntropyLoss(), (x.double(), y))
    survey = th.survey(problem, only=["structure"], progress=False)
    assert label in survey.labels()
    (found,) = [f for f in survey.findings if f.label == "factorisation"]
    report = survey.results["structure"]
    assert found.value == pytest.approx(sum(row["decoupling_error"] for row in report.rows()) / len(report))


def test_uneven_batches_and_ignored_labels():
    x, y = classes()
    y = y.clone()
    y[:30] = -100
    batches = [(x[:128], y[:128]), (x[128:256], y[128:256]), (x[256:], y[256:])]
    found = th.survey(classifier(), nn.CrossEntropyLoss(), batches, only=["weighting"])
    by = {f.label: f for f in found.findings}
    assert by["ignored labels"].value == pytest.approx(0.1)
    assert "44 to 128" in by["uneven batches"].sentence
    audit = found.results["weighting"]
    assert by["uneven batches"].value == pytest.approx(audit.naive_loss - audit.loss)
    whole = th.Problem(classifier(), nn.CrossEntropyLoss(), (x, y))
    assert audit.loss == pytest.approx(whole.loss(), rel=1e-5)


def test_tied_weights_are_counted_once_and_named():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x))

    torch.manual_seed(0)
    tokens = torch.randint(0, 5, (20,))
    found = th.survey(Tied(), nn.CrossEntropyLoss(), (tokens, tokens), only=["parameters"])
    (tied,) = [f for f in found.findings if f.label == "tied parameters"]
    assert "embed.weight" in tied.sentence
    assert "head.weight" in tied.sentence
