"""Spikes of a training loss: where it leaves its own recent level, how high, and when it is back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


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

    Parameters
    ----------
    losses : one per step, at the same weights as `kernel`; NaN and infinity count as the highest of all.
    kernel : norm of the tangent kernel (or sharpness) per step, None where a step was not sampled.

    >>> [event] = spike_events([1.0, 0.9, 4.0, 2.0, 0.8, 0.7], kernel=[3.0, 3.0, 3.0, 2.0, 1.5, 1.5])
    >>> event.start, event.peak, event.end, round(event.height, 3), event.kernel_before, event.kernel_after
    (2, 2, 4, 4.444, 3.0, 1.5)
    """
    if not rise > 1.0 or not 1.0 <= recovered <= rise or window < 1:
        raise ValueError(
            f"A spike needs rise > 1, 1 <= recovered <= rise and window >= 1. Got rise={rise!r}, recovered={recovered!r}, "
            f"window={window!r}."
        )
    series = [x if math.isfinite(x) else math.inf for x in map(float, losses)]
    sampled = None if kernel is None else list(kernel)
    if sampled is not None and len(sampled) != len(series):
        raise ValueError(f"kernel must have one entry per loss, {len(series)} (None where not sampled). Got {len(sampled)}.")
    floor = slack * abs(series[0]) if series and math.isfinite(series[0]) else 0.0
    found: list[SpikeEvent] = []
    start: int | None = None
    before, settled = 0.0, False
    for t in range(1, len(series)):
        level = min(series[max(0, t - window) : t])
        above = series[t] > rise * level and series[t] - level > floor
        if start is not None and series[t] <= recovered * before:
            found.append(_event(series, sampled, start, t, before, closed=True))
            start = None
        elif start is not None and settled and above:
            found.append(_event(series, sampled, start, t, before, closed=False))
            start, before, settled = t, level, False
        elif start is None and above:
            start, before, settled = t, level, False
        else:
            settled = settled or not above
    if start is not None:
        found.append(_event(series, sampled, start, len(series), before, closed=False))
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
