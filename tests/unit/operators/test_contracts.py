"""Every operator keeps the contract."""

from __future__ import annotations

import pytest
import torch

import theodolite as th
from tests.unit.cases import make, mlp, mlp_tanh_mse
from theodolite.operators import DenseOperator, KroneckerOperator, ProductOperator
from theodolite.testing import OperatorContract, dense_gauss_newton, dense_hessian, known_problems, random_symmetric


def _random(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class TestDense(OperatorContract):
    def make(self):
        matrix = random_symmetric(torch.tensor([3.0, 1.0, -2.0, 0.5]))
        return DenseOperator(matrix), matrix


class TestRectangular(OperatorContract):
    def make(self):
        return DenseOperator(_random(3, 5)), _random(3, 5)


class TestKronecker(OperatorContract):
    def make(self):
        a, b = _random(2, 3), _random(4, 2, seed=1)
        return KroneckerOperator(DenseOperator(a), DenseOperator(b)), torch.kron(a, b)


class TestSymmetricKronecker(OperatorContract):
    def make(self):
        a, b = random_symmetric(torch.tensor([2.0, -1.0])), random_symmetric(torch.tensor([1.0, 4.0, 5.0]), seed=1)
        op = DenseOperator(a).kron(DenseOperator(b))
        assert op.symmetric
        return op, torch.kron(a, b)


class TestSum(OperatorContract):
    def make(self):
        a, b = _random(3, 4), _random(3, 4, seed=1)
        return DenseOperator(a) + DenseOperator(b), a + b


class TestProduct(OperatorContract):
    def make(self):
        a, b = _random(3, 4), _random(4, 2, seed=1)
        return ProductOperator(DenseOperator(a), DenseOperator(b)), a @ b


class TestHessian(OperatorContract):
    def make(self):
        case = make(mlp_tanh_mse)
        return th.hessian(case.problem()), dense_hessian(case.objective, case.parameters())


class TestHessianOneByOne(TestHessian):
    def make(self):
        case = make(mlp_tanh_mse)
        return th.hessian(case.problem(), batched=False, keep="never"), dense_hessian(case.objective, case.parameters())


class TestGaussNewton(OperatorContract):
    def make(self):
        case = make(mlp)
        return th.gauss_newton(case.problem()), dense_gauss_newton(case.output, case.loss_of, case.parameters())


class TestJacobian(OperatorContract):
    def make(self):
        case = make(mlp_tanh_mse)
        z = case.output()
        rows = [torch.autograd.grad(v, case.parameters(), retain_graph=True) for v in z.flatten()]
        return th.operators.jacobian(case.problem()), torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


class TestLayerBlock(OperatorContract):
    def make(self):
        case = make(mlp_tanh_mse)
        blocks = th.layer_hessians(case.problem())
        where = blocks.positions("0")
        return blocks["0"], dense_hessian(case.objective, case.parameters())[where][:, where]


@pytest.mark.parametrize("known", known_problems(), ids=lambda k: k.name)
def test_answers_known_on_paper(known):
    torch.testing.assert_close(th.hessian(known.problem).to_dense(), known.hessian, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(th.gauss_newton(known.problem).to_dense(), known.gauss_newton, rtol=1e-12, atol=1e-12)
