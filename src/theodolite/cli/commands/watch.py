"""`theodolite watch`: the live page of a training that a monitor logs, or of two side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from theodolite.cli.terminal import say


def watch(
    run: Annotated[Path, typer.Argument(help="The log of a monitor, or the folder that holds it; it may come later.")],
    other: Annotated[Path | None, typer.Argument(metavar="[RUN2]", help="A second run, drawn beside the first.")] = None,
    port: Annotated[int, typer.Option(help="On 127.0.0.1; 0 takes a free one.")] = 0,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Show the page in the browser.")] = False,
    once: Annotated[Path | None, typer.Option(help="Write the page to this file instead and end.")] = None,
) -> None:
    """Watch a training, or two side by side: a page that redraws loss, alerts, spikes and curvature while they are logged."""
    from theodolite.report.watch import WatchServer, write_watch

    if once is not None:
        page = write_watch(run, once, other=other)
        say(f"The page is {page}")
        if open_page:
            typer.launch(str(page))
        return
    with WatchServer(run, port, other=other) as server:
        paths = [server.path] if server.other is None else [server.path, server.other]
        for path in paths:
            if not path.exists():
                say(f"Waiting for {path}: the page fills as soon as a monitor writes it.")
        say(f"Watching {' and '.join(map(str, paths))} at {server.address} (Ctrl-C ends the page, not the training)")
        if open_page:
            typer.launch(server.address)
        try:
            server.serve()
        except KeyboardInterrupt:
            both = f"{run}" if other is None else f"{run} {other}"
            say(f"Ended. `theodolite watch {both} --once page.html` keeps the page.", err=True)
