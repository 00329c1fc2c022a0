"""`theodolite data`: which data sets there are, where they lie, and how to get them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from theodolite.cli.terminal import say

app = typer.Typer(help="List, fetch and find data sets.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="A name from `theodolite data list`.")]
Folder = Annotated[Path | None, typer.Option(help="Instead of $THEODOLITE_DATA or the cache folder.")]


@app.command("list")
def list_() -> None:
    """List the data sets and say which are here."""
    from theodolite import data

    rows = data.listing()
    width = max(len(row.name) for row in rows)
    for row in rows:
        state = "here" if row.found else "can be fetched" if row.fetchable else "bring your own"
        say(f"{row.name:<{width}}  {state:<14}  {row.title} ({row.terms})")


@app.command()
def fetch(
    name: Name,
    folder: Folder = None,
    base_url: Annotated[str | None, typer.Option(help="Another server with the same files.")] = None,
) -> None:
    """Download a data set, check its sum, and put it in place whole."""
    from theodolite import data

    for file in data.fetch(name, folder=folder, base_url=base_url):
        say(f"{file.path}: {'fetched' if file.downloaded else 'already here and right'}")


@app.command()
def where(name: Name, folder: Folder = None) -> None:
    """Say where a data set lies."""
    from theodolite import data

    say(data.where(name, folder=folder).origin)
