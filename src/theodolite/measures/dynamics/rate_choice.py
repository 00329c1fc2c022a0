"""One learning rate: yours, a lower or a higher one, decided by short trainings of copies.

Every rate is tried from the same weights on the same batches. A run holds its rate for three quarters of its steps and then
lets it fall linearly to zero, because a lower rate always ends lower by its lesser noise alone: after such a cool-down the rates
are compared by what they have learned. The rules are conservative: yours is kept unless another is clearly better.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch.optim import Optimizer

from theodolite.arguments import a_number, checked, count, each, finite, positive, seed
from theodolite.measures import trials
from theodolite.measures.dynamics.optimizers import plain_optimizer
from theodolite.problem import Problem
from theodolite.problem.arguments import a_problem
from theodolite.problem.optimizers import as_optimizer
from theodolite.results import Cost, Outcome, Result, Row

Verdict = Literal["keep", "too high", "too low", "needs warm-up", "converged", "unknown"]

#: Rates that are tried, in units of yours; those in the second place only where nothing before them works, or all of it helps.
LOWER, MUCH_LOWER, HIGHER, MUCH_HIGHER = (1 / 3, 1 / 10), (1 / 100, 1 / 1000), (3.0, 10.0), (100.0, 1000.0)
#: The higher rate that is tried where the near one helps and the far one is too much.
BETWEEN = 6.0
#: Share of the steps over which the rate falls to zero, and over which it rises where warm-up is tried.
COOLDOWN, WARMUP = 0.25, 0.5
#: A loss is clearly lower by this share of the size of the loss.
LEAST = 0.02
#: Yours is too high where its run makes less than this share of the progress of a rate a third, or a fifth and less, of it;
#: and too low where it makes less than the second of that of a rate far above it.
SHARE_NEAR, SHARE_FAR = 0.35, 0.7
FAR = 5.0
#: A loss that no rate lowers by this share of what would count does not move.
FLAT = 0.25
#: An alarm is confirmed by runs so many times longer; of higher rates it takes more to see that they last.
LONGER, STILL_LONGER = 3, 5
#: A loss below that of knowing nothing by so many times what counts is far along, and hardly moves where yours lowers it by less
#: than the second. Then it takes longer runs to see that a rate is too high.
FAR_ALONG, HARDLY_MOVES = 5.0, 2.0
#: A loss below this share of that of knowing nothing is about as low as it gets.
LOW = 0.05
#: Where yours has brought the loss below this share of that of new weights, it is not asked what new weights would do.
LEARNED = 0.25
#: What all runs take at the most, in runs of the usual length.
MOST = 30
#: The loss stands still where no rate moves it and it is above this share of that of knowing nothing.
STANDING = 0.5
#: Starting anew is advised where it gets further than going on by so many times what counts.
RESTART = 5
#: A rate works where it holds the loss within this share of the size of the loss above its start.
HELD = 0.25
#: Weights whose loss is so many times that of new ones are lost.
LOST = 3.0


#: Where a run begins.
HERE, NEW = "here", "new weights"


@dataclass(frozen=True)
class Run:
    """One training: the loss when the rate begins to fall (`held`) and at the end, infinite where it blew up."""

    rate: float
    held: float
    final: float
    steps: int
    warm: bool = False
    fresh: bool = False
    seed: int = 0

    def row(self, start: float) -> Row:
        begin = NEW if self.fresh else HERE
        ends = {"start": start, "held": self.held, "final": self.final, "diverged": not math.isfinite(self.final)}
        return {"rate": self.rate, "steps": self.steps, "from": begin, "warm-up": self.warm, "order": self.seed, **ends}


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class RateChoice(Result):
    """The one rate to train with, and why.

    `verdict` is of the rate that was asked about, `own`: "keep"; "too high" or "too low": `recommended` is clearly better;
    "needs warm-up": it fails at once and works when it rises over the first steps; "converged": hardly anything is left to learn,
    and no rate changes that; "unknown": there was no rate to ask about, or none that was tried moves the loss. `recommended` is
    the rate to set, `best` the one that ended lowest and `gain` how much lower the loss ended than with yours (infinite where
    yours blew up), after `steps` steps. `restart`: that was seen from new weights, because the present ones do not recover;
    `warmup` over how many steps a rate has to rise that needs it. `runs` has a row for each
    training: rate, steps, loss at the `start`, when the rate began to fall (`held`) and at the end (`final`). `margin` is what
    the loss had to differ by to count.
    """

    own: float | None
    best: float | None
    verdict: Verdict
    recommended: float | None
    gain: float
    margin: float
    start: float
    own_final: float
    best_final: float
    steps: int
    runs: tuple[Row, ...]
    batch_size: int
    optimizer: str
    restart: bool = False
    warmup: int = 0

    @property
    def diverged(self) -> bool:
        """Whether the training at the rate asked about blew up."""
        return self.own is not None and not math.isfinite(self.own_final)

    @property
    def own_run(self) -> tuple[float, int] | None:
        """Where the loss ended at your rate from the present weights, and after how many steps; of several lengths the lowest."""
        mine = [row for row in self.runs if row["rate"] == self.own and row["from"] == HERE and not row["warm-up"]]
        lengths = {steps: [row["final"] for row in mine if row["steps"] == steps] for steps in {row["steps"] for row in mine}}
        return min(((sum(ends) / len(ends), steps) for steps, ends in lengths.items()), default=None)

    @property
    def seen_late(self) -> bool:
        """Whether it takes the longest runs to see that yours is too high: shorter trials would not show it."""
        usual = min((row["steps"] for row in self.runs), default=self.steps)
        return self.verdict == "too high" and not self.restart and self.steps >= STILL_LONGER * usual

    @property
    def compared_longer(self) -> bool:
        """Whether yours was compared with a lower rate in longer runs too."""
        long = [row["rate"] for row in self.runs if row["steps"] >= LONGER * self.steps and row["from"] == HERE]
        return self.own in long and any(rate < self.own for rate in long)

    @checked(final=a_number)
    def falls_to(self, final: float) -> bool:
        """Whether a run that ended there lowered the loss by more than next to nothing of it, however much would count."""
        return final < self.start - LEAST * abs(self.start)

    def rows(self) -> list[Row]:
        return [dict(row) for row in self.runs]

    def sentence(self) -> str:
        if self.own is None:
            lowest = "No rate that was tried lowers the loss" if self.recommended is None else self._lowest()
            return f"{lowest}."
        texts = {
            "keep": f"Keep the learning rate {self.own:.3g}: no other that was tried is clearly better",
            "converged": f"Hardly anything is left to learn: the loss is {self.start:.3g}, and no rate tried changes that",
            "unknown": "No rate that was tried moves the loss: it is not the learning rate that is at fault",
            "needs warm-up": f"The learning rate {self.own:.3g} fails at once and works after a warm-up",
        }
        if self.verdict in texts:
            return f"{texts[self.verdict]}."
        new = " from new weights" if self.restart else ""
        mine = "blows up" if self.diverged else f"ends at {self.own_final:.3g}"
        return f"The learning rate {self.own:.3g} is {self.verdict}: it {mine}. {self._lowest()}{new}."

    def _lowest(self) -> str:
        return f"{self.steps} steps at {self.recommended:.2g} bring the loss from {self.start:.3g} to {self.best_final:.3g}"


def _rates(name: str, value: Any) -> list[float]:
    """Learning rates, or none."""
    return [] if isinstance(value, list | tuple) and not value else each(positive)(name, value)


@checked(
    problem=a_problem,
    lr=positive,
    others=_rates,
    batch_size=count,
    steps=count,
    score_on=a_problem,
    trivial=finite,
    seconds=positive,
    seed=seed,
)
def choose_rate(
    problem: Problem,
    lr: float | None = None,
    optimizer: Optimizer | str | None = None,
    *,
    others: Sequence[float] = (),
    batch_size: int | None = None,
    steps: int = 60,
    score_on: Problem | None = None,
    trivial: float | None = None,
    seconds: float | None = None,
    seed: int = 0,
) -> RateChoice:
    """Whether to keep a learning rate, and which one to take instead, from short trainings of copies at several rates.

    Yours is tried with two orders of batches, whose difference is the noise, then a third and a tenth of it, three and ten times
    it, and `others`; farther ones only where these leave the question open. A higher rate must be ahead before and after the
    cool-down, and in runs three times longer. Where the weights no longer recover from a rate, lower ones are tried from new
    weights beside it, if every layer can draw new ones.

    Args:
        lr, optimizer: what you train with; the optimizer is copied with its state. Without `lr` the best of `others` is chosen.
        others: further rates to try, such as the suggestion of `lr_range_test` or half the critical rate.
        batch_size: of random batches; None is that of the problem's own, or 32 where the data is one batch.
        score_on: the problem by whose loss runs are compared, by default the one that trains, in eval mode.
        trivial: the loss of a predictor that has learned nothing, where it is known.
        seconds: about as long as it all may take; runs are shorter then.

    >>> import torch
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> _ = torch.nn.init.zeros_(model.weight)
    >>> x = torch.randn(64, 1, generator=torch.Generator().manual_seed(0))
    >>> problem = Problem(model, torch.nn.MSELoss(), (x, x))
    >>> choose_rate(problem, 1e-4).verdict, choose_rate(problem, 10.0).verdict
    ('too low', 'too high')
    """
    began = time.perf_counter()
    optimizer = as_optimizer(plain_optimizer(optimizer), problem.parameters, lr=lr)
    width = trials.usual_batch_size(problem) if batch_size is None else batch_size
    bench = Bench(problem, optimizer, width, steps, score_on or problem, seed)
    if seconds is not None:
        bench.fit(seconds, lr or next(iter(others), 1e-6))
    found = _Decision(bench, lr, others, trivial).made()
    return replace(found, seed=seed, cost=Cost(time.perf_counter() - began, "short trainings of copies", 0, problem.notes))


@dataclass(frozen=True)
class Pair:
    """The same training with two orders of batches."""

    one: Run
    two: Run

    @property
    def held(self) -> float:
        return 0.5 * (self.one.held + self.two.held)

    @property
    def final(self) -> float:
        return 0.5 * (self.one.final + self.two.final)

    @property
    def least(self) -> float:
        return min(self.one.final, self.two.final)

    @property
    def most(self) -> float:
        return max(self.one.final, self.two.final)


class Bench:
    """Where runs from the same weights are made; each is made once. `pair` is one training with two orders of batches."""

    def __init__(
        self, problem: Problem, optimizer: Optimizer | None, batch_size: int, steps: int, score_on: Problem, seed: int
    ) -> None:
        self.problem, self.optimizer, self.batch_size = trials.in_one_batch(problem), optimizer, batch_size
        self.steps = max(trials.FEWEST, steps)
        self.score_on, self.seed = score_on, seed
        self.runs: dict[tuple[float, bool, bool, int, int], Run] = {}
        self.start = trials.loss_of(problem.model, score_on)
        self.can_restart = not trials.cannot_restart(problem.model)
        self._fresh_start: float | None = None
        self.until, self.spent, self.trained = math.inf, 0.0, 0

    @property
    def fresh_start(self) -> float:
        """The loss of new weights; not a number where there can be none."""
        if not self.can_restart:
            return math.nan
        if self._fresh_start is None:
            setup = trials.copied_setup(self.problem, 1.0, self.optimizer, self.batch_size, fresh=True, seed=self.seed)
            self._fresh_start = trials.loss_of(setup.model, self.score_on)
        return self._fresh_start

    def fit(self, seconds: float, lr: float) -> None:
        """Take as many steps as all runs may have that could become necessary."""
        setup = trials.copied_setup(self.problem, lr, self.optimizer, self.batch_size)
        began = time.perf_counter()
        trials.run_steps(setup, 3, seed=self.seed)
        self.steps = max(trials.FEWEST, min(self.steps, int(3 * seconds / MOST / (time.perf_counter() - began))))
        self.until = began + seconds

    def affords(self, runs: int) -> bool:
        """Whether there is time for so many runs of the usual length, as long as those took that were made."""
        return time.perf_counter() + runs * self.steps * self.spent / max(1, self.trained) <= self.until

    def run(self, rate: float, *, warm: bool = False, fresh: bool = False, longer: int = 1, other: bool = False) -> Run:
        """Train a copy; `other` takes the batches in another order."""
        steps, seed = longer * self.steps, self.seed + other
        key = (rate, warm, fresh, steps, seed)
        if key not in self.runs:
            setup = trials.copied_setup(self.problem, rate, self.optimizer, self.batch_size, fresh=fresh, seed=self.seed)
            began = time.perf_counter()
            self.runs[key] = Run(rate, *self._losses(setup, steps, warm, seed), steps, warm, fresh, int(other))
            self.spent, self.trained = self.spent + time.perf_counter() - began, self.trained + steps
        return self.runs[key]

    def pair(self, rate: float, *, fresh: bool = False) -> Pair:
        return Pair(self.run(rate, fresh=fresh), self.run(rate, fresh=fresh, other=True))

    def _losses(self, setup: trials.Setup, steps: int, warm: bool, seed: int) -> tuple[float, float]:
        cooldown = max(1, int(COOLDOWN * steps))
        setup.warmup = int(WARMUP * self.steps) if warm else 0
        losses = trials.run_steps(setup, steps - cooldown, seed=seed)
        held = trials.loss_of(setup.model, self.score_on) if math.isfinite(losses[-1]) else math.inf
        if not math.isfinite(held):
            return math.inf, math.inf
        setup.warmup, setup.cooldown = 0, cooldown
        losses = trials.run_steps(setup, cooldown, seed=seed + 10_000)
        return held, trials.loss_of(setup.model, self.score_on) if math.isfinite(losses[-1]) else math.inf


class _Decision:
    """The rules, in the order in which they are asked."""

    def __init__(self, bench: Bench, own: float | None, others: Sequence[float], trivial: float | None) -> None:
        self.bench, self.rate, self.others, self.trivial = bench, own, others, trivial
        self.start = bench.start

    def made(self) -> RateChoice:
        if self.rate is None:
            return self._without_a_rate() if math.isfinite(self.start) else self._result("unknown", None)
        self.own = self.bench.pair(self.rate)
        if self._is_lost():
            return self._too_high_from_new_weights(self.rate) or self._result("unknown", None)
        self.lower, self.higher = self._below(self.rate), self._above(self.rate)
        found = self._too_high(self.rate) or self._too_high_from_new_weights(self.rate) or self._too_low(self.rate)
        return found or self._nothing_to_change(self.rate)

    # What counts

    @property
    def reference(self) -> float | None:
        """The loss of knowing nothing, where it can be had."""
        if self.trivial is not None:
            return self.trivial
        return self.bench.fresh_start if self.bench.can_restart else None

    @property
    def margin(self) -> float:
        """By what a loss must be lower to count."""
        start = abs(self.start) if math.isfinite(self.start) and not self._is_lost() else 0.0
        return LEAST * max(start, abs(self.reference or 0.0), 1e-30)

    def _is_lost(self) -> bool:
        known = [loss for loss in (self.trivial, self.bench.fresh_start) if loss is not None and loss > 0]
        return not math.isfinite(self.start) or (bool(known) and self.start > LOST * max(known))

    def _is_low(self) -> bool:
        return self.reference is not None and self.start <= LOW * self.reference

    def _works(self, run: Run, start: float) -> bool:
        """Whether a run did not need its cool-down to come back from far above its start."""
        return math.isfinite(run.final) and run.held <= start + HELD / LEAST * self.margin

    # What is tried

    def _below(self, own: float) -> list[Run]:
        """Lower rates, as long as they are not clearly worse; far lower ones where none of these works."""
        found: list[Run] = []
        best = min((run.final for run in (self.own.one, self.own.two) if self._works(run, self.start)), default=math.inf)
        for factor in (*LOWER, *MUCH_LOWER):
            if factor in MUCH_LOWER and math.isfinite(best):
                break
            found.append(self.bench.run(times(own, factor)))
            if found[-1].final > best + self.margin:
                break
            best = min(best, found[-1].final) if self._works(found[-1], self.start) else best
        return found + self._others(own, found, lower=True)

    def _above(self, own: float) -> list[Run]:
        """Higher rates, as long as they are not clearly worse; far higher ones as long as each helps."""
        found: list[Run] = []
        best = self.own.final
        for factor in (*HIGHER, *MUCH_HIGHER):
            if not math.isfinite(best):
                break
            found.append(self.bench.run(times(own, factor)))
            standing = best > self.start - self.margin
            if best - found[-1].final < (-self.margin if standing or factor == HIGHER[0] else self.margin):
                break
            best = min(best, found[-1].final)
        if len(found) == len(HIGHER) and found[0].final < self.own.least - self.margin:
            found.append(self.bench.run(times(own, BETWEEN)))
        return found + self._others(own, found, lower=False)

    def _others(self, own: float, tried: Sequence[Run], *, lower: bool) -> list[Run]:
        rates = [own, *(run.rate for run in tried)]
        wanted = [rate for rate in self.others if (rate < own) == lower and all(abs(math.log(rate / r)) > 0.6 for r in rates)]
        return [self.bench.run(rate) for rate in wanted]

    # Verdicts

    def _too_high(self, own: float) -> RateChoice | None:
        """A lower rate is clearly better, and a warm-up does not mend it."""
        bench = self.bench
        found = self._better_below(own, self.lower)
        if found is None:
            return None
        mine, chosen = found
        if bench.run(own, warm=True).final <= min(run.final for run in self.lower) + self.margin:
            warm = bench.run(own, warm=True, longer=LONGER)
            if warm.final <= chosen.final + self.margin and warm.held <= chosen.held + self.margin:
                return self._result("needs warm-up", own, mine, warm)
        if bench.can_restart:
            new = bench.run(chosen.rate, fresh=True, longer=LONGER)
            if new.final < chosen.final - RESTART * self.margin:
                mine, chosen = bench.run(own, fresh=True, longer=LONGER), new
        return self._result("too high", chosen.rate, mine, chosen)

    def _too_high_from_new_weights(self, own: float) -> RateChoice | None:
        """New weights at a lower rate get further than yours are now, and new weights at yours do not, also with a warm-up."""
        bench = self.bench
        if not bench.can_restart or self._is_low() or self.own.least < LEARNED * (self.reference or 0.0):
            return None
        tried = [bench.run(times(own, factor), fresh=True) for factor in LOWER]
        if self._is_lost() and not math.isfinite(min(run.final for run in tried)):
            tried += [bench.run(times(own, factor), fresh=True) for factor in MUCH_LOWER]
        if not min(run.final for run in tried) < self.own.least - self.margin:
            return None
        found = self._better_below(own, tried, fresh=True) or self._left_behind(own, tried)
        return None if found is None else self._result("too high", found[1].rate, *found)

    def _left_behind(self, own: float, tried: Sequence[Run]) -> tuple[Run, Run] | None:
        """All your training so far is far behind a few steps from new weights at a lower rate; at yours, more of them are too.

        New weights bear a rate for some time that ruins them later on.
        """
        bench, start, best = self.bench, self.bench.fresh_start, min(tried, key=lambda run: run.final)
        if best.final >= start - self.margin or share_of_progress(start, self.own.least, best.final) >= SHARE_NEAR:
            return None
        later, chosen = (bench.run(rate, fresh=True, longer=LONGER) for rate in (own, best.rate))
        behind = chosen.final < min(start, later.final) - self.margin
        return (later, chosen) if behind and share_of_progress(start, later.final, chosen.final) < SHARE_FAR else None

    def _better_below(self, own: float, lower: Sequence[Run], *, fresh: bool = False) -> tuple[Run, Run] | None:
        """Longer runs at your rate and at a lower one that is clearly better: in them and in short ones, both orders.

        Of those that are as good as the best the lowest rate is taken. In longer runs a catapult is over.
        """
        bench, start = self.bench, self.bench.fresh_start if fresh else self.start
        mine = bench.pair(own, fresh=fresh)
        better = [run for run in lower if self._worse(own, mine, run, start)]
        better = [run for run in better if self._worse(own, mine, bench.run(run.rate, fresh=fresh, other=True), start)]
        if not better:
            return None
        later = mine.one
        if math.isfinite(mine.final) or fresh:
            later = bench.run(own, fresh=fresh, warm=fresh, longer=LONGER)
        rates = sorted({*(run.rate for run in better), *(times(own, factor) for factor in LOWER)}, reverse=True)
        long = [bench.run(rate, fresh=fresh, longer=LONGER) for rate in rates]
        while not any(self._works(run, start) for run in long) and long[-1].rate > own * MUCH_LOWER[-1]:
            long.append(bench.run(times(long[-1].rate, 0.1), fresh=fresh, longer=LONGER))
        long = [run for run in long if self._works(run, start)]
        if not any(self._worse(own, Pair(later, later), run, start) for run in long):
            return None
        lowest = min(long, key=lambda run: run.final)
        alike = [run for run in long if run.final <= lowest.final + self.margin and run.rate >= lowest.rate / FAR]
        return later, min(alike, key=lambda run: run.rate)

    def _worse(self, own: float, mine: Pair, lower: Run, start: float) -> bool:
        """Whether the lower rate is clearly better than yours, and gets so much further that yours is too high."""
        if not self._works(lower, start):
            return False
        if not self._works(mine.one, start) and not self._works(mine.two, start):
            return True  # wherever its cool-down brought it: at that rate the loss rises
        if not mine.least - lower.final > self.margin:
            return False
        if not math.isfinite(mine.final) or start - lower.final <= self.margin:
            return mine.final > start + self.margin
        return share_of_progress(start, mine.final, lower.final) < (SHARE_FAR if lower.rate * FAR <= own else SHARE_NEAR)

    def _too_low(self, own: float) -> RateChoice | None:
        """A rate far above yours is ahead of it and of all between, before and after the cool-down, in longer runs.

        In short ones it must be ahead too, unless the loss stands still at all rates: plateaus take time to leave.
        """
        ahead = [r for r in self.higher if r.final < self.own.least - self.margin and r.held < self.own.held]
        if self._is_low() or not math.isfinite(self.own.final):
            return None
        if self._stands_still():
            ahead = [r for r in self.higher if self._works(r, self.start) and r.final <= self.own.least + self.margin]
        elif any(r.rate >= FAR * own for r in ahead):
            best = min(ahead, key=lambda r: r.final)
            ahead = [best, *sorted((r for r in ahead if r.rate < best.rate), key=lambda r: -r.rate)[:1]]
        else:
            return None
        mine = self.bench.run(own, longer=STILL_LONGER)
        long = [self.bench.run(r.rate, longer=STILL_LONGER) for r in ahead]
        long = [r for r in long if r.final < mine.final - self.margin and r.held < mine.held]
        if not long:
            return None
        lowest = min(long, key=lambda r: r.final)
        if lowest.final >= self.start or share_of_progress(self.start, mine.final, lowest.final) >= SHARE_FAR:
            return None  # yours gets there too
        lead = self.margin if lowest.rate < HIGHER[-1] * own else 0.5 * self.margin
        chosen = min((r for r in long if r.final <= lowest.final + lead), key=lambda r: r.rate)
        return self._result("too low", chosen.rate, mine, chosen) if chosen.rate >= FAR * own else None

    def _stands_still(self) -> bool:
        """Whether no rate moves the loss, and little has been learned."""
        moved = min(self.own.final, *(run.final for run in (*self.lower, *self.higher))) < self.start - self.margin
        return not moved and (self.reference is None or self.start > STANDING * self.reference)

    def _nothing_to_change(self, own: float) -> RateChoice:
        if self._is_low():
            return self._result("converged", own)
        if not math.isfinite(self.own.final):
            return self._result("unknown", None)  # it blows up, and no rate was found that does not
        gain = self.start - min(self.own.final, *(run.final for run in (*self.lower, *self.higher)))
        if gain > FLAT * self.margin:
            return self._too_high_later(own) or self._result("keep", own)
        return self._result("converged" if self._is_far_along() else "unknown", own)

    def _is_far_along(self) -> bool:
        return self.reference is not None and self.start < self.reference - FAR_ALONG * self.margin

    def _too_high_later(self, own: float) -> RateChoice | None:
        """Far along, a rate that is too high shows in longer runs only: in short ones a cool-down makes up for it."""
        bench, moves = self.bench, self.start - self.own.final > HARDLY_MOVES * self.margin
        if moves or not self._is_far_along() or not bench.affords((2 + len(LOWER)) * STILL_LONGER):
            return None
        mine = bench.run(own, longer=STILL_LONGER)
        for factor in LOWER:
            lower = bench.run(times(own, factor), longer=STILL_LONGER)
            helps = not mine.final - lower.final <= trials.BETTER * abs(mine.final)
            if helps and self._worse(own, Pair(mine, mine), lower, self.start):
                both = Pair(mine, bench.run(own, longer=STILL_LONGER, other=True))
                return self._result("too high", lower.rate, mine, lower) if self._worse(own, both, lower, self.start) else None
        return None

    def _without_a_rate(self) -> RateChoice:
        """The best of the others, and of rates around the first of them."""
        around = [times(rate, factor) for rate in self.others[:1] for factor in (1.0, 1 / 3, 3.0)]
        runs = [self.bench.run(rate) for rate in (*around, *self.others[1:])]
        ended = [run for run in runs if run.final < self.start]
        if not ended:
            return self._result("unknown", None)
        lowest = min(run.final for run in ended)
        alike = [run for run in ended if run.final <= lowest + self.margin]
        chosen = min(alike, key=lambda run: run.held)  # of those that end alike the one that needs no cool-down
        return self._result("unknown", chosen.rate, None, chosen)

    def _result(
        self, verdict: Verdict, recommended: float | None, mine: Run | None = None, best: Run | None = None
    ) -> RateChoice:
        """The answer, with the two runs that it rests on; that of yours alone where there is nothing better."""
        own = mine.final if mine is not None else math.nan if self.rate is None else self.own.final
        restart = best is not None and best.fresh
        return RateChoice(
            own=self.rate,
            best=self.rate if best is None else best.rate,
            verdict=verdict,
            recommended=recommended,
            gain=own - best.final if mine is not None and best is not None else 0.0,
            margin=self.margin,
            start=self.bench.fresh_start if restart else self.start,
            own_final=own,
            best_final=own if best is None else best.final,
            steps=self.bench.steps if best is None else best.steps,
            runs=tuple(run.row(self.bench.fresh_start if run.fresh else self.start) for run in self.bench.runs.values()),
            batch_size=self.bench.batch_size,
            optimizer="gradient descent" if self.bench.optimizer is None else type(self.bench.optimizer).__name__,
            restart=restart,
            warmup=int(WARMUP * self.bench.steps) if verdict == "needs warm-up" else 0,
            outcome=Outcome.FINISHED,
        )


def times(rate: float, factor: float) -> float:
    """A multiple of a rate that can be written down.

    >>> times(0.1, 1 / 3), times(0.25, 1.0)
    (0.033, 0.25)
    """
    return float(f"{rate * factor:.2g}")


def share_of_progress(start: float, own: float, best: float) -> float:
    """How far one run came on the way of another; in the logarithm of the loss where that is positive.

    >>> share_of_progress(1.0, 0.1, 0.01), share_of_progress(1.0, 0.0, -3.0)
    (0.5, 0.25)
    >>> round(share_of_progress(1.0, 0.1, 0.0), 3)  # all the way
    0.003
    """
    if min(start, own) > 0 and best >= 0:
        start, own, best = (math.log(max(value, sys.float_info.min)) for value in (start, own, best))
    return (start - own) / (start - best)
