"""What the sharp directions of two models share, layer by layer, beside what their factors predict."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.linalg import overlap_curve
from theodolite.measures.hessian.overlap_law import predicted_overlap
from theodolite.measures.hessian.structure import LayerStructure
from theodolite.results import Outcome, Result, Row


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LayerComparison(Result):
    """One layer of two models: `overlap[k-1]` of their top-k eigenspaces, `predicted` from the factors as they are, and
    `permuted` where hidden units have no common order; `input_dot` is (v₁·v₁')² of the two input auto-correlations.

    `error` bounds what the eigenvectors' residuals leave open in the last point of the curve.
    """

    layer: str
    first: str
    second: str
    outputs: int
    overlap: Tensor
    predicted: Tensor
    permuted: Tensor
    input_dot: float
    error: float

    @property
    def peak(self) -> int:
        """The k at which the overlap is largest."""
        return int(self.overlap.argmax()) + 1

    def rows(self) -> list[Row]:
        curves = {"measured": self.overlap, "predicted": self.predicted, "predicted, units permuted": self.permuted}
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
        return (
            f"{self.layer} of {self.first} and {self.second}: the {k} sharpest directions share {float(self.overlap[-1]):.3g} "
            f"(predicted {float(self.permuted[-1]):.3g} with units in no common order), most at {self.peak}."
        )


def compare_layers(a: LayerStructure, b: LayerStructure, names: tuple[str, str] = ("A", "B")) -> LayerComparison:
    """Overlap of one layer's sharp subspaces in two models of the same architecture."""
    if a.pairs.vectors.shape[0] != b.pairs.vectors.shape[0]:
        raise ValueError(
            f"{a.layer} has {a.pairs.vectors.shape[0]} weights in one model and {b.pairs.vectors.shape[0]} in the other."
        )
    k = min(len(a.pairs.values), len(b.pairs.values))
    first, second = (torch.linalg.eigh(part.factors.input)[1][:, -1] for part in (a, b))
    return LayerComparison(
        layer=a.layer,
        first=names[0],
        second=names[1],
        outputs=a.factors.output.shape[0],
        overlap=overlap_curve(a.pairs.vectors[:, :k], b.pairs.vectors[:, :k]).double(),
        predicted=predicted_overlap(a.factors, b.factors, k),
        permuted=predicted_overlap(a.factors, b.factors, k, permuted=True),
        input_dot=float(first @ second) ** 2,
        error=min(1.0, _slack(a) + _slack(b)),
        outcome=next((part.outcome for part in (a, b) if not part.outcome.good), Outcome.CONVERGED),
        seed=a.seed,
        cost=a.cost,
    )


def _slack(structure: LayerStructure) -> float:
    """Mean squared angle that the residuals leave open, over the gap to the end of the known spectrum."""
    values = structure.pairs.values.double()
    gap = float(values[0] - values[-1]) or 1.0
    return float((structure.pairs.residuals.double() / gap).mean())
