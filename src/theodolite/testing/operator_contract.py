"""The contract that every operator keeps. Inherit it and write `make`; pytest does the rest.

class TestMyOperator(OperatorContract):
    def make(self):
        return MyOperator(..., dtype=self.dtype), dense_matrix        # at most a few hundred rows
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from theodolite.operators import DenseOperator, LinearOperator, as_operator
from theodolite.testing.equality import model_state, same


class OperatorContract:
    """Judged by the dense matrix in float64.

    `make` builds in `self.dtype`, which is float64 but for one test. Where the matrix belongs to a network, `make` sets
    `self.model` to it, and the contract checks that products leave it as found.
    """

    rtol = 1e-8
    #: For the product in float32, relative to the largest entry of the answer.
    rtol_float32 = 1e-4
    dtype: torch.dtype = torch.float64
    model: nn.Module | None = None
    #: Products stay on the device of the operator. False for those that another library makes.
    on_device = True

    @abstractmethod
    def make(self) -> tuple[LinearOperator, Tensor]:
        """The operator and the matrix it stands for."""

    def close(self, got: Tensor, expected: Tensor, rtol: float | None = None) -> None:
        scale = max(float(expected.abs().max()), 1e-300)
        assert got.shape == expected.shape
        assert float((got - expected).abs().max()) <= (rtol or self.rtol) * scale

    def draw(self, rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
        return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=dtype)

    # Products

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
        self.close(op.T.T @ self.draw(op.shape[1], 2, op.dtype), dense @ self.draw(op.shape[1], 2, op.dtype))
        assert op.T.shape == tuple(dense.T.shape)

    def test_linearity(self) -> None:
        op, _ = self.make()
        x, y = self.draw(op.shape[1], 2, op.dtype).T
        self.close(op @ (2 * x - 3 * y), 2 * (op @ x) - 3 * (op @ y))

    def test_dense_form(self) -> None:
        op, dense = self.make()
        self.close(op.to_dense(), dense)
        self.close(op.T.to_dense(), dense.T)

    def test_symmetry_flag_is_true(self) -> None:
        op, dense = self.make()
        if op.symmetric:
            self.close(dense, dense.T)
            op.check_symmetry()

    def test_float32(self) -> None:
        import pytest

        self.dtype = torch.float32
        op, dense = self.make()
        if op.dtype != torch.float32:
            pytest.skip("make() does not build in self.dtype.")
        x = self.draw(op.shape[1], 3, torch.float32)
        assert (op @ x).dtype == torch.float32
        self.close((op @ x).double(), dense.double() @ x.double(), self.rtol_float32)
        assert (op @ x.double()).dtype == torch.float64

    def test_wider_vectors_give_wider_products(self) -> None:
        op, _ = self.make()
        assert (op @ self.draw(op.shape[1], 1, torch.float32)).dtype == torch.float64

    # Algebra

    def test_sums_and_scalings(self) -> None:
        op, dense = self.make()
        x = self.draw(op.shape[1], 2, op.dtype)
        other = self.draw(*op.shape, op.dtype, seed=2)
        self.close((2.0 * op - op) @ x, dense @ x)
        self.close((-op) @ x, -dense @ x)
        self.close((op / 4.0) @ x, dense @ x / 4)
        self.close((op + DenseOperator(other)) @ x, (dense + other) @ x)
        self.close((op * 3.0 + DenseOperator(other)).T.to_dense(), (3 * dense + other).T)

    def test_products_of_operators(self) -> None:
        op, dense = self.make()
        square = op.T @ op
        assert square.shape == (op.shape[1], op.shape[1])
        self.close(square.to_dense(), dense.T @ dense)
        self.close((op @ op.T).T.to_dense(), dense @ dense.T)

    def test_kronecker_product(self) -> None:
        op, dense = self.make()
        small = self.draw(2, 3, op.dtype, seed=3)
        x = self.draw(3 * op.shape[1], 2, op.dtype)
        self.close(DenseOperator(small).kron(op) @ x, torch.kron(small, dense.contiguous()) @ x)

    # Other libraries, other devices

    def test_scipy_round_trip(self) -> None:
        op, dense = self.make()
        exported = op.to_scipy()
        x, y = self.draw(op.shape[1], 2, op.dtype), self.draw(op.shape[0], 2, op.dtype)
        self.close(torch.as_tensor(exported @ x.numpy()), dense @ x)
        self.close(torch.as_tensor(exported.rmatmat(y.numpy())), dense.T @ y)
        self.close(torch.as_tensor(exported.matvec(x[:, 0].numpy())), dense @ x[:, 0])
        back = as_operator(exported, symmetric=op.symmetric)
        assert back.dtype == op.dtype
        self.close(back @ x, dense @ x)
        self.close(back.T @ y, dense.T @ y)

    def test_nothing_leaves_the_device(self) -> None:
        """Neither is a tensor fetched to the CPU or to NumPy, nor one made where torch makes them by default."""
        import pytest

        op, dense = self.make()
        if not self.on_device:
            pytest.skip("Another library makes the products.")
        x = self.draw(op.shape[1], 2, op.dtype).to(op.device)
        assert (op @ x).device == x.device  # the first product also probes, with vectors drawn on the CPU
        with torch.device("meta"), NothingFetched():
            product = op @ x
        self.close(product.cpu(), dense @ x.cpu())

    # Wrong input, and what is left behind

    def test_wrong_shape_names_both_shapes(self) -> None:
        import pytest

        op, _ = self.make()
        with pytest.raises(ValueError, match=str(op.shape[1])):
            op @ torch.zeros(op.shape[1] + 1, dtype=op.dtype)

    def test_integer_vectors_are_refused(self) -> None:
        import pytest

        op, _ = self.make()
        with pytest.raises(ValueError, match="floating-point"):
            op @ torch.zeros(op.shape[1], dtype=torch.long)

    def test_the_vector_and_the_model_are_left_as_found(self) -> None:
        import pytest

        op, dense = self.make()
        model = nn.Module() if self.model is None else self.model
        x, before = self.draw(op.shape[1], 2, op.dtype), model_state(model)
        kept = x.clone()
        first = op @ x
        op.rmatmul(self.draw(op.shape[0], 1, op.dtype))
        with pytest.raises(ValueError):
            op @ x[1:]
        with torch.no_grad():
            assert same(first, op @ x) or torch.allclose(first, op @ x, rtol=self.rtol)
        assert not first.requires_grad
        assert torch.equal(x, kept)
        assert same(before, model_state(model))
        self.close(first, dense @ kept)

    def test_it_prints_its_shape(self) -> None:
        op, _ = self.make()
        assert f"{op.shape[0]} x {op.shape[1]}" in repr(op)


class NothingFetched(TorchFunctionMode):
    """Fails where a tensor is taken off its device."""

    FETCHES = (Tensor.cpu, Tensor.numpy, Tensor.__array__, Tensor.cuda)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in self.FETCHES, f"{getattr(func, '__name__', func)} takes a tensor off its device"
        return func(*args, **(kwargs or {}))
