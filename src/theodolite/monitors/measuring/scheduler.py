"""What is measured when: a share of the training time pays for it, and what goes wrong never ends a training."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TypeVar

from theodolite.errors import NonFiniteError
from theodolite.measures.dynamics.spikes import MatchTable
from theodolite.monitors.measuring.curvature import CurvatureProbe, CurvatureSample
from theodolite.monitors.watching.recorder import StepStats
from theodolite.monitors.watching.watched_model import StepRecord, WatchedModel
from theodolite.problem.batches import Batch

T = TypeVar("T")

#: A gap between two steps counts as training up to this many times the usual one.
PAUSE = 5.0
#: A measurement may cost this many times what it did before.
MARGIN = 1.2
#: Seconds a whole run may spend on spikes beyond its budget: a short run still gets its diagnosis.
GRACE = 2.0
#: Steps of training that a first measurement costs, until its price is known.
FIRST_PRICE = 20.0
#: Steps that are timed before the first measurement of calm times.
TIMED = 5
#: Steps between two losses of the probe in calm times.
PROBE_LOSS_EVERY = 20


@dataclass
class TimeBudget:
    """Seconds of training, of monitoring as a whole (`used`) and of measurements (`spent`), for which the share `budget` pays.

    `budget=None` pays for everything. What is urgent may be paid in advance, up to `credit` times its price, and is then
    saved up again before the next measurement. `steps` counts those that were timed.
    """

    budget: float | None
    credit: float = 1.5
    training: float = 0.0
    used: float = 0.0
    spent: float = 0.0
    steps: int = 0
    prices: dict[str, float] = field(default_factory=dict)
    _gaps: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    _left: float | None = None
    _came: float | None = None

    def enter(self) -> None:
        """Training hands over."""
        self._came = time.perf_counter()
        if self._left is not None:
            gap = self._came - self._left
            self._gaps.append(gap)
            # A pause or a validation between two steps is no training that could pay for measurements.
            self.training += min(gap, PAUSE * median(self._gaps))
            self.steps += 1

    def leave(self) -> None:
        """Training goes on."""
        self._left = time.perf_counter()
        if self._came is not None:
            self.used += self._left - self._came

    def affords(self, what: str, *, urgent: bool = False, guess: float = 0.0) -> bool:
        """Whether a measurement of this kind is within the budget; `guess` is its price until one was paid."""
        if self.budget is None:
            return True
        price = self.prices.get(what, guess)
        return self.spent + MARGIN * price <= self._allowed + (self.credit * price if urgent else 0.0)

    def pay(self, what: str, seconds: float, *, from_budget: bool = True) -> None:
        """Note what a measurement has cost; prices follow slowly, so that one slow moment does not stop all measuring."""
        self.spent += seconds if from_budget else 0.0
        known = self.prices.get(what)
        self.prices[what] = seconds if known is None else 0.5 * (known + seconds)

    @property
    def overdrawn(self) -> float:
        """Seconds spent beyond the budget."""
        return 0.0 if self.budget is None else max(0.0, self.spent - self._allowed)

    @property
    def _allowed(self) -> float:
        """What may have been spent by now: the budget minus what every step costs, but at least half of it, for tiny models."""
        assert self.budget is not None
        whole = self.budget * self.training
        return max(0.5 * whole, whole - max(0.0, self.used - self.spent))


class MeasurementScheduler:
    """Measures watched models as far as the budget goes, and keeps the samples and what went wrong.

    Batch and probe are measured in turn in calm times (`sample`); around spikes `curvature`, `probe_loss` and `typical_loss`
    answer what the diagnosis asks.
    """

    def __init__(self, probe: CurvatureProbe, budget: TimeBudget) -> None:
        self.probe, self.budget = probe, budget
        self.samples: list[CurvatureSample] = []
        self.notes: dict[str, int] = {}
        self._turn = 0  # even: the batch is next, odd: the probe
        self._counts = [0, 0, 0, 0]  # both, only up, only exceeded, neither

    # On schedule

    def sample(self, watched: WatchedModel, record: StepRecord, *, calm: bool) -> None:
        """The measurements of calm times, as far as the budget goes; without a budget, of all times."""
        every_step, exceeded = self.budget.budget is None, None
        if not record.batches or not record.stats.finite or not (calm or every_step):
            return
        if (self._turn % 2 == 0 or every_step) and self._affords("batch"):
            found = self.curvature(watched, record.stats, on="batch", why="schedule", batches=record.batches)
            exceeded = None if found is None else found.exceeded
            self._turn += 1
        if (calm and self.budget.steps % PROBE_LOSS_EVERY == 0) or exceeded is not None:
            loss = self.probe_loss(watched)
            if calm:
                watched.probe.compare(record.stats.loss, loss)
            watched.pending = None if exceeded is None or loss is None else (exceeded, loss)
        if (self._turn % 2 == 1 or every_step) and watched.probe.data is not None and self._affords("probe"):
            self.curvature(watched, record.stats, on="probe", why="schedule", split=True, features=True)
            self._turn += 1

    def settle(self, watched: WatchedModel) -> None:
        """Did the step before, whose batch was measured, raise the loss of the probe?"""
        if watched.pending is None:
            return
        (exceeded, before), watched.pending = watched.pending, None
        after = self.probe_loss(watched)
        if after is not None:
            self._counts[(0 if exceeded else 1) if after > before else (2 if exceeded else 3)] += 1

    @property
    def match(self) -> MatchTable:
        """Exceeded critical rates against rises of the probe's loss."""
        both, only_up, only_exceeded, neither = self._counts
        return MatchTable(both=both, only_up=only_up, only_exceeded=only_exceeded, neither=neither)

    # Single measurements

    def curvature(
        self,
        watched: WatchedModel,
        stats: StepStats,
        *,
        on: str,
        why: str,
        batches: list[Batch] | None = None,
        before: bool = False,
        split: bool = False,
        urgent: bool = False,
        features: bool = False,
    ) -> CurvatureSample | None:
        """The curvature on batches or on the probe, now or `before` the last step.

        None where it failed, or where an urgent one is beyond all credit.
        """
        if urgent and not (self.budget.affords(on, urgent=True, guess=self._guess()) or self.budget.overdrawn < GRACE):
            self.note("a spike was not looked at closely: the budget was spent")
            return None

        def measure() -> CurvatureSample:
            problem = watched.probe_problem(before=before) if batches is None else watched.problem(batches, before=before)
            sample = self.probe.measure(
                problem, watched.optimizer, step=stats.step, on=on, why=why, rate=stats.rate, split=split,
                coming_step=not before, thorough=urgent or self.budget.budget is None,
            )  # fmt: skip
            if not features:
                return sample
            alignment, problem_with_it = watched.feature_alignment()
            if problem_with_it:
                self.note(problem_with_it)
            return replace(sample, agop_alignment=alignment)

        began = time.perf_counter()
        found = self._safely(watched, measure)
        self.budget.pay(on, time.perf_counter() - began)
        if found is not None:
            self.samples.append(found)
        return found

    def probe_loss(self, watched: WatchedModel, *, before: bool = False) -> float | None:
        """The loss of the probe, now or `before` the last step."""
        if watched.probe.data is None:
            return None
        began = time.perf_counter()
        loss = self._safely(watched, lambda: watched.probe_problem(before=before).loss())
        self.budget.pay("probe loss", time.perf_counter() - began, from_budget=False)
        return loss

    def typical_loss(self, watched: WatchedModel, batches: list[Batch]) -> float | None:
        """The median loss of parts of a step's batches: single hard samples do not move it."""
        return self._safely(watched, lambda: watched.typical_loss(batches)) if batches else None

    def _affords(self, what: str) -> bool:
        """Whether the budget pays for a measurement of this kind now; nobody knows before a few steps were timed."""
        return self.budget.affords(what, guess=self._guess()) and (self.budget.steps >= TIMED or self.budget.budget is None)

    def _guess(self) -> float:
        """The price of a kind that was not measured yet: that of the other one, and more, or what usual models pay."""
        known = [self.budget.prices[on] for on in ("batch", "probe") if on in self.budget.prices]
        return 1.5 * known[0] if known else FIRST_PRICE * self.budget.training / max(1, self.budget.steps)

    # What goes wrong

    def note(self, text: str) -> None:
        """Something the report should say."""
        self.notes[text] = self.notes.get(text, 0) + 1

    def all_notes(self) -> tuple[str, ...]:
        counted = [text if n == 1 else f"{text} ({n} times)" for text, n in self.notes.items()]
        return (*counted, *sorted(self.probe.notes))

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """What goes wrong in here is noted, and training goes on."""
        try:
            yield
        except NonFiniteError:
            pass  # the numbers of the step show it
        except Exception as error:
            first = str(error).splitlines()[0] if str(error) else ""
            self.note(f"a look failed ({type(error).__name__}: {first})")

    def _safely(self, watched: WatchedModel, measure: Callable[[], T]) -> T | None:
        with self.guarded(), watched.measuring():
            return measure()
        return None
