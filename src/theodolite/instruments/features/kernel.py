"""What does the tangent kernel say: which outputs move together, how fast can they be fitted, where is the edge?"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch

import theodolite as th
from theodolite.errors import TheodoliteError
from theodolite.instruments.base import InapplicableError, Picture, Results, SurveyContext, Work, inapplicable
from theodolite.instruments.subset import OnSubset, of_samples, outputs_of, subset
from theodolite.linalg import top_eigenpairs
from theodolite.measures.dynamics import CriticalRate, critical_learning_rate
from theodolite.measures.kernel import PLReport, pl_report, squared_loss_curvature
from theodolite.measures.kernel.drift import Kernels, kernel_of
from theodolite.operators import LinearOperator, tangent_kernel_operator
from theodolite.operators.algebra import DenseOperator
from theodolite.problem import Problem
from theodolite.results import Cost, Finding, Result, Row, Severity, number
from theodolite.text import plural

#: With fewer samples than this a formed kernel says little; it is then known by its products, on this many samples.
FEW, BY_PRODUCTS = 8, 32

#: Critical rates within this share of one another agree.
AGREE = 0.1

#: Steps to halve the loss beyond which a promise is none.
SLOW = 1000


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class KernelReport(Result):
    """The tangent kernel on some samples, and the critical rate of plain descent from it beside that of the Hessian.

    `values` are its eigenvalues, descending: all of them where it was `formed`, else the largest; below `resolution` they are
    rounding. `pl` is what a formed kernel promises under a squared loss. `by_outputs` is the critical rate from the kernel
    (squared loss) or from the Gauss-Newton matrix (other losses), None where there is none, with the reason in `missing`.
    """

    samples: int
    population: int
    outputs: int
    values: tuple[float, ...]
    resolution: float
    formed: bool
    pl: PLReport | None
    by_outputs: CriticalRate | None
    by_hessian: CriticalRate
    missing: str = ""

    @property
    def where(self) -> str:
        """The samples as a sentence names them."""
        return of_samples(self.samples, self.population)

    @property
    def largest(self) -> float:
        return self.values[0]

    @property
    def share(self) -> float:
        """The largest eigenvalue over the sum of all."""
        return self.values[0] / sum(self.values) if self.formed else math.nan

    @property
    def rank(self) -> int:
        """How many eigenvalues are more than rounding."""
        return sum(value > self.resolution for value in self.values)

    @property
    def condition(self) -> float:
        if not self.formed:
            return math.nan
        return self.values[0] / self.values[-1] if self.rank == len(self.values) else math.inf

    @property
    def ratio(self) -> float:
        """The critical rate by the kernel over that by the Hessian: λ(H) over λ(Gauss-Newton)."""
        return math.nan if self.by_outputs is None else self.by_outputs.value / self.by_hessian.value

    @property
    def ratio_error(self) -> float:
        if self.by_outputs is None or math.isinf(self.by_hessian.value):
            return 0.0
        pair = (self.by_outputs, self.by_hessian)
        return self.ratio * math.hypot(*(rate.error / rate.value for rate in pair))

    def rows(self) -> list[Row]:
        table: list[tuple[str, float | None, float | None]] = [("largest eigenvalue", self.largest, self.resolution)]
        if self.formed:
            table += [
                ("largest over the sum", self.share, None),
                ("smallest eigenvalue", self.values[-1], self.resolution),
                ("condition number", self.condition, None),
            ]
        if self.pl is not None:
            table += [("PL* constant", self.pl.mu, self.pl.curvature * self.resolution)]
            table += [(f"contraction per step at rate {self.pl.rate:.3g}", self.pl.contraction, None)]
        rates = [rate for rate in (self.by_outputs, self.by_hessian) if rate is not None]
        table += [(f"critical rate by {rate.by.replace('_', '-')}", rate.value, rate.error) for rate in rates]
        table += [("ratio of the two", self.ratio, self.ratio_error)] if self.by_outputs is not None else []
        return [{"quantity": name, "value": value, "error": error} for name, value, error in table]

    def sentence(self) -> str:
        what = f"{self.where}, {plural(self.outputs, 'output')} each"
        found = f"The tangent kernel on {what}, has largest eigenvalue {number(self.largest, self.resolution)}"
        if not self.formed:
            return f"{found}; it was known by its products only, so there is no smallest one."
        found += f", {100 * self.share:.3g} % of the sum of all {len(self.values)}"
        if self.rank < len(self.values):
            return f"{found}; {len(self.values) - self.rank} of them are zero up to rounding."
        return f"{found}; its condition number is {self.condition:.3g}."


def measure_kernel(problem: Problem, *, rows: int, rate: float | None = None, seed: int = 0) -> KernelReport:
    """The report on as many samples as give a kernel of about `rows` rows, or by products where outputs are too many."""
    began = time.perf_counter()
    outputs = outputs_of(problem)
    formed = min(problem.samples, rows // outputs) >= min(FEW, problem.samples)
    part = subset(problem, rows // outputs if formed else BY_PRODUCTS)
    squared = squared_loss_curvature(part) is not None
    op: LinearOperator
    pl = None
    if formed:
        matrix = kernel_of(part)
        op = DenseOperator(matrix)
        values = torch.linalg.eigvalsh(matrix).flip(0).tolist()
        resolution = len(values) * torch.finfo(part.dtype).eps * values[0]
    else:
        op = tangent_kernel_operator(part)
        pairs = top_eigenpairs(op, 1, tol=1e-3, seed=seed, progress=False)
        values, resolution = [float(pairs.values[0])], float(pairs.residuals[0])
    if not values[0] > 0:
        raise InapplicableError("no parameter moves any output at first order, so the tangent kernel is zero")
    if formed and squared:
        pl = pl_report(part, rate=rate, kernels=Kernels(matrix, {}, 0.0), seed=seed)
    by_outputs, missing = _rate_of_outputs(part, op, squared=squared, seed=seed)
    return KernelReport(
        samples=part.samples,
        population=problem.samples,
        outputs=outputs,
        values=tuple(values),
        resolution=resolution,
        formed=formed,
        pl=pl,
        by_outputs=by_outputs,
        by_hessian=critical_learning_rate(part, seed=seed, progress=False),
        missing=missing,
        seed=seed,
        cost=Cost(time.perf_counter() - began, "tangent kernel", 8 * len(values) ** 2, problem.notes),
    )


def _rate_of_outputs(part: Problem, op: LinearOperator, *, squared: bool, seed: int) -> tuple[CriticalRate | None, str]:
    """The critical rate that the linearised model has, or why there is none."""
    try:
        if squared:
            return critical_learning_rate(part, by="kernel", operator=op, seed=seed, progress=False), ""
        found = critical_learning_rate(part, by="gauss_newton", seed=seed, progress=False)
    except (TheodoliteError, ValueError) as error:
        return None, str(error)
    if math.isinf(found.value):
        return None, "the loss does not curve in the outputs, so the Gauss-Newton matrix is zero"
    return found, ""


class Kernel(OnSubset):
    name = "kernel"
    order = 160
    title = "The tangent kernel"
    question = "Which outputs move together, how fast can they be fitted, and does the kernel set the edge of stability?"
    how = (
        "The inner products of the gradients of all outputs of some samples, as a matrix of Gram products layer by layer; where "
        "the model has too many outputs for that, its largest eigenvalue from products. For a squared loss (c/2) Σ r² the edge "
        "of the linearised model is 2/(cλ₁); for other losses the Gauss-Newton matrix, the kernel seen through the curvature of "
        "the loss, takes its place. The Hessian of the same samples differs from it by residuals times the model's own curvature."
    )
    source = "Jacot and others (2018), the neural tangent kernel; PL*: Liu, Zhu and Belkin (2022)."
    efforts = ({"rows": 400}, {"rows": 150}, {"rows": 60})

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        rows, total = effort["rows"], context.problem.samples
        outputs = outputs_of(context.problem)
        formed = rows // outputs >= min(FEW, total)
        share = min(total, rows // outputs if formed else BY_PRODUCTS) / total
        # A pull back for each output, or a search by products of two gradients each; then two searches for an eigenvalue.
        gradients = 4.0 + share * (2.0 * outputs if formed else 60.0)
        size = min(rows, total * outputs)
        seconds = 0.08 + 5e-10 * size**3
        return Work(gradients=gradients, products=60.0 * share, seconds=seconds, bytes=40 * size**2)

    @inapplicable(TheodoliteError, NotImplementedError)  # a layer that cannot be differentiated so
    def run(self, context: SurveyContext, **effort: Any) -> KernelReport:
        return measure_kernel(context.problem, **effort, rate=context.lr, seed=context.seed)

    def findings(self, context: SurveyContext, result: KernelReport) -> list[Finding]:
        advice = ""
        if result.formed and result.share > 0.5 and len(result.values) > 4:
            advice = "One direction of the outputs learns far faster than all others: centred inputs or a normalisation help."
        measured = ("largest eigenvalue of the tangent kernel", result.largest, result.resolution)
        found = [self.found(Severity.NOTE, result.sentence(), "tangent kernel", *measured, advice=advice)]
        found += [self._speed(context, result, result.pl)] if result.pl is not None else []
        return [*found, self._edges(result)]

    def _speed(self, context: SurveyContext, result: KernelReport, pl: PLReport) -> Finding:
        """What the kernel promises for a squared loss."""
        measured = ("PL* constant", pl.mu, pl.curvature * pl.resolution)
        if not pl.holds:
            text = (
                f"The tangent kernel is singular on {result.where}, so the PL* condition does not hold and "
                "no speed of convergence follows from it."
            )
            advice = (
                "Some combinations of outputs cannot be fitted at first order: repeated samples, too few parameters, shut units."
            )
            return self.found(Severity.NOTE, text, "no PL condition", *measured, advice=advice)
        at = f"{'your' if context.lr is not None else 'a'} rate of {pl.rate:.3g}"
        text = f"On {result.where} the PL* condition holds with μ = {number(*measured[1:])}"
        if pl.contraction >= 1:
            text += f", but at {at} a residual grows {pl.contraction:.3g}-fold a step while the kernel stays."
            advice = f"On a fixed kernel plain descent is stable below {pl.largest_rate:.2g}."
            return self.found(Severity.NOTE, text, "PL condition", *measured, advice=advice)
        halving = math.log(2) / -math.log(pl.contraction**2) if pl.contraction > 0 else 0.0
        text += (
            f": at {at} plain descent takes a share of {1 - pl.contraction:.2g} off the slowest residual a step, so the loss "
            f"halves at least every {max(1.0, halving):.3g} steps while the kernel stays."
        )
        if halving > SLOW:
            advice = (
                "So slow that it promises nothing: the loss falls along the large eigenvalues, and stays along the small ones."
            )
            return self.found(Severity.NOTE, text, "PL condition", *measured, advice=advice)
        advice = "More samples can only make the smallest eigenvalue smaller." if result.samples < result.population else ""
        return self.found(Severity.GOOD, text, "PL condition", *measured, advice=advice)

    def _edges(self, result: KernelReport) -> Finding:
        """The critical rate by the kernel beside that by the Hessian."""
        outputs, hessian = result.by_outputs, result.by_hessian
        if outputs is None:
            text = f"There is no critical rate by the kernel to set beside that of the Hessian: {result.missing}"
            return self.found(Severity.NOTE, text.rstrip(".") + ".", "no kernel rate")
        name = "kernel" if outputs.by == "kernel" else "Gauss-Newton matrix"
        measured = (f"critical rate by {name} over that by Hessian", result.ratio, result.ratio_error)
        rates = (
            f"On {result.where} the critical rate by the {name} is {number(outputs.value, outputs.error)} and by the Hessian "
            f"{number(hessian.value, hessian.error)}, a ratio of {number(result.ratio, result.ratio_error)}"
        )
        if abs(result.ratio - 1) <= AGREE:
            text = f"{rates}: the sharpness is that of the linearised model, which therefore predicts the edge."
            return self.found(Severity.GOOD, text, "kernel sets the edge", *measured)
        if result.ratio > 1:
            text = f"{rates}: residuals times the model's own curvature add to the sharpness, which linear theory does not see."
            advice = "Trust the Hessian's rate. The two meet as the residuals fall, or in a wider network."
        else:
            text = f"{rates}: residuals times the model's own curvature hide a part of the sharpness."
            advice = f"As the residuals fall the edge comes down towards {outputs.value:.2g}: choose the rate by that."
        return self.found(Severity.NOTE, text, "residual curvature", *measured, advice=advice)

    def figure(self, results: Results) -> Picture:
        result: KernelReport = results[self.name]
        if not result.formed or len(result.values) < 4:
            return None
        rows = [{"rank": i, "eigenvalue": value} for i, value in enumerate(result.values, 1) if value > 0]
        title = "Eigenvalues of the tangent kernel"
        axes = th.plots.curves(rows, "rank", "eigenvalue", log="xy", title=title, markers=False)
        lowest = min(row["eigenvalue"] for row in rows)
        return th.plots.reference(axes, y=result.resolution, label="rounding") if lowest < 10 * result.resolution else axes
