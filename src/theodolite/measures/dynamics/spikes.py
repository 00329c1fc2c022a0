"""Spikes of a training loss, and whether they come when, and only when, the rate exceeds the critical one of the batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from theodolite.arguments import checked, count, nonnegative, number_in, sequence, series, series_with_gaps, shown, whole
from theodolite.results import Result, Row


@dataclass(frozen=True, kw_only=True)
class SpikeEvent:
    """One rise of the loss and its return.

    `start` is the first step above the recent level `before`, `peak` the highest, `end` the first step back at it (None if
    it never came back). `height` is the peak loss over `before`. The kernel norms are the last one sampled before the rise
    and the first one at or after the end; None where nobody looked.
    """

    start: int
    peak: int
    end: int | None
    height: float
    before: float
    kernel_before: float | None = None
    kernel_after: float | None = None

    @property
    def kernel_fell(self) -> bool | None:
        """Whether the kernel norm was smaller afterwards, as after a catapult; None where it is not known."""
        if self.kernel_before is None or self.kernel_after is None:
            return None
        return self.kernel_after < self.kernel_before


def _flags(name: str, value: Any) -> list[Any]:
    """Entries that are true, false or None, where nobody looked."""
    entries = list(sequence(name, value))
    if any(not (entry is None or (getattr(entry, "ndim", 0) == 0 and entry in (0, 1))) for entry in entries):
        raise ValueError(f"{name} must hold True, False or None. Got {shown(value)}.")
    return entries


@checked(
    losses=series,
    kernel=series_with_gaps,
    rise=number_in(above=1),
    window=count,
    recovered=number_in(least=1),
    slack=nonnegative,
)
def spike_events(
    losses: Iterable[float],
    *,
    rise: float = 1.2,
    window: int = 20,
    recovered: float = 1.05,
    kernel: Iterable[float | None] | None = None,
    slack: float = 1e-6,
) -> tuple[SpikeEvent, ...]:
    """Spikes in a series of losses, in order.

    A spike starts where the loss exceeds `rise` times its smallest value of the last `window` steps (and by more than the
    share `slack` of the first loss: near convergence, noise is not a spike). It ends at the first loss below `recovered`
    times that value. A loss that settles at a higher level instead has no end there, and a further rise is another spike.

    Args:
        losses: one per step, at the same weights as `kernel`; NaN and infinity count as the highest of all.
        kernel: norm of the tangent kernel (or sharpness) per step, None where a step was not sampled.

    >>> [event] = spike_events([1.0, 0.9, 4.0, 2.0, 0.8, 0.7], kernel=[3.0, 3.0, 3.0, 2.0, 1.5, 1.5])
    >>> event.start, event.peak, event.end, round(event.height, 3), event.kernel_before, event.kernel_after
    (2, 2, 4, 4.444, 3.0, 1.5)
    """
    if recovered > rise:
        raise ValueError(f"recovered must be at most rise, {rise:g}. Got {recovered:g}.")
    heights = [x if math.isfinite(x) else math.inf for x in losses]
    sampled = None if kernel is None else list(kernel)
    if sampled is not None and len(sampled) != len(heights):
        raise ValueError(f"kernel and losses must be of one length. Got {len(sampled)} and {len(heights)}.")
    floor = slack * abs(heights[0]) if heights and math.isfinite(heights[0]) else 0.0
    found: list[SpikeEvent] = []
    start: int | None = None
    before, settled = 0.0, False
    for t in range(1, len(heights)):
        level = min(heights[max(0, t - window) : t])
        above = heights[t] > rise * level and heights[t] - level > floor
        back = start is not None and heights[t] <= recovered * before
        if start is not None and (back or (settled and above)):
            found.append(_event(heights, sampled, start, t, before, closed=back))
            start = None
        if start is None and above and not back:
            start, before, settled = t, level, False
        else:
            settled = settled or not above
    if start is not None:
        found.append(_event(heights, sampled, start, len(heights), before, closed=False))
    return tuple(found)


def _event(
    series: Sequence[float], kernel: Sequence[float | None] | None, start: int, stop: int, before: float, *, closed: bool
) -> SpikeEvent:
    """The spike over steps start .. stop − 1; it ended at `stop` if `closed`."""
    peak = max(range(start, stop), key=series.__getitem__)
    earlier = [] if kernel is None else [k for k in kernel[:start] if k is not None]
    later = [] if kernel is None or not closed else [k for k in kernel[stop:] if k is not None]
    return SpikeEvent(
        start=start,
        peak=peak,
        end=stop if closed else None,
        height=series[peak] / before if before > 0 else math.inf,
        before=before,
        kernel_before=earlier[-1] if earlier else None,
        kernel_after=later[0] if later else None,
    )


# Does the loss rise when, and only when, the learning rate exceeds the critical one of the batch?


@dataclass(frozen=True)
class Proportion:
    """`hits` of `count` cases: the share, and the half-width of its Wilson interval (one standard error, never zero)."""

    hits: int
    count: int

    @property
    def value(self) -> float:
        return self.hits / self.count if self.count else math.nan

    @property
    def error(self) -> float:
        if not self.count:
            return math.nan
        share = self.hits / self.count
        return math.sqrt(share * (1 - share) / self.count + 0.25 / self.count**2) / (1 + 1 / self.count)

    def __str__(self) -> str:
        return f"{100 * self.value:.1f} ± {100 * self.error:.1f} % of {self.count}" if self.count else "no case"


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class MatchTable(Result):
    """Steps counted by two questions: was the batch's critical rate exceeded (e), and did the full loss then rise (up)?

    `match_rate` is P(e | up). It is high for free where most batches are exceeded, so `base_rate`, P(e), stands beside it,
    and P(up | e) with P(up | not e) tell how much exceeding matters.
    """

    both: int
    only_up: int
    only_exceeded: int
    neither: int
    unsampled: int = 0

    @property
    def steps(self) -> int:
        """Steps at which both questions have an answer."""
        return self.both + self.only_up + self.only_exceeded + self.neither

    @property
    def match_rate(self) -> Proportion:
        """P(e | up)."""
        return Proportion(self.both, self.both + self.only_up)

    @property
    def base_rate(self) -> Proportion:
        """P(e)."""
        return Proportion(self.both + self.only_exceeded, self.steps)

    @property
    def up_given_exceeded(self) -> Proportion:
        """P(up | e)."""
        return Proportion(self.both, self.both + self.only_exceeded)

    @property
    def up_given_not(self) -> Proportion:
        """P(up | not e)."""
        return Proportion(self.only_up, self.only_up + self.neither)

    def rows(self) -> list[Row]:
        named = {
            "match rate P(e|up)": self.match_rate,
            "base rate P(e)": self.base_rate,
            "P(up|e)": self.up_given_exceeded,
            "P(up|not e)": self.up_given_not,
        }
        return [{"share": k, "value": p.value, "error": p.error, "hits": p.hits, "steps": p.count} for k, p in named.items()]

    def sentence(self) -> str:
        if not self.match_rate.count:
            exceeded = f"in {self.base_rate} steps" if self.base_rate.count else "in none"
            return f"The loss never rose in {self.steps} steps; the critical rate was exceeded {exceeded}."
        return (
            f"Of the steps that raised the loss, {self.match_rate} exceeded the critical rate of their batch, against "
            f"{self.base_rate} steps overall; exceeding it raised the loss in {self.up_given_exceeded}, staying below it in "
            f"{self.up_given_not}."
        )


@checked(exceeded=_flags, losses=series_with_gaps, up=_flags, slack=nonnegative)
def match_table(
    exceeded: Sequence[bool | None],
    losses: Sequence[float | None] | None = None,
    *,
    up: Sequence[bool | None] | None = None,
    slack: float = 0.0,
) -> MatchTable:
    """Count steps by "critical rate of the batch exceeded" and "loss on all the data rose".

    Args:
        exceeded: per step, whether the learning rate lay above the critical rate of its batch; None where not sampled.
        losses: the loss on the whole data before step 0, 1, ... and after the last: one entry more than steps. None where not
            sampled. Use `up` instead where it is known already whether each step raised it.
        slack: rises smaller than this share of the loss are not counted as rises.

    >>> table = match_table([False, True, True, None], losses=[1.0, 0.5, 0.9, 0.4, 0.3])
    >>> table.match_rate.value, table.base_rate.hits, table.up_given_exceeded.value, table.unsampled
    (1.0, 2, 0.5, 1)
    """
    if (losses is None) == (up is None):
        raise ValueError("Give losses (one more than steps) or up (one per step), one of them.")
    if losses is not None:
        if len(losses) != len(exceeded) + 1:
            raise ValueError(
                f"losses must hold the loss before every step of exceeded and after the last, {len(exceeded) + 1} numbers for "
                f"{len(exceeded)} steps. Got {len(losses)}."
            )
        pairs_of_losses = itertools.pairwise(losses)
        up = [None if a is None or b is None else not b <= a * (1.0 + slack) for a, b in pairs_of_losses]  # NaN has risen
    assert up is not None
    if len(up) != len(exceeded):
        raise ValueError(f"up must have one entry per step, {len(exceeded)}. Got {len(up)}.")
    pairs = [(bool(e), bool(u)) for e, u in zip(exceeded, up, strict=True) if e is not None and u is not None]
    return MatchTable(
        both=pairs.count((True, True)),
        only_up=pairs.count((False, True)),
        only_exceeded=pairs.count((True, False)),
        neither=pairs.count((False, False)),
        unsampled=len(exceeded) - len(pairs),
    )


@checked(exceeded=_flags, best_step=whole)
def catapult_count(exceeded: Iterable[bool | None], best_step: int | None = None) -> int:
    """Steps above the critical rate of their batch, among those taken before `best_step` (all, if None).

    With the best validation loss seen after `best_step` steps this is the number of catapults that led there. It counts
    steps, not spikes: one spike may hold several.

    >>> catapult_count([True, False, True, None, True], best_step=4)
    2
    """
    return sum(e is True for e in [None if e is None else bool(e) for e in exceeded][:best_step])
