"""Changes of a training that several instruments try: without some samples, or the best of several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from theodolite.instruments.base import SurveyContext
from theodolite.instruments.subset import spread, subset
from theodolite.measures.data_audit.views import part_of
from theodolite.measures.dynamics.rate_choice import COOLDOWN, LONGER
from theodolite.measures.trials import Remedy, Setup, loss_of, try_changes
from theodolite.problem import Problem

#: Steps and seconds of the runs that choose, and samples on which they are compared.
STEPS, SECONDS, SCORED = 60, 10.0, 500
#: Samples that are held at most of data that is read anew each time.
HELD = 10_000
#: An option that changes more than another is chosen where that makes less progress by this share.
CLEARLY = 0.1
#: An option whose loss ends above that of another by this factor is not tried again.
HOPELESS = 2.0


def best_remedy(context: SurveyContext, options: Sequence[Remedy]) -> Remedy:
    """The first option that is about as good as the best of them, so the mildest stands first; it, where nothing can be tried.

    Another rate must be clearly better in longer runs too, unless the first option is hopeless.
    """
    if len(options) < 2 or context.lr is None:
        return options[0]
    start, ends = _ends(context, options, STEPS)
    first, best = options[0], options[_mildest(start, ends)]
    if best.lr is None or not ends[0] < HOPELESS * min(ends):
        return best
    rivals = [first, best]
    return rivals[_mildest(*_ends(context, rivals, LONGER * STEPS))]


def _ends(context: SurveyContext, options: Sequence[Remedy], steps: int) -> tuple[float, list[float]]:
    """The loss before (the highest, where options begin elsewhere) and those after each option.

    All let their rate fall in the end, or a lower one would always end lower by lesser noise.
    """
    assert context.lr is not None
    seconds = SECONDS if context.allowance is None else min(SECONDS, 0.2 * context.allowance)
    runs = try_changes(
        context.problem,
        {str(place): _cooled(option, int(COOLDOWN * steps)) for place, option in enumerate(options)},
        lr=context.lr,
        optimizer=context.optimizer,
        steps=steps,
        batch_size=context.batch_size,
        score_on=subset(context.problem, SCORED),
        seconds=seconds,
        seed=context.seed,
    )
    starts = [row["start"] for row in runs.trials if math.isfinite(row["start"])]
    ends = [row["changed"] if math.isfinite(row["changed"]) else math.inf for row in runs.trials]
    return max(starts, default=math.nan), ends


def _mildest(start: float, ends: Sequence[float]) -> int:
    """The first that makes about the progress of the best.

    >>> _mildest(0.4, [0.066, 0.064, 0.07]), _mildest(0.7, [0.66, 0.064, 0.06])
    (0, 1)
    >>> _mildest(2.3, [2.3, 2.1]), _mildest(1.0, [math.inf, math.inf])
    (1, 0)
    """
    lowest = min(ends)
    about = CLEARLY * (start - lowest) if math.isfinite(lowest) and start > lowest else 0.0
    return next(place for place, end in enumerate(ends) if end <= lowest + about)


def _cooled(option: Remedy, cooldown: int) -> Remedy:
    """The same with a rate that falls in the end."""
    change = option.change
    if change is None:
        return option

    def cooled(setup: Setup) -> None:
        change(setup)
        setup.cooldown = cooldown

    return replace(option, change=cooled)


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
