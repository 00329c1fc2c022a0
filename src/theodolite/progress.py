"""Progress of long work: a bar on a terminal, silence in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], None]


@contextmanager
def counting(title: str, *, progress: bool | None, total: int | None = None) -> Iterator[Advance]:
    """Yield a function that counts finished units; None shows the bar on a terminal only."""
    if not (sys.stderr.isatty() if progress is None else progress):
        yield lambda units: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True, force_terminal=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda units: bar.advance(task, units)
