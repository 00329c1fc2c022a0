"""The tangent kernel around the current weights: how much it changes, and how fast it lets gradient descent converge.

The PL* condition `‖∇L‖² ≥ 2μL`: for a squared loss L = (c/2) Σ r² the gradient is c Jᵀr, so `‖∇L‖² = c² rᵀKr ≥ 2 c λ_min(K) L`:
μ = c λ_min(K). A half sum has c = 1, a mean over N numbers c = 2/N. While K stays as it is, residuals obey r ← (I − ηcK) r.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from theodolite.arguments import also_called, checked, positive, seed, shown, whole
from theodolite.measures.kernel.problem_views import (
    moved,
    outputs_per_sample,
    random_directions,
    squared_loss_curvature,
    unit,
)
from theodolite.operators import tangent_kernel
from theodolite.problem import Problem
from theodolite.problem.arguments import a_problem, of_dimensions
from theodolite.progress import counting
from theodolite.results import Cost, Outcome, Result, Row

#: Kernels up to this many rows are formed.
LARGEST = 4096


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class KernelDrift(Result):
    """`‖K(w) − K(w₀)‖₂ / ‖K(w₀)‖₂` at several places w; `worst` is the largest. `distances` are ‖w − w₀‖."""

    radius: float
    places: tuple[str, ...]
    distances: tuple[float, ...]
    drifts: tuple[float, ...]
    kernel_norm: float

    @property
    def worst(self) -> float:
        return max(self.drifts)

    def rows(self) -> list[Row]:
        return [
            {"place": p, "distance": r, "drift": d, "kernel_norm": self.kernel_norm, "radius": self.radius, "seed": self.seed}
            for p, r, d in zip(self.places, self.distances, self.drifts, strict=True)
        ]

    def sentence(self) -> str:
        i = self.drifts.index(self.worst)
        return (
            f"The tangent kernel changes by {100 * self.worst:.3g} % of its norm at distance {self.distances[i]:.3g} "
            f"({self.places[i]}), the most of {len(self.places)} places tried."
        )


@dataclass(frozen=True, eq=False)
class Kernels:
    """Tangent kernels at the current weights and at places around them, by name.

    `distances` has the places that are not at distance `radius`.
    """

    here: Tensor
    there: Mapping[str, Tensor]
    radius: float
    distances: Mapping[str, float] = field(default_factory=dict)


@checked(problem=a_problem, radius=positive, probes=whole, displacement=of_dimensions(1), seed=seed)
def kernels_on_ball(
    problem: Problem,
    *,
    radius: float = 1.0,
    probes: int = 8,
    displacement: Tensor | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Kernels:
    """Kernels at w₀, at `probes` random places at distance `radius`, along the gradient of the loss and at `displacement`.

    A displacement is gone as it is, whatever its length: that is where training went.
    """
    refuse_large_kernel(problem)
    problem.refuse_batch_coupling("The tangent kernel")
    steps = {f"random {i + 1}": radius * d for i, d in enumerate(random_directions(problem, probes, seed))}
    descent = unit(problem.gradient())
    if descent is not None:
        steps["descent"] = -radius * descent
    if displacement is not None:
        steps["displacement"] = displacement.double()
    with counting("kernels", progress=progress, total=1 + len(steps)) as count:
        here = kernel_of(problem)
        count(1)
        there = {}
        for name, step in steps.items():
            there[name] = kernel_of(moved(problem, step))
            count(1)
    distances = {} if displacement is None else {"displacement": float(displacement.double().norm())}
    return Kernels(here, there, radius, distances)


def refuse_large_kernel(problem: Problem) -> None:
    """Raise where the kernel of all outputs of all samples is too large to be formed."""
    rows = problem.samples * outputs_per_sample(problem)
    if rows > LARGEST:
        raise ValueError(
            f"The tangent kernel of {rows} outputs (samples × outputs) is larger than the {LARGEST} that are formed. "
            "Build the Problem on fewer samples."
        )


def refuse_zero_kernel(kernel: Tensor) -> None:
    """Raise where the kernel vanishes."""
    if not bool(kernel.any()):
        raise ValueError(
            "The tangent kernel is zero on these samples: no output changes with the measured weights, so nothing can be said "
            "relative to it. Measure at other weights, or on inputs that are not zero."
        )


def kernel_of(problem: Problem, outputs: list[int] | None = None) -> Tensor:
    """The tangent kernel in float64, symmetric to the last bit; of all outputs, or of some."""
    kernel = tangent_kernel(problem, outputs=outputs).double()
    return 0.5 * (kernel + kernel.T)


def spectral_norm(matrix: Tensor) -> float:
    """‖A‖₂ of a symmetric matrix."""
    return float(torch.linalg.eigvalsh(matrix).abs().max())


@checked(there=of_dimensions(2), here=of_dimensions(2))
def relative_drift(there: Tensor, here: Tensor) -> float:
    """`‖K − K₀‖₂ / ‖K₀‖₂`.

    >>> relative_drift(torch.diag(torch.tensor([1.5, 2.0])), torch.diag(torch.tensor([1.0, 2.0])))
    0.25
    """
    return spectral_norm(there - here) / spectral_norm(here)


@checked(problem=a_problem, radius=positive, probes=whole, displacement=of_dimensions(1), seed=seed)
def kernel_drift(
    problem: Problem,
    *,
    radius: float = 1.0,
    probes: int = 8,
    displacement: Tensor | None = None,
    kernels: Kernels | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> KernelDrift:
    """Relative change of the tangent kernel around the current weights.

    Places: `probes` random ones and the descent direction at distance `radius`, and `displacement` (a flat vector w_T − w₀ of a
    training run, say), which is gone as it is, whatever its length. `kernels` reuses what `kernels_on_ball` found.

    >>> model = torch.nn.Linear(2, 1).double()
    >>> data = torch.eye(2).double(), torch.zeros(2, 1).double()
    >>> kernel_drift(Problem(model, torch.nn.MSELoss(), data), probes=2).worst
    0.0
    """
    began = time.perf_counter()
    if kernels is None:
        kernels = kernels_on_ball(problem, radius=radius, probes=probes, displacement=displacement, seed=seed, progress=progress)
    if not kernels.there:
        raise ValueError("There is no place to compare with: ask for probes=1 or more, or give a displacement.")
    refuse_zero_kernel(kernels.here)
    return KernelDrift(
        radius=kernels.radius,
        places=tuple(kernels.there),
        distances=tuple(kernels.distances.get(name, kernels.radius) for name in kernels.there),
        drifts=tuple(relative_drift(there, kernels.here) for there in kernels.there.values()),
        kernel_norm=spectral_norm(kernels.here),
        outcome=Outcome.FINISHED,
        seed=seed,
        cost=Cost(time.perf_counter() - began, "tangent kernels", 8 * kernels.here.numel(), problem.notes),
    )


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PLReport(Result):
    """The tangent kernel as an optimiser sees it.

    `mu` is the PL* constant in the loss's own convention, `curvature` (c above) times `lambda_min`; `mu_ball` is the
    smallest at the places tried. `contraction` is what gradient descent multiplies the slowest residual by per step at
    learning rate `rate`, as long as the kernel stays; the loss falls by its square. Above `largest_rate` it diverges.
    Eigenvalues below `resolution` are rounding.
    """

    lambda_min: float
    lambda_max: float
    resolution: float
    curvature: float
    mu: float
    mu_ball: float
    radius: float
    rate: float
    contraction: float
    places: tuple[str, ...]
    lambda_mins: tuple[float, ...]

    @property
    def condition(self) -> float:
        return self.lambda_max / self.lambda_min if self.lambda_min > self.resolution else math.inf

    @property
    def holds(self) -> bool:
        """Whether the smallest eigenvalue could be told from zero at every place tried."""
        return self.mu_ball > self.curvature * self.resolution

    @property
    def largest_rate(self) -> float:
        return 2.0 / (self.curvature * self.lambda_max)

    def rows(self) -> list[Row]:
        places = (("here", self.lambda_min), *zip(self.places, self.lambda_mins, strict=True))
        return [
            {"place": place, "lambda_min": value, "mu": self.curvature * value, "radius": self.radius, "seed": self.seed}
            for place, value in places
        ]

    def sentence(self) -> str:
        if not self.holds:
            smallest = min((self.lambda_min, *self.lambda_mins))
            return f"The tangent kernel is singular (smallest eigenvalue {smallest:.2g}), so PL* promises nothing."
        known = (
            f"PL* holds with μ = {self.mu:.3g} ({self.mu_ball:.3g} at the worst place tried); the kernel's "
            f"condition number is {self.condition:.3g}."
        )
        if self.contraction >= 1:
            return (
                f"{known} At rate {self.rate:.3g} descent diverges: a residual grows {self.contraction:.4g} times per step. "
                f"It converges below {self.largest_rate:.3g}."
            )
        halving = math.log(2) / -math.log(self.contraction**2) if 0 < self.contraction < 1 else math.nan
        speed = f", so the loss halves at least every {halving:.3g} steps" if math.isfinite(halving) else ""
        return (
            f"{known} At rate {self.rate:.3g} descent contracts by {self.contraction:.4g} per step{speed}; it diverges above "
            f"{self.largest_rate:.3g}."
        )


@also_called(lr="rate")
@checked(problem=a_problem, radius=positive, probes=whole, displacement=of_dimensions(1), rate=positive, seed=seed)
def pl_report(
    problem: Problem,
    *,
    radius: float = 1.0,
    probes: int = 8,
    displacement: Tensor | None = None,
    rate: float | None = None,
    kernels: Kernels | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> PLReport:
    """PL* constant, conditioning and predicted speed of gradient descent, for a squared loss.

    `rate` is the learning rate to predict for, by default 1/(c λ_max). The smallest eigenvalue is also taken at `probes`
    random places at distance `radius`, along the descent direction and at `displacement` (gone as it is, whatever its length).

    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> data = torch.tensor([[1.0, 0.0], [0.0, 3.0]]).double(), torch.ones(2, 1).double()
    >>> report = pl_report(Problem(model, torch.nn.MSELoss(), data), probes=1)  # K = diag(1, 9), c = 2/2
    >>> round(report.mu, 9), round(report.condition, 9), round(report.contraction, 9)
    (1.0, 9.0, 0.888888889)
    """
    if rate is not None and not 0 < rate < math.inf:
        raise ValueError(f"rate must be a positive number. Got {shown(rate)}.")
    began = time.perf_counter()
    curvature = squared_loss_curvature(problem)
    if curvature is None:
        loss = problem.loss_function
        name = "the model's own" if loss is None else getattr(loss, "__name__", type(loss).__name__)
        raise ValueError(
            "pl_report needs a squared loss, (c/2) Σ (f − y)² such as MSELoss or ½ Σ r²: the constant μ follows from the tangent "
            f"kernel only there. The loss of this problem, {name}, is none."
        )
    if kernels is None:
        kernels = kernels_on_ball(problem, radius=radius, probes=probes, displacement=displacement, seed=seed, progress=progress)
    refuse_zero_kernel(kernels.here)
    values = torch.linalg.eigvalsh(kernels.here)
    smallest = tuple(float(torch.linalg.eigvalsh(kernel)[0]) for kernel in kernels.there.values())
    rate = 1.0 / (curvature * float(values[-1])) if rate is None else rate
    return PLReport(
        lambda_min=float(values[0]),
        lambda_max=float(values[-1]),
        resolution=len(values) * torch.finfo(problem.dtype).eps * float(values[-1]),
        curvature=curvature,
        mu=curvature * float(values[0]),
        mu_ball=curvature * min((float(values[0]), *smallest)),
        radius=kernels.radius,
        rate=rate,
        contraction=float((1.0 - rate * curvature * values).abs().max()),
        places=tuple(kernels.there),
        lambda_mins=smallest,
        outcome=Outcome.FINISHED,
        seed=seed,
        cost=Cost(time.perf_counter() - began, "tangent kernels", 8 * kernels.here.numel(), problem.notes),
    )
