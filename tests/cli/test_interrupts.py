"""Ctrl-C at any moment: exit code 130, one line, never a traceback."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import weakref

import pytest

from theodolite.cli import main
from theodolite.cli.ctrl_c import ctrl_c_exits, exit_when_interrupted
from theodolite.instruments import Survey


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


def said_by_the_command() -> None:
    with exit_when_interrupted("Interrupted."):
        press()


def turned_into_130() -> None:
    """As typer does: a command that ends with 130 has not said why for that."""
    try:
        press()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


MEETS = [
    as_it_comes, turned_into_another_error, turned_into_a_failure, turned_into_130, lost_in_a_callback, said_by_the_command,
]  # fmt: skip


@pytest.mark.parametrize("meets", MEETS)
def test_whatever_it_meets_the_end_is_130(meets, capsys):
    with pytest.raises(SystemExit) as ended, ctrl_c_exits():
        meets()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "Interrupted.\n"


def test_an_end_of_its_own_is_kept(capsys):
    """A command that Ctrl-C ends as it should has ended well; what was not interrupted is none of our business."""
    with pytest.raises(SystemExit) as ended, ctrl_c_exits():
        taken_for_the_end()
    assert not ended.value.code
    with pytest.raises(ZeroDivisionError), ctrl_c_exits():
        _ = 1 / 0
    assert capsys.readouterr().err == ""


def test_what_was_finished_is_shown_after_one_line(tmp_path, monkeypatch, capsys):
    """The signal comes while an instrument works."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("theodolite.instruments.rates.rate.Rate.run", lambda *args, **more: press())
    with pytest.raises(SystemExit) as ended:
        main([*SURVEY])
    said = capsys.readouterr()
    assert ended.value.code == 130
    assert [line for line in said.err.splitlines() if "Interrupted" in line] == ["Interrupted; what was finished follows."]
    assert "The page is" in said.out


def test_what_ran_before_the_rest_was_timed_is_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("theodolite.instruments.survey_run.price_steps", lambda *args, **more: press())
    with pytest.raises(SystemExit) as ended:
        main([*SURVEY])
    said = capsys.readouterr()
    assert ended.value.code == 130
    assert "Interrupted; what was finished follows." in said.err.splitlines()
    assert "1 instrument in" in said.out


@pytest.mark.parametrize("meets", ["open_context", "_facts"])
def test_a_survey_that_has_yet_to_begin_or_has_just_ended_says_one_line(meets, tmp_path, monkeypatch, capsys):
    """Between the instruments nothing of ours catches the signal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"theodolite.instruments.survey_run.{meets}", lambda *args, **more: press())
    with pytest.raises(SystemExit) as ended:
        main(["survey", "--only", "batches"])
    assert ended.value.code == 130
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Interrupted")]
    assert said == ["Interrupted."]


def test_findings_are_there_though_the_page_is_not(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Survey, "to_html", lambda *args: press())
    with pytest.raises(SystemExit) as ended:
        main(["survey", "--only", "batches"])
    said = capsys.readouterr()
    assert ended.value.code == 130
    assert said.err.endswith("Interrupted; the page was not written.\n")
    assert "Survey of" in said.out
    assert "1 instrument in" in said.out


#: The script, struck at its import number COUNT; as installed, it imports what it calls first.
STRUCK_IMPORTING = """
import signal, sys
left = int(sys.argv.pop(1))
def strike(event, arguments):
    global left
    if event == "import" and left >= 0:
        left -= 1
        if left < 0:
            signal.raise_signal(signal.SIGINT)
from theodolite.cli.script import main
sys.addaudithook(strike)
main()
"""
SURVEY = ("survey", "--only", "batches", "--only", "rate")


def start(program: str, *arguments: str, folder: object) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": folder}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", program, *arguments], env=environment, start_new_session=True, **pipes)


FEW = [0, 1, 40, 700]
MANY = [*range(0, 40, 3), *range(40, 400, 15), *range(400, 2600, 100)]


@pytest.mark.parametrize("counts", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_during_imports(tmp_path, counts):
    ends = {}
    for count in counts:
        process = start(STRUCK_IMPORTING, str(count), *SURVEY, folder=tmp_path)
        _, errors = process.communicate(timeout=120)
        ends[count] = process.returncode, errors
    assert {count: end for count, end in ends.items() if end != (130, "Interrupted.\n")} == {}


PROGRAM = "print('ready', flush=True); from theodolite.cli.script import main; main()"


def interrupted_after(seconds: float, folder: object) -> tuple[int, str]:
    process = start(PROGRAM, *SURVEY, folder=folder)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    return process.returncode, errors


def ended_well(code: int, errors: str) -> bool:
    """One line on the interruption, after the instruments at work; none where the survey was quicker."""
    said = [line for line in errors.splitlines() if line.startswith("Interrupted")]
    return "Traceback" not in errors and ((code == 130 and len(said) == 1) or (code == 0 and not said))


@pytest.mark.parametrize("count", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_at_any_moment(tmp_path, count):
    chance = random.Random(count)
    ends = {}
    for i in range(count):
        seconds = 0.05 + 6.0 * (i + chance.random()) / count
        ends[seconds] = interrupted_after(seconds, tmp_path)
    assert {at: end for at, end in ends.items() if not ended_well(*end)} == {}
    assert 130 in [code for code, _ in ends.values()]
