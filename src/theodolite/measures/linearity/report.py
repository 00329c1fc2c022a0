"""`linearity`: is this model nearly linear in its weights, and what does that promise for training?"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from theodolite.arguments import also_called, checked, fraction, given, integer, positive, seed, shown, whole
from theodolite.linalg import Eigenpairs, top_eigenpairs
from theodolite.measures.kernel.drift import (
    KernelDrift,
    PLReport,
    kernel_drift,
    kernels_on_ball,
    pl_report,
    refuse_large_kernel,
)
from theodolite.measures.kernel.problem_views import (
    Choice,
    chosen,
    kinks_of,
    moved,
    random_directions,
    scalar_problem,
    squared_loss_curvature,
    unit,
)
from theodolite.measures.linearity.graph import InDegrees, in_degree_report
from theodolite.operators import hessian
from theodolite.problem import Problem
from theodolite.problem.arguments import a_problem, of_dimensions
from theodolite.progress import counting, stages
from theodolite.results import Cost, Outcome, Result, Row, number


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class HessianNorm(Result):
    """`value` is the largest |eigenvalue| of the Hessian of an output with respect to the measured parameters.

    Several outputs or samples give the largest of theirs; `values`, `errors` (eigen-residuals), `samples` and `outputs`
    list them all. `vector` is the eigenvector of the largest, the direction in which the output curves most.
    """

    value: float
    error: float
    values: tuple[float, ...]
    errors: tuple[float, ...]
    samples: tuple[int, ...]
    outputs: tuple[int, ...]
    vector: Tensor
    matvecs: int

    @property
    def where(self) -> tuple[int, int]:
        """(sample, output) of the largest."""
        i = self.values.index(self.value)
        return self.samples[i], self.outputs[i]

    def rows(self) -> list[Row]:
        return [
            {"sample": s, "output": o, "hessian_norm": v, "error": e, "seed": self.seed}
            for s, o, v, e in zip(self.samples, self.outputs, self.values, self.errors, strict=True)
        ]

    def sentence(self) -> str:
        sample, output = self.where
        of = f"output {output} of sample {sample}"
        if len(self.values) > 1:
            of += f", the largest of {len(self.values)}"
        return f"The Hessian of {of} has spectral norm {number(self.value, self.error)}."


@checked(problem=a_problem, tol=fraction, seed=seed)
def hessian_norm(
    problem: Problem,
    *,
    output: Choice = None,
    samples: Choice = None,
    tol: float = 1e-4,
    start: Any = None,
    seed: int = 0,
    progress: bool | None = None,
) -> HessianNorm:
    """Spectral norm of the Hessian of one output of one sample, or the largest of several, without forming it.

    Args:
        problem: its model, parameters and inputs are used, its loss and targets are not. Blocks of the Hessian come from
            `Problem(..., params=...)`.
        output: which of the model's outputs, one or several; may be left out where there is one.
        samples: which samples of the data; by default the first.
        start: an earlier `Eigenpairs` or columns near the wanted eigenvector, for a warm start.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)).double()
    >>> data = torch.full((1, 1), 3.0).double(), torch.zeros(1, 1).double()
    >>> round(hessian_norm(Problem(model, torch.nn.MSELoss(), data)).value, 9)  # of 3 w₁ w₂
    3.0
    """
    began = time.perf_counter()
    problem.refuse_batch_coupling("The Hessian of an output")
    problem.check_repeatable()
    pairs = chosen(problem, output, samples)
    found = [
        top_hessian_pair(scalar_problem(problem, o, s), tol=tol, start=start, seed=seed, progress=progress) for s, o in pairs
    ]
    values = tuple(abs(float(each.values[0])) for each in found)
    errors = tuple(float(each.residuals[0]) for each in found)
    best = max(range(len(values)), key=values.__getitem__)
    return HessianNorm(
        value=values[best],
        error=errors[best],
        values=values,
        errors=errors,
        samples=tuple(s for s, _ in pairs),
        outputs=tuple(o for _, o in pairs),
        vector=found[best].vectors[:, 0],
        matvecs=sum(each.matvecs for each in found),
        outcome=next((each.outcome for each in found if not each.outcome.good), Outcome.CONVERGED),
        seed=seed,
        cost=Cost(time.perf_counter() - began, found[best].cost.route, found[best].cost.peak_bytes, problem.notes),
    )


def top_hessian_pair(
    scalar: Problem, *, tol: float = 1e-4, start: Any = None, seed: int = 0, progress: bool | None = None
) -> Eigenpairs:
    """The eigenpair of largest magnitude of the Hessian of a scalar problem's objective, certified from any start.

    Extreme eigenvalues often come in pairs ±λ: Lanczos tells them apart where power iteration would not settle.
    """
    op = hessian(scalar)
    return top_eigenpairs(op, 1, which="magnitude", tol=tol, start=start, verify="full", seed=seed, progress=progress)


# An output along a straight way through the weights: whether its second derivatives explain how it changes there.

#: Pieces a segment is cut into at first, and at most.
PIECES, MOST_PIECES = 8, 64


def look_along(scalar: Problem, step: Tensor, *, slack: float) -> tuple[float, bool]:
    """φ(t) = f(w₀ + t·step), 0 ≤ t ≤ 1, at equally spaced points, more of them until integrals and differences agree.

    Gives the largest |φ''| seen, and whether that explains φ: not where more than the share `slack` of the change of the slope
    is not the integral of φ'': there is a kink or a jump on the way, or an oscillation faster than 1/64 of it.

    >>> model = torch.nn.Linear(1, 1, bias=False).double()
    >>> data = torch.ones(1, 1).double(), torch.zeros(1, 1).double()
    >>> step = 2.0 - model.weight.detach()[0]
    >>> look_along(Problem(model, lambda f, y: f.pow(3).sum(), data), step, slack=1e-3)[1]           # w³
    True
    >>> look_along(Problem(model, lambda f, y: (f - 1.3).abs().sum(), data), step, slack=1e-3)[1]    # |w − 1.3|
    False
    """
    seen: dict[float, tuple[float, float, float]] = {}
    pieces = PIECES
    while True:
        for i in range(pieces + 1):
            if i / pieces not in seen:
                seen[i / pieces] = _point(scalar, step, i / pieces)
        found = torch.tensor([seen[i / pieces] for i in range(pieces + 1)], dtype=torch.float64)
        resolved = _explained(found, slack, torch.finfo(scalar.dtype).eps)
        if resolved or pieces >= MOST_PIECES:
            return float(found[:, 2].abs().max()), resolved
        pieces *= 2


def _point(scalar: Problem, step: Tensor, t: float) -> tuple[float, float, float]:
    """φ, φ', φ'' at t."""
    there = moved(scalar, t * step)
    value, gradient = there.loss_and_gradient()
    image = hessian(there, keep="never") @ step.to(there.device, there.dtype)
    return value, float(step.double() @ gradient.double()), float(step.double() @ image.double())


def _explained(found: Tensor, slack: float, eps: float) -> bool:
    """Whether Simpson's integrals of φ'' and φ' over pairs of pieces (P+1, 3) give the changes of φ' and φ."""
    value, slope, bend = found.T
    width = 1.0 / (len(found) - 1)
    turned, gone = slope[2::2] - slope[:-2:2], value[2::2] - value[:-2:2]
    missed = [
        float((change - width / 3 * (rate[:-2:2] + 4 * rate[1:-1:2] + rate[2::2])).abs().sum())
        for change, rate in ((turned, bend), (gone, slope))
    ]
    rounding = 16 * eps * len(found) * float(slope.abs().max() + value.abs().max())
    return max(missed) <= slack * float(turned.abs().sum()) + rounding


#: Share by which the estimated bound may fall short, and share of the change of a slope that may stay unexplained.
SLACK = 1e-3


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Deviation(Result):
    """`|f(w₀+δ) − f(w₀) − δᵀ∇f(w₀)|` for several steps δ, and Taylor's bound `½ ‖δ‖² sup ‖H‖` on each segment.

    `worst` is the largest deviation; `gradient_norm` is ‖∇f(w₀)‖, `hessian_norm` ‖H(w₀)‖, `distances` the ‖δ‖. The supremum is
    estimated: `certificates` take the largest Hessian norm at `points` points of a segment, and the second derivative along it
    at more. `certified` tells whether nothing speaks against the estimate: the model has no functions with `kinks` (ReLU), and
    along every segment its second derivatives explain how its slope changes (`unresolved` names those where they do not: kinks
    that have no name, jumps of value or curvature, oscillations too fast to see).
    """

    radius: float
    sample: int
    output: int
    value: float
    gradient_norm: float
    hessian_norm: float
    directions: tuple[str, ...]
    distances: tuple[float, ...]
    deviations: tuple[float, ...]
    certificates: tuple[float, ...]
    kinks: tuple[str, ...]
    unresolved: tuple[str, ...]
    points: int

    @property
    def worst(self) -> float:
        return max(self.deviations)

    @property
    def certificate(self) -> float:
        """The largest of the estimated bounds."""
        return max(self.certificates)

    @property
    def certified(self) -> bool:
        return not self.kinks and not self.unresolved

    @property
    def violations(self) -> int:
        """Directions in which the deviation exceeds its bound; only a smooth model must have none."""
        columns = zip(self.deviations, self.certificates, self.distances, strict=True)
        scale = max(1.0, abs(self.value))
        return sum(v > bound * (1 + SLACK) + 1e-12 * max(scale, r * self.gradient_norm) for v, bound, r in columns)

    @property
    def nonlinearity(self) -> float:
        """The largest deviation over ‖δ‖‖∇f‖: how much of a step's effect the linear model misses."""
        if not self.gradient_norm > 0:
            return math.inf
        return max(d / (r * self.gradient_norm) for d, r in zip(self.deviations, self.distances, strict=True))

    def rows(self) -> list[Row]:
        shared = {"radius": self.radius, "certified": self.certified, "seed": self.seed}
        return [
            {"direction": d, "distance": r, "deviation": v, "certificate": c, **shared}
            for d, r, v, c in zip(self.directions, self.distances, self.deviations, self.certificates, strict=True)
        ]

    def sentence(self) -> str:
        i = self.deviations.index(self.worst)
        linear = self.distances[i] * self.gradient_norm
        share = f" ({self.worst / linear:.2g} of ‖δ‖‖∇f‖)" if linear > 0 else ""
        bound = f"Taylor's bound there, estimated from the Hessian norm at {self.points} points, is {self.certificates[i]:.3g}"
        if self.kinks:
            bound += f", which is not valid here: the model has kinks ({', '.join(self.kinks)}) that a Hessian does not see"
        elif self.unresolved:
            along = ", ".join(self.unresolved[:3]) + (", ..." if len(self.unresolved) > 3 else "")
            bound += f", which is uncertain: along {along} the slope changes in ways that second derivatives at points do not see"
        deviates = f"the output deviates from its linearisation by {self.worst:.3g}{share}, along {self.directions[i]}"
        return f"At distance {self.distances[i]:.3g} {deviates}; {bound}."


@checked(
    problem=a_problem,
    radius=positive,
    directions=whole,
    segments=partial(integer, least=2),
    displacement=of_dimensions(1),
    tol=fraction,
    seed=seed,
)
def linearity_deviation(
    problem: Problem,
    *,
    radius: float = 1.0,
    output: int | None = None,
    sample: int = 0,
    directions: int = 8,
    segments: int = 5,
    displacement: Tensor | None = None,
    start: Any = None,
    tol: float = 1e-4,
    seed: int = 0,
    progress: bool | None = None,
) -> Deviation:
    """Deviation of one output from its first-order Taylor model at distance `radius` from the current weights.

    Directions: `directions` random ones, the gradient of the output and the top eigenvector of its Hessian, at distance
    `radius`; and `displacement` (a flat vector w_T − w₀ of a training run, say), which is gone as it is, whatever its length. On
    each segment the Hessian norm is taken at `segments` points, both ends among them: the largest estimates the supremum of
    Taylor's bound, and is no proof. `start` is a guess of the top eigenvector, if there is one.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1).double()
    >>> data = torch.ones(1, 2).double(), torch.zeros(1, 1).double()
    >>> linearity_deviation(Problem(model, torch.nn.MSELoss(), data), directions=2).worst < 1e-12
    True
    """
    began = time.perf_counter()
    problem.refuse_batch_coupling("The deviation of an output from its linearisation")
    problem.check_repeatable()
    pairs = chosen(problem, output, given("sample", sample), name="sample")
    if len(pairs) > 1:
        raise ValueError(
            f"linearity_deviation looks at one output of one sample. Got output={shown(output)}, sample={shown(sample)}: "
            f"{len(pairs)} numbers. Call it for each, or use linearity(), which takes several and follows the most curved."
        )
    [(sample, index)] = pairs
    scalar = scalar_problem(problem, index, sample)
    value, gradient = scalar.loss_and_gradient()
    top = top_hessian_pair(scalar, tol=tol, start=start, seed=seed, progress=False)
    named = {f"random {i + 1}": radius * d for i, d in enumerate(random_directions(problem, directions, seed))}
    extra = {"gradient": gradient, "top Hessian eigenvector": top.vectors[:, 0]}
    named |= {name: radius * d for name, v in extra.items() if (d := unit(v)) is not None}
    if displacement is not None and unit(displacement) is not None:
        named["displacement"] = displacement.double()
    if not named:
        raise ValueError("There is no direction to look along: the gradient is zero; ask for directions=1 or more.")
    kinks = kinks_of(problem)
    deviations, certificates, unresolved = [], [], []
    with counting("directions", progress=progress, total=len(named)) as count:
        for name, step in named.items():
            there = moved(scalar, step).loss()
            deviations.append(abs(there - value - float(step @ gradient.double())))
            bend = float(step.square().sum()) * _largest_norm(scalar, step, segments, top, tol, seed)
            if not kinks:  # else the bound is void anyway
                seen, resolved = look_along(scalar, step, slack=SLACK)
                bend = max(bend, seen)
                unresolved += [] if resolved else [name]
            certificates.append(0.5 * bend)
            count(1)
    return Deviation(
        radius=radius,
        sample=sample,
        output=index,
        value=value,
        gradient_norm=float(gradient.double().norm()),
        hessian_norm=abs(float(top.values[0])),
        directions=tuple(named),
        distances=tuple(float(step.norm()) for step in named.values()),
        deviations=tuple(deviations),
        certificates=tuple(certificates),
        kinks=kinks,
        unresolved=tuple(unresolved),
        points=segments,
        outcome=top.outcome if not top.outcome.good else Outcome.FINISHED,
        seed=seed,
        cost=Cost(time.perf_counter() - began, top.cost.route, top.cost.peak_bytes, problem.notes),
    )


def _largest_norm(scalar: Problem, step: Tensor, segments: int, top: Eigenpairs, tol: float, seed: int) -> float:
    """The largest Hessian norm at equally spaced points of the segment w₀ .. w₀ + step; each solve starts from the last."""
    largest, start = abs(float(top.values[0])), top
    for i in range(1, segments):
        start = top_hessian_pair(moved(scalar, step * (i / (segments - 1))), tol=tol, start=start, seed=seed, progress=False)
        largest = max(largest, abs(float(start.values[0])))
    return largest if math.isfinite(largest) else math.inf


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LinearityReport(Result):
    """Everything `linearity` measured at the current weights w₀, at distance `radius` from them and at a displacement.

    `hessian` is the curvature of the chosen outputs, `deviation` that of the most curved one from its linearisation,
    `drift` the change of the tangent kernel, `pl` the PL* report (None where the loss is not squared) and `in_degrees`
    what the architecture says.
    """

    radius: float
    hessian: HessianNorm
    deviation: Deviation
    drift: KernelDrift
    pl: PLReport | None
    in_degrees: InDegrees

    @property
    def gradient_norm(self) -> float:
        """‖∇f(w₀)‖ of the output looked at."""
        return self.deviation.gradient_norm

    @property
    def nonlinearity(self) -> float:
        """The largest deviation over ‖δ‖‖∇f‖: how much of a step's effect the linear model misses."""
        return self.deviation.nonlinearity

    def rows(self) -> list[Row]:
        values = {
            "hessian norm": self.hessian.value,
            "gradient norm": self.gradient_norm,
            "worst deviation": self.deviation.worst,
            "certificate": self.deviation.certificate,
            "nonlinearity": self.nonlinearity,
            "kernel drift": self.drift.worst,
        }
        if self.pl is not None:
            values |= {"PL constant": self.pl.mu, "PL constant on the ball": self.pl.mu_ball, "condition": self.pl.condition}
        if self.in_degrees.width is not None:
            values["width"] = float(self.in_degrees.width)
        return [{"quantity": name, "value": value, "radius": self.radius, "seed": self.seed} for name, value in values.items()]

    def sentence(self) -> str:
        parts = [self.hessian, self.deviation, self.drift, *([self.pl] if self.pl else [])]
        said = " ".join(part.sentence() for part in parts)
        return said if self.pl else said + " The loss is not squared, so the kernel gives no PL* constant."


@also_called(lr="rate")
@checked(
    problem=a_problem,
    radius=positive,
    directions=whole,
    segments=partial(integer, least=2),
    displacement=of_dimensions(1),
    rate=positive,
    seed=seed,
)
def linearity(
    problem: Problem,
    *,
    radius: float = 1.0,
    output: Choice = None,
    samples: Choice = None,
    directions: int = 8,
    segments: int = 5,
    displacement: Tensor | None = None,
    rate: float | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> LinearityReport:
    """How linear a model is in its weights, on a ball around where they are.

    Args:
        radius: of the ball, in the Euclidean norm of all measured weights together.
        output, samples: which outputs of which samples the Hessian is taken of; the largest is followed further. One output may
            be left out; without `samples` the first sample is taken.
        directions: random directions tried, for the deviation and for the kernel.
        segments: points per segment at which the Hessian norm is taken for Taylor's bound.
        displacement: flat vector w_T − w₀ of a training run; deviation, drift and PL* are taken there too, whatever its length.
        rate: (or `lr`) learning rate to predict for; by default 1/λ_max in the loss's convention.

    Returns:
        A `LinearityReport`: the Hessian's norm over the ball, the deviation from the linear model, the kernel's drift.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    >>> problem = Problem(model, torch.nn.MSELoss(), (torch.eye(2).double(), torch.zeros(2, 1).double()))
    >>> report = linearity(problem, directions=2, segments=3)
    >>> report.deviation.violations, report.drift.worst > 0
    (0, True)
    """
    began = time.perf_counter()
    refuse_large_kernel(problem)
    with stages(4, progress=progress) as stage:
        stage("Hessian norm")
        norm = hessian_norm(problem, output=output, samples=samples, seed=seed, progress=False)
        sample, chosen = norm.where
        stage("deviation")
        deviation = linearity_deviation(
            problem,
            radius=radius,
            output=chosen,
            sample=sample,
            directions=directions,
            segments=segments,
            displacement=displacement,
            start=norm.vector,
            seed=seed,
            progress=False,
        )
        stage("tangent kernels")
        kernels = kernels_on_ball(problem, radius=radius, probes=directions, displacement=displacement, seed=seed, progress=False)
        drift = kernel_drift(problem, kernels=kernels, seed=seed)
        stage("PL*")
        squared = squared_loss_curvature(problem) is not None
        pl = pl_report(problem, kernels=kernels, rate=rate, seed=seed) if squared else None
    return LinearityReport(
        radius=radius,
        hessian=norm,
        deviation=deviation,
        drift=drift,
        pl=pl,
        in_degrees=in_degree_report(problem.model),
        outcome=norm.outcome if not norm.outcome.good else Outcome.FINISHED,
        seed=seed,
        cost=Cost(time.perf_counter() - began, norm.cost.route, norm.cost.peak_bytes, problem.notes),
    )
