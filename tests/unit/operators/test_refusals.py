"""What operators refuse rather than return a wrong number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import theodolite as th
from theodolite.errors import StaleOperatorError, SymmetryError
from theodolite.operators import LinearOperator


class Lopsided(LinearOperator):
    """Calls itself symmetric and is not; its product number `interrupted` is broken off."""

    def __init__(self, interrupted: int = 0) -> None:
        super().__init__((4, 4), dtype=torch.float64, symmetric=True)
        self.calls, self.interrupted = 0, interrupted

    def _matmat(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.interrupted:
            raise KeyboardInterrupt
        return torch.arange(16.0).double().view(4, 4) @ x


@pytest.mark.parametrize("interrupted", [0, 1, 2, 3])
def test_an_interrupted_probe_begins_anew(interrupted):
    op = Lopsided(interrupted)
    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            op @ torch.ones(4).double()
    for _ in range(2):
        with pytest.raises(SymmetryError, match="calls itself symmetric"):
            op @ torch.ones(4).double()


def test_a_tiny_operator_in_float32_is_not_called_lopsided():
    matrix = torch.diag(torch.tensor([3.0, 2.0, 1.0])) * 1e-30
    torch.testing.assert_close(th.operators.as_operator(matrix) @ torch.ones(3), matrix.diagonal(), rtol=1e-6, atol=0.0)


def test_a_block_without_columns_is_refused():
    with pytest.raises(ValueError, match=r"k of at least 1. Got \(3, 0\)"):
        th.operators.as_operator(torch.eye(3)) @ torch.ones(3, 0)


class OwnLoss(nn.Module):
    """Returns its loss as it is, in a dictionary, or beside its logits."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.net, self.form = nn.Linear(3, 2).double(), form

    def forward(self, x: Tensor, labels: Tensor) -> Tensor | dict[str, Tensor]:
        logits = self.net(x)
        loss = F.cross_entropy(logits, labels)
        return {"scalar": loss, "dictionary": {"loss": loss}, "logits": {"loss": loss, "logits": logits}}[self.form]


@pytest.mark.parametrize("form", ["scalar", "dictionary", "logits"])
def test_gauss_newton_needs_the_output_beside_the_loss(form):
    """Of a loss alone the Gauss-Newton matrix would be zero, which is no answer."""
    x, labels = torch.randn(6, 3).double(), torch.randint(2, (6,))
    model = OwnLoss(form)
    op = th.gauss_newton(th.Problem(model, None, {"x": x, "labels": labels}))
    if form == "logits":
        expected = th.gauss_newton(th.Problem(model.net, nn.CrossEntropyLoss(), (x, labels)))
        torch.testing.assert_close(op.to_dense(), expected.to_dense())
        return
    with pytest.raises(ValueError, match="returns only its loss"):
        op.to_dense()


@pytest.mark.parametrize("keep", ["auto", "always", "never"])
@pytest.mark.parametrize("shared", [False, True])
def test_data_written_into_makes_an_operator_stale(keep, shared):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)).double()
    memory = np.random.default_rng(0).normal(size=(6, 1, 8))
    x = torch.from_numpy(memory) if shared else torch.from_numpy(memory).clone()
    problem = th.Problem(model, nn.CrossEntropyLoss(), (x, torch.arange(6) % 2))
    op = th.hessian(problem, keep=keep)
    op.to_dense()
    torch.testing.assert_close(op.to_dense(), op.to_dense())
    if shared:
        memory *= 2  # torch sees no new version
    else:
        x.mul_(2)
    for _ in range(2):
        with pytest.raises(StaleOperatorError, match="data"):
            op.to_dense()
