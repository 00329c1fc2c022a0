"""The training loss in two parts: what lies in the top eigenspace of the tangent kernel, and the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from theodolite.arguments import checked, count, each, finite, seed
from theodolite.linalg import top_eigenpairs
from theodolite.operators import LinearOperator
from theodolite.problem.arguments import a_finite_tensor, of_dimensions
from theodolite.results import Result, Row


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LossSplit(Result):
    """A loss as `top[s] + rest[s]` for each rank s: the part in the top s·outputs eigendirections, and what is left.

    `eigenvalues` descend; they belong to the tangent kernel (`by="kernel"`) or to the Gauss-Newton matrix of the loss
    (`by="curvature"`).
    """

    total: float
    top: dict[int, float]
    rest: dict[int, float]
    eigenvalues: Tensor
    outputs: int
    by: str

    def rows(self) -> list[Row]:
        return [{"rank": s, "total": self.total, "top": self.top[s], "rest": self.rest[s]} for s in self.top]

    def sentence(self) -> str:
        parts = {s: f"{100 * part / self.total:.3g} %" if self.total else "nothing" for s, part in self.top.items()}
        shares = ", ".join(f"{part} in the top {s * self.outputs}" for s, part in parts.items())
        return f"Loss {self.total:.4g}: {shares} eigendirections of the {_MATRIX[self.by]}."


def _matrix(name: str, value: Any) -> Any:
    """A matrix that is written out, or an operator."""
    return value if isinstance(value, LinearOperator) else of_dimensions(2)(name, value)


_MATRIX = {"kernel": "tangent kernel", "curvature": "Gauss-Newton matrix"}


@checked(kernel=_matrix, residual=a_finite_tensor, ranks=each(count), outputs=count, seed=seed)
def split_loss(
    kernel: Tensor | LinearOperator, residual: Tensor, ranks: Sequence[int] = (1, 5), *, outputs: int = 1, seed: int = 0
) -> LossSplit:
    """Split the mean squared error (1/m) ‖r‖² along the top eigenvectors u_i of a tangent kernel at the same weights.

    `top[s]` is (1/m) Σ (u_iᵀ r)² over the first s·outputs eigenvectors, `rest[s]` what the other directions hold. m counts
    all numbers of the residual, as `nn.MSELoss` does. Where eigenvalues around place s are nearly equal the two parts mix.

    Args:
        kernel: (m, m), sample-major as `tangent_kernel` gives it, or an operator, of which only the top pairs are computed.
        residual: outputs minus targets, (n,) or (n, outputs).

    >>> split = split_loss(torch.diag(torch.tensor([9.0, 1.0, 0.1])), torch.tensor([3.0, 1.0, 1.0]), ranks=(1, 2))
    >>> round(split.total, 6), round(split.top[1], 6), round(split.rest[2], 6)
    (3.666667, 3.0, 0.333333)
    """
    r = residual.detach().double().reshape(-1)
    if tuple(kernel.shape) != (r.numel(), r.numel()):
        raise ValueError(
            f"kernel: that of a residual of {r.numel()} numbers is {r.numel()} × {r.numel()}. Got {tuple(kernel.shape)}."
        )
    wanted = _ranks(ranks, outputs, r.numel())
    if isinstance(kernel, LinearOperator):
        pairs = top_eigenpairs(kernel, wanted[-1] * outputs, tol=1e-6, seed=seed, progress=False)
        values, vectors = pairs.values.double(), pairs.vectors.double()
    else:
        values, vectors = (x.flip(-1) for x in torch.linalg.eigh(kernel.detach().double()))
    parts = (vectors.T @ r.to(vectors.device)).square() / r.numel()
    return _split(parts, float(r @ r) / r.numel(), values, wanted, outputs, "kernel", complete=len(parts) == r.numel())


@checked(
    values=of_dimensions(1),
    vectors=of_dimensions(2),
    gradient=of_dimensions(1),
    loss=finite,
    ranks=each(count),
    outputs=count,
)
def split_loss_by_curvature(
    values: Tensor, vectors: Tensor, gradient: Tensor, loss: float, ranks: Sequence[int] | None = None, *, outputs: int = 1
) -> LossSplit:
    """The same split from eigenpairs (λ_i, v_i) of the Gauss-Newton matrix and the gradient g, with no kernel formed.

    `top[s]` is Σ (v_iᵀ g)² / (2 λ_i), the fall of the quadratic model of the loss along these directions. For a squared loss
    this is exactly what `split_loss` gives. For cross-entropy it is the local quadratic model, in which the residual p − y is
    weighed by the curvature of the loss; its parts need not sum to the loss, and `rest` is the difference.

    Args:
        values, vectors: eigenvalues in descending order (k,) and eigenvectors (p, k), e.g. of
            `top_eigenpairs(gauss_newton(...))`.
        gradient, loss: of the same problem at the same weights, (p,) and a number.
        ranks: None means (1, k / outputs).

    >>> values, vectors = torch.tensor([4.0, 1.0]), torch.eye(3)[:, :2]
    >>> split = split_loss_by_curvature(values, vectors, torch.tensor([2.0, 1.0, 0.5]), 2.0, ranks=(1, 2))
    >>> split.top[1], split.top[2], split.rest[2]
    (0.5, 1.0, 1.0)
    """
    if vectors.ndim != 2 or vectors.shape != (gradient.numel(), values.numel()):
        raise ValueError(
            f"vectors must be (parameters, pairs) = ({gradient.numel()}, {values.numel()}) to fit the gradient and the values. "
            f"Got {tuple(vectors.shape)}."
        )
    held = values.numel() // outputs
    wanted = _ranks(sorted({1, held}) if ranks is None else ranks, outputs, values.numel())
    lengths = (vectors.detach().double().T @ gradient.detach().double().reshape(-1)).square()
    curvature = values.detach().double()
    floor = 1e-12 * float(curvature.abs().max())
    # A direction without curvature holds none of a squared loss; the gradient vanishes along it.
    parts = torch.where(curvature > floor, lengths / (2.0 * curvature.clamp_min(floor or 1.0)), torch.zeros_like(lengths))
    return _split(parts, float(loss), curvature, wanted, outputs, "curvature")


def _ranks(ranks: Sequence[int], outputs: int, size: int) -> list[int]:
    found = sorted(set(ranks))
    if not found or found[0] < 1 or found[-1] * outputs > size:
        raise ValueError(
            f"ranks must be whole numbers from 1 to {size // max(1, outputs)}, for {size} directions and {outputs} outputs. "
            f"Got {tuple(ranks)}."
        )
    return found


def _split(
    parts: Tensor, total: float, values: Tensor, ranks: list[int], outputs: int, by: str, *, complete: bool = False
) -> LossSplit:
    """The result from the share of each eigendirection; `complete`: of all of them."""
    sums = parts.cumsum(0)
    top = {s: float(sums[s * outputs - 1]) for s in ranks}
    if complete:  # all directions at hand: the rest is summed, not a difference
        behind = parts.flip(0).cumsum(0).flip(0)
        rest = {s: float(behind[s * outputs]) if s * outputs < len(parts) else 0.0 for s in ranks}
    else:
        rest = {s: total - part for s, part in top.items()}
    return LossSplit(total=total, top=top, rest=rest, eigenvalues=values, outputs=outputs, by=by)
