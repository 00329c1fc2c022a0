"""What looks may cost: a share of the time that training itself takes."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from statistics import median

#: A gap between two steps counts as training up to this many times the usual one.
PAUSE = 5.0
#: A look may cost this many times what it did before.
MARGIN = 1.2


@dataclass
class Purse:
    """Seconds of training, of monitoring as a whole (`used`) and of looks (`spent`), which the share `budget` of training pays.

    `budget=None` pays for everything. What is urgent may be paid in advance, up to `credit` times its price, and is then
    saved up again before the next look.
    """

    budget: float | None
    credit: float = 1.5
    training: float = 0.0
    used: float = 0.0
    spent: float = 0.0
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
            # A pause or a validation between two steps is no training that could pay for looks.
            self.training += min(gap, PAUSE * median(self._gaps))

    def leave(self) -> None:
        """Training goes on."""
        self._left = time.perf_counter()
        if self._came is not None:
            self.used += self._left - self._came

    def affords(self, what: str, *, urgent: bool = False, guess: float = 0.0) -> bool:
        """Whether a look of this kind is within the budget; `guess` is its price until one was paid."""
        if self.budget is None:
            return True
        price = self.prices.get(what, guess)
        return self.spent + MARGIN * price <= self._allowed + (self.credit * price if urgent else 0.0)

    @property
    def _allowed(self) -> float:
        """What looks may have cost by now: the budget less what every step costs, but at least half of it, for tiny models."""
        assert self.budget is not None
        whole = self.budget * self.training
        return max(0.5 * whole, whole - max(0.0, self.used - self.spent))

    def pay(self, what: str, seconds: float, *, from_budget: bool = True) -> None:
        """Note what a look has cost; prices follow slowly, so that one slow moment does not stop all looking."""
        self.spent += seconds if from_budget else 0.0
        known = self.prices.get(what)
        self.prices[what] = seconds if known is None else 0.5 * (known + seconds)

    @property
    def overdrawn(self) -> float:
        """Seconds spent beyond the budget."""
        return 0.0 if self.budget is None else max(0.0, self.spent - self._allowed)
