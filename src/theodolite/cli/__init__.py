"""L11: the command line. Imports happen inside commands, so that `--help` is instant.

Ctrl-C at any moment ends the command with exit code 130, and never in a traceback.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `theodolite`; without arguments those of the process."""
    with ctrl_c_exits(for_good=arguments is None):
        from theodolite.cli.app import run

        run(arguments)


@contextmanager
def ctrl_c_exits(*, for_good: bool) -> Iterator[None]:
    """Whatever Ctrl-C meets inside, `SystemExit(130)` comes out.

    Libraries turn an interruption into errors of their own, so the signal itself is remembered. One that falls into a callback,
    whose exceptions Python only reports, is sent again. A command that ends well all the same has ended well. With `for_good`
    nothing comes after but the end of Python, which Ctrl-C then cuts short.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    came = threading.Event()

    def interrupt(number: int, frame: object) -> None:
        came.set()
        raise KeyboardInterrupt

    def report(lost: Any) -> None:
        if isinstance(lost.exc_value, KeyboardInterrupt):
            threading.Timer(0.02, _thread.interrupt_main).start()
        else:
            reporter(lost)

    handler, reporter = signal.getsignal(signal.SIGINT), sys.unraisablehook
    try:
        sys.unraisablehook = report
        signal.signal(signal.SIGINT, interrupt)
        yield
    except BaseException as error:
        well = isinstance(error, SystemExit) and not error.code
        if isinstance(error, KeyboardInterrupt) or (came.is_set() and not well):
            raise SystemExit(130) from None
        raise
    finally:
        signal.signal(signal.SIGINT, _end_now if for_good else handler)
        sys.unraisablehook = reporter


def _end_now(number: int, frame: object) -> None:
    os._exit(130)
