"""Critical learning rates of random batches: how many of them lie below the rate one trains with."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from theodolite.arguments import also_called
from theodolite.errors import BatchCoupledError
from theodolite.linalg import top_eigenpairs
from theodolite.measures.dynamics.spikes import Proportion
from theodolite.measures.dynamics.stability_laws import StabilityLaw, stability_law
from theodolite.measures.kernel.quadratic_checks import squared_loss_curvature
from theodolite.measures.kernel.scalar_output import outputs_per_sample, require_problem
from theodolite.operators import as_operator, tangent_kernel
from theodolite.operators.matrices import ON_PARAMETERS, MatrixName, check_matrix_or_none
from theodolite.problem import Batch, Problem
from theodolite.problem.batches import merge
from theodolite.results import Cost, Outcome, Result, Row, number

#: Rows of the kernel of all samples up to which it is formed once and every batch cut out of it.
KERNEL_ROWS = 2000
#: Rows of a batch's kernel up to which all its eigenvalues are computed, in stacks of about this many numbers.
DENSE_ROWS = 300
STACK = 20_000_000
#: Accuracy of the eigenvalue of one batch where it is computed by products.
TOL = 1e-3


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class BatchCriticalRates(Result):
    """Critical learning rates of random batches of one size.

    `rates` holds one per batch; `rate` is the optimizer's (None without one) and `below` the share of batches whose critical
    rate lies under it, with `below_error` from the number of batches: on such a batch a step overshoots.
    """

    rates: Tensor
    batch_size: int
    samples: int
    rate: float | None
    below: float | None
    below_error: float | None
    by: str
    rule: str
    optimizer: str

    def quantile(self, share: float) -> float:
        """The critical rate that this share of the batches does not exceed."""
        return float(torch.quantile(self.rates, share, interpolation="lower"))  # infinite rates do not average

    @property
    def median(self) -> float:
        return self.quantile(0.5)

    def rows(self) -> list[Row]:
        return [
            {"batch": i, "critical_rate": value, "batch_size": self.batch_size, "rate": self.rate, "seed": self.seed}
            for i, value in enumerate(self.rates.tolist())
        ]

    def sentence(self) -> str:
        low, middle, high = (number(self.quantile(q)) for q in (0.05, 0.5, 0.95))
        spread = f"Critical rates of batches of {self.batch_size}: median {middle}, from {low} (5 %) to {high} (95 %)"
        if self.below is None or self.below_error is None:
            return f"{spread}."
        share = f"{100 * self.below:.3g} ± {100 * self.below_error:.2g} %"
        return f"{spread}; the rate {self.rate:.4g} exceeds that of {share} of the batches."


@also_called(matrix="by")
def batch_critical_rates(
    problem: Problem,
    *,
    optimizer: Optimizer | None = None,
    batch_size: int | None = None,
    batches: int = 200,
    own: bool = False,
    by: MatrixName | None = None,
    seed: int = 0,
) -> BatchCriticalRates:
    """The critical learning rate of random batches at the current weights.

    For a squared loss the tangent kernel of all samples is formed once, if it has at most 2000 rows, and the kernel of each
    batch is cut out of it. Otherwise each batch costs some products with its Gauss-Newton matrix, started from the last one.

    Args:
        optimizer: sets the law of stability (momentum, decay, Adam) and the rate to compare with; None is plain descent.
        batch_size: None means the size of the problem's own batches, where it has several.
        batches: how many are drawn, each without replacement.
        own: measure the problem's own batches as they are instead, `batches` of them at most, chosen at random.
        by: (or `matrix`) "kernel", "gauss_newton" or "hessian"; None takes the kernel where that is possible and the Gauss-Newton
            matrix elsewhere.

    >>> model = torch.nn.Linear(1, 1, bias=False).double()
    >>> x = torch.tensor([[1.0], [1.0], [1.0], [2.0]]).double()
    >>> problem = Problem(model, torch.nn.MSELoss(), (x, 0 * x))
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    >>> found = batch_critical_rates(problem, optimizer=sgd, batch_size=1)           # 1 / x²: 1 or, for one in four, 0.25
    >>> sorted(set(found.rates.tolist())), found.below == float((found.rates < 0.5).double().mean())
    ([0.25, 1.0], True)
    """
    require_problem(problem, "batch_critical_rates")
    check_matrix_or_none(by)
    if batches < 1:
        raise ValueError(f"batches must be at least 1. Got {batches!r}.")
    began = time.perf_counter()
    law = stability_law(optimizer, problem)
    if own:
        chosen = _some(list(problem.data), batches, seed)
        size, batches = max(batch.size for batch in chosen), len(chosen)
        largest, by = _each(problem, [[batch] for batch in chosen], law, by)
        route = "each batch alone"
    else:
        size = _batch_size(problem, batch_size)
        largest, by, route = _drawn(problem, random_batches(problem.samples, size, batches, seed), law, by)
    floor = 1e-12 * float(largest.abs().max())
    rates = torch.tensor([law.rate(x) if x > floor else math.inf for x in largest.tolist()], dtype=torch.float64)
    rate = None if optimizer is None else float(optimizer.param_groups[0]["lr"])
    share = None if rate is None else Proportion(int((rates < rate).sum()), batches)
    return BatchCriticalRates(
        rates=rates,
        batch_size=size,
        samples=problem.samples,
        rate=rate,
        below=None if share is None else share.value,
        below_error=None if share is None else share.error,
        by=str(by),
        rule=law.rule,
        optimizer="gradient descent" if optimizer is None else type(optimizer).__name__,
        outcome=Outcome.ESTIMATED,
        seed=seed,
        cost=Cost(seconds=time.perf_counter() - began, route=route),
    )


def random_batches(samples: int, size: int, batches: int, seed: int) -> Tensor:
    """(batches, size): indices of samples, each row without repetition."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(samples, generator=generator)[:size] for _ in range(batches)])


def _some(batches: list[Batch], most: int, seed: int) -> list[Batch]:
    """At most so many batches, chosen at random and left in their order."""
    if len(batches) <= most:
        return batches
    order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(seed))[:most]
    return [batches[i] for i in order.sort().values.tolist()]


def _drawn(problem: Problem, rows: Tensor, law: StabilityLaw, by: MatrixName | None) -> tuple[Tensor, MatrixName, str]:
    """The eigenvalue of the edge of each drawn batch (batches, size), how it was found, and the route."""
    curvature = None
    if by not in ON_PARAMETERS:  # that of a batch: a mean divides by the batch's numbers
        one = problem.with_batches(_pick(problem, rows[0]))
        most = KERNEL_ROWS * rows.shape[1] // problem.samples
        curvature = kernel_curvature(one, law, rows=most, required=by == "kernel")
    if curvature is None:
        largest, found = _each(problem, (_pick(problem, mine) for mine in rows), law, by or "gauss_newton")
        return largest, found, "products, batch by batch"
    return _shifted(curvature * _through_kernel(problem, rows), law), "kernel", "one tangent kernel"


def _shifted(largest: Tensor, law: StabilityLaw) -> Tensor:
    """With the weight decay, which is the same for all parameters here."""
    return largest if law.decay is None else largest + float(law.decay[0])


def _batch_size(problem: Problem, given: int | None) -> int:
    samples = problem.samples
    if given is None:
        if len(problem.data) < 2:
            raise ValueError("The data is one batch: say how large the batches of training are with batch_size=...")
        given = next(iter(problem.data)).size
    if not 1 <= given <= samples:
        raise ValueError(f"batch_size must be from 1 to the number of samples, {samples}. Got {given!r}.")
    return given


def kernel_curvature(problem: Problem, law: StabilityLaw, *, rows: int, required: bool) -> float | None:
    """The c of a squared loss whose curvature is c times its tangent kernel; None where that kernel cannot give the edge.

    None too where it has more than `rows` rows. `required` raises instead, and takes any size.
    """
    decay = law.decay
    plain = law.scale is None and law.shift is None and (decay is None or bool((decay == decay[0]).all()))
    found = squared_loss_curvature(problem) if plain else None
    if required and found is None:
        raise ValueError(
            "by='kernel' needs a squared loss and an optimizer with one rate and one decay for all parameters (no Adam). Use "
            "by='gauss_newton', which knows them."
        )
    if found is None or (not required and problem.samples * outputs_per_sample(problem) > rows):
        return None
    try:
        problem.refuse_batch_coupling("A tangent kernel")
    except BatchCoupledError:
        if required:
            raise
        return None
    return found


def _through_kernel(problem: Problem, chosen: Tensor) -> Tensor:
    """λ₁ of the kernel of each batch, from one kernel of all samples."""
    kernel = tangent_kernel(problem).double()
    outputs = kernel.shape[0] // problem.samples
    rows = (chosen[:, :, None] * outputs + torch.arange(outputs)).flatten(1).to(kernel.device)  # (batches, size * outputs)
    width = rows.shape[1]
    if width > DENSE_ROWS:
        found = [top_eigenpairs(as_operator(kernel[mine][:, mine]), 1, tol=1e-6, progress=False) for mine in rows]
        return torch.tensor([float(pairs.values[0]) for pairs in found], dtype=torch.float64)
    stacks = rows.split(max(1, STACK // width**2))
    return torch.cat([torch.linalg.eigvalsh(kernel[part[:, :, None], part[:, None, :]])[:, -1] for part in stacks]).cpu()


def _each(problem: Problem, parts: Iterable[list[Batch]], law: StabilityLaw, by: MatrixName | None) -> tuple[Tensor, MatrixName]:
    """The eigenvalue of the edge of each part: by its kernel where that is small, else by products from the last eigenvector."""
    found: list[float] = []
    start = None
    for mine in parts:
        part = problem.with_batches(mine)
        if by is None:
            by = "gauss_newton" if kernel_curvature(part, law, rows=DENSE_ROWS, required=False) is None else "kernel"
        if by == "kernel":
            curvature = kernel_curvature(part, law, rows=DENSE_ROWS, required=True)
            assert curvature is not None
            largest = curvature * torch.linalg.eigvalsh(tangent_kernel(part).double())[-1].cpu()
            found.append(float(_shifted(largest, law)))
        else:
            op = law.effective(ON_PARAMETERS[by](part))
            start = top_eigenpairs(op, 1, tol=TOL, start=start, verify="full", seed=0, progress=False)
            found.append(float(start.values[0]))
    return torch.tensor(found, dtype=torch.float64), by or "gauss_newton"


def _pick(problem: Problem, rows: Tensor) -> list[Batch]:
    """The samples of these numbers as one batch, where their shapes allow it."""
    found, before = [], 0
    wanted = rows.sort().values
    for batch in problem.data:
        mine = wanted[(wanted >= before) & (wanted < before + batch.size)] - before
        if len(mine):
            found.append(batch.part(mine))
        before += batch.size
    if len(found) == 1:
        return found
    return merge([part.part(slice(i, i + 1)) for part in found for i in range(part.size)])
