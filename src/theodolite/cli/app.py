"""The command `theodolite`: each of its commands is a thin call of a Python function.

Exit codes: 0 done, 1 a claim, a job or a survey's check failed, 2 wrong usage or bad input, 130 interrupted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import typer

from theodolite.cli.commands import data, experiments
from theodolite.cli.commands.anchors import anchors
from theodolite.cli.commands.checkpoints import compare, path
from theodolite.cli.commands.dictionary import dictionary
from theodolite.cli.commands.stability import stability
from theodolite.cli.commands.survey import survey
from theodolite.cli.commands.watch import watch
from theodolite.cli.terminal import make_importable, module_search_restored
from theodolite.errors import TheodoliteError

app = typer.Typer(
    help="Survey how a neural network trains, and reproduce the papers behind it.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
_COMMANDS: tuple[Callable[..., None], ...] = (survey, compare, path, stability, dictionary, anchors, watch)
_EXPERIMENTS: tuple[Callable[..., None], ...] = (experiments.list_, experiments.reproduce, experiments.report, experiments.info)
for command in (*_COMMANDS, *_EXPERIMENTS):
    app.command(command.__name__.strip("_"))(command)
app.add_typer(data.app, name="data")


def main(arguments: list[str] | None = None) -> None:
    """Entry point: bad input becomes one line on stderr and exit code 2."""
    try:
        with module_search_restored():
            make_importable(Path.cwd())  # for module:Class
            app(args=arguments)
    except (TheodoliteError, ValueError, OSError) as error:
        own = isinstance(error, TheodoliteError) and getattr(error, "strerror", None)
        typer.echo(f"error: {own or error}", err=True)
        raise SystemExit(2) from None
