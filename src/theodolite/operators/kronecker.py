"""Kronecker products, never formed."""

from __future__ import annotations

import torch
from torch import Tensor

from theodolite.operators.algebra import joint_cost
from theodolite.operators.base import LinearOperator
from theodolite.results import Cost


class KroneckerOperator(LinearOperator):
    """`A ⊗ B`, with `(A ⊗ B) vec(X) = vec(A X Bᵀ)` for row-major vec.

    Row-major is torch's own order: for a weight W of shape (m, n) the flat index of `W[i, j]` is `i*n + j`.

    >>> from theodolite.operators import DenseOperator
    >>> a, b = torch.tensor([[2.0]]), torch.tensor([[1.0, 2.0], [2.0, 5.0]])
    >>> KroneckerOperator(DenseOperator(a), DenseOperator(b)).to_dense()
    tensor([[ 2.,  4.],
            [ 4., 10.]])
    """

    def __init__(self, a: LinearOperator, b: LinearOperator) -> None:
        super().__init__(
            (a.shape[0] * b.shape[0], a.shape[1] * b.shape[1]),
            dtype=torch.promote_types(a.dtype, b.dtype),
            device=a.device,
            symmetric=a.symmetric and b.symmetric,
            probe=False,
        )
        self.a, self.b = a, b

    def _matmat(self, x: Tensor) -> Tensor:
        return _apply(x, self.a.shape[1], self.b.shape[1], self.a.__matmul__, self.b.__matmul__)

    def _rmatmat(self, x: Tensor) -> Tensor:
        return _apply(x, self.a.shape[0], self.b.shape[0], self.a.rmatmul, self.b.rmatmul)

    def cost(self) -> Cost:
        return joint_cost(" ⊗ ", self.a, self.b)


def _apply(x: Tensor, rows: int, columns: int, a: object, b: object) -> Tensor:
    k = x.shape[1]
    x = x.reshape(rows, columns * k)
    x = a(x)  # type: ignore[operator]  # (m_a, columns * k)
    m = x.shape[0]
    x = x.reshape(m, columns, k).transpose(0, 1).reshape(columns, m * k)
    x = b(x)  # type: ignore[operator]  # (m_b, m_a * k)
    return x.reshape(-1, m, k).transpose(0, 1).reshape(-1, k)
