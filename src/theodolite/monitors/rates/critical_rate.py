"""Learning rates that follow the critical one, and rates that cycle around it."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from theodolite.arguments import also_called, checked, count, fraction, integer, nonnegative, positive, seed
from theodolite.linalg import top_eigenpairs
from theodolite.measures.dynamics.critical import kernel_curvature
from theodolite.measures.dynamics.optimizers import StabilityLaw, stability_law
from theodolite.operators import tangent_kernel
from theodolite.operators.matrices import ON_PARAMETERS, MatrixName, check_matrix_or_none
from theodolite.problem import Problem
from theodolite.problem.arguments import a_problem, an_optimizer
from theodolite.problem.state_guard import cuda_devices, random_states_kept
from theodolite.training.schedules import Schedule

#: Accuracy of the eigenvalue behind a critical rate, relative, where it is found by products.
TOLERANCE = 1e-2
#: Outputs of all samples up to which the tangent kernel of a squared loss is formed: cheaper there than some products.
KERNEL_ROWS = 512


class EdgeProbe:
    """The critical rate of a problem at the weights it has now; each search starts from the eigenvector of the last.

    `optimizer` sets the law (momentum, weight decay, Adam), None is plain descent. `by` (or `matrix`) names the matrix:
    "kernel" (squared losses, one rate for all parameters), "gauss_newton" (which has the same eigenvalues there), "hessian";
    None takes the kernel where it is small and serves, and the Gauss-Newton matrix elsewhere. After `measure`, `sharpness` is
    the eigenvalue behind the rate: for a mean squared error over n samples (2/n) times the norm of the tangent kernel.
    """

    @also_called(matrix="by")
    @checked(problem=a_problem, optimizer=an_optimizer, tol=fraction, seed=seed)
    def __init__(
        self,
        problem: Problem,
        optimizer: Optimizer | None = None,
        *,
        by: MatrixName | None = None,
        tol: float = TOLERANCE,
        seed: int = 0,
    ) -> None:
        check_matrix_or_none(by)
        law = stability_law(optimizer, problem)  # refuses what has no law before anything runs
        forced = by == "kernel"
        self._curvature = None if by in ON_PARAMETERS else kernel_curvature(problem, law, rows=KERNEL_ROWS, required=forced)
        self.by: MatrixName = "kernel" if self._curvature is not None else by or "gauss_newton"
        self.problem, self.optimizer, self.tol, self.seed = problem, optimizer, tol, seed
        self.sharpness = math.nan
        self.matvecs = 0
        self.start: torch.Tensor | None = None

    def measure(self) -> float:
        """The critical rate here and now; infinite where no direction curves upwards."""
        law = stability_law(self.optimizer, self.problem)
        self.sharpness = self._by_products(law) if self._curvature is None else self._by_kernel(law, self._curvature)
        return law.rate(self.sharpness) if self.sharpness > 0 else math.inf

    def _by_kernel(self, law: StabilityLaw, curvature: float) -> float:
        largest = curvature * float(torch.linalg.eigvalsh(tangent_kernel(self.problem).double())[-1])
        return largest if law.decay is None else largest + float(law.decay[0])

    def _by_products(self, law: StabilityLaw) -> float:
        op = law.effective(ON_PARAMETERS[self.by](self.problem))
        pairs = top_eigenpairs(op, 1, tol=self.tol, start=self.start, seed=self.seed, progress=False)
        self.start = pairs.vectors.clone()  # nothing else is carried on, so that a resumed run sees the same numbers
        self.matvecs += pairs.matvecs
        return float(pairs.values[0])


class CriticalRateLR(LRScheduler):
    """A torch scheduler that keeps the learning rate at a multiple of the critical one.

    Every `every` steps the critical rate is measured at the current weights and the rate of the first group set to
    `multiple` times it; other groups keep their ratio to the first. Below 1 the loss falls smoothly; above 1 every correction
    asks for a catapult. Neither weights, gradients nor random state are touched. Where no direction curves upwards the rate
    stays as it is.

    Args:
        probe: the `Problem` whose critical rate is followed (all the data, or a part of it), or an `EdgeProbe` of it.

    >>> from torch import nn
    >>> model = nn.Linear(1, 1, bias=False).double()
    >>> x = torch.tensor([[1.0], [3.0]]).double()
    >>> sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    >>> follow = CriticalRateLR(sgd, Problem(model, nn.MSELoss(), (x, 0 * x)), multiple=0.5, every=10)
    >>> round(sgd.param_groups[0]["lr"], 6)                  # λ = 10, half of 2/λ
    0.1
    """

    @checked(optimizer=an_optimizer, multiple=positive, every=count, last_epoch=integer)
    def __init__(
        self, optimizer: Optimizer, probe: Problem | EdgeProbe, multiple: float = 0.9, every: int = 20, *, last_epoch: int = -1
    ) -> None:
        self.probe = probe if isinstance(probe, EdgeProbe) else EdgeProbe(a_problem("probe", probe), optimizer)
        self.multiple, self.every = multiple, every
        self.critical_rate = math.nan
        first = float(optimizer.param_groups[0]["lr"])
        if not first > 0:
            raise ValueError("optimizer: the rate of its first group must be positive, for the other groups are measured by it.")
        if last_epoch >= 0 and any("initial_lr" not in group for group in optimizer.param_groups):
            raise ValueError(
                "last_epoch goes on with the optimizer of an earlier scheduler: load its state first, or leave last_epoch out."
            )
        self.shares = [float(group["lr"]) / first for group in optimizer.param_groups]
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | torch.Tensor]:
        current: list[float | torch.Tensor] = [group["lr"] for group in self.optimizer.param_groups]
        if self.last_epoch % self.every:
            return current
        with random_states_kept(cuda_devices(self.probe.problem.model)):
            self.critical_rate = self.probe.measure()
        if not math.isfinite(self.critical_rate):
            return current
        return [self.multiple * self.critical_rate * share for share in self.shares]

    def state_dict(self) -> dict[str, Any]:
        """Numbers and the eigenvector to start from; the model and the data are not in it."""
        state = {key: value for key, value in super().state_dict().items() if key != "probe"}
        return {**state, "start": self.probe.start}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        self.probe.start = state.pop("start", None)
        super().load_state_dict(state)


@checked(low=nonnegative, high=positive, period=partial(integer, least=2))
def cyclical_rate(low: float, high: float, period: int) -> Schedule:
    """A triangle between two learning rates: from `low` up to `high` in half a period, and back.

    With `low` below the critical rate and `high` above it, each rising phase asks for a catapult.

    >>> rate = cyclical_rate(1.0, 3.0, 4)
    >>> [rate(step) for step in range(6)]
    [1.0, 2.0, 3.0, 2.0, 1.0, 2.0]
    """
    if low > high:
        raise ValueError(f"low must be at most high, {high:g}. Got {low:g}.")

    def rate(step: int) -> float:
        phase = (step % period) / period
        return low + (high - low) * (1.0 - abs(2.0 * phase - 1.0))

    return rate
