"""What a run sees when: the order of its batches and its learning rates, as functions of seed, epoch and step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.arguments import also_called, checked, count, each, integer, nonnegative, place, positive, shown, whole
from theodolite.files import json_check_sum
from theodolite.problem.batches import Batch, BatchParser, has_length, is_bare
from theodolite.problem.tensors import named_tensors
from theodolite.training.interruption import tensor_check_sums

Schedule = Callable[[int], float]


class Feed:
    """Batches epoch by epoch.

    Tensors are shuffled by their own generator. A list of batches is taken in its order, a loader as it comes (its
    shuffling follows torch's random state, which `train` seeds and saves).
    """

    def __init__(self, data: Any, parse: BatchParser, *, batch_size: int | None, shuffle: bool, seed: int) -> None:
        self._parse = parse
        self.batch_size, self.shuffle, self.seed = batch_size, shuffle, seed
        self.generator: torch.Generator | None = getattr(data, "generator", None)  # a loader's own
        self._whole: Batch | None = None
        self._parts: Sequence[Any] | Iterable[Any] = ()
        if isinstance(data, tuple) and data and is_bare(data[-1]):
            self._whole = self._parse(data, 0)
        elif isinstance(data, Iterator):
            raise ValueError("data can be read only once; give a list of batches or a DataLoader.")
        elif isinstance(data, Iterable) and not isinstance(data, Mapping | str):
            if batch_size is not None:
                raise ValueError("batch_size is for data given as tensors; a list or a loader brings its own batches.")
            self._parts = data
        else:
            raise ValueError(f"data must be (inputs, targets), a list of batches or a DataLoader. Got {type(data).__name__}.")

    def identity(self) -> dict[str, Any]:
        """What tells this feed from others: sizes, and check sums of tensors at hand; nothing is drawn from a loader."""
        if self._whole is not None:
            size = self._whole.size
            width = min(self.batch_size or size, size)
            return {"batch_size": width, "shuffle": self.shuffle and width < size, "data": _identity_of([self._whole])}
        if isinstance(self._parts, list | tuple):
            return {"data": _identity_of([self._parse(raw, i) for i, raw in enumerate(self._parts)])}
        found = {"batch_size": getattr(self._parts, "batch_size", None)}
        dataset = getattr(self._parts, "dataset", None)
        with suppress(TypeError):  # no length
            found["batches"] = len(self._parts)  # type: ignore[arg-type]
            found["samples"] = len(dataset)  # type: ignore[arg-type]
        if isinstance(tensors := getattr(dataset, "tensors", None), tuple):
            found["data"] = _identity_of([Batch(tensors, {}, None, len(tensors[0]))])
        return found

    def __len__(self) -> int:
        """Batches in an epoch; of a source without a length this raises."""
        if self._whole is None:
            return len(self._parts)  # type: ignore[arg-type]
        return -(-self._whole.size // (self.batch_size or self._whole.size))

    def place_of(self, step: int) -> tuple[int, int]:
        """Epoch and batch in it to which a step belongs."""
        if step == 0:
            return 0, 0
        if self._whole is None and (not has_length(self._parts) or not len(self._parts)):  # type: ignore[arg-type]
            raise ValueError("first needs data of known length: give tensors, a list of batches or a loader that has a length.")
        return divmod(step, len(self))

    def epoch(self, number: int) -> Iterator[Batch]:
        """The batches of one epoch."""
        if self._whole is None:
            for i, raw in enumerate(self._parts):
                yield self._parse(raw, i)
            return
        size = self._whole.size
        width = min(self.batch_size or size, size)
        if width == size:
            yield self._whole
            return
        order = epoch_order(self.seed, number, size) if self.shuffle else torch.arange(size)
        for first in range(0, size, width):
            yield self._whole.part(order[first : first + width])


def _identity_of(batches: Sequence[Batch]) -> str:
    sums = tensor_check_sums(dict(named_tensors([(batch.args, batch.kwargs, batch.target) for batch in batches])))
    return f"{sum(batch.size for batch in batches)} samples with check sum {json_check_sum(sums)}"


def epoch_order(seed: int, epoch: int, size: int) -> Tensor:
    """The order of the samples in an epoch."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def check_length(steps: int | None, epochs: int | None) -> None:
    """Refuse a run whose length is given twice or not at all."""
    if (steps is None) == (epochs is None):
        raise ValueError(f"Give steps or epochs, one of them. Got steps={steps!r}, epochs={epochs!r}.")


def as_steps(name: str, when: int | Sequence[int] | None, length: int | None, first: int = 0) -> Callable[[int], bool]:
    """Whether a step is one before which something is done: every so many from the first on, or those listed.

    Of a run of `length` steps a list may also name the step after the last.

    >>> due = as_steps("every", [0, 10], 10)
    >>> [step for step in range(11) if due(step)]
    [0, 10]
    """
    if when is None:
        return lambda step: False
    if isinstance(when, str | Mapping) or not isinstance(when, Iterable):
        if isinstance(when, bool) or not isinstance(when, Integral):
            raise ValueError(f"{name} must be a number of steps, or a list of steps. Got {shown(when)}.")
        every = integer(name, when, least=1)
        return lambda step: (step - first) % every == 0
    if length is None:
        listed = {whole(f"{name}[{i}]", step) for i, step in enumerate(when)}
    else:
        listed = {first + place(f"{name}[{i}]", step - first, length + 1) for i, step in enumerate(when)}
    return listed.__contains__


# Learning rates over time, as functions of the step.


def as_schedule(schedule: Schedule | Mapping[int, float] | float | None) -> Schedule | None:
    """A function of the step from a function, a constant, or a table `{first step: rate}`.

    >>> rate = as_schedule({0: 0.1, 50: 0.01})
    >>> rate(0), rate(49), rate(50)
    (0.1, 0.1, 0.01)
    """
    if schedule is None or (callable(schedule) and not isinstance(schedule, nn.Module | type)):
        return schedule
    if isinstance(schedule, int | float):
        rate = positive("schedule", schedule)
        return lambda step: rate
    if not isinstance(schedule, Mapping) or 0 not in schedule:
        raise ValueError(
            f"schedule must be a function of the step, a number, or a table with an entry for step 0. Got {shown(schedule)}."
        )
    table = sorted((whole("a step of the schedule", step), nonnegative(f"schedule[{step}]", v)) for step, v in schedule.items())
    return lambda step: [rate for first, rate in table if first <= step][-1]


@also_called(lr="rate")
@checked(rate=positive, factor=positive, at=each(whole))
def step_decay(rate: float, factor: float, at: list[int]) -> Schedule:
    """`rate`, multiplied by `factor` at each step in `at`.

    >>> [round(step_decay(1.0, 0.1, [10, 20])(t), 3) for t in (0, 10, 25)]
    [1.0, 0.1, 0.01]
    """
    return lambda step: rate * factor ** sum(step >= place for place in at)


@also_called(lr="rate")
@checked(rate=positive, steps=count, final=nonnegative)
def cosine(rate: float, steps: int, *, final: float = 0.0) -> Schedule:
    """Half a cosine wave from `rate` to `final`.

    >>> [round(cosine(1.0, 10)(t), 3) for t in (0, 5, 10)]
    [1.0, 0.5, 0.0]
    """
    return lambda step: final + (rate - final) * 0.5 * (1.0 + math.cos(math.pi * min(step, steps) / steps))


@checked(steps=count)
def warmup(schedule: Schedule | float, steps: int) -> Schedule:
    """A linear rise over the first steps, then the schedule.

    >>> [warmup(0.4, 4)(t) for t in (0, 1, 3, 9)]
    [0.1, 0.2, 0.4, 0.4]
    """
    rate = as_schedule(schedule)
    if rate is None:
        raise ValueError("schedule is missing: give a learning rate, or a function of the step.")
    return lambda step: rate(step) * min(1.0, (step + 1) / steps)
