"""Does the loss rise when, and only when, the learning rate exceeds the critical one of the batch?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from theodolite.results import Result, Row


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
            return f"The loss never rose in {self.steps} steps; the critical rate was exceeded in {self.base_rate} steps."
        return (
            f"Of the steps that raised the loss, {self.match_rate} exceeded the critical rate of their batch, against "
            f"{self.base_rate} steps overall; exceeding it raised the loss in {self.up_given_exceeded}, staying below it in "
            f"{self.up_given_not}."
        )


def match_table(
    exceeded: Sequence[bool | None],
    losses: Sequence[float | None] | None = None,
    *,
    up: Sequence[bool | None] | None = None,
    slack: float = 0.0,
) -> MatchTable:
    """Count steps by "critical rate of the batch exceeded" and "loss on all the data rose".

    Parameters
    ----------
    exceeded : per step, whether the learning rate lay above the critical rate of its batch; None where not sampled.
    losses : the loss on the whole data before step 0, 1, ... and after the last: one entry more than steps. None where not
        sampled. Use `up` instead where it is known already whether each step raised it.
    slack : rises smaller than this share of the loss are not counted as rises.

    >>> table = match_table([False, True, True, None], losses=[1.0, 0.5, 0.9, 0.4, 0.3])
    >>> table.match_rate.value, table.base_rate.hits, table.up_given_exceeded.value, table.unsampled
    (1.0, 2, 0.5, 1)
    """
    if (losses is None) == (up is None):
        raise ValueError("Give losses (one more than steps) or up (one per step), one of them.")
    if losses is not None:
        if len(losses) != len(exceeded) + 1:
            raise ValueError(
                f"losses must hold the loss before every step and after the last, {len(exceeded) + 1} numbers for "
                f"{len(exceeded)} steps. Got {len(losses)}."
            )
        up = [_rose(a, b, slack) for a, b in itertools.pairwise(losses)]
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


def _rose(before: float | None, after: float | None, slack: float) -> bool | None:
    """Whether a loss rose; one that is no number any more did."""
    if before is None or after is None:
        return None
    return not after <= before * (1.0 + slack)


def catapult_count(exceeded: Iterable[bool | None], best_step: int | None = None) -> int:
    """Steps above the critical rate of their batch, among those taken before `best_step` (all, if None).

    With the best validation loss seen after `best_step` steps this is the number of catapults that led there. It counts
    steps, not spikes: one spike may hold several.

    >>> catapult_count([True, False, True, None, True], best_step=4)
    2
    """
    return sum(e is True for e in [None if e is None else bool(e) for e in exceeded][:best_step])
