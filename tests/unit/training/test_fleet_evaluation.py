"""Losses and accuracies of a fleet on whole data sets: those of one call of the loss, however the models are run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.training.fleets import recorder

SIZE = 30
X = torch.randn(SIZE, 4, generator=torch.Generator().manual_seed(0)).double()
LABELS = torch.cat([torch.zeros(12), torch.ones(8), torch.full((10,), 2.0)]).long()
VALUES = torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(2)).double()
IGNORING = LABELS.masked_fill(torch.arange(SIZE) < 14, -100)


def factory(seed: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def half_sum(output, target):
    return 0.5 * (output - target).square().sum()


def from_tuple(output, target):
    """A loss that wants the whole output of the model."""
    main, extra = output
    return half_sum(main, target) + extra.square().mean()


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = factory(0)

    def forward(self, x):
        main = self.inner(x)
        return main, main.sum(1)


CASES = {
    "half a sum": (half_sum, VALUES, factory),
    "class weights": (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 9.0, 0.2]).double()), LABELS, factory),
    "ignored labels": (nn.CrossEntropyLoss(), IGNORING, factory),
    "a summed loss": (nn.CrossEntropyLoss(reduction="sum"), LABELS, factory),
    "a mean": (nn.MSELoss(), VALUES, factory),
    "a loss of the whole output": (from_tuple, VALUES, lambda seed: Pair()),
}


@pytest.mark.parametrize("route", ["vmap", "loop"])
@pytest.mark.parametrize("name", CASES)
def test_parts_do_not_show_in_the_loss(name, route, monkeypatch):
    """Test and final losses are those of the loss of all outputs, also where data goes through in parts of 7 samples."""
    loss, target, make = CASES[name]
    monkeypatch.setattr(recorder, "EVALUATED_AT_ONCE", 14)
    fleet = th.Fleet(make, [0, 1], loss=loss, rate=[1e-3, 2e-3], route=route)
    run = fleet.train((X, target), steps=2, test=(X, target), evaluate=True, progress=False)
    for r in range(2):
        with torch.no_grad():
            exact = float(loss(fleet.model(r)(X), target))
        assert float(run.final_loss[r]) == pytest.approx(exact, rel=1e-12)
        assert float(run.test_loss[r, -1]) == pytest.approx(exact, rel=1e-12)


def test_ignored_labels_are_neither_right_nor_wrong():
    fleet = th.Fleet(factory, [0, 1], loss=nn.CrossEntropyLoss(), rate=0.1)
    run = fleet.train((X, LABELS), steps=3, test=(X, IGNORING), progress=False)
    counted = IGNORING >= 0
    for r in range(2):
        right = fleet.model(r)(X).argmax(1) == IGNORING
        assert float(run.test_accuracy[r, -1]) == pytest.approx(float(right[counted].double().mean()), rel=1e-12)
    other = th.Fleet(factory, [0], loss=nn.CrossEntropyLoss(ignore_index=2), rate=0.1)
    run = other.train((X, LABELS), steps=1, test=(X, LABELS), progress=False)
    right = other.model(0)(X).argmax(1) == LABELS
    assert float(run.test_accuracy[0, -1]) == pytest.approx(float(right[LABELS != 2].double().mean()), rel=1e-12)


@pytest.mark.parametrize("route", ["vmap", "loop"])
@pytest.mark.parametrize(
    ("test", "message"),
    [
        ((X[:, :2], VALUES), r"test data does not fit.*\(30, 2\).*30x2 and 4x5"),
        ((X, VALUES[:, :1]), r"test data does not fit.*\(30, 3\).*\(30, 1\)"),
        ((X, VALUES[:7]), r"test data does not fit.*\(30, 3\).*\(7, 3\)"),
    ],
)
def test_test_data_that_does_not_fit_is_refused_in_its_own_shapes(test, message, route):
    fleet = th.Fleet(factory, 2, loss=nn.MSELoss(), rate=0.1, route=route)
    with pytest.raises(ValueError, match=message):
        fleet.train((X, VALUES), steps=1, test=test, progress=False)
