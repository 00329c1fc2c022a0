"""L11: the command line. Imports happen inside commands, so that `--help` is instant.

Ctrl-C at any moment ends the command with exit code 130 and one line, and never in a traceback.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # built in, as all is that runs before Ctrl-C is seen to
import atexit
import os

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `theodolite`; without arguments those of the process."""
    if arguments is None:
        end_at_once()
    from theodolite.cli.ctrl_c import ctrl_c_exits

    with ctrl_c_exits(own_process=arguments is None) as interrupted:
        from theodolite.cli.app import run

        run(arguments, interrupted)


def end_at_once() -> None:
    """Let Ctrl-C end the process where there is nothing to put in order: while Python imports, and while it ends."""
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, end)
        # Python takes its handlers back last of all, and a signal after that would kill a process that has done its work.
        atexit.register(_signal.signal, _signal.SIGINT, _signal.SIG_IGN)


def end(number: int, frame: object) -> None:
    """A handler of SIGINT that needs nothing more of Python."""
    try:
        os.write(2, b"Interrupted.\n")
    finally:
        os._exit(130)
