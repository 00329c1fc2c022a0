"""Changes of a training that several instruments try: without some samples, or the best of several."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from theodolite.instruments.base import SurveyContext
from theodolite.instruments.subset import spread, subset
from theodolite.measures.data_audit.views import part_of
from theodolite.measures.trials import Remedy, Setup, loss_of, try_changes
from theodolite.problem import Problem

#: Steps and seconds of the runs that choose, and samples on which they are compared.
STEPS, SECONDS, SCORED = 60, 10.0, 500
#: Samples that are held at most of data that is read anew each time.
HELD = 10_000


def best_remedy(context: SurveyContext, options: Sequence[Remedy]) -> Remedy:
    """The option after which the loss is lowest; the first one where nothing can be tried. Those that begin anew are as good."""
    if len(options) < 2 or context.lr is None:
        return options[0]
    seconds = SECONDS if context.allowance is None else min(SECONDS, 0.2 * context.allowance)
    runs = try_changes(
        context.problem,
        {str(place): option for place, option in enumerate(options)},
        lr=context.lr,
        optimizer=context.optimizer,
        steps=STEPS,
        batch_size=context.batch_size,
        score_on=subset(context.problem, SCORED),
        seconds=seconds,
        seed=context.seed,
    )
    ends = [row["changed"] if math.isfinite(row["changed"]) else math.inf for row in runs.trials]
    return options[ends.index(min(ends))]


def leave_out(context: SurveyContext, samples: Sequence[int] | Tensor, advice: str, judge: Problem | None = None) -> Remedy:
    """Train without these samples. Both trainings are judged by the others, unless there is a better judge."""
    kept = torch.ones(context.problem.samples, dtype=torch.bool)
    kept[torch.as_tensor(samples)] = False
    rest = torch.nonzero(kept).flatten()
    judged = part_of(context.problem, spread(rest, SCORED)) if judge is None else subset(judge, SCORED)
    trained = rest if context.problem.data.held else spread(rest, HELD)

    def change(setup: Setup) -> None:
        setup.problem = part_of(setup.problem, trained)

    return Remedy(advice, change, score=lambda model: loss_of(model, judged))
