"""A part of the data for what would take too long on all of it."""

from __future__ import annotations

from contextlib import suppress
from functools import reduce
from typing import ClassVar

import torch
from torch import Tensor

from theodolite.errors import BatchCoupledError
from theodolite.instruments.base import InapplicableError, Instrument, SurveyContext
from theodolite.measures.kernel.problem_views import outputs_per_sample
from theodolite.problem import Batch, Problem


def subset(problem: Problem, most: int) -> Problem:
    """The problem on at most so many samples, spread evenly over its data, as one batch where shapes allow.

    Whole where samples of a batch belong together.
    """
    total = problem.samples
    if total <= most or problem.coupled:
        return problem
    keep = spread(torch.arange(total), most)
    parts: list[Batch] = []
    before = 0
    for batch in problem.data:
        mine = keep[(keep >= before) & (keep < before + batch.size)] - before
        if len(mine):
            parts.append(batch.part(mine))
        before += batch.size
    with suppress(RuntimeError):  # sequences of different lengths stay apart
        parts = [reduce(Batch.joined, parts)]
    return problem.with_batches(parts)


def spread(rows: Tensor, most: int) -> Tensor:
    """At most so many of these numbers, spread evenly.

    >>> spread(torch.arange(9), 3)
    tensor([0, 4, 8])
    """
    return rows if len(rows) <= most else rows[torch.linspace(0, len(rows) - 1, most).round().long()]


def moving_subset(problem: Problem, most: int) -> Problem:
    """The same, where training goes somewhere."""
    part = subset(problem, most)
    if not bool(part.gradient().any()):
        raise InapplicableError("the gradient is zero, so training goes nowhere")
    return part


def of_samples(part: int, total: int) -> str:
    """How a sentence names the samples that were used.

    >>> of_samples(40, 1437), of_samples(8, 8)
    ('40 of the 1437 samples', 'all 8 samples')
    """
    if part < total:
        return f"{part} of the {total} samples"
    return f"all {total} samples" if total > 1 else "the one sample"


def outputs_of(problem: Problem) -> int:
    """Outputs of a sample, from a look at one."""
    return outputs_per_sample(subset(problem, 1))


class OnSubset(Instrument):
    """An instrument that takes a part of the data, and its outputs sample by sample."""

    quantity: ClassVar[str] = "The tangent kernel"

    def applies(self, context: SurveyContext) -> str:
        try:
            context.problem.refuse_batch_coupling(self.quantity)
            self.look(context.problem)
        except (BatchCoupledError, ValueError) as error:  # the latter where weights were given batch by batch
            return str(error)
        return ""

    def look(self, problem: Problem) -> None:
        """Raise where a run could not begin."""
        subset(problem, 1)
