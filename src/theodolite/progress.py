"""Progress of long work: a bar on a terminal, silence in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

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


@unbroken_context
def stages(total: int, *, progress: bool | None) -> Iterator[Stage]:
    """Yield a function that names the stage now begun; the bar counts those before it."""
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
