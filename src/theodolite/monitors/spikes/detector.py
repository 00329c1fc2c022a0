"""When a loss begins to spike and when it is back, one step at a time and in spite of the noise of mini-batches."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal

Phase = Literal["calm", "begins", "goes on", "is over"]
#: What a diagnosis may find out about a rise: it was noise, the beginning of a new level, a short rise without a cause (which
#: raises the bar), a spike although the loss does not show it, or a new spike within another.
Correction = Literal["noise", "new level", "short rise", "spike", "new spike"]

#: Losses of calm times from which noise is estimated, and how many of them it takes.
HISTORY, ENOUGH = 60, 8
#: The most noises above the least loss that are ever asked for.
MOST_NOISES = 10.0
#: Before the noise is known, a loss this many times the least so far is a spike.
UNKNOWN_NOISE = 1.5
#: Steps after which a loss that is not back has found a new level.
PATIENCE = 200


def step_noise(values: Sequence[float]) -> float:
    """Standard deviation of numbers around a slow trend, from the median difference of neighbours; infinite for too few.

    >>> round(step_noise([1.0, 1.1] * 4), 4)
    0.1048
    """
    gaps = [abs(b - a) for a, b in itertools.pairwise(values)]
    return 1.4826 / math.sqrt(2.0) * median(gaps) if len(gaps) >= ENOUGH - 1 else math.inf


def log_noise(values: Sequence[float]) -> float:
    """The same of their logarithms; 0 where they are not positive, or too few."""
    if not values or min(values) <= 0:
        return 0.0
    noise = step_noise([math.log(x) for x in values])
    return noise if math.isfinite(noise) else 0.0


@dataclass(frozen=True)
class LossState:
    """What a loss means at one step.

    `before` and `top` are the losses before the last spike and at its highest, `peak` the step of the latter; `start` is None
    while there is no spike. Where one begins, `excess` says how many noises the loss lies above the least one, and `noise` and
    `spread` are those of the loss and of its logarithm.
    """

    phase: Phase
    start: int | None
    peak: int
    before: float
    top: float
    excess: float = 0.0
    noise: float = 0.0
    spread: float = 0.0


@dataclass
class SpikeDetector:
    """A spike begins where the loss exceeds `rise` times the least of the last `window` losses, by more than the noise.

    Noise is the spread of calm losses from one step to the next. `noises` of it above the least loss must be exceeded, in the
    loss and in its logarithm: a smooth loss does so at once, that of small batches only by a real jump, and a loss near zero,
    where single hard samples count, only by an extraordinary one. The spike is over once the loss is back at `recovered` times
    what it was before. After `patience` steps without that the new level counts as the normal one.
    """

    rise: float = 1.2
    window: int = 20
    recovered: float = 1.05
    noises: float = 5.0
    patience: int = PATIENCE
    _calm: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    _before: float = math.nan
    _least: float = math.nan
    _excess: float = 0.0
    _start: int | None = None
    _peak: int = -1
    _top: float = -math.inf

    def update(self, step: int, loss: float) -> LossState:
        """What this loss means; one that is not finite begins a spike, or goes on with it."""
        if self._start is not None:
            phase = self._during(step, loss, self._start)
        elif self._jumps(loss):
            self._begin(step, loss)
            phase = "begins"
        else:
            self._calm.append(loss)
            phase = "calm"
        found = LossState(phase, self._start, self._peak, self._before, self._top)
        if phase != "begins":
            return found
        noise = step_noise(list(self._calm))
        noise = noise if math.isfinite(noise) else 0.0
        return replace(found, excess=self._excess, noise=noise, spread=log_noise(self._calm))

    def correct(self, correction: Correction | None, step: int, loss: float) -> None:
        """Take back or add what the diagnosis of the last state has found out about it."""
        if correction in ("noise", "new level"):
            self._start = None
            if correction == "new level":
                self._calm.clear()
            self._calm.append(loss)
        elif correction == "short rise":
            self._calm.append(self._top)
            self.noises = min(MOST_NOISES, 1.3 * self.noises)
        elif correction == "spike":
            self._begin(step, loss)
        elif correction == "new spike":
            self._start = step

    def _begin(self, step: int, loss: float) -> None:
        recent = self._recent()
        self._start, self._peak, self._top = step, step, loss
        self._before = median(recent) if recent else math.nan
        self._least = min(recent, default=math.nan)

    def _recent(self) -> list[float]:
        return list(self._calm)[-self.window :]

    def _jumps(self, loss: float) -> bool:
        if not math.isfinite(loss):
            return True
        recent = self._recent()
        if not recent:
            return False
        least = min(recent)
        if len(recent) < ENOUGH:
            self._excess = math.inf
            return loss > _raised(least, UNKNOWN_NOISE)
        if loss <= _raised(least, self.rise):
            return False
        self._excess = min(
            _ratio(loss - least, step_noise(list(self._calm))), _ratio(_log_ratio(loss, least), log_noise(self._calm))
        )
        return self._excess > self.noises

    def _during(self, step: int, loss: float, start: int) -> Phase:
        if loss > self._top or not math.isfinite(loss):
            self._peak, self._top = step, loss
        # A smooth loss must come back to where it jumped from, a noisy one to the middle of its noise.
        noise = step_noise(list(self._calm))
        level = max(_raised(self._least, self.recovered), self._least + (3.0 * noise if math.isfinite(noise) else 0.0))
        back = loss <= level or (math.isnan(self._least) and math.isfinite(loss))
        if not back and step - start < self.patience:
            return "goes on"
        if not back:
            self._calm.clear()
        self._start = None
        self._calm.append(loss)
        return "is over"


def _raised(value: float, factor: float) -> float:
    """`factor` times a positive loss; losses may be negative, and then the same share is added."""
    return value + (factor - 1.0) * abs(value)


def _ratio(rise: float, noise: float) -> float:
    return rise / noise if noise > 0 else math.inf if rise > 0 else 0.0


def _log_ratio(loss: float, least: float) -> float:
    """Logarithm of a rise; infinite where a loss is not positive, which leaves the judgement to the plain difference."""
    return math.log(loss / least) if least > 0 and loss > 0 else math.inf
