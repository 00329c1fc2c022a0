"""The course of a loss: its level and trend with their errors, the best so far, and whether it learns. Numbers only."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from theodolite.results import Row, fields_of

State = Literal["starting", "learning", "flat", "lost", "not learning", "diverged", "not finite"]

#: Losses kept for level and trend, and how many of the last ones make the level.
RECENT, LEVEL = 400, 100
#: Losses at the beginning that say where a run began.
BEGINNING = 10
#: Parts of a window whose means give trend and errors: neighbouring losses are not independent, means of parts nearly are.
PARTS = 10
#: Steps over which losses are averaged before they can be the best.
SMOOTHED = 25
#: A difference is seen where it is so many times its error.
SIGMAS = 3.0
#: Below a guess by at least this share of it: something is known about the inputs.
BELOW = 0.02
#: Above a guess, and above the beginning, so many times: what was there is gone.
DIVERGED = 2.0
#: Share of what was once gained that must be gone again before progress counts as lost.
LOST = 0.4
#: Steps at a rate near the highest one before a flat loss counts as one that does not learn. Without another sign of trouble a
#: plateau at the beginning is common: it takes so many more (`progress.causes`).
PATIENCE = 100


def mean_with_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error, from the means of parts; the error of a few values is infinite.

    >>> mean_with_error([1.0, 3.0] * 10)
    (2.0, 0.0)
    """
    mean = fmean(values) if values else math.nan
    means = _part_means(values)
    if len(means) < 4:
        return mean, math.inf
    middle = fmean(means)
    return mean, math.sqrt(sum((m - middle) ** 2 for m in means) / (len(means) * (len(means) - 1)))


def trend(values: Sequence[float]) -> tuple[float, float]:
    """Change per step and its standard error, by least squares through the means of parts; without an error for a few values.

    >>> slope, error = trend([3.0 - 0.5 * step for step in range(40)])
    >>> round(slope, 6), round(error, 6)
    (-0.5, 0.0)
    """
    means = _part_means(values)
    if len(means) < 4:
        return 0.0, math.inf
    places = [i - (len(means) - 1) / 2 for i in range(len(means))]
    spread = sum(x * x for x in places)
    middle = fmean(means)
    slope = sum(x * (m - middle) for x, m in zip(places, means, strict=True)) / spread
    rest = sum((m - middle - slope * x) ** 2 for x, m in zip(places, means, strict=True)) / (len(means) - 2)
    width = len(values) // len(means)
    return slope / width, math.sqrt(rest / spread) / width


def _part_means(values: Sequence[float]) -> list[float]:
    """The means of up to `PARTS` equal parts of at least two values, the oldest odd ones left out."""
    parts = min(PARTS, len(values) // 2)
    if parts < 4:
        return []
    width = len(values) // parts
    kept = values[len(values) - parts * width :]
    return [fmean(kept[i * width : (i + 1) * width]) for i in range(parts)]


@dataclass(frozen=True, kw_only=True)
class LossSummary:
    """A loss at one moment.

    `level` is its mean over the last steps and `slope` its change per step over the last `window`, both with errors; `best` is
    the lowest level so far, at `best_step`, `since` steps ago, and `highest` the highest loss of the window; `began` is where it
    began and `trivial` what a guess gets (None where that is not known). `possible_gain` is the share of it that the last batches
    may have gained, as far as their noise allows (None where it was not compared batch by batch). `state` is a word for all this.
    """

    step: int
    state: State
    steps: int
    level: float
    error: float
    slope: float
    slope_error: float
    window: int
    best: float
    best_step: int
    since: int
    began: float
    highest: float = math.nan
    trivial: float | None = None
    trivial_name: str = ""
    possible_gain: float | None = None

    @property
    def falls(self) -> bool:
        return self.slope < -SIGMAS * self.slope_error

    @property
    def reference(self) -> float:
        """What a run that knows nothing would have: the loss of a guess, or where this one began."""
        return self.began if self.trivial is None else self.trivial

    def row(self) -> Row:
        return fields_of(self, "step state level error slope slope_error best best_step since trivial")


class LossCourse:
    """Follows a loss step by step; what is asked for seldom is computed when asked for."""

    def __init__(self) -> None:
        self.steps = 0
        self.working = 0  # steps at a rate near the highest so far
        self.recent: deque[float] = deque(maxlen=RECENT)
        self.finite = True
        self.best, self.best_step, self._best_index = math.inf, -1, 0
        self._first: list[float] = []
        self._smooth = 0.0
        self._highest_rate = 0.0
        self._last_step = -1

    def update(self, step: int, loss: float, rate: float) -> None:
        """One more step."""
        self.steps += 1
        self._last_step = step
        self.finite = math.isfinite(loss)
        if not self.finite:
            return
        self.recent.append(loss)
        if len(self._first) < BEGINNING:
            self._first.append(loss)
        if not rate <= self._highest_rate:  # rates that are no numbers count as working ones
            self._highest_rate = rate
        self.working += not rate < 0.3 * self._highest_rate
        self._smooth += (loss - self._smooth) / min(self.steps, SMOOTHED)
        if self._smooth < self.best and self.steps >= min(SMOOTHED, BEGINNING):
            self.best, self.best_step, self._best_index = self._smooth, step, self.steps

    @property
    def began(self) -> float:
        """The mean of the first losses, or the very first one where they run away from it."""
        mean = fmean(self._first) if self._first else math.nan
        return self._first[0] if self._first and mean > 2.0 * abs(self._first[0]) else mean

    def summary(
        self,
        trivial: float | None = None,
        trivial_name: str = "",
        *,
        ended: bool = False,
        possible_gain: float | None = None,
    ) -> LossSummary:
        """How the loss stands now, against that of a guess; `ended`: the learning rate is gone, and nothing more will come."""
        last = list(self.recent)[-max(4 * PARTS, self.steps // 2) :]  # not the beginning, which bends
        level, error = mean_with_error(last[-max(20, min(LEVEL, self.steps // 5)) :])
        slope, slope_error = trend(last)
        began = self.began
        best = min(self.best, level) if last else math.nan
        found = {"level": level, "error": error, "slope": slope, "slope_error": slope_error, "best": best, "began": began}
        state = judge(
            **found, trivial=trivial, steps=self.steps, window=len(last), finite=self.finite,
            patient=ended or self.working >= PATIENCE,
        )  # fmt: skip
        return LossSummary(
            step=self._last_step,
            state=state,
            steps=self.steps,
            window=len(last),
            best_step=self.best_step,
            since=self.steps - self._best_index,
            highest=max(last, default=math.nan),
            trivial=trivial,
            trivial_name=trivial_name,
            possible_gain=possible_gain,
            **found,
        )


def judge(
    *,
    level: float,
    error: float,
    slope: float,
    slope_error: float,
    best: float,
    began: float,
    trivial: float | None,
    steps: int,
    window: int,
    finite: bool = True,
    patient: bool = True,
) -> State:
    """What the numbers of a loss say, by explicit rules.

    Below a guess by more than its error, a loss is learning where it falls and flat where it does not; lost where much of the
    best is gone again. At the level of a guess it is learning while it falls fast enough to get below soon, and not learning
    otherwise, once there was time to begin (`patient`).

    >>> numbers = {"error": 0.01, "slope_error": 1e-4, "began": 2.4, "trivial": 2.3, "steps": 500, "window": 400}
    >>> judge(level=0.4, slope=-0.001, best=0.4, **numbers), judge(level=2.3, slope=0.0, best=2.29, **numbers)
    ('learning', 'not learning')
    >>> judge(level=1.9, slope=0.0, best=0.9, **numbers), judge(level=40.0, slope=0.1, best=1.0, **numbers)
    ('lost', 'diverged')
    """
    if not finite:
        return "not finite"
    if steps < 2 * BEGINNING or not math.isfinite(error):
        return "starting"
    reference = began if trivial is None else trivial
    falls = slope < -SIGMAS * slope_error
    highest = max(reference, began)
    if level - highest > max(SIGMAS * error, (DIVERGED - 1.0) * abs(highest)) and not falls:
        return "diverged"
    if reference - level > max(SIGMAS * error, BELOW * abs(reference)):
        if level - best > max(SIGMAS * error, LOST * (reference - best)) and not falls:
            return "lost"
        return "learning" if falls else "flat"
    ahead = (
        10.0 if level < began - SIGMAS * error else 1.0
    )  # a loss that only comes down from where it was thrown has to be quick
    gaining = falls and level + ahead * window * slope < (1.0 - BELOW) * reference
    if gaining or not patient:
        return "learning" if falls else "starting"
    return "not learning"
