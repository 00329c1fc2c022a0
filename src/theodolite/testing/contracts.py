"""The contract that every operator keeps. Inherit it and write `make`; pytest does the rest.

class TestMyOperator(OperatorContract):
    def make(self):
        return MyOperator(...), dense_matrix        # float64, at most a few hundred rows
"""

from __future__ import annotations

from abc import abstractmethod

import pytest
import torch
from torch import Tensor

from theodolite.operators import LinearOperator, as_operator


class OperatorContract:
    """Judged by the dense matrix in float64."""

    rtol = 1e-8

    @abstractmethod
    def make(self) -> tuple[LinearOperator, Tensor]:
        """The operator and the matrix it stands for."""

    def close(self, got: Tensor, expected: Tensor) -> None:
        scale = max(float(expected.abs().max()), 1e-300)
        assert float((got - expected).abs().max()) <= self.rtol * scale

    def draw(self, rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
        return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=dtype)

    def test_shape_and_dtype(self) -> None:
        op, dense = self.make()
        assert op.shape == tuple(dense.shape)
        assert op.dtype == torch.float64

    def test_product_with_one_vector(self) -> None:
        op, dense = self.make()
        x = self.draw(op.shape[1], 1, op.dtype)[:, 0]
        self.close(op @ x, dense @ x)
        assert (op @ x).shape == (op.shape[0],)

    def test_product_with_a_block(self) -> None:
        op, dense = self.make()
        x = self.draw(op.shape[1], 5, op.dtype)
        self.close(op @ x, dense @ x)

    def test_transposed_product(self) -> None:
        op, dense = self.make()
        x = self.draw(op.shape[0], 3, op.dtype)
        self.close(op.rmatmul(x), dense.T @ x)
        self.close(op.T @ x, dense.T @ x)

    def test_linearity(self) -> None:
        op, _ = self.make()
        x, y = self.draw(op.shape[1], 2, op.dtype).T
        self.close(op @ (2 * x - 3 * y), 2 * (op @ x) - 3 * (op @ y))

    def test_dense_form(self) -> None:
        op, dense = self.make()
        self.close(op.to_dense(), dense)

    def test_symmetry_flag_is_true(self) -> None:
        op, dense = self.make()
        if op.symmetric:
            self.close(dense, dense.T)
            op.check_symmetry()

    def test_scipy_export_and_import_agree(self) -> None:
        op, dense = self.make()
        exported = op.to_scipy()
        x = self.draw(op.shape[1], 2, op.dtype)
        self.close(torch.as_tensor(exported @ x.numpy()), dense @ x)
        self.close(as_operator(exported, symmetric=op.symmetric) @ x, dense @ x)

    def test_sums_and_scalings(self) -> None:
        op, dense = self.make()
        x = self.draw(op.shape[1], 2, op.dtype)
        self.close((2.0 * op - op) @ x, dense @ x)
        self.close((-op) @ x, -dense @ x)

    def test_wrong_shape_names_both_shapes(self) -> None:
        op, _ = self.make()
        with pytest.raises(ValueError, match=str(op.shape[1])):
            op @ torch.zeros(op.shape[1] + 1, dtype=op.dtype)

    def test_integer_vectors_are_refused(self) -> None:
        op, _ = self.make()
        with pytest.raises(ValueError, match="floating-point"):
            op @ torch.zeros(op.shape[1], dtype=torch.long)

    def test_wider_vectors_give_wider_products(self) -> None:
        op, _ = self.make()
        assert (op @ self.draw(op.shape[1], 1, torch.float32)).dtype == torch.float64
