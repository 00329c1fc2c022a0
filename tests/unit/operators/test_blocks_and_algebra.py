"""Blocks of layers in odd places, closed forms that do not apply, algebra of operators, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.errors import NonFiniteError
from theodolite.testing import dense_hessian

GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(11, 6, generator=GENERATOR, dtype=torch.float64)
Y = torch.randint(3, (11,), generator=GENERATOR)
CE = nn.CrossEntropyLoss()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def test_blocks_with_positions_before_the_flattening():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)).double()
    x, y = torch.randn(7, 2, 3, generator=torch.Generator().manual_seed(1)).double(), torch.randint(2, (7,))
    blocks = th.layer_hessians(th.Problem(model, CE, (x, y)))
    dense = dense_hessian(lambda: CE(model(x), y), list(model.parameters()))
    for name, op in blocks.items():
        where = blocks.positions(name)
        torch.testing.assert_close(op.to_dense(), dense[where][:, where])
    assert "closed form" not in blocks.cost().route


def test_each_layer_proves_its_own_batching():
    class Reversed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.norm, self.body = nn.Linear(6, 3), nn.GroupNorm(2, 6), nn.Linear(6, 6)

        def forward(self, x):
            return self.head(torch.tanh(self.norm(self.body(x))))

    model = Reversed().double()
    blocks = th.layer_hessians(th.Problem(model, CE, (X, Y)))
    dense = dense_hessian(lambda: CE(model(X), Y), list(model.parameters()))
    for name, op in blocks.items():
        where = blocks.positions(name)
        torch.testing.assert_close(op.to_dense(), dense[where][:, where])


def test_a_subclass_of_a_loss_gets_no_closed_form():
    class RootMeanSquare(nn.MSELoss):
        def forward(self, z, y):
            return super().forward(z, y).sqrt()

    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    y = torch.randn(11, 3).double()
    blocks = th.layer_hessians(th.Problem(model, RootMeanSquare(), (X, y)))
    dense = dense_hessian(lambda: RootMeanSquare()(model(X), y), list(model.parameters()))
    for name, op in blocks.items():
        where = blocks.positions(name)
        torch.testing.assert_close(op.to_dense(), dense[where][:, where])


def test_algebra():
    a, b = torch.randn(4, 4).double(), torch.randn(4, 4).double()
    one, two = th.operators.DenseOperator(a), th.operators.DenseOperator(b)
    torch.testing.assert_close((one @ two).to_dense(), a @ b)
    torch.testing.assert_close((one / 2).to_dense(), a / 2)
    identity = th.operators.IdentityOperator(4)
    torch.testing.assert_close((one + 0.5 * identity).to_dense(), a + 0.5 * torch.eye(4).double())
    with pytest.raises(TypeError):
        one + 3
    with pytest.raises(TypeError, match="to_scipy"):
        one @ np.ones(4)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: th.hessian(network()), ValueError, "wrap it"),
        (lambda: th.operators.DenseOperator(torch.zeros(0, 0)), ValueError, "entries"),
        (lambda: th.operators.DenseOperator(torch.full((2, 2), float("nan"))), NonFiniteError, "NaN"),
        (lambda: th.top_eigenpairs(torch.eye(3), 1, seed=None), ValueError, "seed must be an integer"),
        (lambda: th.top_eigenpairs({"a": torch.eye(3)}, 1, start=torch.eye(3)), ValueError, "start must be a mapping"),
        (lambda: th.top_eigenpairs({"a": torch.eye(3)}, 1, start={"b": torch.eye(3)}), ValueError, "none of the operators"),
    ],
)
def test_bad_arguments_say_what_to_do(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_complex_operators_are_refused():
    from scipy.sparse.linalg import aslinearoperator

    with pytest.raises(ValueError, match="real"):
        th.operators.as_operator(aslinearoperator(np.array([[1, 1j], [-1j, 1]])))


def test_a_product_with_wrong_blocks_is_explained():
    blocks = th.layer_hessians(th.Problem(network(), CE, (X, Y)))
    with pytest.raises(ValueError, match="expected a matrix"):
        blocks.products({"0": torch.ones(30)})
    with pytest.raises(ValueError, match="Got"):
        blocks.products({"0": torch.ones(29, 1)})
