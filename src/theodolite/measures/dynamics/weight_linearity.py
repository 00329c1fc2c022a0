"""Whether training leaves the place where a model is linear in its weights: radius of the linear twin, drift of the kernel."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from theodolite.arguments import also_called, checked, count, positive, seed
from theodolite.errors import NonFiniteError
from theodolite.measures.dynamics.optimizers import descend
from theodolite.measures.kernel.drift import kernel_of, relative_drift
from theodolite.measures.kernel.problem_views import outputs_per_sample, random_directions, unit
from theodolite.measures.linearity.graph import InDegrees, in_degree_report
from theodolite.operators import jacobian
from theodolite.problem import Problem, split_like
from theodolite.problem.arguments import a_problem
from theodolite.problem.optimizers import as_optimizer
from theodolite.results import Cost, Result, Row, number

#: The linear twin is trusted while it misses at most this share of the change of the outputs.
TRUSTED = 0.1

#: Outputs of a sample that the drift of the kernel is measured on, at most, and looks at it along the trial.
OUTPUTS, LOOKS = 10, 5

#: Radii tried, over the norm of the weights.
RADII = tuple(np.geomspace(1e-3, 10.0, 17).tolist())

#: Groups of samples that are left out in turn for an error.
GROUPS = 5


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class WeightLinearity(Result):
    """How far the outputs follow their linear twin f(w₀) + J(w − w₀), and how the kernel J Jᵀ changes in a trial run.

    Directions are "descent", that of the first step, "trial", where the run went, and a random one. `misses` has a row for each
    direction and radius (over the norm of the weights): the share of the change of the outputs that the twin misses. `trusted`
    has, for the first two, the radius up to which that is at most 10 %, and its error; infinity: beyond all radii tried, 0:
    below them.
    `path` has a row for each look at the run: step, loss, drift ‖K − K₀‖/‖K₀‖, distance gone over the norm of the weights, and
    the share missed by the twin there. Errors are jackknife errors over the samples looked at, for the
    run that was made; 0 where these are fewer than ten.
    """

    samples: int
    kernel_samples: int
    outputs: int
    weight_norm: float
    misses: tuple[Row, ...]
    trusted: dict[str, tuple[float, float]]
    path: tuple[Row, ...]
    drift_error: float
    missed_error: float
    rate: float
    steps: int
    in_degrees: InDegrees

    @property
    def linear(self) -> bool:
        """Whether no direction shows any deviation, up to rounding."""
        return all(row["missed"] < 1e-3 for row in self.misses if row["radius"] > 0.01)

    @property
    def radius(self) -> tuple[float, float]:
        """Where training goes, the radius up to which the twin misses at most 10 %, and its error."""
        return self.trusted.get("trial") or self.trusted["descent"]

    @property
    def blew_up(self) -> bool:
        """Whether the trial ended early, its loss or kernel not finite."""
        return bool(self.path[-1]["step"] < self.steps)

    @property
    def fall(self) -> float:
        """The share of the loss that the trial took away; NaN where the loss is below 0 at either end: it is never gone."""
        first, last = self.path[0]["loss"], self.path[-1]["loss"]
        return (first - last) / first if first > 0 and last >= 0 else math.nan

    @property
    def drift(self) -> float:
        drift: float = self.path[-1]["drift"]
        return drift

    @property
    def projected(self) -> float:
        """The drift by the time the loss is gone, if it went on in proportion."""
        return self.drift / self.fall if self.fall > 0 else math.nan

    def rows(self) -> list[Row]:
        return [dict(row) for row in self.path]

    def sentence(self) -> str:
        if self.linear:
            return "The model is linear in its weights: its outputs follow the linear twin in every direction tried."
        radius, error = self.radius
        where = "Where training goes" if "trial" in self.trusted else "Downhill"
        if radius == 0:
            return f"{where} the linear twin misses more than 10 % of how the outputs change already at {_percent(RADII[0])}."
        far = _percent(RADII[-1]) if math.isinf(radius) else f"{number(100 * radius, 100 * error)} % of the weights' norm"
        return f"{where} the linear twin misses less than 10 % of how the outputs change up to {far}."


def _percent(radius: float) -> str:
    return f"{100 * radius:.3g} % of the weights' norm"


@also_called(lr="rate")
@checked(problem=a_problem, rate=positive, steps=count, kernel_on=a_problem, seed=seed)
def weight_linearity(
    problem: Problem,
    rate: float,
    *,
    steps: int = 50,
    optimizer: Optimizer | str | None = None,
    kernel_on: Problem | None = None,
    seed: int = 0,
) -> WeightLinearity:
    """Deviation from the linear twin over a grid of radii, then a trial run of `steps` full-batch steps at `rate` on a copy.

    The kernel is formed on the samples of `kernel_on` (the same model on fewer samples; None: on all) and at most ten outputs of
    each: a few hundred rows are enough.

    >>> model = torch.nn.Linear(2, 1).double()
    >>> data = torch.eye(2).double(), torch.ones(2, 1).double()
    >>> weight_linearity(Problem(model, torch.nn.MSELoss(), data), 0.1, steps=5).linear
    True
    """
    optimizer = as_optimizer(optimizer, problem.parameters, lr=rate)
    began = time.perf_counter()
    outputs = outputs_per_sample(problem)
    chosen = sorted({round(i * (outputs - 1) / (OUTPUTS - 1)) for i in range(OUTPUTS)}) if outputs > OUTPUTS else None
    twin = _Twin(problem)
    kernel_on = kernel_on or problem
    trial = _run(twin, rate, optimizer, steps, kernel_on, chosen)
    directions = {"descent": unit(-problem.gradient()), "trial": unit(trial.away)}
    named = {name: d for name, d in directions.items() if d is not None}
    if not named:
        raise NonFiniteError("The gradient is zero, so training goes nowhere and there is no direction to look along.")
    named["random"] = random_directions(problem, 1, seed)[0]
    tried = {name: [twin.missed(radius * twin.scale * d) for radius in RADII] for name, d in named.items()}
    misses = tuple(
        {"direction": name, "radius": radius, "missed": missed.share()}
        for name, found in tried.items()
        for radius, missed in zip(RADII, found, strict=True)
    )
    return WeightLinearity(
        samples=problem.samples,
        kernel_samples=kernel_on.samples,
        outputs=outputs,
        weight_norm=twin.scale,
        misses=misses,
        trusted={name: _trusted(found) for name, found in tried.items() if name != "random"},
        path=tuple(trial.path),
        drift_error=trial.drift_error,
        missed_error=trial.missed_error,
        rate=rate,
        steps=steps,
        in_degrees=in_degree_report(problem.model),
        seed=seed,
        cost=Cost(time.perf_counter() - began, "tangent kernels", 0, problem.notes),
    )


@dataclass(frozen=True)
class _Missed:
    """Squared deviation from the twin and squared change of the outputs, sample by sample."""

    deviation: Tensor
    change: Tensor

    def share(self, kept: Tensor | slice = slice(None)) -> float:
        """The share of the change that the twin misses, over the samples `kept`."""
        total = float(self.change[kept].sum())
        if not math.isfinite(total):
            return math.inf
        return math.sqrt(float(self.deviation[kept].sum()) / total) if total > 0 else 0.0


class _Twin:
    """The linear twin of a problem at its weights: what the outputs are elsewhere, and what it says they are."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.start = problem.vector
        self.scale = float(self.start.double().norm()) or 1.0
        self.jacobian = jacobian(problem)
        self.here = self.outputs(self.start)

    def outputs(self, vector: Tensor) -> list[Tensor]:
        """The outputs at other weights, one (samples, outputs) matrix per batch."""
        problem = self.problem
        tensors = problem.tensors(split_like(vector.to(self.start), problem.leaves(grad=False)))
        with problem.session(second=False), torch.no_grad():
            outputs = [(problem.output(tensors, batch, i, check=False), batch.size) for i, _, batch in problem.iterate()]
        return [output.double().reshape(size, -1) for output, size in outputs]

    def missed(self, step: Tensor) -> _Missed:
        """How far the outputs at w₀ + step are from the twin's."""
        there = self.outputs(self.start.double() + step.to(self.start.device))
        linear = (self.jacobian @ step.to(self.start)).double().split([now.numel() for now in self.here])
        moved = [then - now for now, then in zip(self.here, there, strict=True)]
        deviation = [(gone - line.view_as(gone)).square().sum(1) for gone, line in zip(moved, linear, strict=True)]
        return _Missed(torch.cat(deviation), torch.cat([gone.square().sum(1) for gone in moved]))


def _trusted(found: list[_Missed]) -> tuple[float, float]:
    """The radius at which the missed share first passes 10 %, and its jackknife error over groups of samples."""
    radius = _crossing([missed.share() for missed in found])
    if not 0 < radius < math.inf:
        return radius, 0.0
    return radius, _jackknife(len(found[0].change), lambda kept: _crossing([m.share(kept) for m in found]))


def _crossing(shares: list[float]) -> float:
    """Where the curve crosses 10 %, log-log interpolated; 0 where it starts above, infinity where it stays below.

    >>> round(_crossing([0.01 * r / RADII[0] for r in RADII]), 6)
    0.01
    """
    over = next((i for i, share in enumerate(shares) if share > TRUSTED), None)
    if over is None:
        return math.inf
    if over == 0:
        return 0.0
    low, high = max(shares[over - 1], 1e-12), min(shares[over], 1e12)
    part = math.log(TRUSTED / low) / math.log(high / low)
    return float(RADII[over - 1] * (RADII[over] / RADII[over - 1]) ** part)


def _jackknife(samples: int, quantity: Callable[[Tensor], float]) -> float:
    """The error of a quantity of the samples kept, from leaving each of a few groups out in turn; 0 for few samples."""
    if samples < 2 * GROUPS:
        return 0.0
    label = torch.arange(samples) % GROUPS
    finite = np.array([value for group in range(GROUPS) if math.isfinite(value := quantity(label != group))])
    return float(np.sqrt((GROUPS - 1) * finite.var())) if len(finite) > 1 else 0.0


class _Trial(NamedTuple):
    path: list[Row]
    away: Tensor
    drift_error: float
    missed_error: float


def _run(
    twin: _Twin, rate: float, optimizer: Optimizer | None, steps: int, kernel_on: Problem, outputs: list[int] | None
) -> _Trial:
    """A trial run with a look at kernel and twin now and then."""
    problem = twin.problem

    def gram(copy: Problem) -> Tensor:
        here = kernel_on.in_float64() if copy.dtype != kernel_on.dtype else kernel_on
        return kernel_of(here.with_model(copy.model), outputs)

    looks = {round(i * steps / LOOKS) for i in range(LOOKS + 1)}
    first = last = gram(problem)
    if not float(first.trace()) > 0:
        raise NonFiniteError("The tangent kernel is zero on these samples, so its relative change is not defined.")
    here: _Missed | None = None
    gone = torch.zeros_like(twin.start.double())
    path: list[Row] = []
    for step, loss, trial in descend(problem, rate, steps, optimizer):
        if step not in looks:
            continue
        away = trial.vector.double() - twin.start.double()
        now, there = gram(trial), twin.missed(away)
        if not bool(torch.isfinite(now).all()):
            break
        last, here, gone = now, there, away
        far = float(away.norm()) / twin.scale
        path.append({"step": step, "loss": loss, "drift": relative_drift(last, first), "distance": far, "missed": here.share()})
    if here is None:
        raise NonFiniteError("The loss or the tangent kernel is not finite before the first step.")

    def drift(kept: Tensor) -> float:
        """That of the rows and columns of the samples kept."""
        mask = kept.repeat_interleave(len(first) // kernel_on.samples).to(first.device)
        return relative_drift(last[mask][:, mask], first[mask][:, mask])

    return _Trial(path, gone, _jackknife(kernel_on.samples, drift), _jackknife(problem.samples, here.share))
