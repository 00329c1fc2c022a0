"""What the arguments of a fleet mean, checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from theodolite.arguments import integer
from theodolite.training.schedules import Schedule, as_schedule

AnySchedule = Schedule | Mapping[int, float] | float | None
Factors = Callable[[int], float | Tensor]  # step -> one factor for all replicas, or (R,)


def as_seeds(name: str, seeds: Sequence[int]) -> list[int]:
    numbers = [int(seed) for seed in seeds]
    if any(seed < 0 for seed in numbers):
        raise ValueError(f"{name} must not be negative. Got {min(numbers)}.")
    return numbers


def as_rates(rate: Any, replicas: int) -> Tensor:
    if rate is None:
        raise ValueError("rate is missing: give a learning rate, one for all replicas or one per replica.")
    rates = torch.as_tensor(rate, dtype=torch.float64).detach().cpu()
    if rates.ndim > 1 or (rates.ndim == 1 and len(rates) != replicas):
        raise ValueError(f"rate must be one number or one per replica: {replicas}. Got shape {tuple(rates.shape)}.")
    if not bool((torch.isfinite(rates) & (rates >= 0)).all()):
        raise ValueError(f"rate must be finite and not negative. Got {rates.tolist()}.")
    return rates.expand(replicas).clone()


def as_factors(schedule: AnySchedule | Sequence[AnySchedule], replicas: int) -> Factors:
    """What the rates are multiplied with in each step, from one schedule for all or one per replica."""
    if not isinstance(schedule, list | tuple):
        one = as_schedule(schedule)  # type: ignore[arg-type]
        return lambda step: 1.0 if one is None else _factor(one(step), step)
    if len(schedule) != replicas:
        raise ValueError(f"schedule must be one for all replicas or a list of one per replica: {replicas}. Got {len(schedule)}.")
    each = [as_schedule(one) for one in schedule]

    def factors(step: int) -> Tensor:
        found = [1.0 if one is None else _factor(one(step), step) for one in each]
        return torch.tensor(found, dtype=torch.float64)

    return factors


def _factor(factor: float, step: int) -> float:
    found = float(factor)
    if not 0.0 <= found < math.inf:
        raise ValueError(f"schedule must give finite factors that are not negative. Got {found} at step {step}.")
    return found


def as_length(steps: int | None, epochs: int | None, batches: int) -> int:
    """Steps of a run."""
    if (steps is None) == (epochs is None):
        raise ValueError(f"Give steps or epochs, one of them. Got steps={steps!r}, epochs={epochs!r}.")
    for name, value in (("steps", steps), ("epochs", epochs)):
        if value is not None:
            integer(name, value, least=1)
    return steps if steps is not None else (epochs or 0) * batches


def as_steps(name: str, when: int | Sequence[int] | None, length: int) -> set[int]:
    """The steps before which something is done: every so many, or those listed."""
    if when is None:
        return set()
    if isinstance(when, int):
        integer(name, when, least=1)
        return set(range(0, length, when))
    for step in when:
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= length:
            raise ValueError(f"{name} must list steps of the run, 0..{length}. Got {step!r}.")
    return set(when)
