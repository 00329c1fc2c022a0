"""L11: the command line. Imports happen inside commands, so that `--help` is instant."""

from theodolite.cli.app import main

__all__ = ["main"]
