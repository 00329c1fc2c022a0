"""Timing in gradients, rows of the table, and what to do when a contender fails."""

from __future__ import annotations

import gc
import io
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

from quiet import Patience, Watch

Work = Callable[[], Any]

#: A timed section lasts at least this long, so that the clock and the interpreter do not matter.
LEAST_SECONDS = 0.02


@dataclass(frozen=True)
class Settings:
    """How long to measure. `quick` shrinks sizes and rounds: for trying the harness, not for numbers."""

    quick: bool = False
    patience: Patience = field(default_factory=lambda: Patience(0.0))

    @property
    def rounds(self) -> int:
        return 3 if self.quick else 15

    @property
    def budget(self) -> float:
        """Seconds after which a long computation is not repeated again, and a race has no further round."""
        return 1.0 if self.quick else 20.0

    def pick(self, full: int, quick: int) -> int:
        return quick if self.quick else full


@dataclass(frozen=True)
class Sample:
    """Seconds of the work, and of a gradient beside it; `disturbed` if other processes used the cores meanwhile."""

    work: float
    gradient: float
    disturbed: bool


@dataclass(frozen=True)
class Timing:
    """Cost in gradients: the median over undisturbed samples where there are any."""

    samples: list[Sample]

    @property
    def ratios(self) -> list[float]:
        quiet = [s for s in self.samples if not s.disturbed]
        return sorted(s.work / s.gradient for s in quiet or self.samples)

    @property
    def gradients(self) -> float:
        return statistics.median(self.ratios)

    @property
    def disturbed(self) -> bool:
        return all(s.disturbed for s in self.samples)

    def details(self) -> dict[str, Any]:
        quarter = len(self.ratios) // 4
        return {
            "quartiles": [self.ratios[quarter], self.ratios[-1 - quarter]],
            "gradient_seconds": statistics.median(s.gradient for s in self.samples),
            "samples": len(self.samples),
            "disturbed_samples": sum(s.disturbed for s in self.samples),
        }


@dataclass
class Row:
    """One line of the table. `gradients` is a cost in forward + backward passes over the same data."""

    item: str
    work: str
    who: str
    gradients: float | None = None
    ratio: float | None = None  # of the cost to ours, filled in by `with_ratios`
    error: float | None = None
    products: float | None = None
    memory: float | None = None  # peak, in training steps
    note: str = ""
    details: dict[str, Any] = field(default_factory=dict)  # for results.json only

    def charge(self, timing: Timing) -> None:
        """Put down a cost, and say so if other processes were at work all the time."""
        self.gradients = timing.gradients
        self.details.update(timing.details())
        if timing.disturbed:
            self.say("the machine was busy: the cost means little")

    def say(self, text: str) -> None:
        """Add to the note."""
        self.note = "; ".join(filter(None, [self.note, text]))


def clock(work: Work, times: int = 1) -> float:
    """Seconds of one call, as the mean of several in a row."""
    began = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - began) / times


def repeats(work: Work) -> int:
    """How many calls fill a timed section."""
    return max(1, round(LEAST_SECONDS / max(clock(work), 1e-7)))


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """As `timeit` does: a collection must not land in one contender's time."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def race(gradient: Work, works: Mapping[str, Work], settings: Settings) -> dict[str, Timing]:
    """Time short works, each beside a gradient.

    In every round each work is timed right after the gradient, and only their ratio is kept: a machine that
    slows down slows both. The order rotates, so that nobody always runs on a neighbour's caches. A round in which
    other processes used the cores is made again.
    """
    settings.patience.wait()
    times = {name: repeats(work) for name, work in works.items()}
    gradient_times = repeats(gradient)
    rounds: list[dict[str, Sample]] = []
    began = time.perf_counter()
    while (quiet := _quiet(rounds)) < settings.rounds:
        if time.perf_counter() - began > settings.budget * (4 if quiet >= 3 else 10):
            break
        settings.patience.wait()
        order = [*works][quiet % len(works) :] + [*works][: quiet % len(works)]
        seconds, watch = {}, Watch()
        with no_garbage_collection():
            for name in order:
                unit = clock(gradient, gradient_times)
                seconds[name] = (clock(works[name], times[name]), unit)
        disturbed = watch.disturbed()
        rounds.append({name: Sample(work, unit, disturbed) for name, (work, unit) in seconds.items()})
    return {name: Timing([each[name] for each in rounds]) for name in works}


def _quiet(rounds: list[dict[str, Sample]]) -> int:
    return sum(not any(s.disturbed for s in each.values()) for each in rounds)


def one_shot(gradient: Work, work: Callable[[], Any], settings: Settings, *, most: int = 5) -> tuple[Timing, Any]:
    """Time a long computation between gradients, a few times while the budget lasts; returns its last result.

    The first time counts only if there is no other: it also pays for imports and first allocations.
    """
    times = repeats(gradient) * 2
    samples: list[Sample] = []
    began = time.perf_counter()
    result = None
    while _go_on(samples, time.perf_counter() - began, most, settings):
        if not samples or samples[-1].disturbed:
            settings.patience.wait()
        watch = Watch()
        with no_garbage_collection():
            before = clock(gradient, times)
            start = time.perf_counter()
            result = work()
            spent = time.perf_counter() - start
            unit = (before + clock(gradient, times)) / 2
        samples.append(Sample(spent, unit, watch.disturbed()))
    return Timing(samples[1:] if any(not s.disturbed for s in samples[1:]) else samples), result


def _go_on(samples: list[Sample], spent: float, most: int, settings: Settings) -> bool:
    """More samples: `most` while the budget lasts, many of a short computation, another try if all were disturbed."""
    if not samples:
        return True
    if all(s.disturbed for s in samples):
        return len(samples) < 4 and settings.patience.left > 0
    return spent < (settings.budget if len(samples) <= most else settings.budget / 10)


def explain(error: BaseException) -> str:
    """What a row says about a failure: the exception class and the first line of its message."""
    if isinstance(error, ModuleNotFoundError):
        return f"not installed ({error.name})"
    lines = str(error).strip().splitlines() or [""]
    text = lines[0] if len(lines[0]) <= 160 else lines[0][:157] + "..."
    return f"{type(error).__name__}: {text}"


def try_row(row: Row, fill: Callable[[Row], None]) -> Row:
    """Fill a row; a failure is recorded in it and never hidden."""
    try:
        with redirect_stdout(io.StringIO()):  # some peers print what they then raise
            fill(row)
    except Exception as error:  # a peer may raise anything
        row.say(f"FAILED {explain(error)}")
        row.details["failed"] = True
    return row


def with_ratios(rows: list[Row]) -> list[Row]:
    """Set each row's cost relative to the first row of ours on the same work."""
    ours: dict[tuple[str, str], float] = {}
    for row in rows:
        if row.who.startswith("ours") and row.gradients is not None:
            ours.setdefault((row.item, row.work), row.gradients)
    for row in rows:
        base = ours.get((row.item, row.work))
        if base and row.gradients is not None:
            row.ratio = row.gradients / base
    return rows
