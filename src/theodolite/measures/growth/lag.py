"""How long a trial has to be, from its own early losses: when the ranks have settled, and who can be dropped.

Candidates are compared on the same parts of the validation data, so that each difference has its paired error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from theodolite.measures.growth.diagnostics import (
    AGREEMENT,
    ERRORS,
    heat_map,
    paired_error,
    ranks_mean_something,
    spearman,
    told_apart,
    transition,
)

Array = NDArray[np.float64]

#: Looks in a row at which a rule must hold.
TWICE = 2
#: Differences below this share of a loss are the rounding of sums in float32.
ROUNDING = 2.0**-21
#: The horizon over the trial so far, where nobody says how long the grown model will be trained.
USUAL_HORIZON = 20


@dataclass(frozen=True)
class TrialCurves:
    """Validation losses of candidates, part by part of the validation data, at the steps looked at so far.

    `parts` is (candidates, steps, parts): NaN from where a candidate was dropped, infinite where it diverged. `weights` are those
    of the parts in the mean. Candidates stand in the order in which ties are broken.
    """

    names: tuple[str, ...]
    steps: tuple[int, ...]
    parts: Array
    weights: Array

    @property
    def losses(self) -> Array:
        """(candidates, steps), NaN where a candidate was dropped."""
        found: Array = self.parts @ (self.weights / self.weights.sum())
        return found

    @property
    def alive(self) -> list[int]:
        """The candidates that are in the trial at the last look."""
        return [c for c, loss in enumerate(self.losses[:, -1]) if not math.isnan(loss)]

    @property
    def leader(self) -> int:
        """The candidate with the least loss at the last look; of equal ones the first."""
        last = self.losses[:, -1]
        return int(np.argmin(np.where(np.isnan(last), np.inf, last)))

    def until(self, looks: int) -> TrialCurves:
        """What was known after so many looks."""
        return TrialCurves(self.names, self.steps[:looks], self.parts[:, :looks], self.weights)

    def mean(self, differences: Array) -> tuple[float, float]:
        """A weighted mean over the parts, and its error."""
        value = float(differences @ (self.weights / self.weights.sum()))
        return value, paired_error(differences.tolist(), self.weights.tolist())

    def behind(self, candidate: int, leader: int | None = None, look: int = -1) -> tuple[float, float]:
        """How far a candidate is behind another one, by default the leader, and the paired error of that."""
        leader = self.leader if leader is None else leader
        if not np.isfinite(self.parts[[candidate, leader], look]).all():
            return (math.inf if candidate != leader else 0.0), 0.0
        difference, error = self.mean(self.parts[candidate, look] - self.parts[leader, look])
        return difference, max(error, ROUNDING * abs(self.mean(self.parts[leader, look])[0]))

    @property
    def noise(self) -> float:
        """The typical paired error at the last look: the median over the candidates behind the leader."""
        errors = [self.behind(c)[1] for c in self.alive if c != self.leader]
        known = [error for error in errors if math.isfinite(error)]
        return float(np.median(known)) if known else 0.0

    def look_at(self, step: float) -> int:
        """The look nearest to a step."""
        return int(np.argmin([abs(s - step) for s in self.steps]))

    def ranked(self) -> list[int]:
        """Candidates from the best to the worst: those in the trial by their last loss, then those dropped, latest first."""
        losses = self.losses
        seen = (~np.isnan(losses)).sum(axis=1)
        last = [losses[c, seen[c] - 1] if seen[c] else math.inf for c in range(len(losses))]
        return sorted(range(len(losses)), key=lambda c: (-int(seen[c]), last[c], c))

    def tied(self) -> list[int]:
        """Candidates that are not told apart from the leader: behind by less than twice the error."""
        return [c for c in self.alive if c != self.leader and not told_apart(*self.behind(c))]

    def transition(self) -> float | None:
        """Where the ranks turned, among the candidates that stayed; None where there is nothing to rank, or no such step."""
        kept = self.losses[self.alive]
        if len(kept) < 3 or kept.shape[1] < 2 or not ranks_mean_something(kept[:, -1], self.noise):
            return None
        return transition(self.steps, kept)

    def heat_map(self) -> Array | None:
        """`Spearman(ℓ_t, ℓ_t')` among the candidates that stayed; None where their spread is not three times the noise."""
        kept = self.losses[self.alive]
        return heat_map(kept) if len(kept) > 2 and ranks_mean_something(kept[:, -1], self.noise) else None


# The rule


@dataclass(frozen=True)
class Gain:
    """How a candidate stands against the leader: how far behind, and by what that shrinks as the steps double.

    `projected` is where it would stand at the horizon: the gap shrinks with each doubling of the steps as it did over the last
    one, times how much faster that was than the doubling before, which is taken between 1 (steady in log t) and 2 (steady in t).
    """

    behind: float
    behind_error: float
    gain: float
    gain_error: float
    doublings: float

    @property
    def gains(self) -> bool:
        """Whether it gains on the leader by more than the error of that."""
        return self.gain > self.gain_error

    @property
    def may_pass(self) -> bool:
        """Whether it gains fast enough to pass the leader by the horizon."""
        return self.gains and self.behind < self.gain * self.doublings

    @property
    def is_out(self) -> bool:
        """Whether it is behind for certain, and stays so at the horizon though it gain by twice the error more than it did."""
        most = max(0.0, self.gain) + ERRORS * self.gain_error
        return told_apart(self.behind, self.behind_error) and self.behind - ERRORS * self.behind_error > most * self.doublings


def gain_of(curves: TrialCurves, candidate: int, horizon: float) -> Gain | None:
    """How a candidate stands against the leader at the last look; None before there are three steps to compare."""
    leader, now = curves.leader, len(curves.steps) - 1
    half, quarter = (curves.look_at(curves.steps[now] / d) for d in (2, 4))
    behind, error = curves.behind(candidate)
    if not math.isfinite(behind):
        return Gain(math.inf, 0.0, 0.0, 0.0, 0.0)
    if not 0 < curves.steps[quarter] < curves.steps[half] < curves.steps[now]:
        return None
    gaps = curves.parts[candidate] - curves.parts[leader]  # (steps, parts)
    if not np.isfinite(gaps[[quarter, half]]).all():
        return None
    per_doubling = 1 / math.log2(curves.steps[now] / curves.steps[half])
    gain, gain_error = (per_doubling * value for value in curves.mean(gaps[half] - gaps[now]))
    before = curves.mean(gaps[quarter] - gaps[half])[0] / math.log2(curves.steps[half] / curves.steps[quarter])
    ratio = min(2.0, max(1.0, gain / before)) if before > 0 else 2.0
    k = max(0.0, math.log2(horizon / curves.steps[now]))
    return Gain(behind, error, gain, gain_error, _geometric(ratio, k))


def _geometric(ratio: float, k: float) -> float:
    """`ratio + ratio² + ...` over k doublings, k of any size: k where the ratio is 1, `2 (2^k − 1)` where it is 2.

    >>> _geometric(1.0, 3.0), _geometric(2.0, 3.0)
    (3.0, 14.0)
    """
    return k if ratio - 1 < 1e-9 else ratio * (ratio**k - 1) / (ratio - 1)


def has_settled(curves: TrialCurves, horizon: float | None = None) -> bool:
    """Whether a trial has been long enough, from what it has seen itself.

    Three things must hold: the ranks agree with those at half the steps, Spearman at least 0.8, at this look and the one before;
    the lead is larger than its error; no candidate gains on the leader fast enough to pass it within `horizon` steps. A trial
    with one candidate left has settled.
    """
    alive = curves.alive
    if len(alive) < 2:
        return True
    if not _ranks_agree(curves):
        return False
    others = [c for c in alive if c != curves.leader]
    lead, error = min((curves.behind(c) for c in others), key=lambda pair: pair[0])
    if not lead > error:
        return False
    found = [gain_of(curves, c, horizon or USUAL_HORIZON * curves.steps[-1]) for c in others]
    return all(gain is not None and not gain.may_pass for gain in found)


def _ranks_agree(curves: TrialCurves) -> bool:
    """The ranks at this look and at the one before are those at half the steps."""
    losses = curves.losses[curves.alive]
    for look in range(len(curves.steps) - TWICE, len(curves.steps)):
        half = -1 if look < 1 else curves.look_at(curves.steps[look] / 2)
        if half < 1 or half >= look or not spearman(losses[:, half], losses[:, look]) >= AGREEMENT:
            return False
    return True


def dropped_now(curves: TrialCurves, horizon: float | None = None) -> list[int]:
    """The candidates that cannot win any more: they were out at this look and at the one before, or their loss is not finite."""
    lost = [c for c in curves.alive if not math.isfinite(curves.losses[c, -1])]
    if len(lost) == len(curves.alive):
        return []
    out = set(lost)
    if len(curves.steps) >= TWICE:
        out |= set(_out(curves, horizon)) & set(_out(curves.until(len(curves.steps) - 1), horizon))
    return sorted(out - {curves.leader})


def _out(curves: TrialCurves, horizon: float | None) -> list[int]:
    far = horizon or USUAL_HORIZON * curves.steps[-1]
    gains = {c: gain_of(curves, c, far) for c in curves.alive if c != curves.leader}
    return [c for c, gain in gains.items() if gain is not None and gain.is_out]


def settled_at(curves: TrialCurves, horizon: float | None = None) -> int | None:
    """The first look at which a trial would have ended; None if at none of them."""
    return next((look for look in range(1, len(curves.steps) + 1) if has_settled(curves.until(look), horizon)), None)
