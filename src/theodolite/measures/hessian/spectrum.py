"""What a spectrum means for training: how badly it is conditioned, and how the gradient lies in it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from torch import Tensor

from theodolite.arguments import checked, fraction, instance
from theodolite.linalg import Density, Eigenpairs
from theodolite.problem.arguments import of_dimensions, tensors_fit
from theodolite.results import Cost, Outcome, Result, Row, number


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Conditioning(Result):
    """How the curvature is spread over directions.

    `flat` is the share of directions whose curvature is below `threshold` times the sharpest, `negative` the share that
    curves downwards by more than that; `stable_rank` is tr H² / λ₁², the number of directions that carry the curvature;
    `spread` is the sharpest over the root mean square of all eigenvalues. The sharpest is the largest in magnitude.

    The known eigenvalues enter exactly, only the rest is estimated. Errors are standard errors over the probes: the share
    of a random unit vector in a subspace follows a beta law, and
    the variance of its quadratic form in H² is 2 tr H⁴ / probes.
    """

    sharpness: float
    flat: float
    flat_error: float
    negative: float
    negative_error: float
    stable_rank: float
    stable_rank_error: float
    spread: float
    threshold: float
    size: int

    def rows(self) -> list[Row]:
        return [
            {"quantity": "share of flat directions", "value": self.flat, "error": self.flat_error},
            {"quantity": "share of negative directions", "value": self.negative, "error": self.negative_error},
            {"quantity": "stable rank", "value": self.stable_rank, "error": self.stable_rank_error},
            {"quantity": "the sharpest over the root mean square", "value": self.spread, "error": None},
            {"quantity": "directions", "value": float(self.size), "error": 0.0},
        ]

    def sentence(self) -> str:
        return (
            f"{number(100 * self.flat, 100 * self.flat_error)} % of {self.size} directions are flat (below "
            f"{self.threshold:g} of the sharpest); the curvature lives in about "
            f"{number(self.stable_rank, self.stable_rank_error)}."
        )


@checked(pairs=instance(Eigenpairs), density=instance(Density), threshold=fraction)
def conditioning(pairs: Eigenpairs, density: Density, threshold: float = 0.01) -> Conditioning:
    """Summary of a spectrum from its top eigenpairs and its density (Lanczos quadrature).

    >>> import torch
    >>> from theodolite.linalg import spectral_density, top_eigenpairs
    >>> matrix = torch.diag(torch.tensor([3.0, 3.0, 0.0, 0.0, 0.0, 0.0]).double())
    >>> summary = conditioning(top_eigenpairs(matrix, 2), spectral_density(matrix, probes=64, steps=4))
    >>> round(summary.stable_rank, 9), abs(summary.flat - 4 / 6) <= 4 * summary.flat_error
    (2.0, True)
    """
    began = time.perf_counter()
    size = len(pairs.vectors)
    nodes, weights = density.nodes.double(), density.weights.double()
    sharpness = max(float(pairs.values.abs().max()), float(nodes.abs().max()))
    if not sharpness > 0:
        raise ValueError("The curvature is zero in every direction.")
    flat = float(weights[nodes.abs() < threshold * sharpness].sum())
    negative = float(weights[nodes <= -threshold * sharpness].sum())
    known = pairs.values.double()
    rest = nodes < float(known.min()) - 1e-3 * sharpness  # what the exact eigenvalues do not account for
    second = float(known.square().sum()) + size * float((weights * nodes.square())[rest].sum())
    fourth = size * float((weights * nodes**4)[rest].sum())
    return Conditioning(
        sharpness=sharpness,
        flat=flat,
        flat_error=_share_error(flat, size, density.probes),
        negative=negative,
        negative_error=_share_error(negative, size, density.probes),
        stable_rank=second / sharpness**2,
        stable_rank_error=math.sqrt(2 * fourth / density.probes) / sharpness**2,
        spread=sharpness / math.sqrt(second / size),
        threshold=threshold,
        size=size,
        outcome=Outcome.ESTIMATED,
        seed=density.seed,
        cost=Cost(seconds=time.perf_counter() - began, route="quadrature"),
    )


def _share_error(share: float, size: int, probes: int) -> float:
    """Standard deviation of the mean share of `probes` random unit vectors in a subspace of dimension share·size."""
    share = min(1.0, max(0.0, share))
    return math.sqrt(2 * share * (1 - share) / ((size + 2) * probes))


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


@checked(gradient=of_dimensions(1), pairs=instance(Eigenpairs))
@tensors_fit
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
    last = float(pairs.values[-1])
    gap = min((abs(last - float(v)) for v in pairs.nearby_values), default=abs(last))
    return min(1.0, 2.0 * float(pairs.residuals.double().norm()) / gap) if gap > 0 else 1.0
