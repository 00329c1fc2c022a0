"""The spectrum of the Hessian: its ends, its trace, its density, its condition, and where the gradient points in it."""

from __future__ import annotations

import itertools
import math
from typing import Any, ClassVar, Literal

import torch

import theodolite as th
from theodolite.instruments.base import InapplicableError, Instrument, Picture, Results, SurveyContext, Work
from theodolite.linalg import Density, Eigenpairs, TraceEstimate, spectral_density, top_eigenpairs, trace
from theodolite.linalg.density import PROBE_BYTES
from theodolite.linalg.eigenpairs import BASIS_BYTES
from theodolite.measures.hessian import Alignment, Conditioning, conditioning, gradient_alignment
from theodolite.results import Finding, Row, Severity, number


def basis_bytes(context: SurveyContext, k: int) -> int:
    """Memory of a solver's basis, which restarts rather than grow beyond its limit."""
    return min(BASIS_BYTES, context.problem.size * (4 * k + 60) * 12)


class SpectrumEnd(Instrument):
    """Eigenpairs at one end of the spectrum."""

    which: ClassVar[Literal["largest", "smallest"]]

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        """Verification included: the mean over networks of many kinds, good to a factor of 1.6.

        The lower end of a spectrum is crowded, so its pairs take longer.
        """
        size, k = context.problem.size, min(effort["k"], context.problem.size)
        products = 30.0 + 15 * k if self.which == "smallest" else 20.0 + 6 * k
        return Work(products=min(size + 8.0, products), bytes=basis_bytes(context, k))

    def run(self, context: SurveyContext, **effort: Any) -> Eigenpairs:
        k = min(effort["k"], context.problem.size)
        cap = context.affordable(500 + 100 * k)
        return top_eigenpairs(context.hessian, k, which=self.which, max_matvecs=cap, seed=context.seed, progress=False)

    def rows(self, result: Eigenpairs) -> list[Row]:
        return [
            {"rank": i, "eigenvalue": row["eigenvalue"], "residual": row["residual"], "differs from zero": not row["unresolved"]}
            for i, row in enumerate(result.rows(), 1)
        ]


class Curvature(SpectrumEnd):
    name = "curvature"
    order = 60
    title = "The sharpest directions"
    question = "How strongly does the loss curve, and in how many directions?"
    how = (
        "Exact eigenpairs of the loss Hessian by restarted Lanczos with full reorthogonalisation on exact products; the error is "
        "the true residual ‖Hv − λv‖, and a certificate bounds the chance that an eigenvalue was missed."
    )
    source = "Sagun and others (2017) and Papyan (2018): one sharp direction per class, less one, stands out of the bulk."
    efforts = ({"k": 12}, {"k": 5}, {"k": 1})
    which = "largest"

    def findings(self, context: SurveyContext, result: Eigenpairs) -> list[Finding]:
        top, error = float(result.values[0]), float(result.residuals[0])
        measured = ("largest Hessian eigenvalue", top, error)
        if not result.converged:
            text = (
                f"The sharpest direction curves by about {number(top, error)}, but the search did not "
                f"finish: {result.outcome.value}."
            )
            return [self.found(Severity.WARNING, text, "not converged", *measured, advice="Allow a larger budget.")]
        if top <= result.tol * result.scale:
            text = f"No direction curves upwards (largest eigenvalue {number(top, error)})."
            return [self.found(Severity.NOTE, text, "no curvature", *measured)]
        text = f"The sharpest direction has curvature {number(top, error)}{self._outliers(context, result)}."
        return [self.found(Severity.NOTE, text, "sharpness", *measured)]

    def _outliers(self, context: SurveyContext, result: Eigenpairs) -> str:
        """How many eigenvalues stand out: those before the widest relative gap, if it is wide."""
        values = [v for v in result.values.tolist() if v > result.tol * result.scale]
        if len(values) < 4:
            return ""
        gaps = [a / b for a, b in itertools.pairwise(values)]
        place = max(range(len(gaps)), key=gaps.__getitem__)
        if gaps[place] < 1.5:
            return "; the eigenvalues below it follow without a gap"
        classes = getattr(context.results.get("batches"), "classes", 0)
        known = f", as expected of {classes} classes" if classes == place + 2 else ""
        return (
            f"; {place + 1} direction{'s stand' if place else ' stands'} out (the next is {gaps[place]:.2g} times flatter{known})"
        )

    def figure(self, results: Results) -> Picture:
        return th.plots.eigenvalues(results[self.name], title="Largest eigenvalues of the Hessian")


class NegativeCurvature(SpectrumEnd):
    name = "negative"
    order = 80
    title = "Negative curvature"
    question = "Are there directions in which the loss curves downwards, so that this is no minimum?"
    how = "The smallest eigenpairs of the Hessian, by the same search as the largest; the error is the true residual."
    source = "Dauphin and others (2014): high-dimensional losses have saddles rather than bad minima."
    efforts = ({"k": 3}, {"k": 1})
    which = "smallest"

    def applies(self, context: SurveyContext) -> str:
        return "" if context.problem.size > 1 else "there is only one parameter"

    def findings(self, context: SurveyContext, result: Eigenpairs) -> list[Finding]:
        low, error = float(result.values[-1]), float(result.residuals[-1])
        measured = ("smallest Hessian eigenvalue", low, error)
        rounding = 20 * torch.finfo(context.problem.dtype).eps * result.scale
        if low >= -max(2 * error, rounding):
            sure = "" if result.converged else " as far as the search went"
            text = f"No direction curves downwards{sure}: the smallest eigenvalue is {number(low, error)}."
            return [self.found(Severity.GOOD, text, "no negative curvature", *measured)]
        top = context.results.get("curvature")
        upwards = float(top.values[0]) if isinstance(top, Eigenpairs) else 0.0
        share = f"{abs(low) / (upwards if upwards > 0 else result.scale):.2g} of the sharpest"
        if -low < result.tol * result.scale:
            text = f"The loss curves downwards very slightly: smallest eigenvalue {number(low, error)}, {share}."
            return [self.found(Severity.NOTE, text, "negative curvature", *measured)]
        square = float(context.gradient.double().square().sum())
        if square / (2 * result.scale) <= 1e-3 * abs(context.problem.loss()):  # what a step of the critical size would change
            text = (
                "This is a saddle: the gradient is nearly zero, but a direction curves downwards by "
                f"{number(low, error)} ({share})."
            )
            advice = "Training lingers here; a little noise, momentum or a step along that eigenvector leaves it."
            return [self.found(Severity.WARNING, text, "saddle", *measured, advice=advice)]
        text = f"The loss curves downwards along some direction: smallest eigenvalue {number(low, error)}, {share}."
        advice = "Usual on the way down; at the end of training it says that there is a way further down."
        return [self.found(Severity.NOTE, text, "negative curvature", *measured, advice=advice)]


class GradientAlignment(Instrument):
    name = "alignment"
    order = 110
    title = "The gradient and the sharp directions"
    question = "How much of the gradient lies in the sharpest directions?"
    how = (
        "The gradient over all data is projected on the eigenvectors found above; the error follows from their residuals and gap."
    )
    source = "Gur-Ari, Roberts and Dyer (2018), Gradient Descent Happens in a Tiny Subspace."
    needs = ("curvature",)

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        return Work(gradients=0.0 if "gradient" in vars(context) else 1.0)

    def run(self, context: SurveyContext, **effort: Any) -> Alignment:
        pairs: Eigenpairs = context.results["curvature"]
        if not bool(context.gradient.any()):
            raise InapplicableError("the gradient is zero and has no direction")
        if not float(pairs.values[0]) > pairs.tol * pairs.scale:
            raise InapplicableError("no direction curves upwards")
        return gradient_alignment(context.gradient, pairs)

    def findings(self, context: SurveyContext, result: Alignment) -> list[Finding]:
        text = (
            f"{number(100 * result.fraction, 100 * result.error)} % of the squared gradient lies in the {result.k} sharpest "
            f"directions; a random vector would have {100 * result.chance:.2g} %."
        )
        advice = ""
        if result.fraction > 0.5 and result.chance < 0.1:
            advice = (
                "Most of each step goes across the valley, not along it: a smaller rate, momentum or "
                "preconditioning makes it useful."
            )
        share = ("share of the squared gradient", result.fraction, result.error)
        return [self.found(Severity.NOTE, text, "gradient alignment", *share, advice=advice)]

    def figure(self, results: Results) -> Picture:
        result = results[self.name]
        if result.k < 3:
            return None
        title = "Share of the squared gradient in the sharpest directions"
        axes = th.plots.curves(result.rows(), x="directions", y="fraction", markers=True, title=title, ylabel="share")
        axes.set_ylim(0, 1.05)
        return axes


class Trace(Instrument):
    name = "trace"
    order = 120
    title = "Total curvature"
    question = "What is the sum of all eigenvalues, and how is it shared out?"
    how = (
        "Hutch++: the trace on a sketched sharp subspace is exact, the rest is averaged over random "
        "vectors; the error is a standard error."
    )
    source = "Meyer, Musco, Musco and Woodruff (2021), Hutch++: Optimal Stochastic Trace Estimation."
    efforts = ({"matvecs": 96}, {"matvecs": 30})

    def applies(self, context: SurveyContext) -> str:
        return "" if context.problem.size >= 6 else "there are so few parameters that the eigenvalues say it all"

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        return Work(block_products=effort["matvecs"], bytes=context.problem.size * effort["matvecs"] * 8)

    def run(self, context: SurveyContext, **effort: Any) -> TraceEstimate:
        found: TraceEstimate = trace(context.hessian, matvecs=effort["matvecs"], seed=context.seed, progress=False)
        return found

    def findings(self, context: SurveyContext, result: TraceEstimate) -> list[Finding]:
        mean = result.value / context.problem.size
        text = f"The trace of the Hessian is {number(result.value, result.stderr)}, {mean:.2g} per parameter"
        pairs = context.results.get("curvature")
        if isinstance(pairs, Eigenpairs) and float(pairs.values[0]) > 0:
            text += f", {result.value / float(pairs.values[0]):.3g} times the sharpest direction"
        return [self.found(Severity.NOTE, f"{text}.", "trace", "trace of the Hessian", result.value, result.stderr)]


class Spectrum(Instrument):
    name = "density"
    order = 130
    title = "The whole spectrum"
    question = "How are all eigenvalues distributed, not only the largest?"
    how = (
        "Block Lanczos quadrature from random vectors, smoothed by a narrow Gaussian; the band is two "
        "standard errors over the vectors."
    )
    source = "Ghorbani, Krishnan and Xiao (2019); Golub and Welsch (1969) for the quadrature."
    efforts = ({"probes": 6, "steps": 32}, {"probes": 3, "steps": 20})

    def applies(self, context: SurveyContext) -> str:
        return "" if context.problem.size >= 10 else "there are so few parameters that the eigenvalues say it all"

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        products = effort["probes"] * min(effort["steps"], context.problem.size)
        orthogonal = 2.2e-10 * context.problem.size * products**2  # every vector against all before it, twice
        return Work(block_products=products, seconds=orthogonal, bytes=min(PROBE_BYTES, context.problem.size * products * 8))

    def run(self, context: SurveyContext, **effort: Any) -> Density:
        found: Density = spectral_density(context.hessian, **effort, seed=context.seed, progress=False)
        return found

    def rows(self, result: Density) -> list[Row]:
        """A coarse table: the share of directions between bounds."""
        nodes, weights = result.nodes, result.weights
        top = float(nodes.abs().max()) or 1.0
        edges = [-1.0, -0.1, -0.01, -0.001, 0.001, 0.01, 0.1, 1.0]
        rows = []
        for low, high in itertools.pairwise(edges):
            inside = (nodes > (low if low > -1 else -1.001) * top) & (nodes <= (high if high < 1 else 1.001) * top)
            rows.append({"from": low * top, "to": high * top, "share of directions": float(weights[inside].sum())})
        return rows

    def findings(self, context: SurveyContext, result: Density) -> list[Finding]:
        low, high = float(result.nodes.min()), float(result.nodes.max())
        mean = float((result.nodes * result.weights).sum())
        # The quadratic form of a random unit vector varies by 2 tr H² / n².
        square = float((result.nodes.square() * result.weights).sum())
        error = math.sqrt(2 * square / (context.problem.size * result.probes))
        text = f"The spectrum reaches from {low:.3g} to {high:.3g}; the mean eigenvalue is {number(mean, error)}."
        return [self.found(Severity.NOTE, text, "spectrum", "mean eigenvalue", mean, error)]

    def figure(self, results: Results) -> Picture:
        marks = getattr(results.get("curvature"), "values", None)
        return th.plots.density(results[self.name], nodes=marks, title="Density of the eigenvalues of the Hessian")


class ConditionOfCurvature(Instrument):
    name = "conditioning"
    order = 140
    title = "Conditioning"
    question = "Do few directions hold all the curvature, and how flat are the others?"
    how = "From the quadrature of the whole spectrum and the largest eigenvalue; errors from the number of random vectors."
    source = "Ghorbani and others (2019); a quadratic's slow directions need about λ₁/λ steps at the critical rate."
    needs = ("curvature", "density")
    work = Work()

    def run(self, context: SurveyContext, **effort: Any) -> Conditioning:
        pairs: Eigenpairs = context.results["curvature"]
        if not bool(pairs.values.any()):
            raise InapplicableError("the curvature is zero in every direction")
        return conditioning(pairs, context.results["density"])

    def findings(self, context: SurveyContext, result: Conditioning) -> list[Finding]:
        text = (
            f"{number(100 * result.flat, 100 * result.flat_error)} % of the {result.size} directions are flat, below "
            f"{100 * result.threshold:g} % of the sharpest; the curvature lives in about "
            f"{number(result.stable_rank, result.stable_rank_error)} directions."
        )
        advice = ""
        if result.spread > 30:
            advice = (
                f"Badly conditioned: the root mean square curvature is {result.spread:.2g} times below the sharpest. "
                "Adaptive rates, normalisation layers or scaled inputs help."
            )
        flat = ("share of flat directions", result.flat, result.flat_error)
        return [self.found(Severity.NOTE, text, "conditioning", *flat, advice=advice)]
