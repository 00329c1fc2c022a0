"""Is the batch too small? Larger batches are tried beside yours, for as many steps."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from torch.optim import Optimizer

from theodolite.arguments import checked, count, finite, positive, seed
from theodolite.measures import trials
from theodolite.measures.dynamics.rate_choice import LEAST, LONGER, Bench, Pair, share_of_progress, times
from theodolite.problem import Problem
from theodolite.problem.arguments import a_problem, an_optimizer
from theodolite.results import Cost, Outcome, Result, Row

#: How much larger the other batch is, and how large at least.
LARGER, AT_LEAST = 8, 16
#: Yours is too small where it makes less than this share of the progress of the larger one.
SHARE = 0.35


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class BatchChoice(Result):
    """Batches of `own` samples beside `larger` ones, at the same rate and for as many steps.

    `too_small`: the larger ones get much further, with both orders of batches, in longer runs, and further than a lower rate
    would with yours. `start`, `own_final` and `larger_final` are losses; `restart`: of runs from new weights.
    """

    own: int
    larger: int
    too_small: bool
    start: float
    own_final: float
    larger_final: float
    steps: int
    restart: bool = False

    def rows(self) -> list[Row]:
        ends = ((self.own, self.own_final), (self.larger, self.larger_final))
        return [{"batch_size": size, "start": self.start, "final": final, "steps": self.steps} for size, final in ends]

    def sentence(self) -> str:
        ends = [f"{final:.3g}" if math.isfinite(final) else "blow up" for final in (self.own_final, self.larger_final)]
        verdict = "too small" if self.too_small else "large enough"
        return f"Batches of {self.own} are {verdict}: {self.steps} steps end at {ends[0]}, with {self.larger} at {ends[1]}."


@checked(
    problem=a_problem,
    lr=positive,
    optimizer=an_optimizer,
    batch_size=count,
    steps=count,
    score_on=a_problem,
    trivial=finite,
    seconds=positive,
    seed=seed,
)
def choose_batch_size(
    problem: Problem,
    lr: float,
    optimizer: Optimizer | None = None,
    *,
    batch_size: int | None = None,
    steps: int = 60,
    score_on: Problem | None = None,
    trivial: float | None = None,
    seconds: float | None = None,
    seed: int = 0,
) -> BatchChoice:
    """Whether batches eight times as large get much further in as many steps.

    They always get a little further. Yours are called too small only where they make less than a third of that progress, and a
    third of the rate does not mend it. Arguments as for `choose_rate`.

    >>> import torch
    >>> x = torch.randn(256, 1, generator=torch.Generator().manual_seed(0))
    >>> problem = Problem(torch.nn.Linear(1, 1, bias=False), torch.nn.MSELoss(), (x, x))
    >>> choose_batch_size(problem, 0.01, batch_size=16).too_small
    False
    """
    began = time.perf_counter()
    own = trials.usual_batch_size(problem) if batch_size is None else batch_size
    larger = max(own, min(max(LARGER * own, AT_LEAST), problem.samples // 2))
    whole = trials.in_one_batch(problem)
    mine, theirs = (Bench(whole, optimizer, width, steps, score_on or problem, seed) for width in (own, larger))
    if seconds is not None:
        theirs.fit(seconds / 2, lr)
        mine.steps = theirs.steps
    found = [_compared(mine, theirs, lr, trivial, fresh=fresh) for fresh in ([False, True] if mine.can_restart else [False])]
    told = next((f for f in found if f.too_small), found[0])
    return BatchChoice(
        own=own,
        larger=larger,
        too_small=told.too_small,
        start=told.start,
        own_final=told.own,
        larger_final=told.larger,
        steps=mine.steps,
        restart=told.fresh,
        outcome=Outcome.FINISHED,
        seed=seed,
        cost=Cost(time.perf_counter() - began, "short trainings of copies", 0, problem.notes),
    )


@dataclass(frozen=True)
class _Comparison:
    too_small: bool
    start: float
    own: float
    larger: float
    fresh: bool


def _compared(mine: Bench, theirs: Bench, lr: float, trivial: float | None, *, fresh: bool) -> _Comparison:
    start = mine.fresh_start if fresh else mine.start
    here = mine.pair(lr)
    one = theirs.run(lr, fresh=fresh)
    margin = LEAST * max(abs(start), abs(trivial or 0.0))
    if not one.final < here.least - margin:  # nor would new weights get further than yours
        return _Comparison(False, start, here.final, one.final, fresh)
    own, larger = mine.pair(lr, fresh=fresh), theirs.pair(lr, fresh=fresh)
    gentle = mine.run(times(lr, 1 / 3), fresh=fresh)
    small = _much_further(start, own, larger, margin) and larger.most < gentle.final - margin
    if small:
        long = [bench.run(lr, fresh=fresh, longer=LONGER) for bench in (mine, theirs)]
        small = _much_further(start, Pair(long[0], long[0]), Pair(long[1], long[1]), margin)
    return _Comparison(small, start, own.final, larger.final, fresh)


def _much_further(start: float, own: Pair, larger: Pair, margin: float) -> bool:
    if not larger.most < own.least - margin or not larger.final < start - margin:
        return False
    return not math.isfinite(own.final) or share_of_progress(start, own.final, larger.final) < SHARE
