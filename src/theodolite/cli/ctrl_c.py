"""Ctrl-C ends a command with exit code 130 and one line that says what is left, whatever it meets."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from theodolite.cli import end
from theodolite.interrupts import HandledBy, press_again, unbroken_context


class Interrupted(SystemExit):
    """The end of a command that has said its one line, here or, without a `sentence`, before."""

    def __init__(self, sentence: str = "") -> None:
        super().__init__(130)
        if not sentence:
            return
        with suppress(OSError, ValueError):  # nobody listens
            sys.stderr.write(f"{sentence}\n")


@contextmanager
def exit_when_interrupted(sentence: str) -> Iterator[None]:
    """Ctrl-C ends the command with exit code 130 and a sentence on what was kept."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(sentence) from None


@unbroken_context
def ctrl_c_exits(*, own_process: bool = False) -> Iterator[Callable[[], bool]]:
    """Whatever Ctrl-C meets inside, `SystemExit(130)` comes out; yields a function that says whether it came.

    Libraries turn an interruption into errors of their own, so the signal itself is remembered. Some drop one that comes while
    they are imported: a command that has its `own_process` ends it there. One that falls into a callback, whose exceptions Python
    only reports, is sent again. A command that ends well all the same has ended well.
    """
    came = threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        came.set()
        if own_process and _importing(frame):
            _flush()
            end(number, frame)
        raise KeyboardInterrupt

    def report(lost: Any) -> None:
        if isinstance(lost.exc_value, KeyboardInterrupt):
            press_again()
        else:
            reporter(lost)

    reporter = sys.unraisablehook
    try:
        sys.unraisablehook = report
        with HandledBy(interrupt):
            yield came.is_set
    except BaseException as error:
        # Only our own end has said its line: typer makes a bare 130 of an interruption that nobody has caught.
        done = isinstance(error, Interrupted) or (isinstance(error, SystemExit) and error.code in (None, 0))
        if isinstance(error, KeyboardInterrupt) or (came.is_set() and not done):
            raise Interrupted("Interrupted.") from None
        raise
    finally:
        sys.unraisablehook = reporter
        _flush()  # the end of Python may be cut short


def _importing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


def _flush() -> None:
    with suppress(OSError, ValueError, RuntimeError):
        sys.stdout.flush()
