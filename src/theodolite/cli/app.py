"""The command `theodolite`: each of its commands is a thin call of a Python function.

Exit codes: 0 done, 1 a claim, a job or a survey's check failed, 2 wrong usage or bad input, 130 interrupted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from theodolite.cli.commands import data, experiments
from theodolite.cli.commands.anchors import anchors
from theodolite.cli.commands.bound import bound
from theodolite.cli.commands.checkpoints import compare, path
from theodolite.cli.commands.dictionary import dictionary
from theodolite.cli.commands.grow import grow
from theodolite.cli.commands.stability import stability
from theodolite.cli.commands.survey import survey
from theodolite.cli.commands.tune import tune
from theodolite.cli.commands.watch import watch
from theodolite.cli.terminal import module_search_restored, printable_warnings, say
from theodolite.errors import TheodoliteError

#: What the bare command shows.
DOORS = """Theodolite measures how a neural network trains. Two doors:

  theodolite survey                                   is it learning, what is wrong, what to change? (a small example)
  theodolite survey --model mymodule:build --data mymodule:data --lr 0.1        the same of your own model

  theodolite list                                     figures and tables of the papers, each with claims that can fail
  theodolite reproduce catapult/figure-3.3            run one, judge it, write a page

  theodolite --help lists every command, theodolite --install-completion completes them in your shell."""

app = typer.Typer(
    help="Survey how a neural network trains, and reproduce the papers behind it.",
    invoke_without_command=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
_COMMANDS: tuple[Callable[..., None], ...] = (survey, compare, path, stability, bound, tune, grow, dictionary, anchors, watch)
_EXPERIMENTS: tuple[Callable[..., None], ...] = (experiments.list_, experiments.reproduce, experiments.report, experiments.info)
for command in (*_COMMANDS, *_EXPERIMENTS):
    app.command(command.__name__.strip("_"))(command)
app.add_typer(data.app, name="data")


@app.callback()
def doors(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False
) -> None:
    """Survey how a neural network trains, and reproduce the papers behind it."""
    if version:
        from theodolite import __version__

        say(f"theodolite {__version__}")
        raise typer.Exit(0)
    if context.invoked_subcommand is None:
        say(DOORS)
        raise typer.Exit(0)


def run(arguments: list[str] | None, interrupted: Callable[[], bool]) -> None:
    """Bad input becomes one line on stderr and exit code 2; what an interruption was turned into is left to the caller."""
    try:
        with module_search_restored(), printable_warnings():
            app(args=arguments)
    except Exception as error:
        line = _line(error)
        if line is None or interrupted():
            raise
        say(f"error: {line}", err=True)
        raise SystemExit(2) from None


def _line(error: Exception) -> str | None:
    """What a user can act on, in one line; None for an error of ours, which shows where it happened."""
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # the latter is a RuntimeError of torch's
        return f"There is not enough memory for this ({str(error).partition('DefaultCPUAllocator: ')[2] or error})."
    if isinstance(error, TheodoliteError):
        return str(getattr(error, "strerror", None) or error)
    return str(error) if isinstance(error, ValueError | OSError) else None
