"""Matrices that are there, and sums, scalings, products, transposes and Kronecker products of operators."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from theodolite.arguments import checked, count, instance
from theodolite.errors import NonFiniteError
from theodolite.operators.base import LinearOperator
from theodolite.problem.arguments import a_device, a_tensor, of_dimensions
from theodolite.results import Cost


def add(left: LinearOperator, right: LinearOperator) -> LinearOperator:
    """`left + right`."""
    return SumOperator(tuple(term for op in (left, right) for term in (op.terms if isinstance(op, SumOperator) else (op,))))


class CompositeOperator(LinearOperator):
    """An operator made of `parts`; `sign` stands between their routes in its cost.

    Products go through those of the parts, which have probes of their own: by default there is none for the whole.
    """

    sign = ""

    def __init__(
        self, shape: tuple[int, int], parts: tuple[LinearOperator, ...], *, symmetric: bool | None = None, probe: bool = False
    ) -> None:
        dtype = functools.reduce(torch.promote_types, (op.dtype for op in parts))
        symmetric = all(op.symmetric for op in parts) if symmetric is None else symmetric
        super().__init__(shape, dtype=dtype, device=parts[0].device, symmetric=symmetric, probe=probe)
        self.parts = parts

    def cost(self) -> Cost:
        costs = [op.cost() for op in self.parts]
        notes = tuple(dict.fromkeys(note for cost in costs for note in cost.notes))
        return Cost(route=self.sign.join(c.route for c in costs), peak_bytes=sum(c.peak_bytes for c in costs), notes=notes)


class SumOperator(CompositeOperator):
    """The sum `A + B + ...`."""

    sign = " + "

    def __init__(self, terms: tuple[LinearOperator, ...]) -> None:
        if len({op.shape for op in terms}) != 1:
            raise ValueError(f"Only operators of one shape can be added. Got {', '.join(str(op.shape) for op in terms)}.")
        super().__init__(terms[0].shape, terms)
        self.terms = terms

    def _matmat(self, x: Tensor) -> Tensor:
        return torch.stack([op @ x for op in self.terms]).sum(0)

    def _rmatmat(self, x: Tensor) -> Tensor:
        return torch.stack([op.rmatmul(x) for op in self.terms]).sum(0)


class ScaledOperator(CompositeOperator):
    """The multiple `scalar * A`."""

    def __init__(self, op: LinearOperator, scalar: float) -> None:
        super().__init__(op.shape, (op,))
        self.op, self.scalar = op, scalar

    def _matmat(self, x: Tensor) -> Tensor:
        return self.scalar * (self.op @ x)

    def _rmatmat(self, x: Tensor) -> Tensor:
        return self.scalar * self.op.rmatmul(x)

    def suggest_start(self, k: int) -> Tensor | None:
        return self.op.suggest_start(k) if self.scalar > 0 else None


class TransposedOperator(CompositeOperator):
    """The transpose `Aᵀ`."""

    def __init__(self, op: LinearOperator) -> None:
        super().__init__((op.shape[1], op.shape[0]), (op,), symmetric=False)
        self.op = op

    def _matmat(self, x: Tensor) -> Tensor:
        return self.op.rmatmul(x)

    def _rmatmat(self, x: Tensor) -> Tensor:
        return self.op @ x


class ProductOperator(CompositeOperator):
    """`A @ B`, applied right to left."""

    sign = " @ "

    @checked(left=instance(LinearOperator), right=instance(LinearOperator))
    def __init__(self, left: LinearOperator, right: LinearOperator, *, symmetric: bool = False) -> None:
        if left.shape[1] != right.shape[0]:
            raise ValueError(f"Shapes {left.shape} and {right.shape} cannot be multiplied.")
        super().__init__((left.shape[0], right.shape[1]), (left, right), symmetric=symmetric, probe=True)
        self.left, self.right = left, right

    def _matmat(self, x: Tensor) -> Tensor:
        return self.left @ (self.right @ x)

    def _rmatmat(self, x: Tensor) -> Tensor:
        return self.right.rmatmul(self.left.rmatmul(x))


class IdentityOperator(LinearOperator):
    """The identity, for shifts: `op + 0.1 * IdentityOperator(op.shape[0], dtype=op.dtype)`."""

    @checked(n=count, dtype=instance(torch.dtype), device=a_device)
    def __init__(self, n: int, *, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> None:
        super().__init__((n, n), dtype=dtype, device=device, symmetric=True, probe=False)

    def _matmat(self, x: Tensor) -> Tensor:
        return x.clone()


class DenseOperator(LinearOperator):
    """An explicit matrix behind the operator interface.

    >>> import torch
    >>> op = DenseOperator(torch.diag(torch.tensor([3.0, 1.0])))
    >>> op @ torch.tensor([1.0, 1.0])
    tensor([3., 1.])
    >>> op.symmetric
    True
    """

    @checked(matrix=a_tensor)
    def __init__(self, matrix: Tensor, *, symmetric: bool | None = None) -> None:
        if matrix.ndim != 2:
            raise ValueError(f"DenseOperator takes a matrix. Got a tensor of shape {tuple(matrix.shape)}.")
        matrix = _floating(matrix.detach())
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


def _floating(x: Tensor) -> Tensor:
    """Real numbers as floats that can be multiplied with: integers in float64, half precision in float32."""
    if x.is_complex():
        raise ValueError(f"Only real matrices are accepted. Got {x.dtype}; pass its .real where the rest is zero.")
    if not x.is_floating_point():
        return x.double()
    return x.float() if x.dtype.itemsize < 4 else x


def is_symmetric(matrix: Tensor) -> bool:
    """Whether a matrix is symmetric to the rounding of its dtype."""
    if matrix.shape[0] != matrix.shape[1]:
        return False
    tolerance = 1e-10 if matrix.dtype.itemsize == 8 else 1e-4
    return float((matrix - matrix.T).abs().max()) <= tolerance * float(matrix.abs().max())


class DiagonalOperator(LinearOperator):
    """`diag(d)` for a vector d.

    >>> import torch
    >>> DiagonalOperator(torch.tensor([2.0, 3.0]).double()) @ torch.ones(2).double()
    tensor([2., 3.], dtype=torch.float64)
    """

    @checked(diagonal=of_dimensions(1))
    def __init__(self, diagonal: Tensor) -> None:
        if diagonal.ndim != 1:
            raise ValueError(f"diagonal must be a vector. Got shape {tuple(diagonal.shape)}.")
        diagonal, n = _floating(diagonal), diagonal.shape[0]
        super().__init__((n, n), dtype=diagonal.dtype, device=diagonal.device, symmetric=True, probe=False)
        self.diagonal = diagonal

    def _matmat(self, x: Tensor) -> Tensor:
        return self.diagonal[:, None] * x


class CongruentOperator(CompositeOperator):
    """`S A S` with S diagonal; symmetric where A is."""

    @checked(op=instance(LinearOperator), scale=instance(DiagonalOperator))
    def __init__(self, op: LinearOperator, scale: DiagonalOperator) -> None:
        if op.shape != scale.shape:
            raise ValueError(f"Shapes {op.shape} and {scale.shape} do not fit.")
        super().__init__(op.shape, (op,))
        self.op, self.scale = op, scale

    def _matmat(self, x: Tensor) -> Tensor:
        return self.scale @ (self.op @ (self.scale @ x))

    def _rmatmat(self, x: Tensor) -> Tensor:
        return self.scale @ self.op.rmatmul(self.scale @ x)


@checked(op=instance(LinearOperator), scale=of_dimensions(1))
def congruent(op: LinearOperator, scale: Tensor) -> CongruentOperator:
    """`diag(s) A diag(s)`, never formed; with `s = 1/sqrt(p)` it has the eigenvalues of `P⁻¹A`.

    >>> import torch
    >>> from theodolite.operators import as_operator
    >>> congruent(as_operator(torch.ones(2, 2).double()), torch.tensor([1.0, 3.0]).double()).to_dense()
    tensor([[1., 3.],
            [3., 9.]], dtype=torch.float64)
    """
    return CongruentOperator(op, DiagonalOperator(scale))


class KroneckerOperator(CompositeOperator):
    """`A ⊗ B`, with `(A ⊗ B) vec(X) = vec(A X Bᵀ)` for row-major vec.

    Row-major is torch's own order: for a weight W of shape (m, n) the flat index of `W[i, j]` is `i*n + j`.

    >>> from theodolite.operators import DenseOperator
    >>> a, b = torch.tensor([[2.0]]), torch.tensor([[1.0, 2.0], [2.0, 5.0]])
    >>> KroneckerOperator(DenseOperator(a), DenseOperator(b)).to_dense()
    tensor([[ 2.,  4.],
            [ 4., 10.]])
    """

    sign = " ⊗ "

    @checked(a=instance(LinearOperator), b=instance(LinearOperator))
    def __init__(self, a: LinearOperator, b: LinearOperator) -> None:
        super().__init__((a.shape[0] * b.shape[0], a.shape[1] * b.shape[1]), (a, b))
        self.a, self.b = a, b

    def _matmat(self, x: Tensor) -> Tensor:
        return _apply(x, self.a.shape[1], self.b.shape[1], self.a.__matmul__, self.b.__matmul__)

    def _rmatmat(self, x: Tensor) -> Tensor:
        return _apply(x, self.a.shape[0], self.b.shape[0], self.a.rmatmul, self.b.rmatmul)


def _apply(x: Tensor, rows: int, columns: int, a: Callable[[Tensor], Tensor], b: Callable[[Tensor], Tensor]) -> Tensor:
    k = x.shape[1]
    x = a(x.reshape(rows, columns * k))  # (m_a, columns * k)
    m = x.shape[0]
    x = b(x.reshape(m, columns, k).transpose(0, 1).reshape(columns, m * k))  # (m_b, m_a * k)
    return x.reshape(-1, m, k).transpose(0, 1).reshape(-1, k)
