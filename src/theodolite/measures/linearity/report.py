"""`linearity`: is this model nearly linear in its weights, and what does that promise for training?"""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from theodolite.arguments import also_called
from theodolite.measures.kernel.drift import KernelDrift, kernel_drift, kernels_on_ball, refuse_large_kernel
from theodolite.measures.kernel.polyak_lojasiewicz import PLReport, pl_report
from theodolite.measures.kernel.quadratic_checks import squared_loss_curvature
from theodolite.measures.kernel.scalar_output import Choice, require_problem
from theodolite.measures.linearity.deviation import Deviation, HessianNorm, hessian_norm, linearity_deviation
from theodolite.measures.linearity.in_degree import InDegrees, in_degree_report
from theodolite.problem import Problem
from theodolite.progress import stages
from theodolite.results import Cost, Outcome, Result, Row


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

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    >>> problem = Problem(model, torch.nn.MSELoss(), (torch.eye(2).double(), torch.zeros(2, 1).double()))
    >>> report = linearity(problem, directions=2, segments=3)
    >>> report.deviation.violations, report.drift.worst > 0
    (0, True)
    """
    require_problem(problem, "linearity")
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
