"""`LinearOperator`: a matrix known by its action. Algorithms see this and never a network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Self, overload

import torch
from torch import Tensor

from theodolite.arguments import random_seed, shown
from theodolite.errors import NonFiniteError, SymmetryError
from theodolite.interrupts import unbroken
from theodolite.results import Cost

if TYPE_CHECKING:
    import scipy.sparse.linalg

#: How far `uᵀ(Av)` and `vᵀ(Au)` may differ, relative to `‖Av‖`, for Gaussian u and v.
SYMMETRY_TOLERANCE = {torch.float64: 1e-6, torch.float32: 5e-3}


class LinearOperator(ABC):
    """A matrix of `shape` known only by its products.

    Subclasses write `_matmat`, which takes a block of columns (n, k) in the operator's own dtype and
    returns (m, k); those that are not symmetric also write `_rmatmat` for the transposed product.
    Users write `op @ v` and `op @ V`. Products are returned in the wider of the two dtypes, so float64
    vectors stay float64 beside a float32 network.

    >>> class Doubled(LinearOperator):
    ...     def _matmat(self, block):
    ...         return 2.0 * block
    >>> (Doubled((3, 3), dtype=torch.float64, symmetric=True) @ torch.ones(3)).tolist()
    [2.0, 2.0, 2.0]
    """

    def __init__(
        self,
        shape: tuple[int, int],
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        symmetric: bool = False,
        probe: bool = True,
    ) -> None:
        if symmetric and shape[0] != shape[1]:
            raise ValueError(f"A symmetric operator must be square. Got shape {shape}.")
        self.shape = shape
        self.dtype = dtype
        self.device = torch.device(device)
        self.symmetric = symmetric
        self._probe_pending = symmetric and probe

    @abstractmethod
    def _matmat(self, x: Tensor) -> Tensor:
        """The product with a block of columns: (n, k) -> (m, k)."""

    def _rmatmat(self, x: Tensor) -> Tensor:
        """The transposed product: (m, k) -> (n, k)."""
        if self.symmetric:
            return self._matmat(x)
        raise TypeError(f"{type(self).__name__} is not symmetric and has no transposed product; write _rmatmat.")

    # What users call

    @overload
    def __matmul__(self, x: Tensor) -> Tensor: ...
    @overload
    def __matmul__(self, x: LinearOperator) -> LinearOperator: ...
    def __matmul__(self, x: Tensor | LinearOperator) -> Tensor | LinearOperator:
        if isinstance(x, LinearOperator):
            from theodolite.operators.algebra import ProductOperator

            return ProductOperator(self, x)
        self.check_operand(x)
        self.check_symmetry()
        return self._product(self._matmat, x)

    def rmatmul(self, x: Tensor) -> Tensor:
        """The transposed product `opᵀ @ x`."""
        self.check_operand(x, transposed=True)
        return self._product(self._rmatmat, x)

    @property
    def T(self) -> LinearOperator:  # noqa: N802
        """The transposed operator."""
        from theodolite.operators.algebra import TransposedOperator

        return self if self.symmetric else TransposedOperator(self)

    def to_dense(self) -> Tensor:
        """The matrix itself, column block by column block; for tests and small operators."""
        n = self.shape[1]
        width = 256
        eye = torch.eye(n, dtype=self.dtype, device=self.device)
        return torch.cat([self @ eye[:, i : i + width] for i in range(0, n, width)], dim=1)

    def to_scipy(self) -> scipy.sparse.linalg.LinearOperator:
        """The operator for SciPy: `eigsh(op.to_scipy(), ...)`."""
        from theodolite.operators.scipy_bridge import to_scipy

        exported: scipy.sparse.linalg.LinearOperator = to_scipy(self)
        return exported

    def suggest_start(self, k: int) -> Tensor | None:
        """Columns (n, j) worth starting an eigen-solver from, or None. A hook for subclasses."""
        return None

    def cost(self) -> Cost:
        """How the products are made and what they hold in memory."""
        return Cost(route=type(self).__name__)

    def check_symmetry(self, *, seed: int = 0) -> None:
        """Compare `uᵀ(Av)` with `vᵀ(Au)` for Gaussian vectors, once; frameworks err too.

        Two probes share a vector, so the check costs three products.
        """
        if not self._probe_pending:
            return
        self._check_derivatives()
        generator = torch.Generator().manual_seed(random_seed(seed))
        x = torch.randn(3, self.shape[1], generator=generator, dtype=torch.float32).T  # columns lie in one piece
        x = x.to(device=self.device, dtype=self.dtype)
        # One by one: the probe must not decide how blocks are multiplied, nor triple the memory.
        ax = torch.empty_like(x)
        for i in range(3):
            ax[:, i] = self._product(self._matmat, x[:, i])
        gap = symmetry_gap(x, ax)
        if gap > SYMMETRY_TOLERANCE.get(self.dtype, 0.05) and self._confirm_asymmetry(x, ax):
            raise SymmetryError(self._asymmetry_message(gap))
        self._probe_pending = False  # only now: an interrupted probe has shown nothing

    def trusted(self) -> Self:
        """The same operator without its probes, which cost products: for one whose like, on the same model, has passed them."""
        self._probe_pending = False
        return self

    # For subclasses

    def _check_derivatives(self) -> None:  # noqa: B027 - most operators are no derivative of anything
        """Raise where products are symmetric but wrong; for operators that know what they are the derivative of."""

    def _confirm_asymmetry(self, x: Tensor, ax: Tensor) -> bool:
        """Last word before `SymmetryError`; an operator may find out here that it is all rounding."""
        return True

    def _asymmetry_message(self, gap: float) -> str:
        return (
            f"{type(self).__name__} calls itself symmetric but u'(Av) and v'(Au) differ by {gap:.1e} of |Av|. "
            "Usual causes: (a) a product made with torch.func.hessian or jvp(jacrev(f)), which are wrong through "
            "LayerNorm in torch 2.13 (use double backward, or theodolite.hessian); (b) a custom autograd.Function "
            "whose double backward is wrong; (c) a matrix that is not symmetric at all (pass symmetric=False)."
        )

    def check_operand(self, x: Tensor, *, transposed: bool = False, columns_only: bool = False) -> None:
        """Raise unless `x` can be multiplied, saying what came and what is accepted."""
        rows = self.shape[0 if transposed else 1]
        if not isinstance(x, Tensor):
            raise TypeError(
                f"x: {type(self).__name__} multiplies torch tensors. Got {type(x).__name__}; use op.to_scipy() for NumPy."
            )
        if x.ndim not in ((2,) if columns_only else (1, 2)) or x.shape[0] != rows or 0 in x.shape[1:]:
            matrix = f"a matrix ({rows}, k) with k of at least 1"
            accepted = matrix if columns_only else f"a vector ({rows},) or {matrix}"
            raise ValueError(f"x: {type(self).__name__} has shape {self.shape} and expects {accepted}. Got {tuple(x.shape)}.")
        if x.is_meta:
            raise ValueError(f"x must hold numbers. Got {shown(x)}.")
        if not x.is_floating_point():
            raise ValueError(
                f"x: {type(self).__name__} multiplies floating-point vectors. Got {x.dtype}; call .double() on it first."
            )

    def _product(self, matmat: Any, x: Tensor) -> Tensor:
        columns = x[:, None] if x.ndim == 1 else x
        with without_autocast(self.device):
            out: Tensor = matmat(columns.detach().to(device=self.device, dtype=self.dtype))
        # The sum is the cheap witness; only if it fails is every entry looked at.
        if not bool(torch.isfinite(out.sum())) and not bool(torch.isfinite(out).all()):
            raise NonFiniteError(self._nonfinite_message(columns))
        out = out.to(torch.promote_types(self.dtype, x.dtype))
        return out[:, 0] if x.ndim == 1 else out

    def _nonfinite_message(self, columns: Tensor) -> str:
        if not bool(torch.isfinite(columns).all()):
            return "x, the vector to be multiplied, holds NaN or inf."
        return (
            f"{type(self).__name__} returned NaN or inf for a finite vector: (a) the loss has diverged at these parameters, "
            "(b) half or single precision overflowed, try a float64 model, (c) a batch holds bad values."
        )

    def __repr__(self) -> str:
        kind = "symmetric " if self.symmetric else ""
        return f"<{type(self).__name__}: {kind}{self.shape[0]} x {self.shape[1]}, {self.dtype}>"

    # Algebra: lazily built, so that this file stays the contract

    def __add__(self, other: LinearOperator) -> LinearOperator:
        from theodolite.operators.algebra import add

        return add(self, other) if isinstance(other, LinearOperator) else NotImplemented

    def __sub__(self, other: LinearOperator) -> LinearOperator:
        return self + (-1.0) * other

    def __neg__(self) -> LinearOperator:
        return (-1.0) * self

    def __mul__(self, scalar: float | Tensor) -> LinearOperator:
        from theodolite.operators.algebra import ScaledOperator

        if not isinstance(scalar, int | float) and not (isinstance(scalar, Tensor) and scalar.numel() == 1):
            return NotImplemented
        return ScaledOperator(self, float(scalar))

    __rmul__ = __mul__

    def __truediv__(self, scalar: float | Tensor) -> LinearOperator:
        return self * (1.0 / scalar)

    def kron(self, other: LinearOperator) -> LinearOperator:
        """The Kronecker product `self ⊗ other`, never formed."""
        from theodolite.operators.algebra import KroneckerOperator

        return KroneckerOperator(self, other)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Operators multiply in their own dtype, whatever surrounds the call."""
    return unbroken(torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext())


def symmetry_gap(x: Tensor, ax: Tensor) -> float:
    """Largest `|uᵀ(Av) − vᵀ(Au)| / ‖Av‖` over neighbouring columns u, v of `x`, with `ax` = A x."""
    gaps = []
    for i in range(x.shape[1] - 1):
        (u, v), (au, av) = x[:, i : i + 2].T, ax[:, i : i + 2].T
        norm = max(_dot(au, au), _dot(av, av)) ** 0.5
        gaps.append(abs(_dot(u, av) - _dot(v, au)) / max(norm, 1e-300))
    return max(gaps, default=0.0)


def _dot(u: Tensor, v: Tensor) -> float:
    """In float64, one pair at a time: squares of tiny float32 products underflow, and all columns at once are a lot of memory."""
    return float(torch.dot(u.double(), v.double()))


def rows_of(x: Tensor) -> Tensor:
    """Columns (n, k) as contiguous rows (k, n), copied only where they must be.

    torch transposes on one thread; for a few columns its general copy (three dimensions) is two to eight times quicker.
    """
    if x.shape[1] > 16 or x.T.is_contiguous():
        return x.T.contiguous()
    return x.T[:, None].contiguous()[:, 0]
