"""Learning rates over time, as functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from theodolite.arguments import also_called

Schedule = Callable[[int], float]


def as_schedule(schedule: Schedule | Mapping[int, float] | float | None) -> Schedule | None:
    """A function of the step from a function, a constant, or a table `{first step: rate}`.

    >>> rate = as_schedule({0: 0.1, 50: 0.01})
    >>> rate(0), rate(49), rate(50)
    (0.1, 0.1, 0.01)
    """
    if schedule is None or callable(schedule):
        return schedule
    if isinstance(schedule, int | float):
        return lambda step: float(schedule)
    if not isinstance(schedule, Mapping) or 0 not in schedule:
        raise ValueError(
            f"schedule must be a function of the step, a number, or a table with an entry for step 0. Got {schedule!r}."
        )
    table = sorted(schedule.items())
    return lambda step: [rate for first, rate in table if first <= step][-1]


@also_called(lr="rate")
def step_decay(rate: float, factor: float, at: list[int]) -> Schedule:
    """`rate`, multiplied by `factor` at each step in `at`.

    >>> [round(step_decay(1.0, 0.1, [10, 20])(t), 3) for t in (0, 10, 25)]
    [1.0, 0.1, 0.01]
    """
    return lambda step: rate * factor ** sum(step >= place for place in at)


@also_called(lr="rate")
def cosine(rate: float, steps: int, *, final: float = 0.0) -> Schedule:
    """Half a cosine wave from `rate` to `final`.

    >>> [round(cosine(1.0, 10)(t), 3) for t in (0, 5, 10)]
    [1.0, 0.5, 0.0]
    """
    return lambda step: final + (rate - final) * 0.5 * (1.0 + math.cos(math.pi * min(step, steps) / steps))


def warmup(schedule: Schedule | float, steps: int) -> Schedule:
    """A linear rise over the first steps, then the schedule.

    >>> [warmup(0.4, 4)(t) for t in (0, 1, 3, 9)]
    [0.1, 0.2, 0.4, 0.4]
    """
    rate = as_schedule(schedule)
    assert rate is not None
    return lambda step: rate(step) * min(1.0, (step + 1) / steps)
