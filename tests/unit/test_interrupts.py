"""Contexts that Ctrl-C cannot break off: when the user's handler is called, and what it finds."""

from __future__ import annotations

import gc
import signal
import threading
import time
from contextlib import contextmanager, suppress

import pytest

from theodolite.interrupts import (
    AT_MOST,
    LATER,
    HandledBy,
    acquire,
    called_within,
    unbroken,
    unbroken_call,
    unbroken_context,
)


@pytest.fixture(autouse=True)
def handler():
    """The user's handler is Python's own, and is there again afterwards."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def press_and_note(log) -> None:
    press()
    log.append("too late")


@unbroken_context
def turned(log, entering=None, leaving=None):
    log.append("on")
    try:
        if entering:
            entering()
        yield log
    finally:
        if leaving:
            leaving()
        log.append("off")


def test_an_interruption_while_entering_leaves_again_and_the_block_is_not_run():
    log = []
    with pytest.raises(KeyboardInterrupt), turned(log, entering=press):
        log.append("inside")
    assert log == ["on", "off"]


def test_an_interruption_while_leaving_comes_when_all_is_left():
    log = []
    with pytest.raises(KeyboardInterrupt), turned(log, leaving=press):
        log.append("inside")
    assert log == ["on", "inside", "off"]


def test_inside_the_block_it_comes_at_once():
    log = []
    with pytest.raises(KeyboardInterrupt), turned(log):
        press_and_note(log)
    assert log == ["on", "off"]


@pytest.mark.parametrize("where", ["entering", "leaving"])
def test_the_outermost_of_several_delivers_it_once(where):
    log, came = [], []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(list(log)))

    @unbroken_context
    def both():
        with turned(log, **{where: press}), turned(log):
            yield

    with both():
        log.append("inside")
    assert log == ["on", "on", "inside", "off", "off"]
    assert came == [["on", "on"] if where == "entering" else log]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_handler_that_does_not_raise_changes_nothing():
    log, came = [], []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame is not None)))
    with turned(log, entering=press, leaving=press):
        press()
    assert log == ["on", "off"]
    assert came == [(signal.SIGINT, True)] * 3
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_the_users_handler_can_be_interrupted_itself():
    """Its own code is no part of what must not be broken off, also where it is called late."""
    came = []

    def users(number, frame):
        came.append(number)
        if len(came) == 1:
            press()
            came.append("not reached")
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, users)
    with pytest.raises(KeyboardInterrupt), turned([], leaving=press):
        pass
    assert came == [signal.SIGINT] * 2
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_errors_of_the_block_and_of_the_context_come_through():
    log = []
    with pytest.raises(ZeroDivisionError) as raised, turned(log):
        _ = 1 / 0
    assert len(raised.traceback) == 1  # without the frames of the context

    def fails():
        raise OSError

    with pytest.raises(OSError, match=r"^$"), turned(log, entering=fails):
        log.append("inside")
    with pytest.raises(OSError, match=r"^$"), turned(log, leaving=fails):
        pass
    with pytest.raises(StopIteration), turned(log):
        raise StopIteration
    assert log == ["on", "off", "on", "off", "on", "on", "off"]


def test_a_context_may_end_an_error_and_must_yield_once():
    @unbroken_context
    def forgiving():
        with suppress(ValueError):
            yield

    with forgiving():
        raise ValueError

    @unbroken_context
    def twice():
        yield
        yield

    with pytest.raises(RuntimeError, match="yields twice"), twice():
        pass


@pytest.mark.parametrize("other", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_handler_that_is_not_written_in_python_stays(other):
    before = signal.signal(signal.SIGINT, other)
    with turned([]):
        assert signal.getsignal(signal.SIGINT) is other
    assert signal.signal(signal.SIGINT, before) is other


def test_a_handler_set_inside_the_block_stays():
    def mine(number, frame):
        raise AssertionError

    with turned([]):
        signal.signal(signal.SIGINT, mine)
        with turned([]):
            assert signal.getsignal(signal.SIGINT) is not mine
        assert signal.getsignal(signal.SIGINT) is mine
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is mine


def test_other_threads_have_nothing_to_do_with_it():
    log, seen = [], []

    def work():
        with turned(log):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
    with pytest.raises(KeyboardInterrupt), turned([], leaving=lambda: (press(), work())):
        pass
    assert log == ["on", "off"] * 2


def test_contexts_that_end_out_of_order_give_the_handler_back():
    first, second = turned([]), turned([])
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    second.__exit__(None, None, None)


def test_a_context_that_nobody_left_is_left_when_it_is_collected():
    def abandoned():
        with turned(log):
            yield

    log, generator = [], abandoned()
    next(generator)
    del generator
    gc.collect()
    assert log == ["on", "off"]


# Contexts of others


class Theirs:
    """A class as torch's contexts are: broken off in `__exit__`, it stays on."""

    def __init__(self, leaving) -> None:
        self.leaving, self.on = leaving, False

    def __enter__(self):
        self.on = True

    def __exit__(self, *exception):
        self.leaving()
        self.on = False


def enter_and_wait(context, log) -> None:
    with context:
        log.append("inside")
    time.sleep(2 * AT_MOST)


def test_contexts_of_others_inside_ours_are_left_first():
    theirs = Theirs(press)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), turned([]):
        enter_and_wait(theirs, [])
    assert not theirs.on
    assert time.monotonic() - began < AT_MOST


def test_so_are_generators_of_others():
    @contextmanager
    def theirs():
        log.append("on")
        press()
        try:
            yield
        finally:
            log.append("off")

    log = []
    with pytest.raises(KeyboardInterrupt), turned([]):
        enter_and_wait(theirs(), log)
    assert log == ["on", "inside", "off"]


def test_those_that_take_long_are_interrupted():
    def long():
        press()
        time.sleep(10 * AT_MOST)

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), turned([]), Theirs(long):
        pass
    assert AT_MOST <= time.monotonic() - began < 8 * AT_MOST


def test_one_that_is_wrapped_needs_no_other_around_it():
    theirs = Theirs(press)
    with pytest.raises(KeyboardInterrupt), unbroken(theirs):
        assert theirs.on
    assert not theirs.on


def test_an_interruption_of_a_finaliser_is_not_lost():
    class Finalised:
        def __del__(self) -> None:
            press()

    def make_and_wait():
        Finalised()
        time.sleep(10 * LATER)

    with pytest.raises(KeyboardInterrupt), turned([]):
        make_and_wait()


# What else is made of it


def test_a_call_is_finished_first():
    log = []

    @unbroken_call
    def both(a, *, b):
        log.append(a)
        press()
        log.append(b)
        return "never seen"

    with pytest.raises(KeyboardInterrupt):
        both(1, b=2)
    assert log == [1, 2]
    assert unbroken_call(lambda a: a + 1)(1) == 2


def test_a_function_called_within_a_context():
    theirs = Theirs(lambda: None)

    @called_within(lambda: theirs)
    def inside(a):
        return a, theirs.on

    assert inside(3) == (3, True)
    assert not theirs.on


def test_another_handler_for_a_block():
    came = []
    with HandledBy(lambda number, frame: came.append(number)):
        press()
        with turned([], leaving=press):
            pass
    assert came == [signal.SIGINT] * 2
    with pytest.raises(KeyboardInterrupt):
        press()


def test_waiting_for_a_lock_is_interrupted():
    lock = threading.Lock()
    lock.acquire()

    @unbroken_context
    def locked():
        acquire(lock)
        try:
            yield
        finally:
            lock.release()

    began = time.monotonic()
    threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt), locked():
        pass
    assert time.monotonic() - began < 5
    lock.release()
    with locked():
        assert lock.locked()
    assert not lock.locked()
