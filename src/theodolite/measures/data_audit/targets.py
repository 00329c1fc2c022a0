"""On what scale are the targets of a regression, beside the outputs of the model?"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.arguments import checked, count, seed
from theodolite.measures.data_audit.views import (
    NUMBERS,
    SAMPLES,
    answers_on,
    chosen_rows,
    labels_of,
    middle_and_width,
    numbers_in,
    numbers_of,
    part_of,
)
from theodolite.problem import Problem
from theodolite.problem.arguments import a_problem
from theodolite.results import Cost, Outcome, Result, Row

#: A target is an outlier beyond this many spreads from the median, if no more than a share of the samples are.
OUTLYING, AT_MOST = 12.0, 0.05


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class TargetAudit(Result):
    """Means and spreads of targets and outputs, column by column; `explained` is the share of the variance that the model has.

    `outliers` are all samples whose targets lie far outside those of the others, the farthest first, and `outlier_share` is
    their share of the squared error of the outputs.
    """

    means: tuple[float, ...]
    spreads: tuple[float, ...]
    output_means: tuple[float, ...]
    output_spreads: tuple[float, ...]
    explained: float
    samples: int
    outliers: tuple[int, ...] = ()
    outlier_share: float = 0.0

    @property
    def distance(self) -> float:
        """How far the outputs have to go, in units of their own spread or of 1: to the mean, or to the spread of the targets."""
        columns = zip(self.means, self.spreads, self.output_means, self.output_spreads, strict=True)
        return max(max(abs(mean - out), spread) / max(1.0, wide) for mean, spread, out, wide in columns)

    @property
    def size(self) -> float:
        """The largest mean or spread of the targets."""
        return max(map(abs, (*self.means, *self.spreads)))

    def rows(self) -> list[Row]:
        columns = zip(self.means, self.spreads, self.output_means, self.output_spreads, strict=True)
        names = ("target", "mean", "spread", "output_mean", "output_spread")
        return [dict(zip(names, (i, *values), strict=True)) for i, values in enumerate(columns)]

    def sentence(self) -> str:
        targets = f"{self.means[0]:.3g} and {self.spreads[0]:.3g}"
        outputs = f"{self.output_means[0]:.3g} and {self.output_spreads[0]:.3g}"
        return f"Mean and spread of the targets are {targets}, of the outputs {outputs}."


@checked(problem=a_problem, most=count, seed=seed)
def audit_targets(problem: Problem, *, most: int = SAMPLES, seed: int = 0) -> TargetAudit:
    """Compare targets that are numbers with what the model returns.

    >>> x = torch.linspace(-1, 1, 50)[:, None]
    >>> found = audit_targets(Problem(torch.nn.Linear(1, 1), torch.nn.MSELoss(), (x, 5000 + 300 * x)))
    >>> found.distance > 1000
    True
    """
    began = time.perf_counter()
    rows = chosen_rows(problem, most, seed)
    sampled = None if labels_of(problem) is not None else numbers_of(problem, rows)
    far = None if sampled is None else _outliers(problem, sampled)
    if far is None:
        raise ValueError(_NEEDS)
    # A few outliers would hardly be among the samples: they are a stratum of their own.
    order = torch.randperm(len(far), generator=torch.Generator().manual_seed(seed))
    rows = torch.cat([rows, far[order[:most]]]).unique()
    targets, answers = numbers_of(problem, rows), answers_on(part_of(problem, rows))
    if targets is None or answers is None or answers.outputs.shape != targets.shape:
        raise ValueError(_NEEDS)
    outlying = torch.isin(rows, far)
    shares = _shares(outlying, len(far), problem.samples)
    outputs = answers.outputs
    means, output_means = shares @ targets, shares @ outputs
    variances, output_variances = shares @ (targets - means).square(), shares @ (outputs - output_means).square()
    errors, variance = shares * (outputs - targets).square().sum(1), float(variances.sum())
    return TargetAudit(
        means=tuple(means.tolist()),
        spreads=tuple(variances.sqrt().tolist()),
        output_means=tuple(output_means.tolist()),
        output_spreads=tuple(output_variances.sqrt().tolist()),
        explained=1 - float(errors.sum()) / variance if variance > 0 else math.nan,
        samples=len(rows),
        outliers=tuple(far.tolist()),
        outlier_share=float(errors[outlying].sum() / errors.sum()) if len(far) else 0.0,
        outcome=Outcome.FINISHED if len(rows) == problem.samples else Outcome.ESTIMATED,
        seed=seed,
        cost=Cost(seconds=time.perf_counter() - began, route="one forward pass", notes=problem.notes),
    )


_NEEDS = "audit_targets needs targets that are numbers, as many as the model returns for a sample."


def _shares(outlying: Tensor, outliers: int, total: int) -> Tensor:
    """What each sample stands for, where there are so many `outliers` among `total` samples."""
    seen = int(outlying.sum())
    each, other = outliers / max(1, seen), (total - outliers) / (len(outlying) - seen)
    return torch.where(outlying, each, other).double() / total


def _outliers(problem: Problem, sampled: Tensor) -> Tensor | None:
    """Numbers of all samples whose targets lie far outside the middle half of some `sampled` ones (n, k), the farthest first.

    There are none where that half has no width; None where other samples have no k numbers as targets.
    """
    middle, spread = middle_and_width(sampled)
    distances: list[Tensor] = []
    for batch in problem.data:
        numbers = numbers_in(batch, problem.loss_function)
        if numbers is None or numbers.shape[1] != len(middle):
            return None
        parts = (part.double() for part in numbers.split(max(1, NUMBERS // len(middle))))
        distances += [torch.where(spread > 0, (part - middle).abs() / spread, 0.0).amax(1) for part in parts]
    distance = torch.cat(distances)
    farthest = distance.argsort(descending=True)[: int((distance > OUTLYING).sum())]
    return farthest if len(farthest) <= AT_MOST * len(distance) else farthest[:0]


@dataclass(frozen=True)
class StandardisedTargets:
    """A loss of outputs and targets after both were shifted and scaled, column by column."""

    loss: Any
    shift: Tensor
    scale: Tensor

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        value: Tensor = self.loss(self._standard(output), self._standard(target))
        return value

    def rescale(self, module: nn.Module, args: Any, output: Any) -> Any:
        """A hook behind the model: what it returns for standardised targets, on the scale of the true ones."""
        if not isinstance(output, Tensor):
            return output
        shift, scale = self._for(output)
        return output * scale + shift

    def _standard(self, values: Tensor) -> Tensor:
        shift, scale = self._for(values)
        return (values - shift) / scale

    def _for(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Shift and scale in the shape of one sample."""
        shape = values.shape[1:]
        return self.shift.to(values).reshape(shape), self.scale.to(values).reshape(shape)


def standardised_targets(found: TargetAudit, loss: Any) -> StandardisedTargets:
    """The loss on standardised targets, and the hook that goes with it."""
    scale = torch.tensor(found.spreads, dtype=torch.float64)
    return StandardisedTargets(loss, torch.tensor(found.means, dtype=torch.float64), torch.where(scale > 0, scale, 1.0))
