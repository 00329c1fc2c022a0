"""The PL* condition `‖∇L‖² ≥ 2μL` from the tangent kernel: how fast gradient descent will converge.

For a squared loss L = (c/2) Σ r² the gradient is c Jᵀr, so `‖∇L‖² = c² rᵀKr ≥ 2 c λ_min(K) L`: μ = c λ_min(K). A half
sum has c = 1, a mean over N numbers c = 2/N. While K stays as it is, residuals obey r ← (I − ηcK) r.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.arguments import also_called
from theodolite.measures.kernel.drift import Kernels, kernels_on_ball, refuse_zero_kernel
from theodolite.measures.kernel.quadratic_checks import squared_loss_curvature
from theodolite.measures.kernel.scalar_output import require_problem
from theodolite.problem import Problem
from theodolite.results import Cost, Outcome, Result, Row


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
    require_problem(problem, "pl_report")
    if rate is not None and not 0 < rate < math.inf:
        raise ValueError(f"rate must be a positive number. Got {rate!r}.")
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
