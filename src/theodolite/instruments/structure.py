"""Why are the sharp directions of a layer what they are, and can two small factors stand for its curvature?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from theodolite.instruments.base import Instrument, Site, Work, listed
from theodolite.instruments.curvature import basis_bytes
from theodolite.measures.audit import BatchAudit
from theodolite.measures.hessian import StructureReport, hessian_structure
from theodolite.operators.kronecker import affine_layers
from theodolite.results import Finding, Row, Severity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: A decoupling error up to this lets the factors stand for the block; beyond the other they do not.
TRUSTED, DOUBTFUL = 0.5, 0.9

#: Residuals of the eigenpairs, over the largest eigenvalue.
TOLERANCE = 1e-3

#: More layers take longer than the picture is worth.
MOST_LAYERS = 30


class Structure(Instrument):
    name = "structure"
    title = "Structure of the layers' curvature"
    question = "Do the output Hessian and the input of a layer explain its sharp directions?"
    how = (
        "For every linear and convolutional layer: the exact block's eigenpairs, the output Hessian E[M] and the input "
        "auto-correlation E[xxᵀ] from one backward pass per output, and the spectral norm of block − E[M] ⊗ E[xxᵀ] over that "
        "of the block (decoupling error). Overlap (of the block's and the product's eigenvectors) and rank ratio (1 for a rank "
        "one matrix) are those of the eigenvalues before the widest gap. Input mean is (v₁·μ)²/‖μ‖², input gap is γ₁/γ₂, "
        "with γ and v the eigenvalues and eigenvectors of E[xxᵀ] and μ the mean input."
    )
    source = "Wu and others (2020), Dissecting Hessian: decoupling of the layer-wise Hessian."
    efforts = ({"k": 10}, {"k": 3})

    def applies(self, site: Site) -> str:
        recipes, _ = affine_layers(site.problem, list(site.problem.layers))
        if not any(recipe.groups == 1 for recipe in recipes):
            return "no layer is a linear layer or a plain convolution"
        if len(recipes) > MOST_LAYERS:
            return f"there are {len(recipes)} layers; theodolite.hessian_structure(problem, layers) measures some of them"
        if site.problem.weighting.rule == "sum" or site.problem.mode == "train":
            return "the factors are means over samples that do not depend on one another"
        return ""

    def cost(self, site: Site, **effort: Any) -> Work:
        rounds = 40 + 8 * effort["k"]
        count = len(site.problem.layers)
        seconds = rounds * (site.layer_round + 5e-4 * count + 3e-8 * site.problem.size)
        return Work(gradients=20.0, products=0.01, seconds=seconds, bytes=basis_bytes(site, effort["k"]))

    def run(self, site: Site, **effort: Any) -> StructureReport:
        audit = site.results.get("batches")
        classes = audit.classes if isinstance(audit, BatchAudit) and 1 < audit.classes <= 100 else None
        return hessian_structure(site.problem, k=effort["k"], tol=TOLERANCE, classes=classes, seed=site.seed, progress=False)

    def rows(self, result: StructureReport) -> list[Row]:
        keep = ("layer", "sharpness", "residual", "decoupling_error", "overlap", "rank_ratio")
        inputs = {"input_mean": "squared_dot", "input_gap": "ratio"}
        names = {key: key for key in keep} | inputs
        return [{name: row[key] for name, key in names.items()} for row in result.rows()]

    def findings(self, site: Site, result: StructureReport) -> list[Finding]:
        rows = result.rows()
        good = [row["layer"] for row in rows if row["decoupling_error"] <= TRUSTED]
        bad = [row["layer"] for row in rows if row["decoupling_error"] > DOUBTFUL]
        mean = sum(row["decoupling_error"] for row in rows) / len(rows)
        text = f"Two small factors explain the curvature of {len(good)} of {len(rows)} layers (mean decoupling error {mean:.2g})"
        text += f", but not that of {listed(bad)}." if bad else "."
        advice = "Where they do, a Kronecker preconditioner (K-FAC, Shampoo) fits; elsewhere it would mislead." if bad else ""
        # A quotient of two norms, each an eigenvalue known to its residual; that of the difference is below the tolerance.
        worst = max(row["residual"] / max(abs(row["sharpness"]), 1e-30) for row in rows)
        fields = {"quantity": "mean decoupling error", "value": mean, "error": mean * (TOLERANCE + worst)}
        found = [self.found(Severity.NOTE, text, label="factorisation", advice=advice, **fields)]
        return [*found, *self._inputs(rows)]

    def _inputs(self, rows: list[Row]) -> list[Finding]:
        inner = rows[1:]  # the first layer's input is the data
        if not inner:
            return []
        normalised = [row["layer"] for row in inner if row["squared_dot"] < 0.3 and row["ratio"] < 2]
        if normalised:
            text = (
                f"The inputs of {listed(normalised)} have no dominant direction, as normalisation makes "
                "them: no rank-one outliers there."
            )
            value = float(len(normalised))
            return [self.found(Severity.NOTE, text, label="normalised inputs", quantity="layers", value=value)]
        dominant = [row["layer"] for row in inner if row["squared_dot"] > 0.9 and row["ratio"] > 2]
        if not dominant:
            return []
        ratio = sum(row["ratio"] for row in inner if row["layer"] in dominant) / len(dominant)
        text = (
            f"The inputs of {len(dominant)} of {len(inner)} inner layers are nearly one direction, "
            f"their mean (it is {ratio:.2g} times "
            "stronger than the next): sharp directions are an output direction times that mean."
        )
        advice = "A normalisation layer takes the mean away, and with it these outliers."
        fields = {"quantity": "largest over second eigenvalue of the input auto-correlation", "value": ratio}
        return [self.found(Severity.NOTE, text, label="rank-one inputs", advice=advice, **fields)]

    def figure(self, results: Mapping[str, Any]) -> Axes | None:
        from theodolite import plots

        report = results[self.name]
        name = max(report, key=lambda layer: float(report[layer].pairs.values[0]))
        corner = report[name].correspondence().outputs[:10, :10].clamp(max=1.0)  # rounding
        if min(corner.shape) < 3:
            return None
        return plots.matrix(
            corner,
            row_names=range(1, len(corner) + 1),
            column_names=range(1, corner.shape[1] + 1),
            limits=(0.0, 1.0),
            center=None,
            number=".2f",
            label="share of the eigenvector",
            title=f"{name}: sharp directions against output directions",
            xlabel="eigenvector of the block",
            ylabel="eigenvector of E[M]",
        )
