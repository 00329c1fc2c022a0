"""Uneven batches give the full-batch operator, whatever the loss divides by."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import theodolite as th
from theodolite.errors import NonFiniteError, WeightingError


def network(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def split(x: torch.Tensor, y: torch.Tensor, sizes: tuple[int, ...] = (128, 128, 44)) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(x.split(list(sizes)), y.split(list(sizes)), strict=True))


X = torch.randn(300, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
CLASSES = torch.randint(3, (300,), generator=torch.Generator().manual_seed(2))
IGNORING = torch.where(torch.arange(300) % 7 < torch.arange(300) // 60, -100, CLASSES)  # ever more ignored labels
REAL = torch.randn(300, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
WEIGHTS = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)

LOSSES = {
    "cross-entropy": (nn.CrossEntropyLoss(), CLASSES),
    "ignored labels": (nn.CrossEntropyLoss(), IGNORING),
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHTS), IGNORING),
    "class probabilities": (nn.CrossEntropyLoss(), F.softmax(REAL, dim=1)),
    "mse": (nn.MSELoss(), REAL),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), IGNORING),
    "batchmean": (nn.KLDivLoss(reduction="batchmean"), F.softmax(REAL, dim=1)),
    "function, mean": (lambda z, y: F.cross_entropy(z, y), CLASSES),
    "function, ignoring": (lambda z, y: F.cross_entropy(z, y), IGNORING),
    "function, sum": (lambda z, y: F.cross_entropy(z, y, reduction="sum"), IGNORING),
    "function, row sums": (lambda z, y: (z - y).square().sum(1).mean(), REAL),
    "soft margin": (nn.MultiLabelSoftMarginLoss(), (REAL > 0).double()),
}


@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize("make", [th.hessian, th.gauss_newton], ids=["hessian", "gauss-newton"])
def test_uneven_batches_give_the_full_batch_operator(name, make):
    loss, y = LOSSES[name]
    model = network()
    v = torch.randn(sum(p.numel() for p in model.parameters()), 2, dtype=torch.float64)
    full = make(th.Problem(model, loss, (X, y))) @ v
    parts = th.Problem(model, loss, split(X, y))
    scale = float(full.abs().max())
    assert float((make(parts) @ v - full).abs().max()) <= 1e-10 * max(scale, 1e-12)
    whole = th.Problem(model, loss, (X, y))
    assert parts.loss() == pytest.approx(whole.loss(), rel=1e-12)
    torch.testing.assert_close(parts.gradient(), whole.gradient(), rtol=1e-10, atol=1e-12)


def test_single_precision_batches_are_summed_in_double():
    model = network().float()
    v = torch.randn(sum(p.numel() for p in model.parameters()))
    full = th.hessian(th.Problem(model, nn.CrossEntropyLoss(), (X.float(), CLASSES))) @ v
    parts = th.hessian(th.Problem(model, nn.CrossEntropyLoss(), split(X.float(), CLASSES))) @ v
    assert float((full - parts).norm() / full.norm()) < 1e-5


class TinyLanguageModel(nn.Module):
    """Returns its own loss, shifted by one position, as Hugging Face causal models do."""

    def __init__(self, shift: bool) -> None:
        super().__init__()
        self.embedding, self.head, self.shift = nn.Embedding(6, 4), nn.Linear(4, 6), shift

    def forward(self, input_ids, labels=None):
        logits = self.head(torch.tanh(self.embedding(input_ids)))
        z, y = (logits[:, :-1], labels[:, 1:]) if self.shift else (logits, labels)
        loss = F.cross_entropy(z.reshape(-1, 6), y.reshape(-1))
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize("shift", [True, False])
def test_language_model_batches_are_weighted_by_their_tokens(shift):
    torch.manual_seed(0)
    model = TinyLanguageModel(shift).double()
    ids = torch.randint(6, (7, 5))
    labels = ids.clone()
    labels[0, 1:] = -100
    labels[1, 3:] = -100
    labels[5:, 2:] = -100
    full = {"input_ids": ids, "labels": labels}
    batches = [{k: v[rows] for k, v in full.items()} for rows in (slice(0, 2), slice(2, 6), slice(6, 7))]
    whole, parts = th.Problem(model, None, full), th.Problem(model, None, batches)
    assert parts.weighting.rule == ("shifted labels" if shift else "labels")
    v = torch.randn(whole.size, dtype=torch.float64)
    for make in (th.hessian, th.gauss_newton):
        expected = make(whole) @ v
        assert float((make(parts) @ v - expected).abs().max()) <= 1e-10 * float(expected.abs().max())


def test_hugging_face_causal_batches():
    from tests.unit.cases import gpt2, make

    case = make(gpt2)
    ids = torch.randint(1, 7, (5, 5))
    labels = ids.clone()
    labels[0, 2:] = -100
    labels[3:, 1:4] = -100
    full = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
    batches = [{k: v[:2] for k, v in full.items()}, {k: v[2:] for k, v in full.items()}]
    whole, parts = th.Problem(case.model, None, full), th.Problem(case.model, None, batches)
    v = torch.randn(whole.size, dtype=torch.float64)
    expected = th.hessian(whole) @ v
    assert float((th.hessian(parts) @ v - expected).abs().max()) <= 1e-10 * float(expected.abs().max())


def test_loss_functions_that_no_rule_explains_need_a_weight():
    model = network()

    def odd(z, y):
        return F.cross_entropy(z, y, reduction="sum") / len(y) ** 1.5

    with pytest.raises(WeightingError, match="batch_weight"):
        th.Problem(model, odd, split(X, CLASSES)).loss()
    given = th.Problem(model, odd, split(X, CLASSES), batch_weight=lambda batch: batch.size**1.5)
    assert given.weighting.rule == "given"
    listed = th.Problem(model, odd, split(X, CLASSES), batch_weight=[128**1.5, 128**1.5, 44**1.5])
    assert listed.loss() == pytest.approx(given.loss())
    with pytest.raises(ValueError, match="one weight per batch"):
        th.Problem(model, odd, split(X, CLASSES), batch_weight=[1.0]).loss()


def test_reduction_none_is_refused():
    with pytest.raises(ValueError, match="reduction"):
        th.Problem(network(), nn.CrossEntropyLoss(reduction="none"), (X, CLASSES)).loss()


def test_all_labels_ignored_is_refused():
    nothing = torch.full((300,), -100)
    with pytest.raises((ValueError, ArithmeticError), match=r"ignored|nan|NaN"):
        th.Problem(network(), nn.CrossEntropyLoss(), (X, nothing)).loss()


class OwnIgnored(nn.Module):
    """A loss of no known type with a label of its own to ignore: the rule is found by trial."""

    ignore_index = 255

    def forward(self, z, y):
        return F.cross_entropy(z, y, ignore_index=255)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(ignore_index=255), nn.NLLLoss(ignore_index=255), OwnIgnored()])
@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
def test_a_batch_ignored_by_the_label_of_the_loss_weighs_nothing(loss, first):
    model = nn.Sequential(network(), nn.LogSoftmax(1))
    some = CLASSES.clone()
    some[:20] = 255
    empty, full, partly = (X[:7], torch.full((7,), 255)), (X, CLASSES), (X, some)
    batches = [empty, partly, full] if first else [partly, full, empty]
    truth = float(loss(model(torch.cat([X, X])), torch.cat([some, CLASSES])).detach())
    problem = th.Problem(model, loss, batches)
    assert problem.loss() == pytest.approx(truth, rel=1e-12)
    assert problem.weighting.rule == "labels"
    assert problem.num_weighted_batches == 2


def test_all_labels_ignored_by_the_label_of_the_loss_is_said():
    with pytest.raises(ValueError, match=r"Every label of the data is 255, which is ignored.*another ignore_index"):
        th.Problem(network(), nn.CrossEntropyLoss(ignore_index=255), (X, torch.full((300,), 255)))


def test_the_first_batch_that_counts_is_named_by_its_place():
    nothing = torch.full((300,), -100)
    with pytest.raises(NonFiniteError, match="The loss of batch 1 is inf"):
        th.Problem(network(), lambda z, y: F.cross_entropy(z, y) / 0.0, [(X, nothing), (X, CLASSES)])


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ([1.0, float("inf")], r"finite and non-negative\. Batch 1 weighs inf: give"),
        ([float("nan"), 1.0], r"finite and non-negative\. Batch 0 weighs nan"),
        ([1.0, -2.0], r"finite and non-negative\. Batch 1 weighs -2\.0"),
        (lambda batch: float("inf"), "Batch 0 weighs inf"),
        ([0.0, 0.0], "positive and finite sum"),
        ([1e308, 1e308], "positive and finite sum"),
        ("samples", r"function of the batch.*one number per batch\. Got 'samples'; for samples give lambda batch: batch\.size"),
        ("12", "one number per batch"),
        ({0: 1.0, 1: 2.0}, "one number per batch"),
        ([1.0, None], "one number per batch.* Got None"),
        (lambda batch: "many", "returns a number.* Got 'many'"),
    ],
)
def test_weights_that_are_no_weights_are_refused(weight, message):
    data = [(X, CLASSES), (X, CLASSES)]
    with pytest.raises(ValueError, match=message):
        th.Problem(network(), nn.CrossEntropyLoss(), data, batch_weight=weight)
    unchecked = th.Problem(network(), nn.CrossEntropyLoss(), data, batch_weight=weight, check=False)
    with pytest.raises(ValueError, match=message):
        unchecked.loss()


def test_a_loss_that_is_not_a_number_in_a_later_batch_is_named():
    def breaks(z, y):
        return F.cross_entropy(z, y) * (float("nan") if len(z) == 44 else 1.0)

    with pytest.raises(NonFiniteError, match=r"The loss of batch 2 is nan.*batch_weight"):
        th.Problem(network(), breaks, split(X, CLASSES)).loss()
    kept = th.Problem(network(), breaks, split(X, CLASSES), batch_weight=[128, 128, 0])
    assert kept.loss() == pytest.approx(float(F.cross_entropy(network()(X[:256]), CLASSES[:256]).detach()), rel=1e-12)


def test_a_shuffling_loader_is_harmless():
    model = network()
    loader = DataLoader(TensorDataset(X, CLASSES), batch_size=64, shuffle=True)
    problem = th.Problem(model, nn.CrossEntropyLoss(), loader)
    assert problem.loss() == problem.loss()
    assert problem.loss() == pytest.approx(th.Problem(model, nn.CrossEntropyLoss(), (X, CLASSES)).loss(), rel=1e-12)


def test_sampling_error_of_the_loss():
    """The jackknife error of a mean is its textbook standard error."""
    problem = th.Problem(network(), nn.CrossEntropyLoss(), split(X, CLASSES))
    with torch.no_grad():
        losses = F.cross_entropy(problem.model(X), CLASSES, reduction="none")
    textbook = float(losses.std()) / 300**0.5
    error = problem.sampling_error(lambda p: p.loss(), groups=150)
    assert error == pytest.approx(textbook, rel=0.25)
    assert problem.sampling_error(lambda p: p.loss(), groups=150, population=400) == pytest.approx(error / 2, rel=1e-6)
    assert problem.sampling_error(lambda p: p.loss(), groups=150, population=300) == 0.0
