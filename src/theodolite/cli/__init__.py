"""L11: the command line. Imports happen inside commands, so that `--help` is instant."""

from __future__ import annotations

from theodolite.cli.interrupts import ctrl_c_exits

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `theodolite`; without arguments those of the process."""
    with ctrl_c_exits(for_good=arguments is None):
        from theodolite.cli.app import run

        run(arguments)
