"""What several commands share: options, checks of what was given, and output for people and machines."""

from __future__ import annotations

import json
import math
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from theodolite.arguments import at_least
from theodolite.interrupts import unbroken_context
from theodolite.text import printable

Model = Annotated[str, typer.Option(help="A built-in NAME, module:attribute, or hf:DIRECTORY.")]
Data = Annotated[str | None, typer.Option(help="A data set's NAME, module:attribute, or a file.")]
Loss = Annotated[str | None, typer.Option(help="cross-entropy, mse, bce, l1 or module:attribute.")]
Samples = Annotated[int | None, typer.Option(help="Measure on this many samples.")]
Seed = Annotated[int, typer.Option(help="Of everything random.")]
EngineName = Annotated[str, typer.Option(help="serial, joblib (processes) or ray (a cluster).")]
Address = Annotated[str | None, typer.Option(help="A cluster for ray: auto or ray://HOST:PORT; default: started here.")]
Workers = Annotated[int | None, typer.Option(help="Worker processes; default: the cores, here or of the cluster.")]
Threads = Annotated[int, typer.Option(help="Threads per job.")]

_PAGE = 1 << 20  # bytes of a page


def whole_numbers(option: str, text: str, *, least: int, example: str) -> tuple[int, ...]:
    """Whole numbers with commas between them, in order, none twice.

    >>> whole_numbers("--sizes", "800,200,400", least=1, example="200,400,800")
    (200, 400, 800)
    """
    try:
        found = tuple(sorted(int(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"{option} must be whole numbers with commas between them, as {example}. Got {text!r}.") from None
    if found[0] < least:
        raise ValueError(f"{option} must be at least {least}. Got {found[0]}.")
    if len(set(found)) < len(found):
        raise ValueError(f"{option} must be different numbers. Got {text!r}.")
    return found


def check_counts(least: int = 1, **options: int | None) -> None:
    """Refuse options below `least`; None was not given."""
    at_least(least, **{f"--{name.replace('_', '-')}": value for name, value in options.items() if value is not None})


def check_folder(out: Path) -> None:
    """Refuse a folder that cannot be written, before anything is measured: a page's worth is tried there and taken away."""
    place = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not place.is_dir():
        raise ValueError(f"--out must be a folder. {place} is a file.")
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(bytes(_PAGE))
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written: {error.strerror or error}. Name another folder.") from error


@unbroken_context
def module_search_restored() -> Iterator[None]:
    """Folders that a command makes importable are forgotten when it ends."""
    before = list(sys.path)
    try:
        yield
    finally:
        sys.path[:] = before


def make_importable(folder: Path) -> None:
    """Let modules be found in a folder too, until the command ends: last of all, so that no file there hides one of Python's."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def with_notes(facts: Mapping[str, str], notes: Iterable[str]) -> dict[str, str]:
    """The facts of a page, with what the user should know as the last of them."""
    joined = "; ".join(notes)
    return {**facts, **({"notes": joined} if joined else {})}


def say(text: object, *, err: bool = False, head: str = "") -> None:
    """Print a line for people: every command does it here, so that names from strangers' files stay text; `head` is our own."""
    typer.echo(head + printable(text), err=err)


@unbroken_context
def printable_warnings() -> Iterator[None]:
    """Warnings too quote names."""
    before = warnings.formatwarning
    try:
        warnings.formatwarning = lambda *parts, **more: printable(before(*parts, **more))
        yield
    finally:
        warnings.formatwarning = before


def print_json(value: Any) -> None:
    """What a command found, for machines; NaN and infinity, which JSON does not know, become null."""
    typer.echo(json.dumps(plain(value), indent=1, default=str, allow_nan=False))


def show(as_json: bool, everything: Mapping[str, Any], *lines: object) -> None:
    """What a command found: everything for machines, or these lines for people."""
    if as_json:
        print_json(everything)
        return
    for line in lines:
        say(line)


def plain(value: Any) -> Any:
    """The same without NaN and infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value
