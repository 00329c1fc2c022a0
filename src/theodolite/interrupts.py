"""Ctrl-C and global state: contexts are entered and left as a whole, or not at all.

Python runs the handler of SIGINT between two instructions. So a `KeyboardInterrupt` may break off `__enter__` after a switch was
turned, or `__exit__` before its first line, and no `try` closes these gaps. While a context of ours is open in the main thread,
therefore, a handler of ours stands in for the user's and looks at the frames of the stack on which it is called:

- where a context of ours is being entered or left, it takes note, and the user's handler is called when that has ended;
- in anybody's `__enter__` or `__exit__` (torch's own contexts have the same gaps) it comes back a moment later, and so in
  `__del__`, where Python drops exceptions;
- anywhere else, in the computation inside a `with` block above all, the user's handler is called at once.

Frames need no mark that would itself have to be set and removed in time. Signals reach the main thread only: in others all this
does nothing, and nothing interrupts there.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the module signal looks names up in enumerations, for microseconds
import _thread
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial, wraps
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")

Handler = Callable[[int, FrameType | None], Any]

SIGINT = int(_signal.SIGINT)
#: Seconds until a signal that met somebody's `__enter__` or `__exit__` comes back, and for how long it does at most.
LATER, AT_MOST = 0.002, 0.25


class UnbrokenContext(AbstractContextManager[T]):
    """A context whose `_enter` and `_leave`, which a subclass writes, are not interrupted.

    Where an interruption came in `_enter` and the user's handler raises, what was entered is left before anybody sees it.
    """

    _handler: _StandIn | None = None
    _installed = False

    def _enter(self) -> T:
        raise NotImplementedError

    def _leave(self, error: BaseException | None) -> bool:
        """Put everything back; whether the error ends here."""
        raise NotImplementedError

    def __enter__(self) -> T:
        handler = _signal.getsignal(SIGINT)
        self._handler = handler if type(handler) is _StandIn else self._install(handler)
        try:
            value = self._enter()
        except BaseException:
            self._end(sys._getframe(1))
            raise
        if self._handler is not None and self._handler.came:
            try:
                self._handler.deliver(sys._getframe(1))
            except BaseException as error:
                self.__exit__(type(error), error, error.__traceback__)
                raise
        return value

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool | None:
        try:
            return self._leave(error)
        finally:
            self._end(sys._getframe(1))

    def _install(self, users: Any) -> _StandIn | None:
        """Stand in for a handler that is written in Python; what ignores the signal or ends the process stays."""
        if not callable(users) or not _in_main_thread():
            return None
        handler, self._installed = _StandIn(users), True
        _signal.signal(SIGINT, handler)
        return handler

    def _end(self, frame: FrameType) -> None:
        """Give the user's handler its place back, and call it for what came."""
        handler, installed = self._handler, self._installed
        self._handler, self._installed = None, False
        if handler is None:
            return
        if installed and _in_main_thread() and _signal.getsignal(SIGINT) is handler:
            _signal.signal(SIGINT, handler.users)
        if handler.came:
            handler.deliver(frame)


class _StandIn:
    """The handler of SIGINT while a context of ours is open."""

    def __init__(self, users: Handler) -> None:
        self.users = users
        self.came = False  # while a context of ours was entered or left
        self._since: float | None = None  # the first time that one of others was

    def __call__(self, number: int, frame: FrameType | None) -> None:
        place = _place(frame)
        if place == "ours":
            self.came = True
        elif place == "theirs" and self._waits():
            press_again()
        else:
            self._since = None
            self.users(number, frame)

    def _waits(self) -> bool:
        now = time.monotonic()
        self._since = self._since or now
        return now - self._since < AT_MOST

    def deliver(self, frame: FrameType) -> None:
        """Call the user's handler for what came, unless a context of ours around `frame` is entered or left, which then does."""
        if _in_main_thread() and _place(frame) != "ours":
            self.let_through(frame)

    def let_through(self, frame: FrameType) -> None:
        """Call the user's handler for what came."""
        self.came = False
        self.users(SIGINT, frame)


def _place(frame: FrameType | None) -> str:
    """Whose context, if any, is entered or left in this frame or around it."""
    found = "theirs" if frame is not None and frame.f_globals.get("__name__") in _BEFORE_TRY else ""
    while frame is not None:
        code = frame.f_code
        if code in _CLOSED:
            return "ours"
        if code is _OPEN:  # the user's handler is at work
            return found
        if code.co_name in _FINISHED_FIRST:
            found = "theirs"
        frame = frame.f_back
    return found


#: Methods that are finished first: an exception in the first two leaves a context half entered, in the last it is lost.
_FINISHED_FIRST = {"__enter__", "__exit__", "__del__"}
#: Code of torch that counts a level up and then begins a `try`, outside of any context: its own frames are like `__enter__`.
_BEFORE_TRY = {"torch._vmap_internals"}
_CLOSED = {UnbrokenContext.__enter__.__code__, UnbrokenContext.__exit__.__code__}
_OPEN = _StandIn.let_through.__code__


def _in_main_thread() -> bool:
    return _thread.get_ident() == threading.main_thread().ident


def press_again() -> None:
    """Send this process SIGINT a moment later; a handler may call it."""
    _thread.start_new_thread(_press_later, ())  # threading.Thread takes locks, which the interrupted code may hold


def _press_later() -> None:
    time.sleep(LATER)
    if hasattr(_signal, "pthread_kill"):  # a real signal wakes a main thread that waits
        _signal.pthread_kill(threading.main_thread().ident, SIGINT)
    else:
        _thread.interrupt_main()


# What others use


def unbroken_context(function: Callable[P, Iterator[T]]) -> Callable[P, AbstractContextManager[T]]:
    """`contextlib.contextmanager` for what turns a switch, sets a hook or replaces something: entered and left as a whole.

    What stands before and after `yield` should be short, since nothing interrupts it.
    """

    @wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T]:
        return _Generated(function(*args, **kwargs))

    return make


class _Generated(UnbrokenContext[T]):
    def __init__(self, generator: Iterator[T]) -> None:
        self._generator = cast(Any, generator)

    def _enter(self) -> T:
        return cast(T, next(self._generator))

    def _leave(self, error: BaseException | None) -> bool:
        trace = None if error is None else error.__traceback__
        try:
            if error is None:
                next(self._generator)
            else:
                self._generator.throw(error)
        except StopIteration as stop:
            return error is not None and stop is not error
        except BaseException as raised:
            # Python turns a StopIteration that goes through a generator into a RuntimeError.
            if error is None or not (raised is error or (isinstance(error, StopIteration) and raised.__cause__ is error)):
                raise
            error.__traceback__ = trace  # without the frames in here
            return False
        raise RuntimeError(f"{self._generator.__qualname__} yields twice.")


def unbroken(context: AbstractContextManager[T, Any]) -> AbstractContextManager[T]:
    """Any context, such as `torch.no_grad()`, entered and left as a whole; for those that no context of ours surrounds."""
    return _Wrapped(context)


class _Wrapped(UnbrokenContext[T]):
    def __init__(self, context: AbstractContextManager[T, Any]) -> None:
        self._context = context

    def _enter(self) -> T:
        return self._context.__enter__()

    def _leave(self, error: BaseException | None) -> bool:
        trace = None if error is None else error.__traceback__
        return bool(self._context.__exit__(None if error is None else type(error), error, trace))


def called_within(make: Callable[[], AbstractContextManager[Any, Any]]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Each call of the function runs inside a context, such as `torch.no_grad`, that is entered and left as a whole."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            with _Wrapped(make()):
                return function(*args, **kwargs)

        return call

    return decorate


def unbroken_call(function: Callable[P, T]) -> Callable[P, T]:
    """A function that is not interrupted, such as one that sets hooks and notes them; it should be short."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with _Called(partial(function, *args, **kwargs)) as value:
            return value

    return call


class _Called(UnbrokenContext[T]):
    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function

    def _enter(self) -> T:
        return self._function()

    def _leave(self, error: BaseException | None) -> bool:
        return False


class HandledBy(UnbrokenContext[None]):
    """Ctrl-C calls this function inside the block instead of the user's handler, if that is one that Python calls."""

    def __init__(self, function: Handler) -> None:
        self._function, self._before = function, function

    def _enter(self) -> None:
        if self._handler is not None:
            self._before, self._handler.users = self._handler.users, self._function

    def _leave(self, error: BaseException | None) -> bool:
        if self._handler is not None:
            self._handler.users = self._before
        return False


def acquire(lock: Any) -> None:
    """Take a lock while a context is entered; waiting for it can be interrupted."""
    while not lock.acquire(timeout=0.05):
        handler = _signal.getsignal(SIGINT)
        if type(handler) is _StandIn and handler.came and _in_main_thread():
            handler.let_through(sys._getframe())
