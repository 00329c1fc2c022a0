"""What the sharp directions of two models share, layer by layer, beside what their factors predict."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.linalg import Eigenpairs, overlap_curve
from theodolite.measures.hessian.overlap_law import predicted_overlap
from theodolite.measures.hessian.structure import LayerStructure
from theodolite.results import Outcome, Result, Row, number


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LayerComparison(Result):
    """One layer of two models: `overlap[k-1]` of their top-k eigenspaces, `predicted` from the factors as they are, and
    `permuted` where hidden units have no common order, which the `last` layer's have; `input_dot` is (v₁·v₁')² of the two
    input auto-correlations.

    `errors[k-1]` estimates what the eigenvectors' residuals leave open in `overlap[k-1]`; it is 1 where the k-th eigenvalue
    cannot be told from the next, for there is no such subspace then, or the next is not known.
    """

    layer: str
    first: str
    second: str
    outputs: int
    last: bool
    overlap: Tensor
    errors: Tensor
    predicted: Tensor
    permuted: Tensor
    input_dot: float

    @property
    def peak(self) -> int:
        """The k at which the overlap is largest."""
        return int(self.overlap.argmax()) + 1

    def rows(self) -> list[Row]:
        curves = {"measured": self.overlap, "predicted": self.predicted}
        if not self.last:
            curves["predicted, units permuted"] = self.permuted
        return [
            {
                "layer": self.layer,
                "pair": f"{self.first} and {self.second}",
                "curve": name,
                "dimension": k + 1,
                "overlap": float(v),
            }
            for name, curve in curves.items()
            for k, v in enumerate(curve)
        ]

    def sentence(self) -> str:
        k = len(self.overlap)
        free = "" if self.last else f", {float(self.permuted[-1]):.3g} with units in no common order"
        return (
            f"{self.layer} of {self.first} and {self.second}: the {k} sharpest directions share "
            f"{number(float(self.overlap[-1]), float(self.errors[-1]))} (predicted {float(self.predicted[-1]):.3g}{free}), "
            f"most at {self.peak}."
        )


def compare_layers(
    a: LayerStructure, b: LayerStructure, names: tuple[str, str] = ("A", "B"), *, k: int | None = None
) -> LayerComparison:
    """Overlap of one layer's sharp subspaces in two models of the same architecture, up to k directions (None: all known).

    The error of the overlap of k directions needs eigenvalue k + 1: of all known ones it may not be known.
    """
    shapes = [(len(part.factors.output), len(part.factors.input)) for part in (a, b)]
    if shapes[0] != shapes[1]:
        sizes = " and ".join(f"{m}×{n} in {name}" for (m, n), name in zip(shapes, names, strict=True))
        raise ValueError(f"{a.layer} must have the same size in both models. Its weight is {sizes}.")
    known = min(len(a.pairs.values), len(b.pairs.values))
    k = known if k is None else min(k, known)
    first, second = (torch.linalg.eigh(part.factors.input)[1][:, -1] for part in (a, b))
    return LayerComparison(
        layer=a.layer,
        first=names[0],
        second=names[1],
        outputs=a.factors.output.shape[0],
        last=a.factors.last,
        overlap=overlap_curve(a.pairs.vectors[:, :k], b.pairs.vectors[:, :k]).double(),
        errors=overlap_errors(a.pairs, b.pairs)[:k],
        predicted=predicted_overlap(a.factors, b.factors, k),
        permuted=predicted_overlap(a.factors, b.factors, k, permuted=True),
        input_dot=float(first @ second) ** 2,
        outcome=next((part.outcome for part in (a, b) if not part.outcome.good), Outcome.CONVERGED),
        seed=a.seed,
        cost=a.cost,
    )


def overlap_errors(a: Eigenpairs, b: Eigenpairs) -> Tensor:
    """What residuals leave open in the overlap of the first k eigenvectors, k = 1, 2, ...: an estimate of first order.

    As in Davis and Kahan's theorem a computed vector i of the first k is tilted out of the eigenspace by at most its
    residual over its gap, `r_i / (λ_i − λ_{k+1})` with the computed eigenvalues; Θ collects these angles. Turning U by Θ moves
    `tr(P_U P_V)/k` by at most `(2/k) √(Σ c²s²) ‖Θ‖`, c and s the cosines and sines between U and V, and by `‖Θ‖²/k` more in
    second order.
    """
    width = min(len(a.values), len(b.values))
    count = torch.arange(1, width + 1, dtype=torch.float64)
    turns = torch.stack([_turns(pairs)[:width] for pairs in (a, b)]).minimum(count.sqrt())
    dots = a.vectors[:, :width].double().T @ b.vectors[:, :width].double()
    corners = [dots[:k, :k] for k in range(1, width + 1)]
    # Σ c² − Σ c⁴, by the traces of C = D Dᵀ and C².
    mixed = torch.stack([d.square().sum() - (d @ d.T).square().sum() for d in corners]).clamp_min(0.0).sqrt()
    errors = ((2 * mixed * turns + turns.square()) / count).sum(0)
    return errors.clamp(max=1.0)


def _turns(pairs: Eigenpairs) -> Tensor:
    """The angle ‖Θ‖ of the first k eigenvectors, k = 1, 2, ...; infinite where the gap is zero or not known."""
    values, residuals = pairs.values.double(), pairs.residuals.double()
    if len(values) == pairs.vectors.shape[0]:
        beyond = float("-inf")  # nothing is left out
    else:
        beyond = float(pairs.nearby_values.double().max()) if len(pairs.nearby_values) else float("inf")
    following = torch.cat([values[1:], values.new_tensor([beyond])])
    gaps = values[:, None] - following  # (i, k)
    rounding = 100 * torch.finfo(pairs.values.dtype).eps * pairs.scale
    tilts = torch.where(gaps > rounding, residuals[:, None] / gaps.clamp_min(1e-300), float("inf"))
    inside = torch.ones_like(tilts, dtype=torch.bool).triu()
    return torch.where(inside, tilts, 0.0).square().sum(0).sqrt()
