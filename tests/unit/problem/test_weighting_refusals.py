"""What batches weigh where the loss does not say what it divides by: recognised, or refused in plain words."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import theodolite as th
from theodolite.errors import WeightingError

GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(11, 6, generator=GENERATOR, dtype=torch.float64)
Y = torch.randint(3, (11,), generator=GENERATOR)
CE = nn.CrossEntropyLoss()
WEIGHT = torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def class_weighted(z, y):
    return F.cross_entropy(z, y, weight=WEIGHT)


@pytest.mark.parametrize(
    "batches",
    [
        [(X[c == Y], Y[c == Y]) for c in range(3)],
        [(X[i : i + 1], Y[i : i + 1]) for i in range(11)],
        [(X[:4], Y[:4]), (X[4:8], Y[4:8]), (X[8:], Y[8:])],
    ],
    ids=["sorted by class", "single samples", "mixed"],
)
def test_a_weighting_that_cannot_be_recognised_is_refused(batches):
    with pytest.raises(WeightingError, match="batch_weight"):
        th.Problem(network(), class_weighted, batches).loss()
    told = th.Problem(network(), class_weighted, batches, batch_weight=lambda b: float(WEIGHT[b.target].sum()))
    assert told.loss() == pytest.approx(th.Problem(network(), class_weighted, (X, Y)).loss(), rel=1e-12)


def test_a_rule_must_fit_every_batch():
    def ignore_zero(z, y):
        return F.cross_entropy(z, y, ignore_index=0)

    y = Y.clamp(min=1)
    y[-1] = 0  # the only ignored label is in the last batch
    with pytest.raises(WeightingError):
        th.Problem(network(), ignore_zero, [(X[i : i + 4], y[i : i + 4]) for i in range(0, 11, 4)]).loss()


def test_batches_of_ignored_labels_weigh_nothing():
    nothing = torch.full((5,), -100)
    for loss in (CE, nn.CrossEntropyLoss(weight=WEIGHT), F.cross_entropy):
        alone = th.Problem(network(), loss, (X[:6], Y[:6]))
        both = th.Problem(network(), loss, [(X[6:], nothing), (X[:6], Y[:6])])
        assert both.loss() == pytest.approx(alone.loss(), rel=1e-12)
        torch.testing.assert_close(th.hessian(both).to_dense(), th.hessian(alone).to_dense())
        with pytest.raises(ValueError, match="ignored"):
            th.Problem(network(), loss, (X[6:], nothing))


def test_weights_and_sums_do_not_mix():
    loss = nn.CrossEntropyLoss(reduction="sum")
    with pytest.raises(ValueError, match="batch_weight weighs means"):
        th.Problem(network(), loss, [(X, Y), (X, Y)], batch_weight=[1.0, 2.0]).loss()
    with pytest.raises(ValueError, match="batch_weight must be"):
        th.Problem(network(), CE, [(X, Y), (X, Y)], batch_weight=2.0).loss()


def test_broadcasting_targets_are_refused():
    model = nn.Linear(6, 1).double()
    with pytest.raises(ValueError, match=r"\(11, 1\).*\(11,\).*view"):
        th.Problem(model, nn.MSELoss(), (X, Y.double()))


def test_class_labels_beyond_the_weights_are_named():
    with pytest.raises(ValueError, match="Class labels must lie in 0"):
        th.Problem(network(), nn.CrossEntropyLoss(weight=WEIGHT), [(X, Y), (X, Y + 1)]).loss()
