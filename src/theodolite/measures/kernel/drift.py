"""How much the tangent kernel changes with the weights; for a linear model it does not."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from theodolite.measures.kernel.scalar_output import moved, outputs_per_sample, random_directions, require_problem, unit
from theodolite.operators import tangent_kernel
from theodolite.problem import Problem
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
    require_problem(problem, "A measure of the tangent kernel")
    if not radius > 0 or probes < 0:
        raise ValueError(f"radius must be positive and probes at least 0. Got {radius} and {probes}.")
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


def relative_drift(there: Tensor, here: Tensor) -> float:
    """`‖K − K₀‖₂ / ‖K₀‖₂`.

    >>> relative_drift(torch.diag(torch.tensor([1.5, 2.0])), torch.diag(torch.tensor([1.0, 2.0])))
    0.25
    """
    return spectral_norm(there - here) / spectral_norm(here)


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
