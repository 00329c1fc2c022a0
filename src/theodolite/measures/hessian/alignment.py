"""How much of the gradient lies in the sharpest directions."""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from theodolite.linalg import Eigenpairs
from theodolite.results import Cost, Outcome, Result, Row, number


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Alignment(Result):
    """`fractions[j]` is the share of ‖g‖² in the first j+1 eigenvectors, `chance` what a random vector would have in all k.

    `error` bounds what the residuals of the eigenvectors leave open in the last share (Davis and Kahan: the angle of the
    subspace is at most residual over gap; the gap is that to the nearest eigenvalue seen beyond the k).
    """

    fraction: float
    fractions: Tensor
    chance: float
    error: float
    k: int

    def rows(self) -> list[Row]:
        return [{"directions": j + 1, "fraction": float(f)} for j, f in enumerate(self.fractions)]

    def sentence(self) -> str:
        return (
            f"{100 * self.fraction:.3g} % of the squared gradient lies in the {self.k} sharpest directions "
            f"(a random vector: {100 * self.chance:.2g} %); error {number(100 * self.error)} %."
        )


def gradient_alignment(gradient: Tensor, pairs: Eigenpairs) -> Alignment:
    """The share of the squared gradient inside the span of the eigenvectors.

    >>> import torch
    >>> from theodolite.linalg import top_eigenpairs
    >>> pairs = top_eigenpairs(torch.diag(torch.tensor([4.0, 1.0, 0.5]).double()), k=1)
    >>> round(gradient_alignment(torch.tensor([3.0, 4.0, 0.0]).double(), pairs).fraction, 6)
    0.36
    """
    began = time.perf_counter()
    g = gradient.double()
    square = float(g @ g)
    if not square > 0:
        raise ValueError("The gradient is zero: it has no direction.")
    fractions = ((pairs.vectors.double().T @ g).square() / square).cumsum(0)
    k = len(pairs.values)
    return Alignment(
        fraction=float(fractions[-1]),
        fractions=fractions,
        chance=k / len(g),
        error=_error(pairs, len(g)),
        k=k,
        outcome=Outcome.FINISHED if pairs.converged else pairs.outcome,
        seed=pairs.seed,
        cost=Cost(seconds=time.perf_counter() - began, route="projection"),
    )


def _error(pairs: Eigenpairs, size: int) -> float:
    """2 sin θ with sin θ <= ‖R‖/gap, at most 1; 0 where the eigenvectors span everything."""
    if len(pairs.values) == size:
        return 0.0
    beyond = pairs.nearby_values
    last = float(pairs.values[-1])
    gap = min((abs(last - float(v)) for v in beyond), default=abs(last))
    residual = float(pairs.residuals.double().norm())
    return min(1.0, 2.0 * residual / gap) if gap > 0 else 1.0
