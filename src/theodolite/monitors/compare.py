"""`compare_runs`: two monitored runs side by side, at equal steps and at equal time, from what their logs hold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from theodolite.arguments import checked, shown
from theodolite.monitors.log import MonitorLog, Record, fold, log_path, read_log
from theodolite.monitors.progress.loss_course import mean_with_error
from theodolite.monitors.report import MonitorReport
from theodolite.results import Outcome, Result, Row
from theodolite.text import number, plural

#: Parts into which the common steps are cut to see where runs part, and steps of a part at least.
PARTS, PART_STEPS = 50, 10
#: Share of the common steps, and of the common time, whose mean is compared; at least so many steps.
LAST, LAST_STEPS = 0.1, 20
#: A difference counts where it is so many times its error; runs part where it stays so many times.
AHEAD, PARTED = 2.0, 3.0


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class RunComparison(Result):
    """Two runs side by side.

    `ahead` names the run with the lower loss at the last common step `at_step`, empty where the difference is within its error;
    `ahead_in_time` the same after the `at_seconds` of training that both had. `difference` and `time_difference` are the loss of
    the second run minus that of the first, with standard errors. `parted` is the step from which they differ for good,
    `same_until` the last step up to which their losses are equal bit by bit (None where there is none). `runs` has a row for each
    run; `points` are mean losses over parts of the runs, to draw.
    """

    names: tuple[str, str]
    runs: tuple[Row, ...]
    points: tuple[Row, ...]
    ahead: str
    at_step: int | None
    difference: float
    error: float
    ahead_in_time: str
    at_seconds: float | None
    time_difference: float
    time_error: float
    parted: int | None = None
    same_until: int | None = None

    def rows(self) -> list[Row]:
        """One row per run."""
        return [dict(row) for row in self.runs]

    def sentence(self) -> str:
        return " ".join([*self.verdict(), *map(_about, self.runs)])

    def verdict(self) -> list[str]:
        """Sentences: which run is ahead at equal steps, at equal time, and where they part."""
        return [part for part in (self._at_steps(), self._in_time(), self._parting()) if part]

    def _at_steps(self) -> str:
        if self.at_step is None:
            return f"{self.names[0]} and {self.names[1]} have no step in common."
        levels = " and ".join(f"{_with_error(row['loss'], row['error'])} ({row['run']})" for row in self.runs)
        who = f"{self.ahead} is ahead" if self.ahead else "Neither run is ahead"
        return f"{who} at step {self.at_step}: losses {levels}."

    def _in_time(self) -> str:
        if self.at_seconds is None:
            return ""
        who = f"{self.ahead_in_time} is ahead" if self.ahead_in_time else "neither is ahead"
        same = "too" if self.ahead_in_time == self.ahead and self.ahead else ""
        return f"After {self.at_seconds:.3g} s of training {who}{' ' * bool(same)}{same}."

    def _parting(self) -> str:
        same = f"Their losses are equal bit by bit up to step {self.same_until}. " if self.same_until else ""
        return (same + ("" if self.parted is None else f"They part at step {self.parted}.")).strip()


def _two_names(name: str, value: Any) -> tuple[str, str]:
    if not isinstance(value, tuple | list) or len(value) != 2 or not all(isinstance(text, str) for text in value):
        raise ValueError(f"{name} must be two texts, one for each run. Got {shown(value)}.")
    return value[0], value[1]


@checked(names=_two_names)
def compare_runs(a: Any, b: Any, *, names: tuple[str, str] | None = None) -> RunComparison:
    """Compare two monitored runs: who is ahead at equal steps and at equal time, where they part, and what befell each.

    Args:
        a, b: a log (its file or folder, or a `MonitorLog`), a `MonitorReport`, or a `Monitor`.
        names: what to call them; by default their folders, or "first" and "second".

    Returns:
        A frozen `RunComparison`; `print` it, take `rows()`, or `plot()` it. Losses are means over the last tenth of the common
        steps (or time), with standard errors from the scatter of parts.

    >>> falling = lambda pace: fold({"kind": "step", "step": t, "loss": 2.0 * pace**t} for t in range(100))
    >>> found = compare_runs(falling(0.99), falling(0.95), names=("slow", "fast"))
    >>> found.ahead, found.at_step, found.same_until
    ('fast', 99, 0)
    """
    first, second = _Run.of("a", a, "first"), _Run.of("b", b, "second")
    if names is not None:
        first.name, second.name = names
    if first.name == second.name:
        first.name, second.name = f"{first.name} (first)", f"{second.name} (second)"
    last = min(first.last_step, second.last_step)
    levels = [run.level_at(last) for run in (first, second)]
    seconds = min(first.total_seconds, second.total_seconds)
    in_time = [run.level_after(seconds) for run in (first, second)]
    ahead = _ahead(first, second, levels)
    runs = [run.row(level) for run, level in zip((first, second), levels, strict=True)]
    return RunComparison(
        names=(first.name, second.name),
        runs=tuple(runs),
        points=tuple(point for run in (first, second) for point in run.points(_parts(first, second))),
        ahead=ahead[0],
        at_step=int(last) if math.isfinite(last) else None,
        difference=ahead[1],
        error=ahead[2],
        **_time_fields(first, second, in_time, seconds),
        parted=_parting(first, second),
        same_until=_same_until(first, second),
        outcome=Outcome.FINISHED,
    )


class _Run:
    """One run as a comparison needs it, whatever it came from."""

    def __init__(self, log: MonitorLog, name: str) -> None:
        self.log, self.name = log, name
        self.steps = [row for row in log.steps if _is_number(row.get("loss"))]
        self.losses = {row["step"]: float(row["loss"]) for row in self.steps}
        self.seconds = _seconds(log, self.steps)

    @classmethod
    def of(cls, argument: str, given: Any, name: str) -> _Run:
        """The argument of that name, as one of these; `name` is what it is called where it has no name of its own."""
        if isinstance(given, str | PathLike):
            path = log_path(given)
            return cls(read_log(given), path.parent.name if path.name == "monitor.jsonl" else Path(given).stem)
        if isinstance(given, MonitorLog):
            return cls(given, name)
        given = given.report() if hasattr(given, "observe") else given
        if not isinstance(given, MonitorReport):
            raise TypeError(f"{argument} must be a log (a path or a MonitorLog), a report or a monitor. Got {shown(given)}.")
        end: Record = {"kind": "end", **given.end_record()}
        return cls(fold([*given.records(), end]), name)

    @property
    def last_step(self) -> float:
        return max(self.losses, default=-math.inf)

    @property
    def total_seconds(self) -> float:
        return max(self.seconds.values(), default=-math.inf)

    def level_at(self, last: float) -> tuple[float, float]:
        """The mean loss up to a step, over the last tenth of what both runs have."""
        before = [loss for step, loss in self.losses.items() if step <= last]
        return _level(before)

    def level_after(self, seconds: float) -> tuple[float, float]:
        before = [self.losses[step] for step, time in self.seconds.items() if time <= seconds]
        return _level(before)

    def points(self, edges: Sequence[float]) -> Iterable[Row]:
        """Mean losses over parts."""
        for low, high in itertools.pairwise(edges):
            inside = [(step, loss) for step, loss in self.losses.items() if low <= step < high and math.isfinite(loss)]
            if inside:
                times = [self.seconds[step] for step, _ in inside if step in self.seconds]
                middle = fmean(step for step, _ in inside)
                mean = fmean(loss for _, loss in inside)
                yield {"run": self.name, "step": middle, "seconds": fmean(times) if times else None, "loss": mean}

    def row(self, level: tuple[float, float]) -> Row:
        """What befell it."""
        ratios = [look["ratio"] for look in self.log.looks if _is_number(look.get("ratio")) and look.get("why") != "spike"]
        finite = [(loss, step) for step, loss in self.losses.items() if math.isfinite(loss)]
        best, at = min(finite, default=(math.nan, None))
        unsettled = [spike for spike in self.log.spikes if spike.get("end") is None or spike.get("aftermath") in _HARM]
        return {
            "run": self.name,
            "loss": level[0],
            "error": level[1],
            "steps": len(self.losses),
            "seconds": self.total_seconds if self.seconds else None,
            "best": best,
            "best_step": at,
            "rate": self.steps[-1].get("rate") if self.steps else None,
            "ratio": median(ratios) if ratios else None,
            "spikes": len(self.log.spikes),
            "not_recovered": len(unsettled),
            "alerts": ", ".join(f"{alert.get('alert')} at step {alert['step']}" for alert in self.log.alerts),
            "verdict": str((self.log.end or {}).get("verdict") or ""),
        }


_HARM = ("did not recover", "died")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _seconds(log: MonitorLog, steps: Sequence[Record]) -> dict[float, float]:
    """Seconds of training at each step; of older logs in proportion to their total, where they have one."""
    if steps and all(_is_number(row.get("seconds")) for row in steps):
        return {row["step"]: float(row["seconds"]) for row in steps}
    end = log.end or {}
    total, monitor = end.get("seconds"), end.get("monitor_seconds", 0.0)
    if not steps or not isinstance(total, int | float) or not isinstance(monitor, int | float):
        return {}
    return {row["step"]: (total - monitor) * (i + 1) / len(steps) for i, row in enumerate(steps)}


def _level(losses: Sequence[float]) -> tuple[float, float]:
    """The mean of the last tenth, at least of a few."""
    return mean_with_error(losses[-max(LAST_STEPS, int(LAST * len(losses))) :]) if losses else (math.nan, math.inf)


def _ahead(first: _Run, second: _Run, levels: Sequence[tuple[float, float]]) -> tuple[str, float, float]:
    """Who is ahead, by how much, and the error of that; a loss that is not finite is behind every other."""
    (a, error_a), (b, error_b) = levels
    if math.isfinite(a) != math.isfinite(b):
        return (first.name if math.isfinite(a) else second.name), b - a, math.inf
    difference, error = b - a, math.hypot(error_a, error_b)
    clear = abs(difference) > AHEAD * error
    return (first.name if difference > 0 else second.name) if clear and difference else "", difference, error


def _time_fields(first: _Run, second: _Run, levels: Sequence[tuple[float, float]], seconds: float) -> dict[str, Any]:
    if not math.isfinite(seconds):
        return {"ahead_in_time": "", "at_seconds": None, "time_difference": math.nan, "time_error": math.inf}
    name, difference, error = _ahead(first, second, levels)
    return {"ahead_in_time": name, "at_seconds": seconds, "time_difference": difference, "time_error": error}


def _parts(first: _Run, second: _Run) -> list[float]:
    """Edges of parts that cover the steps of both runs."""
    steps = [*first.losses, *second.losses]
    if not steps:
        return []
    low, high = min(steps), max(steps) + 1
    parts = max(1, min(PARTS, int((high - low) // PART_STEPS)))
    return [low + (high - low) * i / parts for i in range(parts + 1)]


def _parting(first: _Run, second: _Run) -> int | None:
    """The first step of the part from which on one run is always clearly above the other."""
    edges, found = _parts(first, second), None
    last = min(first.last_step, second.last_step)
    side = 0.0
    for low, high in itertools.pairwise(edges):
        inside = [[loss for step, loss in run.losses.items() if low <= step < high and step <= last] for run in (first, second)]
        if min(map(len, inside)) < 2:
            continue
        difference, clear = fmean(inside[1]) - fmean(inside[0]), True
        if math.isfinite(difference):
            error = math.hypot(*(stdev(losses) / math.sqrt(len(losses)) for losses in inside))
            clear = abs(difference) > PARTED * error
        now = math.copysign(1.0, difference) if clear else 0.0
        if not clear:
            found = None
        elif found is None or now != side:
            found = math.ceil(low)
        side = now
    return found


def _same_until(first: _Run, second: _Run) -> int | None:
    common = sorted(first.losses.keys() & second.losses.keys())
    same = None
    for step in common:
        if first.losses[step] != second.losses[step]:
            break
        same = step
    return None if same is None else int(same)


def _with_error(value: float, error: float) -> str:
    return number(value, error) if math.isfinite(error) and error > 1e-4 * abs(value) else f"{value:.4g}"


def _about(row: Row) -> str:
    """A run in one sentence: its rate against the critical one, its spikes and alerts."""
    rate = "" if row["ratio"] is None else f"learning rate {row['ratio']:.2g} times critical, "
    spikes = plural(row["spikes"], "spike")
    spikes += f" ({row['not_recovered']} not recovered)" if row["not_recovered"] else ""
    return f"{row['run']}: {rate}{spikes}, {row['alerts'] or 'no alerts'}."
