"""kill -9 of the whole process group at random moments, then --resume: the rows are those of an undisturbed run."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.experiments.samples import Slow
from theodolite.experiments import load_run
from theodolite.testing.experiment_contract import same

ROOT = Path(__file__).parents[2]
TARGET = "tests.experiments.samples:Slow"


def command(out: Path, *more: str) -> list[str]:
    options = ["--engine", "joblib", "--workers", "2", "--out", str(out), *more]  # the last of an option counts
    return [sys.executable, "-c", "from theodolite.cli import main; main()", "reproduce", TARGET, *options]


def _hears_ctrl_c() -> None:
    """A job started in the background of a script inherits that Ctrl-C is ignored; the one under test must not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(out: Path, pause: str, *more: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "SLOW_PAUSE": pause, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        command(out, *more), cwd=ROOT, env=environment, start_new_session=True, preexec_fn=_hears_ctrl_c, **pipes
    )


def finish(out: Path, pause: str, *more: str) -> None:
    process = start(out, pause, *more)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors


def rows_of(out: Path):
    return load_run(out / "samples" / "slow" / "tiny", [Slow()]).rows


def lines_of(out: Path) -> int:
    path = out / "samples" / "slow" / "tiny" / "rows.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_and_resume(tmp_path: Path, pause: str, kills: int, seed: int, engine: str = "joblib") -> None:
    finish(tmp_path / "whole", pause)
    whole = rows_of(tmp_path / "whole")
    assert len(whole) == 20
    moments = random.Random(seed)
    interrupted = 0
    for kill in range(kills):
        out = tmp_path / f"run{kill}"
        process = start(out, pause, "--engine", engine)
        began = time.monotonic()
        # Half of the kills fall while workers start and early jobs run, half after a number of jobs has been written.
        wanted, patience = moments.randint(0, 9), moments.uniform(0.2, 6.0)
        while process.poll() is None and time.monotonic() - began < 60 and lines_of(out) < wanted:
            time.sleep(0.002)
            if kill % 2 and time.monotonic() - began > patience:
                break
        time.sleep(moments.uniform(0.0, 0.3))
        interrupted += process.poll() is None
        with contextlib.suppress(ProcessLookupError):  # it had just ended
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        finish(out, pause, "--resume", "--engine", engine)
        assert same(rows_of(out), whole)
        assert lines_of(out) == 10
    assert interrupted >= kills * 0.6  # the kills really fell into running runs


def test_a_kill(tmp_path):
    kill_and_resume(tmp_path, pause="0.25", kills=1, seed=0)


@pytest.mark.slow
def test_fifty_kills(tmp_path):
    kill_and_resume(tmp_path, pause="2.0", kills=50, seed=1)


@pytest.mark.slow
def test_ten_kills_of_a_run_on_ray(tmp_path):
    kill_and_resume(tmp_path, pause="2.0", kills=10, seed=2, engine="ray")


@pytest.mark.slow
def test_two_processes_resume_one_run(tmp_path):
    """One wins, the other says so and changes nothing."""
    processes = [start(tmp_path, "0.4", "--resume") for _ in range(2)]
    ended = [(p.communicate(timeout=120), p.returncode) for p in processes]
    assert sorted(code for _, code in ended) == [0, 2]
    (loser,) = [errors for (_, errors), code in ended if code == 2]
    assert "is being written by process" in loser
    assert lines_of(tmp_path) == 10


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["joblib", "ray"])
def test_ctrl_c_leaves_a_resumable_run(tmp_path, engine):
    process = start(tmp_path, "0.4", "--engine", engine)
    while lines_of(tmp_path) < 2:
        time.sleep(0.01)
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--resume" in errors
    assert "Traceback" not in errors
    done = lines_of(tmp_path)
    assert 2 <= done < 10
    finish(tmp_path, "0.4", "--resume")
    assert lines_of(tmp_path) == 10
