"""Ctrl-C at any moment: exit code 130, never a traceback."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import weakref

import pytest

from theodolite.cli import ctrl_c_exits


@pytest.fixture(autouse=True)
def hears_ctrl_c():
    """Those who run in the background of a script inherit that it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def as_it_comes() -> None:
    press()


def turned_into_another_error() -> None:
    try:
        press()
    except KeyboardInterrupt as error:
        raise ImportError("could not be loaded") from error


def turned_into_a_failure() -> None:
    try:
        press()
    except KeyboardInterrupt:
        raise SystemExit(1) from None


def taken_for_the_end() -> None:
    try:
        press()
    except KeyboardInterrupt:
        raise SystemExit(0) from None


def lost_in_a_callback() -> None:
    class Thing:
        pass

    thing = Thing()
    watched = weakref.ref(thing, lambda reference: press())
    del thing
    for _ in range(500):  # it is sent again
        time.sleep(0.01)
    del watched


@pytest.mark.parametrize("meets", [as_it_comes, turned_into_another_error, turned_into_a_failure, lost_in_a_callback])
def test_whatever_it_meets_the_end_is_130(meets, capsys):
    with pytest.raises(SystemExit) as ended, ctrl_c_exits(for_good=False):
        meets()
    assert ended.value.code == 130
    assert "Traceback" not in capsys.readouterr().err


def test_an_end_of_its_own_is_kept():
    """A command that Ctrl-C ends as it should has ended well; what was not interrupted is none of our business."""
    with pytest.raises(SystemExit) as ended, ctrl_c_exits(for_good=False):
        taken_for_the_end()
    assert not ended.value.code
    with pytest.raises(ZeroDivisionError), ctrl_c_exits(for_good=False):
        _ = 1 / 0


PROGRAM = "import sys, theodolite.cli; print('ready', flush=True); theodolite.cli.main()"


def interrupted_after(seconds: float, folder: object) -> tuple[int, str]:
    command = [sys.executable, "-c", PROGRAM, "survey", "--only", "batches", "--only", "rate"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": folder}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    return process.returncode, errors


@pytest.mark.parametrize("count", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_at_any_moment(tmp_path, count):
    chance = random.Random(count)
    ends = {}
    for i in range(count):
        seconds = 6.0 * (i + chance.random()) / count
        ends[seconds] = interrupted_after(seconds, tmp_path)
    odd = {at: end for at, end in ends.items() if end[0] not in (0, 130) or "Traceback" in end[1]}
    assert odd == {}
    assert 130 in [code for code, _ in ends.values()]
