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

from quiet import Patience

Work = Callable[[], Any]

#: A timed section lasts at least this long, so that the clock and the interpreter do not matter.
LEAST_SECONDS = 0.02

#: A gradient this many times slower than the fastest one shows that somebody else was using the cores.
DISTURBED = 1.5


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
class Timing:
    """Cost in gradients: the median over quiet rounds, with the quartiles, and the seconds of one gradient."""

    gradients: float
    low: float
    high: float
    gradient_seconds: float
    rounds: int
    disturbed: int

    def details(self) -> dict[str, Any]:
        return {
            "quartiles": [self.low, self.high],
            "gradient_seconds": self.gradient_seconds,
            "rounds": self.rounds,
            "disturbed_rounds": self.disturbed,
        }


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
    slows down slows both. The order rotates, so that nobody always runs on a neighbour's caches.
    """
    settings.patience.wait()
    names = list(works)
    times = {name: repeats(works[name]) for name in names}
    gradient_times = repeats(gradient)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    began = time.perf_counter()
    with no_garbage_collection():
        for turn in range(settings.rounds):
            if turn >= 3 and time.perf_counter() - began > 4 * settings.budget:
                break
            for i in range(len(names)):
                name = names[(i + turn) % len(names)]
                unit = clock(gradient, gradient_times)
                samples[name].append(Sample(clock(works[name], times[name]), unit))
    fastest = min((s.gradient for each in samples.values() for s in each), default=0.0)
    return {name: _summary(each, fastest) for name, each in samples.items()}


def one_shot(gradient: Work, work: Callable[[], Any], settings: Settings, *, most: int = 5) -> tuple[Timing, Any]:
    """Time a long computation between gradients, a few times while the budget lasts; returns its last result.

    The first time counts only if there is no other: it also pays for imports and first allocations.
    """
    settings.patience.wait()
    times = repeats(gradient) * 2
    samples: list[Sample] = []
    began = time.perf_counter()
    result = None
    while not samples or (len(samples) <= most and time.perf_counter() - began < settings.budget):
        with no_garbage_collection():
            before = clock(gradient, times)
            start = time.perf_counter()
            result = work()
            spent = time.perf_counter() - start
            samples.append(Sample(spent, (before + clock(gradient, times)) / 2))
    samples = samples[1:] or samples
    return _summary(samples, min(s.gradient for s in samples)), result


@dataclass(frozen=True)
class Sample:
    """Seconds of the work, and of a gradient beside it."""

    work: float
    gradient: float


def _summary(samples: list[Sample], fastest: float) -> Timing:
    """The median ratio over the rounds whose gradient was not disturbed by other processes."""
    quiet = [s for s in samples if s.gradient <= DISTURBED * fastest] or samples
    ratios = sorted(s.work / s.gradient for s in quiet)
    quarter = len(ratios) // 4
    seconds = statistics.median(s.gradient for s in quiet)
    disturbed = sum(s.gradient > DISTURBED * fastest for s in samples)
    return Timing(statistics.median(ratios), ratios[quarter], ratios[-1 - quarter], seconds, len(samples), disturbed)


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
        row.note = "; ".join(filter(None, [row.note, f"FAILED {explain(error)}"]))
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
