"""Blocks of layers in odd places, closed forms that do not apply, algebra of operators, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse.linalg
import torch
from torch import nn

import theodolite as th
from theodolite.errors import NonFiniteError
from theodolite.operators.algebra import DiagonalOperator, congruent
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
        (lambda: th.hessian(network()), TypeError, r"problem takes a theodolite\.Problem"),
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


INTEGERS = np.array([[2, 1], [1, 3]])


@pytest.mark.parametrize(
    "source",
    [
        INTEGERS,
        INTEGERS.astype(np.uint8),
        INTEGERS.astype(np.float16),
        INTEGERS.astype(np.longdouble),
        INTEGERS.astype(">f8"),
        torch.tensor(INTEGERS),
        torch.tensor(INTEGERS).half(),
        torch.tensor(INTEGERS).to_sparse(),
        scipy.sparse.csr_array(INTEGERS),
        scipy.sparse.linalg.aslinearoperator(INTEGERS),
    ],
    ids=lambda source: f"{type(source).__name__} {source.dtype}",
)
def test_numbers_of_any_width_are_the_matrix_they_say(source):
    op = th.operators.as_operator(source)
    assert op.dtype in (torch.float32, torch.float64)
    assert (op @ torch.tensor([0.25, 0.5]).double()).tolist() == [1.0, 1.75]
    assert th.top_eigenpairs(source, 2, tol=1e-6).values.tolist() == pytest.approx([2.5 + 1.25**0.5, 2.5 - 1.25**0.5], rel=1e-5)


def test_an_integer_diagonal_does_not_cut_what_it_multiplies():
    assert (DiagonalOperator(torch.tensor([2, 3])) @ torch.tensor([0.5, 0.5])).tolist() == [1.0, 1.5]


def test_operands_of_different_widths_meet_in_the_wider_one():
    narrow, wide = torch.tensor([[1.0, 0.25], [0.25, 2.0]]), torch.tensor([[3.0, 0.5], [0.5, 1.0]]).double()
    a, b = th.operators.as_operator(narrow), th.operators.as_operator(wide)
    for made, dense in (
        (a + b, narrow + wide),
        (a @ b, narrow.double() @ wide),
        (a.kron(b), torch.kron(narrow.double(), wide)),
        (congruent(a, wide[0]), wide[0, :, None] * narrow * wide[0]),
    ):
        x = torch.linspace(0.1, 1, dense.shape[1]).double()
        assert (made @ x).dtype == torch.float64
        torch.testing.assert_close(made @ x, dense.double() @ x)
        torch.testing.assert_close((made @ x.float()).double(), dense.double() @ x, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("source", [np.array([["a"]]), np.array([[None]]), np.eye(2) * 1j, torch.eye(2) * 1j])
def test_what_holds_no_real_numbers_is_refused(source):
    with pytest.raises(ValueError, match=r"Only real (operators|matrices) are accepted"):
        th.operators.as_operator(source)


def test_complex_operators_are_refused():
    from scipy.sparse.linalg import aslinearoperator

    with pytest.raises(ValueError, match="real"):
        th.operators.as_operator(aslinearoperator(np.array([[1, 1j], [-1j, 1]])))


def test_a_product_with_wrong_blocks_is_explained():
    blocks = th.layer_hessians(th.Problem(network(), CE, (X, Y)))
    with pytest.raises(ValueError, match="expects a matrix"):
        blocks.products({"0": torch.ones(30)})
    with pytest.raises(ValueError, match="Got"):
        blocks.products({"0": torch.ones(29, 1)})
