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
    SAMPLES,
    answers_on,
    chosen_rows,
    labels_of,
    middle_and_width,
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

    `outliers` are the samples whose targets lie far outside those of the others, the farthest first, and `outlier_share` is
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
    targets = None if labels_of(problem) is not None else numbers_of(problem, rows)
    answers = None if targets is None else answers_on(part_of(problem, rows))
    if targets is None or answers is None or answers.outputs.shape != targets.shape:
        raise ValueError("audit_targets needs targets that are numbers, as many as the model returns for a sample.")
    outputs = answers.outputs
    errors, variance = (outputs - targets).square().sum(1), float((targets - targets.mean(0)).square().sum())
    far = _outliers(targets)
    return TargetAudit(
        means=tuple(targets.mean(0).tolist()),
        spreads=tuple(_spread(targets)),
        output_means=tuple(outputs.mean(0).tolist()),
        output_spreads=tuple(_spread(outputs)),
        explained=1 - float(errors.sum()) / variance if variance > 0 else math.nan,
        samples=len(rows),
        outliers=tuple(rows[far].tolist()),
        outlier_share=float(errors[far].sum() / errors.sum()) if len(far) else 0.0,
        outcome=Outcome.FINISHED if len(rows) == problem.samples else Outcome.ESTIMATED,
        seed=seed,
        cost=Cost(seconds=time.perf_counter() - began, route="one forward pass", notes=problem.notes),
    )


def _spread(values: Tensor) -> list[float]:
    return list((values - values.mean(0)).square().mean(0).sqrt().tolist())


def _outliers(targets: Tensor) -> Tensor:
    """Places of the targets far outside the middle half of all, (n, columns); none where that half has no width."""
    middle, spread = middle_and_width(targets)
    distance = torch.where(spread > 0, (targets - middle).abs() / spread, 0.0).amax(1)
    farthest = distance.argsort(descending=True)[: int((distance > OUTLYING).sum())]
    return farthest if len(farthest) <= AT_MOST * len(targets) else farthest[:0]


@dataclass(frozen=True)
class StandardisedTargets:
    """A loss of outputs and targets after both were shifted and scaled, column by column."""

    loss: Any
    shift: Tensor
    scale: Tensor

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        shift, scale = self.shift.to(output), self.scale.to(output)
        value: Tensor = self.loss((output - shift) / scale, (target - shift) / scale)
        return value

    def rescale(self, module: nn.Module, args: Any, output: Any) -> Any:
        """A hook behind the model: what it returns for standardised targets, on the scale of the true ones."""
        return output * self.scale.to(output) + self.shift.to(output) if isinstance(output, Tensor) else output


def standardised_targets(found: TargetAudit, loss: Any) -> StandardisedTargets:
    """The loss on standardised targets, and the hook that goes with it."""
    scale = torch.tensor(found.spreads, dtype=torch.float64)
    return StandardisedTargets(loss, torch.tensor(found.means, dtype=torch.float64), torch.where(scale > 0, scale, 1.0))
