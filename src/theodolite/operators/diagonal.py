"""Diagonal matrices, and scalings of rows and columns at once."""

from __future__ import annotations

from torch import Tensor

from theodolite.operators.algebra import joint_cost
from theodolite.operators.base import LinearOperator
from theodolite.results import Cost


class DiagonalOperator(LinearOperator):
    """`diag(d)` for a vector d.

    >>> import torch
    >>> DiagonalOperator(torch.tensor([2.0, 3.0]).double()) @ torch.ones(2).double()
    tensor([2., 3.], dtype=torch.float64)
    """

    def __init__(self, diagonal: Tensor) -> None:
        if diagonal.ndim != 1:
            raise ValueError(f"diagonal must be a vector. Got shape {tuple(diagonal.shape)}.")
        n = diagonal.shape[0]
        super().__init__((n, n), dtype=diagonal.dtype, device=diagonal.device, symmetric=True, probe=False)
        self.diagonal = diagonal

    def _matmat(self, x: Tensor) -> Tensor:
        return self.diagonal[:, None] * x


class CongruentOperator(LinearOperator):
    """`S A S` with S diagonal; symmetric where A is."""

    def __init__(self, op: LinearOperator, scale: DiagonalOperator) -> None:
        if op.shape != scale.shape:
            raise ValueError(f"Shapes {op.shape} and {scale.shape} do not fit.")
        super().__init__(op.shape, dtype=op.dtype, device=op.device, symmetric=op.symmetric, probe=False)
        self.op, self.scale = op, scale

    def _matmat(self, x: Tensor) -> Tensor:
        return self.scale @ (self.op @ (self.scale @ x))

    def _rmatmat(self, x: Tensor) -> Tensor:
        return self.scale @ self.op.rmatmul(self.scale @ x)

    def cost(self) -> Cost:
        return joint_cost(" in ", self.op)


def congruent(op: LinearOperator, scale: Tensor) -> CongruentOperator:
    """`diag(s) A diag(s)`, never formed; with `s = 1/sqrt(p)` it has the eigenvalues of `P⁻¹A`.

    >>> import torch
    >>> from theodolite.operators import as_operator
    >>> congruent(as_operator(torch.ones(2, 2).double()), torch.tensor([1.0, 3.0]).double()).to_dense()
    tensor([[1., 3.],
            [3., 9.]], dtype=torch.float64)
    """
    return CongruentOperator(op, DiagonalOperator(scale))
