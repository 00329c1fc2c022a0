"""Sums, scalings, products and transposes of operators."""

from __future__ import annotations

import torch
from torch import Tensor

from theodolite.operators.base import LinearOperator
from theodolite.results import Cost


def add(left: LinearOperator, right: LinearOperator) -> LinearOperator:
    """`left + right`."""
    return SumOperator((*_terms(left), *_terms(right)))


def _terms(op: LinearOperator) -> tuple[LinearOperator, ...]:
    return op.terms if isinstance(op, SumOperator) else (op,)


def _joint_dtype(ops: tuple[LinearOperator, ...]) -> torch.dtype:
    dtype = ops[0].dtype
    for op in ops[1:]:
        dtype = torch.promote_types(dtype, op.dtype)
    return dtype


def joint_cost(sign: str, *ops: LinearOperator) -> Cost:
    """The cost of an operator made of others."""
    costs = [op.cost() for op in ops]
    notes = tuple(dict.fromkeys(note for cost in costs for note in cost.notes))
    return Cost(route=sign.join(c.route for c in costs), peak_bytes=sum(c.peak_bytes for c in costs), notes=notes)


class SumOperator(LinearOperator):
    """`A + B + ...`"""

    def __init__(self, terms: tuple[LinearOperator, ...]) -> None:
        shapes = {op.shape for op in terms}
        if len(shapes) != 1:
            raise ValueError(f"Only operators of one shape can be added. Got {', '.join(map(str, (op.shape for op in terms)))}.")
        super().__init__(
            terms[0].shape,
            dtype=_joint_dtype(terms),
            device=terms[0].device,
            symmetric=all(op.symmetric for op in terms),
            probe=False,
        )
        self.terms = terms

    def _matmat(self, x: Tensor) -> Tensor:
        return torch.stack([op @ x for op in self.terms]).sum(0)

    def _rmatmat(self, x: Tensor) -> Tensor:
        return torch.stack([op.rmatmul(x) for op in self.terms]).sum(0)

    def cost(self) -> Cost:
        return joint_cost(" + ", *self.terms)


class ScaledOperator(LinearOperator):
    """`scalar * A`"""

    def __init__(self, op: LinearOperator, scalar: float) -> None:
        super().__init__(op.shape, dtype=op.dtype, device=op.device, symmetric=op.symmetric, probe=False)
        self.op, self.scalar = op, scalar

    def _matmat(self, x: Tensor) -> Tensor:
        return self.scalar * (self.op @ x)

    def _rmatmat(self, x: Tensor) -> Tensor:
        return self.scalar * self.op.rmatmul(x)

    def suggest_start(self, k: int) -> Tensor | None:
        return self.op.suggest_start(k) if self.scalar > 0 else None

    def cost(self) -> Cost:
        return self.op.cost()


class TransposedOperator(LinearOperator):
    """`Aᵀ`"""

    def __init__(self, op: LinearOperator) -> None:
        super().__init__((op.shape[1], op.shape[0]), dtype=op.dtype, device=op.device)
        self.op = op

    def _matmat(self, x: Tensor) -> Tensor:
        return self.op.rmatmul(x)

    def _rmatmat(self, x: Tensor) -> Tensor:
        return self.op @ x

    def cost(self) -> Cost:
        return self.op.cost()


class ProductOperator(LinearOperator):
    """`A @ B`, applied right to left."""

    def __init__(self, left: LinearOperator, right: LinearOperator, *, symmetric: bool = False) -> None:
        if left.shape[1] != right.shape[0]:
            raise ValueError(f"Shapes {left.shape} and {right.shape} cannot be multiplied.")
        super().__init__(
            (left.shape[0], right.shape[1]),
            dtype=_joint_dtype((left, right)),
            device=left.device,
            symmetric=symmetric,
        )
        self.left, self.right = left, right

    def _matmat(self, x: Tensor) -> Tensor:
        return self.left @ (self.right @ x)

    def _rmatmat(self, x: Tensor) -> Tensor:
        return self.right.rmatmul(self.left.rmatmul(x))

    def cost(self) -> Cost:
        return joint_cost(" @ ", self.left, self.right)


class IdentityOperator(LinearOperator):
    """The identity, for shifts: `op + 0.1 * IdentityOperator(op.shape[0], dtype=op.dtype)`."""

    def __init__(self, n: int, *, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> None:
        super().__init__((n, n), dtype=dtype, device=device, symmetric=True, probe=False)

    def _matmat(self, x: Tensor) -> Tensor:
        return x.clone()
