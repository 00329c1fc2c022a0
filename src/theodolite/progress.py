"""Progress of long work: a bar on a terminal, silence in a pipe; and when it has to end."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from theodolite.errors import OutOfTimeError
from theodolite.interrupts import unbroken_context

if TYPE_CHECKING:
    from rich.progress import Progress

Advance = Callable[[int], None]
Stage = Callable[[str], None]


def _bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True, force_terminal=True), transient=True)


@unbroken_context
def counting(title: str, *, progress: bool | None, total: int | None = None) -> Iterator[Advance]:
    """Yield a function that counts finished units; None shows the bar on a terminal only."""
    if not (sys.stderr.isatty() if progress is None else progress):
        yield lambda units: None
        return
    with _bar() as bar:
        task = bar.add_task(title, total=total)
        yield lambda units: bar.advance(task, units)


class TimeLimit:
    """When work has to end: `at` is a reading of `time.perf_counter`, and may be moved while it runs."""

    def __init__(self, at: float = math.inf) -> None:
        self.at = at

    def check(self) -> None:
        """Raise `OutOfTimeError` where the time is over."""
        if time.perf_counter() > self.at:
            raise OutOfTimeError("it was stopped because its time was over")


@unbroken_context
def stages(total: int, *, progress: bool | Stage | None) -> Iterator[Stage]:
    """Yield a function that names the stage now begun; the bar counts those before it. A function is given the names instead."""
    if callable(progress):
        yield progress
        return
    if not (sys.stderr.isatty() if progress is None else progress):
        yield lambda name: None
        return
    with _bar() as bar:
        task = bar.add_task("looking around", total=total)
        begun = 0

        def begin(name: str) -> None:
            nonlocal begun
            bar.update(task, description=name, completed=begun)
            begun += 1

        yield begin
