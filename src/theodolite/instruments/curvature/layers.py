"""Curvature layer by layer: which layer is sharp, and what its sharp directions are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import theodolite as th
from theodolite.errors import BatchCoupledError
from theodolite.instruments.base import Instrument, Picture, Results, SurveyContext, Work, inapplicable
from theodolite.instruments.curvature.spectrum import basis_bytes
from theodolite.linalg import Eigenpairs, top_eigenpairs
from theodolite.measures.hessian import StructureReport, hessian_structure
from theodolite.operators.kronecker import affine_layers
from theodolite.results import Finding, ResultMapping, Row, Severity, number
from theodolite.text import listed

#: More layers than this are drawn by their place in the network, fewer each by its spectrum.
FEW = 6

#: A decoupling error up to this lets the factors stand for the block; beyond the other they do not.
TRUSTED, DOUBTFUL = 0.5, 0.9
#: Residuals of the eigenpairs, over the largest eigenvalue.
TOLERANCE = 1e-3
#: More layers take longer than the picture is worth.
MOST_LAYERS = 30


class Layers(Instrument):
    name = "layers"
    order = 90
    title = "Curvature layer by layer"
    question = "Which layers are sharp, and which are flat?"
    how = (
        "The exact diagonal block of the Hessian of each layer's weight; the largest eigenpairs of all blocks are found in "
        "lockstep on one graph. The error is the true residual."
    )
    source = "Wu and others (2020), Dissecting Hessian: layer-wise structure and its eigenspaces."
    efforts = ({"k": 3}, {"k": 1})

    def applies(self, context: SurveyContext) -> str:
        return "" if len(context.problem.layers) > 1 else "the model has a single layer"

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        rounds = 18 + 12 * effort["k"]
        count = len(context.problem.layers)
        beside = 4e-4 * count + 3e-8 * context.problem.size  # each layer's solver
        return Work(products=0.01, seconds=rounds * (context.layer_round + beside), bytes=basis_bytes(context, effort["k"]))

    def run(self, context: SurveyContext, **effort: Any) -> ResultMapping:
        cap = None
        if context.allowance is not None:
            cap = max(6, int(context.allowance / max(context.layer_round + 4e-4 * len(context.problem.layers), 1e-9)))
        return top_eigenpairs(context.layer_blocks, effort["k"], max_matvecs=cap, seed=context.seed, progress=False)

    def rows(self, result: ResultMapping) -> list[Row]:
        return [
            {
                "layer": name,
                "largest eigenvalue": float(pairs.values[0]),
                "residual": float(pairs.residuals[0]),
                "parameters": pairs.vectors.shape[0],
                "converged": pairs.converged,
            }
            for name, pairs in result.items()
        ]

    def findings(self, context: SurveyContext, result: ResultMapping) -> list[Finding]:
        tops = {name: (float(pairs.values[0]), float(pairs.residuals[0])) for name, pairs in result.items()}
        sharpest = max(tops, key=lambda name: tops[name][0])
        flattest = min(tops, key=lambda name: tops[name][0])
        value, error = tops[sharpest]
        measured = (f"largest eigenvalue of the block of {sharpest}", value, error)
        if not value > 0:
            return [self.found(Severity.NOTE, "No layer's own block curves upwards.", "sharpest layer", *measured)]
        whole = context.results.get("curvature")
        share, advice = "", ""
        if isinstance(whole, Eigenpairs) and float(whole.values[0]) > 0:
            part = value / float(whole.values[0])
            share = f", {100 * part:.3g} % of the whole network's"
            advice = (
                "This layer sets the largest stable rate; a smaller rate or a normalisation there lets the others go faster."
                if part > 0.5
                else "No single layer holds the sharpness: the layers are sharp together."
            )
        text = (
            f"The sharpest layer is {sharpest} with curvature {number(value, error)}{share}; the flattest is {flattest} "
            f"({tops[flattest][0]:.3g})."
        )
        slow = sum(not pairs.converged for pairs in result.values())
        text += f" The search did not finish in {slow} layers." if slow else ""
        return [self.found(Severity.NOTE, text, "sharpest layer", *measured, advice=advice)]

    def figure(self, results: Results) -> Picture:
        result = results[self.name]
        if len(result) <= FEW:
            return th.plots.eigenvalues(result, by="layer", log=True, title="Largest eigenvalues of each layer's block")
        tops = [row["largest eigenvalue"] for row in self.rows(result)]
        rows = [{"layer number": i, "eigenvalue": top} for i, top in enumerate(tops, 1) if top > 0]
        title = "Sharpness of each layer, in the order of the model"
        return th.plots.curves(
            rows, x="layer number", y="eigenvalue", log="y", markers=True, title=title, ylabel="largest eigenvalue"
        )


class Structure(Instrument):
    name = "structure"
    order = 100
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
    columns: ClassVar[Mapping[str, str]] = {
        **{key: key for key in ("layer", "sharpness", "residual", "decoupling_error", "overlap", "rank_ratio")},
        **{"squared_dot": "input_mean", "ratio": "input_gap"},
    }

    def applies(self, context: SurveyContext) -> str:
        recipes, _ = affine_layers(context.problem, list(context.problem.layers))
        if not any(recipe.groups == 1 for recipe in recipes):
            return "no layer is a linear layer or a plain convolution"
        if len(recipes) > MOST_LAYERS:
            return f"there are {len(recipes)} layers; theodolite.hessian_structure(problem, layers) measures some of them"
        if context.problem.weighting.rule == "sum" or context.problem.mode == "train":
            return "the factors are means over samples that do not depend on one another"
        return ""

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        rounds = 40 + 8 * effort["k"]
        count = len(context.problem.layers)
        seconds = rounds * (context.layer_round + 5e-4 * count + 3e-8 * context.problem.size)
        return Work(gradients=20.0, products=0.01, seconds=seconds, bytes=basis_bytes(context, effort["k"]))

    @inapplicable(ValueError, BatchCoupledError)  # a loss without factors, no layer with two
    def run(self, context: SurveyContext, **effort: Any) -> StructureReport:
        seen = getattr(context.results.get("batches"), "classes", 0)
        classes = seen if 1 < seen <= 100 else None
        return hessian_structure(context.problem, **effort, tol=TOLERANCE, classes=classes, seed=context.seed, progress=False)

    def findings(self, context: SurveyContext, result: StructureReport) -> list[Finding]:
        rows = result.rows()
        good = [row["layer"] for row in rows if row["decoupling_error"] <= TRUSTED]
        bad = [row["layer"] for row in rows if row["decoupling_error"] > DOUBTFUL]
        mean = sum(row["decoupling_error"] for row in rows) / len(rows)
        text = f"Two small factors explain the curvature of {len(good)} of {len(rows)} layers (mean decoupling error {mean:.2g})"
        text += f", but not that of {listed(bad, 4)}." if bad else "."
        advice = "Where they do, a Kronecker preconditioner (K-FAC, Shampoo) fits; elsewhere it would mislead." if bad else ""
        # A quotient of two norms, each an eigenvalue known to its residual; that of the difference is below the tolerance.
        worst = max(row["residual"] / max(abs(row["sharpness"]), 1e-30) for row in rows)
        measured = ("mean decoupling error", mean, mean * (TOLERANCE + worst))
        return [self.found(Severity.NOTE, text, "factorisation", *measured, advice=advice), *self._inputs(rows)]

    def _inputs(self, rows: list[Row]) -> Iterator[Finding]:
        inner = rows[1:]  # the first layer's input is the data
        normalised = [row["layer"] for row in inner if row["squared_dot"] < 0.3 and row["ratio"] < 2]
        if normalised:
            text = (
                f"The inputs of {listed(normalised, 4)} have no dominant direction, as normalisation makes "
                "them: no rank-one outliers there."
            )
            yield self.found(Severity.NOTE, text, "normalised inputs", "layers", float(len(normalised)))
            return
        dominant = [row["ratio"] for row in inner if row["squared_dot"] > 0.9 and row["ratio"] > 2]
        if dominant:
            ratio = sum(dominant) / len(dominant)
            text = (
                f"The inputs of {len(dominant)} of {len(inner)} inner layers are nearly one direction, their mean (it is "
                f"{ratio:.2g} times stronger than the next): sharp directions are an output direction times that mean."
            )
            advice = "A normalisation layer takes the mean away, and with it these outliers."
            measured = ("largest over second eigenvalue of the input auto-correlation", ratio)
            yield self.found(Severity.NOTE, text, "rank-one inputs", *measured, advice=advice)

    def figure(self, results: Results) -> Picture:
        report = results[self.name]
        name = max(report, key=lambda layer: float(report[layer].pairs.values[0]))
        corner = report[name].correspondence().outputs[:10, :10].clamp(max=1.0)  # rounding
        if min(corner.shape) < 3:
            return None
        return th.plots.matrix(
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
