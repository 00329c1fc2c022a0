"""A matrix that is there: the bridge from tensors, and the operator of known-answer tests."""

from __future__ import annotations

import torch
from torch import Tensor

from theodolite.errors import NonFiniteError
from theodolite.operators.base import LinearOperator
from theodolite.results import Cost


class DenseOperator(LinearOperator):
    """An explicit matrix behind the operator interface.

    >>> import torch
    >>> op = DenseOperator(torch.diag(torch.tensor([3.0, 1.0])))
    >>> op @ torch.tensor([1.0, 1.0])
    tensor([3., 1.])
    >>> op.symmetric
    True
    """

    def __init__(self, matrix: Tensor, *, symmetric: bool | None = None) -> None:
        if matrix.ndim != 2:
            raise ValueError(f"DenseOperator takes a matrix. Got a tensor of shape {tuple(matrix.shape)}.")
        matrix = matrix.detach()
        if not matrix.is_floating_point():
            raise ValueError(f"DenseOperator takes a floating-point matrix. Got {matrix.dtype}.")
        if matrix.numel() == 0:
            raise ValueError(f"DenseOperator takes a matrix with entries. Got shape {tuple(matrix.shape)}.")
        matrix = matrix.to_dense() if matrix.layout != torch.strided else matrix
        if not bool(torch.isfinite(matrix).all()):
            raise NonFiniteError("The matrix holds NaN or inf.")
        if symmetric is None:
            symmetric = is_symmetric(matrix)
        rows, columns = matrix.shape
        super().__init__((rows, columns), dtype=matrix.dtype, device=matrix.device, symmetric=symmetric)
        self.matrix = matrix

    def _matmat(self, x: Tensor) -> Tensor:
        return self.matrix @ x

    def _rmatmat(self, x: Tensor) -> Tensor:
        return self.matrix.T @ x

    def to_dense(self) -> Tensor:
        return self.matrix.clone()

    def cost(self) -> Cost:
        return Cost(route="dense matrix", peak_bytes=self.matrix.numel() * self.matrix.element_size())


def is_symmetric(matrix: Tensor) -> bool:
    """Whether a matrix is symmetric to the rounding of its dtype."""
    if matrix.shape[0] != matrix.shape[1]:
        return False
    tolerance = 1e-10 if matrix.dtype.itemsize == 8 else 1e-4
    return float((matrix - matrix.T).abs().max()) <= tolerance * float(matrix.abs().max())
