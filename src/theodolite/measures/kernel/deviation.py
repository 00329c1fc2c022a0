"""How far a model is from its linearisation, with Taylor's bound beside it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from theodolite.linalg import Eigenpairs
from theodolite.measures.kernel.hessian_norm import top_hessian_pair
from theodolite.measures.kernel.scalar_output import chosen, kinks_of, moved, random_directions, scalar_problem, unit
from theodolite.problem import Problem
from theodolite.progress import counting
from theodolite.results import Cost, Outcome, Result, Row

#: The largest Hessian norm is looked for at a few points of a segment, so the bound may be short by this much.
SLACK = 1e-3


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Deviation(Result):
    """`|f(w₀+Rd) − f(w₀) − R dᵀ∇f(w₀)|` for several unit directions d, and Taylor's bound `½ R² max ‖H‖` on each segment.

    `worst` is the largest deviation; `gradient_norm` is ‖∇f(w₀)‖, `hessian_norm` ‖H(w₀)‖. `certified` tells whether the
    bound holds for the model at all: it does for smooth functions, and not where `kinks` names some (ReLU).
    """

    radius: float
    sample: int
    output: int
    value: float
    gradient_norm: float
    hessian_norm: float
    directions: tuple[str, ...]
    deviations: tuple[float, ...]
    certificates: tuple[float, ...]
    kinks: tuple[str, ...]

    @property
    def worst(self) -> float:
        return max(self.deviations)

    @property
    def certificate(self) -> float:
        """The largest of the bounds."""
        return max(self.certificates)

    @property
    def certified(self) -> bool:
        return not self.kinks

    @property
    def violations(self) -> int:
        """Directions in which the deviation exceeds its bound; only a smooth model must have none."""
        rounding = 1e-12 * max(1.0, abs(self.value), self.radius * self.gradient_norm)
        pairs = zip(self.deviations, self.certificates, strict=True)
        return sum(deviation > bound * (1 + SLACK) + rounding for deviation, bound in pairs)

    def rows(self) -> list[Row]:
        shared = {"radius": self.radius, "certified": self.certified, "seed": self.seed}
        return [
            {"direction": d, "deviation": v, "certificate": c, **shared}
            for d, v, c in zip(self.directions, self.deviations, self.certificates, strict=True)
        ]

    def sentence(self) -> str:
        where = self.directions[self.deviations.index(self.worst)]
        linear = self.radius * self.gradient_norm
        share = f" ({self.worst / linear:.2g} of R‖∇f‖)" if linear > 0 else ""
        bound = f"Taylor's bound is {self.certificate:.3g}"
        if self.kinks:
            bound += f", which is not valid here: the model has kinks ({', '.join(self.kinks)}) that a Hessian does not see"
        deviates = f"the output deviates from its linearisation by {self.worst:.3g}{share}, along {where}"
        return f"At distance {self.radius:g} {deviates}; {bound}."


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

    Directions: `directions` random ones, the gradient of the output, the top eigenvector of its Hessian, and
    `displacement` (that of a training run, say) where it is given. On each segment the Hessian norm is taken at
    `segments` points, both ends among them. `start` is a guess of the top eigenvector, if there is one.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1).double()
    >>> data = torch.ones(1, 2).double(), torch.zeros(1, 1).double()
    >>> linearity_deviation(Problem(model, torch.nn.MSELoss(), data), directions=2).worst < 1e-12
    True
    """
    if not radius > 0 or segments < 2 or directions < 0:
        raise ValueError(
            f"radius must be positive, segments at least 2, directions at least 0. Got {radius}, {segments}, {directions}."
        )
    began = time.perf_counter()
    problem.refuse_batch_coupling("The deviation of an output from its linearisation")
    problem.check_repeatable()
    [(sample, index)] = chosen(problem, output, sample)
    scalar = scalar_problem(problem, index, sample)
    value, gradient = scalar.loss_and_gradient()
    top = top_hessian_pair(scalar, tol=tol, start=start, seed=seed, progress=False)
    named = {f"random {i + 1}": d for i, d in enumerate(random_directions(problem, directions, seed))}
    extra = {"gradient": gradient, "top Hessian eigenvector": top.vectors[:, 0], "displacement": displacement}
    named |= {name: d for name, v in extra.items() if v is not None and (d := unit(v)) is not None}
    if not named:
        raise ValueError("There is no direction to look along: the gradient is zero; ask for directions=1 or more.")
    deviations, certificates = [], []
    with counting("directions", progress=progress, total=len(named)) as count:
        for direction in named.values():
            step = radius * direction
            there = moved(scalar, step).loss()
            deviations.append(abs(there - value - float(step @ gradient.double())))
            certificates.append(0.5 * radius**2 * _largest_norm(scalar, step, segments, top, tol, seed))
            count(1)
    return Deviation(
        radius=radius,
        sample=sample,
        output=index,
        value=value,
        gradient_norm=float(gradient.double().norm()),
        hessian_norm=abs(float(top.values[0])),
        directions=tuple(named),
        deviations=tuple(deviations),
        certificates=tuple(certificates),
        kinks=kinks_of(problem),
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
