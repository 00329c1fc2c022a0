"""Every operator keeps the contract."""

from __future__ import annotations

from inspect import isabstract

import pytest
import torch
from torch import Tensor

import theodolite as th
from tests.unit.cases import make, mlp, mlp_tanh_mse
from theodolite.operators import (
    DenseOperator,
    DiagonalOperator,
    IdentityOperator,
    KroneckerOperator,
    LinearOperator,
    ProductOperator,
    as_operator,
    congruent,
)
from theodolite.operators.kronecker.factors import GroupedKroneckerOperator
from theodolite.testing import OperatorContract, dense_gauss_newton, dense_hessian, known_problems, random_symmetric


def _random(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _symmetric(values: list[float], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return random_symmetric(torch.tensor(values), seed=seed).to(dtype)


class TestDense(OperatorContract):
    def make(self):
        matrix = _symmetric([3.0, 1.0, -2.0, 0.5], self.dtype)
        return DenseOperator(matrix), matrix


class TestRectangular(OperatorContract):
    def make(self):
        return DenseOperator(_random(3, 5, self.dtype)), _random(3, 5, self.dtype)


class TestDiagonal(OperatorContract):
    def make(self):
        diagonal = _random(5, 1, self.dtype)[:, 0]
        return DiagonalOperator(diagonal), torch.diag(diagonal)


class TestIdentity(OperatorContract):
    def make(self):
        return IdentityOperator(4, dtype=self.dtype), torch.eye(4, dtype=self.dtype)


class TestCongruent(OperatorContract):
    def make(self):
        matrix, scale = _symmetric([3.0, 1.0, -2.0], self.dtype), _random(3, 1, self.dtype)[:, 0]
        return congruent(DenseOperator(matrix), scale), scale[:, None] * matrix * scale


class TestKronecker(OperatorContract):
    def make(self):
        a, b = _random(2, 3, self.dtype), _random(4, 2, self.dtype, seed=1)
        return KroneckerOperator(DenseOperator(a), DenseOperator(b)), torch.kron(a, b)


class TestSymmetricKronecker(OperatorContract):
    def make(self):
        a, b = _symmetric([2.0, -1.0], self.dtype), _symmetric([1.0, 4.0, 5.0], self.dtype, seed=1)
        op = DenseOperator(a).kron(DenseOperator(b))
        assert op.symmetric
        return op, torch.kron(a, b)


class TestGroupedKronecker(OperatorContract):
    """A grouped convolution with two groups of two outputs and three inputs."""

    def make(self):
        output, inputs = _symmetric([2.0, 1.0, 3.0, 0.5], self.dtype), _symmetric([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], self.dtype)
        own = torch.block_diag(torch.ones(2, 3), torch.ones(2, 3)).flatten().bool()  # weights within a group
        return GroupedKroneckerOperator(output, inputs, 2), torch.kron(output, inputs)[own][:, own]


class TestSum(OperatorContract):
    def make(self):
        a, b = _random(3, 4, self.dtype), _random(3, 4, self.dtype, seed=1)
        return DenseOperator(a) + DenseOperator(b), a + b


class TestScaled(OperatorContract):
    def make(self):
        return 2.5 * DenseOperator(_random(3, 4, self.dtype)), 2.5 * _random(3, 4, self.dtype)


class TestTransposed(OperatorContract):
    def make(self):
        return DenseOperator(_random(3, 4, self.dtype)).T, _random(3, 4, self.dtype).T


class TestProduct(OperatorContract):
    def make(self):
        a, b = _random(3, 4, self.dtype), _random(4, 2, self.dtype, seed=1)
        return ProductOperator(DenseOperator(a), DenseOperator(b)), a @ b


class TestForeign(OperatorContract):
    """A SciPy operator."""

    on_device = False

    def make(self):
        import scipy.sparse

        matrix = _random(4, 3, self.dtype)
        return as_operator(scipy.sparse.csr_matrix(matrix.numpy()), symmetric=False), matrix


class OfNetwork(OperatorContract):
    """A matrix of a small network, in float64 by double backward."""

    case = staticmethod(mlp_tanh_mse)

    def prepared(self):
        exact = make(self.case)
        used = exact if self.dtype == torch.float64 else exact.to(self.dtype)
        self.model = used.model
        return used, exact


class TestHessian(OfNetwork):
    def make(self):
        case, exact = self.prepared()
        return th.hessian(case.problem()), dense_hessian(exact.objective, exact.parameters())


class TestHessianOneByOne(OfNetwork):
    def make(self):
        case, exact = self.prepared()
        return th.hessian(case.problem(), batched=False, keep="never"), dense_hessian(exact.objective, exact.parameters())


class TestGaussNewton(OfNetwork):
    case = staticmethod(mlp)

    def make(self):
        case, exact = self.prepared()
        return th.gauss_newton(case.problem()), dense_gauss_newton(exact.output, exact.loss_of, exact.parameters())


class TestJacobian(OfNetwork):
    def make(self):
        case, exact = self.prepared()
        rows = [torch.autograd.grad(v, exact.parameters(), retain_graph=True) for v in exact.output().flatten()]
        return th.operators.jacobian(case.problem()), torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


class TestLayerBlock(OfNetwork):
    def make(self):
        case, exact = self.prepared()
        blocks = th.layer_hessians(case.problem())
        where = blocks.positions("0")
        return blocks["0"], dense_hessian(exact.objective, exact.parameters())[where][:, where]


class TestTangentKernel(OfNetwork):
    def make(self):
        case, exact = self.prepared()
        rows = [torch.autograd.grad(v, exact.parameters(), retain_graph=True) for v in exact.output().flatten()]
        jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
        return th.tangent_kernel_operator(case.problem()), jacobian @ jacobian.T


def _kinds(of: type) -> set[type]:
    return {kind for child in of.__subclasses__() for kind in {child, *_kinds(child)}}


def test_every_operator_has_its_contract():
    """And is also built in float32: a class that cannot be would skip that test."""
    suites = [kind for kind in _kinds(OperatorContract) if kind.__name__.startswith("Test") and kind.__module__ == __name__]
    met = set()
    for suite in suites:
        single = suite()
        single.dtype = torch.float32
        op, _ = single.make()
        assert op.dtype == torch.float32, suite.__name__
        met |= {type(op)}
    ours = {kind for kind in _kinds(LinearOperator) if kind.__module__.startswith("theodolite.") and not isabstract(kind)}
    assert {kind.__name__ for kind in ours - met} == set()


@pytest.mark.parametrize("known", known_problems(), ids=lambda k: k.name)
def test_answers_known_on_paper(known):
    torch.testing.assert_close(th.hessian(known.problem).to_dense(), known.hessian, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(th.gauss_newton(known.problem).to_dense(), known.gauss_newton, rtol=1e-12, atol=1e-12)
