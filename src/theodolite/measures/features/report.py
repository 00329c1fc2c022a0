"""`feature_report`: which directions and coordinates of its input a model looks at, and how far that agrees with a reference."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from theodolite.linalg import top_eigenpairs
from theodolite.measures.features.agop import inner, require_same_inputs
from theodolite.measures.features.gradients import InputGradients, Settings, as_source, chunks
from theodolite.measures.features.groups import Jackknife, Matrix, Moments, diagonal_of, gather, weighted_mean
from theodolite.results import Cost, Outcome, Result, Row, number

#: Top directions reported, and input coordinates named.
TOP = 10
#: Up to this size all eigenvalues are computed at once; beyond, the largest by iteration.
DENSE = 1000
#: A squared derivative below this many squared roundings of the largest is none.
ROUNDINGS = 16.0


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class FeatureReport(Result):
    """The average gradient outer product G of a model in numbers.

    `values` are its largest eigenvalues, `vectors` (d, r) the directions that belong to them, `diagonal` (d) the mean squared
    derivative in each coordinate. `effective_rank` is (Tr G)²/‖G‖²: 1 for a single direction, d for all alike. Alignments are
    cosines of G with a reference matrix (None where none was given), the identity (no preferred direction) and the covariance
    of the inputs (None where they do not vary); `chance` is that of the identity with the reference. Errors are the
    delete-a-group jackknife over samples, 0 for a single sample.
    """

    values: Tensor
    vectors: Tensor
    diagonal: Tensor
    trace: float
    effective_rank: float
    effective_rank_error: float
    top_share: float
    top_share_error: float
    identity: float
    covariance: float | None
    reference: float | None
    reference_error: float
    chance: float | None
    samples: int
    outputs: int
    at: str | None = None

    @property
    def dim(self) -> int:
        return len(self.diagonal)

    @property
    def shares(self) -> list[float]:
        """What each of the top directions has of the trace."""
        return (self.values / self.trace).tolist()

    @property
    def coordinates(self) -> list[tuple[int, float]]:
        """The most used coordinates with their share of the trace."""
        order = self.diagonal.argsort(descending=True, stable=True)[:TOP]
        return [(int(i), float(self.diagonal[i]) / self.trace) for i in order]

    @property
    def unused(self) -> list[int]:
        """Coordinates on which no output depends, at any of the samples."""
        least = ROUNDINGS * torch.finfo(self.diagonal.dtype).eps ** 2 * float(self.diagonal.max())
        return (self.diagonal <= least).nonzero().flatten().tolist()

    def rows(self) -> list[Row]:
        table: list[tuple[str, float | None, float | None]] = [
            ("effective rank", self.effective_rank, self.effective_rank_error),
            ("share of the top direction", self.top_share, self.top_share_error),
            ("unused coordinates", float(len(self.unused)), None),
            ("alignment with the identity", self.identity, None),
        ]
        if self.covariance is not None:
            table.append(("alignment with the input covariance", self.covariance, None))
        if self.reference is not None:
            table.append(("alignment with the reference", self.reference, self.reference_error))
            table.append(("alignment of the identity with the reference", self.chance, None))
        values = enumerate(zip(self.values.tolist(), self.shares, strict=True), 1)
        table += [row for i, (v, s) in values for row in ((f"eigenvalue {i}", v, None), (f"share of direction {i}", s, None))]
        table += [(f"share of coordinate {i}", share, None) for i, share in self.coordinates]
        return [{"quantity": name, "value": value, "error": error, "seed": self.seed} for name, value, error in table]

    def sentence(self) -> str:
        where = "inputs" if self.at is None else f"features of {self.at}"
        rank = number(self.effective_rank, self.effective_rank_error)
        said = f"The outputs depend on {rank} of {self.dim} directions of the {where} (effective rank); "
        said += f"{number(100 * self.top_share, 100 * self.top_share_error)} % of the squared gradient lies along the first"
        if self.unused:
            said += f"; {len(self.unused)} coordinate{'s have' if len(self.unused) > 1 else ' has'} no effect"
        if self.reference is not None:
            said += f"; alignment with the reference {number(self.reference, self.reference_error)}"
            said += f", of no preferred direction {self.chance:.3g}"
        return said + "."


def feature_report(
    model_or_problem: Any,
    inputs: Any = None,
    reference: Tensor | InputGradients | None = None,
    *,
    at: str | None = None,
    batch_size: int | None = None,
    projections: int | None = None,
    seed: int = 0,
) -> FeatureReport:
    """What a model looks at: the average gradient outer product in numbers, with error bars.

    `reference` is what it should look at: the AGOP of a better model on the same inputs, or the expected one of a known
    target. The other arguments are those of `agop`.

    >>> model = torch.nn.Linear(4, 1, bias=False).double()
    >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 4.0, 0.0, 0.0]]))
    >>> print(feature_report(model, torch.randn(20, 4).double()))
    The outputs depend on 1 of 4 directions of the inputs (effective rank); 100 % of the squared gradient lies along the first; \
2 coordinates have no effect.
    """
    began = time.perf_counter()
    problem = as_source(model_or_problem, inputs)
    gathered = gather(chunks(problem, inputs, Settings(at, batch_size, projections, seed)), seed)
    matrices, weights = [g.matrix() for g in gathered.groups if g.count], [float(g.count) for g in gathered.groups if g.count]
    if reference is not None:
        require_same_inputs(matrices[0], reference)
    diagonal = weighted_mean([diagonal_of(m) for m in matrices], weights)
    if not float(diagonal.sum()) > 0:
        raise ValueError("The model's outputs do not depend on its inputs at any of these samples: the AGOP is zero.")
    values, vectors = _top(matrices, weights)
    moments = Moments(matrices, vectors, reference)
    jackknife = Jackknife(weights)
    rank, rank_error = jackknife(moments.effective_rank)
    share, share_error = jackknife(moments.top_share)
    aligned, aligned_error = (None, 0.0) if reference is None else jackknife(moments.alignment)
    whole = [w / sum(weights) for w in weights]
    chance = None
    if reference is not None:
        used = diagonal_of(reference).double()
        chance = min(1.0, float(used.sum()) / math.sqrt(len(used) * inner(reference, reference)))
    return FeatureReport(
        values=values,
        vectors=vectors,
        diagonal=diagonal,
        trace=float(diagonal.sum()),
        effective_rank=rank,
        effective_rank_error=rank_error,
        top_share=share,
        top_share_error=share_error,
        identity=min(1.0, math.sqrt(rank / len(diagonal))),  # Tr G / (‖G‖ √d)
        covariance=_with_covariance(matrices, whole, gathered.values, moments),
        reference=aligned,
        reference_error=aligned_error,
        chance=chance,
        samples=int(sum(weights)),
        outputs=gathered.outputs,
        at=at,
        outcome=Outcome.FINISHED if projections is None else Outcome.ESTIMATED,
        seed=seed,
        cost=Cost(time.perf_counter() - began, "input gradients", 0, problem.notes),
    )


def _top(matrices: list[Matrix], weights: list[float]) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues of the mean, descending, and their directions (d, r)."""
    rows = [m.rows for m in matrices if isinstance(m, InputGradients)]
    if len(rows) == len(matrices) and sum(map(len, rows)) < rows[0].shape[1]:
        joined = torch.cat(rows) / math.sqrt(sum(weights))
        values, vectors = _largest(joined @ joined.T)
        # Orthonormal also where an eigenvalue is zero up to rounding and its column is noise.
        return values, torch.linalg.qr(joined.T.double() @ vectors.double())[0].to(joined.dtype)
    return _largest(weighted_mean([m if isinstance(m, Tensor) else m.matrix() for m in matrices], weights))


def _largest(matrix: Tensor) -> tuple[Tensor, Tensor]:
    size = len(matrix)
    if size > DENSE:
        pairs = top_eigenpairs(matrix, TOP, progress=False)
        return pairs.values.clamp_min(0).to(matrix.dtype), pairs.vectors.to(matrix.dtype)
    values, vectors = torch.linalg.eigh(matrix.double())
    r = min(TOP, size)
    return values[-r:].flip(0).clamp_min(0).to(matrix.dtype), vectors[:, -r:].flip(1).to(matrix.dtype)


def _with_covariance(matrices: list[Matrix], weights: list[float], values: Tensor, moments: Moments) -> float | None:
    centred = values - values.mean(0)
    if float(centred.abs().max()) <= 1e-6 * float(values.abs().max()):
        return None
    spread = InputGradients(centred, len(centred))
    shared = sum(w * inner(m, spread) for w, m in zip(weights, matrices, strict=True))
    return min(1.0, shared / (moments.size(torch.tensor(weights, dtype=torch.float64)) * math.sqrt(inner(spread, spread))))
