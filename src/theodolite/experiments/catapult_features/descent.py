"""Gradient descent and SGD on a squared loss, with the tangent kernel of all points at every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from theodolite.experiments.catapult_features.samples import Points
from theodolite.linalg import top_eigenpairs
from theodolite.measures.dynamics import split_loss
from theodolite.operators import as_operator, tangent_kernel
from theodolite.problem import Problem
from theodolite.results import Row

#: Rows of a kernel up to which all its eigenvectors are computed.
DENSE = 400
#: A loss this many times the first has diverged.
BLOWN_UP = 1e8
#: By how much a rate must exceed a critical one to count.
MARGIN = 1e-8

Rate = Callable[[int, float], float]


def descend(
    model: nn.Module,
    sample: Points,
    rate: Rate,
    *,
    steps: int,
    batch_size: int | None = None,
    ranks: Sequence[int] = (1, 5),
    until: float = 0.0,
    seed: int = 0,
) -> Iterator[Row]:
    """Descent on the mean squared error: a row for the weights before each step and after the last.

    A row holds the loss on all points, λ₁ of their kernel, the critical rate of all points and of the batch about to be used
    (numbers in the batch over λ₁ of its kernel, a part of that of all), whether the rate exceeds it, and `top_s`, `rest_s`.

    Parameters
    ----------
    rate : of the step and the critical rate of all points at the current weights.
    batch_size : None is gradient descent; else batches of shuffled epochs.
    until : stop once the loss on all points is below this.
    """
    weights = [p for p in model.parameters() if p.requires_grad]
    problem = Problem(model, nn.MSELoss(), (sample.x, sample.y), check=False)
    batches = _batches(len(sample.x), batch_size, seed)
    first = math.inf
    for step in range(steps + 1):
        with torch.no_grad():
            residual = (model(sample.x) - sample.y).double()
        loss = float(residual.square().mean())
        first = loss if step == 0 else first
        if not loss < BLOWN_UP * first:
            yield {"step": step, "loss": None, "diverged": True}
            return
        kernel = tangent_kernel(problem).double()
        row = {"step": step, "diverged": False, **look(kernel, residual, ranks)}
        if step == steps or loss < until:
            yield row
            return
        batch = next(batches)
        row |= choose(kernel, batch, sample.outputs, rate(step, row["critical"]))
        yield row
        _step(model, weights, sample, batch, row["rate"])


def look(kernel: Tensor, residual: Tensor, ranks: Sequence[int]) -> Row:
    """Loss, kernel norm, critical rate and the split of the loss; residuals (n, outputs)."""
    size, outputs = residual.numel(), residual.shape[1]
    split = split_loss(kernel if size <= DENSE else as_operator(kernel), residual, ranks, outputs=outputs)
    largest = float(split.eigenvalues[0])
    parts = {f"top_{s}": split.top[s] for s in split.top} | {f"rest_{s}": split.rest[s] for s in split.rest}
    return {"loss": split.total, "kernel": largest, "critical": size / largest if largest > 0 else math.inf, **parts}


def choose(kernel: Tensor, batch: Tensor, outputs: int, rate: float) -> Row:
    """The rate of a step beside the critical rate of its batch."""
    rows = (batch[:, None] * outputs + torch.arange(outputs)).flatten()
    critical = batch_critical(kernel, rows)
    return {"rate": rate, "batch_critical": critical, "exceeded": rate - critical > MARGIN}


def batch_critical(kernel: Tensor, rows: Tensor) -> float:
    """Numbers over λ₁ of the kernel of some outputs; infinite for a network that has died."""
    part = kernel if len(rows) == len(kernel) else kernel[rows][:, rows]
    if len(rows) <= DENSE:
        largest = float(torch.linalg.eigvalsh(part)[-1])
    else:
        largest = float(top_eigenpairs(as_operator(part), 1, tol=1e-6, progress=False).values[0])
    return len(rows) / largest if largest > 0 else math.inf


def _step(model: nn.Module, weights: Sequence[Tensor], sample: Points, batch: Tensor, rate: float) -> None:
    loss = nn.functional.mse_loss(model(sample.x[batch]), sample.y[batch])
    gradient = torch.autograd.grad(loss, list(weights))
    with torch.no_grad():
        for w, g in zip(weights, gradient, strict=True):
            w.sub_(rate * g)


def _batches(n: int, size: int | None, seed: int) -> Iterator[Tensor]:
    """Indices of one batch after the other: all points, or shuffled epochs without replacement."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        if size is None or size >= n:
            yield torch.arange(n)
        else:
            yield from torch.randperm(n, generator=generator).split(size)


def constant(ratio: float) -> Rate:
    """A rate fixed at `ratio` times the critical one of the start."""
    found: list[float] = []

    def rate(step: int, critical: float) -> float:
        if step == 0:
            found.append(ratio * critical)
        return found[-1]

    return rate
