"""Of several changes against one fault, the one that a short training of a copy likes best."""

from __future__ import annotations

import math
from collections.abc import Sequence

from theodolite.instruments.base import SurveyContext
from theodolite.instruments.subset import subset
from theodolite.measures.trials import Remedy, try_changes

#: Steps and seconds of the runs that choose, and samples on which they are compared.
STEPS, SECONDS, SCORED = 60, 10.0, 500


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
