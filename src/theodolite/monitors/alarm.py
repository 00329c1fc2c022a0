"""When a loss begins to spike and when it is back, told one step at a time and in spite of the noise of mini-batches."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

Word = Literal["calm", "begins", "goes on", "is over"]

#: Losses of calm times from which noise is estimated, and how many of them it takes.
HISTORY, ENOUGH = 60, 8
#: The most noises above the least loss that are ever asked for.
MOST_NOISES = 10.0
#: Before the noise is known, a loss this many times the least so far is a spike.
UNKNOWN_NOISE = 1.5


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


@dataclass
class Alarm:
    """A spike begins where the loss exceeds `rise` times the least of the last `window` losses, by more than the noise.

    Noise is the spread of calm losses from one step to the next. `noises` of it above the least loss must be exceeded, in the
    loss and in its logarithm: a smooth loss does so at once, that of small batches only by a real jump, and a loss near zero,
    where single hard samples count, only by an extraordinary one; `excess` tells by how many. The spike is over once the loss
    is back at `recovered` times what it was before. After `patience` steps without that the new level counts as the normal one.
    """

    rise: float = 1.2
    window: int = 20
    recovered: float = 1.05
    noises: float = 5.0
    patience: int = 200
    calm: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    before: float = math.nan
    least: float = math.nan
    excess: float = 0.0
    start: int | None = None
    peak: int = -1
    top: float = -math.inf

    @property
    def on(self) -> bool:
        return self.start is not None

    @property
    def spread(self) -> float:
        """Noise of the logarithm of the loss."""
        return log_noise(self.calm)

    @property
    def noise(self) -> float:
        """Noise of the loss; 0 where it is not known yet."""
        found = step_noise(list(self.calm))
        return found if math.isfinite(found) else 0.0

    def update(self, step: int, loss: float) -> Word:
        """What this loss means; one that is not finite begins a spike, or goes on with it."""
        if self.on:
            return self._during(step, loss)
        if self._jumps(loss):
            self.begin(step, loss)
            return "begins"
        self.calm.append(loss)
        return "calm"

    def begin(self, step: int, loss: float) -> None:
        """Count what follows as a spike."""
        recent = self._recent()
        self.start, self.peak, self.top = step, step, loss
        self.before = median(recent) if recent else math.nan
        self.least = min(recent, default=math.nan)

    def dismiss(self, loss: float, *, new_level: bool = False) -> None:
        """It was no spike: the loss belongs to the noise, or to data of another kind, whose level is a new one."""
        self.start = None
        if new_level:
            self.calm.clear()
        self.calm.append(loss)

    def learn(self, loss: float) -> None:
        """A short rise without a cause was noise after all: it counts as such, and the next one must be clearer."""
        self.calm.append(loss)
        self.noises = min(MOST_NOISES, 1.3 * self.noises)

    def _recent(self) -> list[float]:
        return list(self.calm)[-self.window :]

    def _jumps(self, loss: float) -> bool:
        if not math.isfinite(loss):
            return True
        recent = self._recent()
        if not recent:
            return False
        least = min(recent)
        if len(recent) < ENOUGH:
            self.excess = math.inf
            return loss > _raised(least, UNKNOWN_NOISE)
        if loss <= _raised(least, self.rise):
            return False
        self.excess = min(_ratio(loss - least, step_noise(list(self.calm))), _ratio(_log_ratio(loss, least), self.spread))
        return self.excess > self.noises

    def _during(self, step: int, loss: float) -> Word:
        assert self.start is not None
        if loss > self.top or not math.isfinite(loss):
            self.peak, self.top = step, loss
        # A smooth loss must come back to where it jumped from, a noisy one to the middle of its noise.
        noise = step_noise(list(self.calm))
        level = max(_raised(self.least, self.recovered), self.least + (3.0 * noise if math.isfinite(noise) else 0.0))
        back = loss <= level or (math.isnan(self.least) and math.isfinite(loss))
        if not back and step - self.start < self.patience:
            return "goes on"
        if not back:
            self.calm.clear()
        self.start = None
        self.calm.append(loss)
        return "is over"


def _raised(value: float, factor: float) -> float:
    """`factor` times a positive loss; losses may be negative, and then the same share is added."""
    return value + (factor - 1.0) * abs(value)


def _ratio(rise: float, noise: float) -> float:
    return rise / noise if noise > 0 else math.inf if rise > 0 else 0.0


def _log_ratio(loss: float, least: float) -> float:
    """Logarithm of a rise; infinite where a loss is not positive, which leaves the judgement to the plain difference."""
    return math.log(loss / least) if least > 0 and loss > 0 else math.inf
