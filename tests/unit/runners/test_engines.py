"""The same rows from every engine; failures and deaths stay with their job."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.experiments.samples import Deadly, Failing, Right
from theodolite.files import write_whole
from theodolite.runners import finish_all, run_all, run_stored
from theodolite.testing.experiment_contract import same

JOBS = [{"seed": i, "pause": 0.0} for i in range(8)]


def by_seed(rows):
    return sorted(rows, key=lambda row: (row["seed"], row["part"]))


@pytest.fixture(scope="module")
def serial_rows():
    return by_seed(run_all(Right().run, JOBS))


@pytest.mark.parametrize("workers", [1, 3])
def test_same_rows_as_serial(serial_rows, parallel, workers):
    assert same(by_seed(run_all(Right().run, JOBS, engine=parallel, workers=workers)), serial_rows)


def test_a_task_may_return_one_row():
    assert list(run_all(lambda job: {"twice": 2 * job["x"]}, [{"x": 1}, {"x": 5}])) == [{"twice": 2}, {"twice": 10}]


def test_a_job_that_raises_does_not_stop_the_others(engine):
    finished = sorted(finish_all(Failing().run, JOBS, engine=engine, workers=2), key=lambda f: f.index)
    assert [f.failure is not None for f in finished] == [False, True] * 4
    assert "seed 3 is odd" in finished[3].failure.error
    assert "raise RuntimeError" in finished[3].failure.traceback
    rows = list(run_all(Failing().run, JOBS[:2], engine=engine, workers=2))
    assert next(row for row in rows if row.get("outcome") == "failed")["seed"] == 1


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit])
def test_a_job_cannot_end_the_run(error):
    def task(job):
        raise error

    assert [f.failure.error.split(":")[0] for f in finish_all(task, [{}, {"x": 1}])] == [error.__name__] * 2


def test_ctrl_c_is_not_a_failure():
    def task(job):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(run_all(task, [{}]))


def test_a_dead_worker_is_tried_again_then_reported_while_the_others_go_on(parallel):
    finished = sorted(finish_all(Deadly().run, JOBS, engine=parallel, workers=2), key=lambda f: f.index)
    assert [f.index for f in finished] == list(range(8))
    assert [f.index for f in finished if f.failure] == [2]
    assert "died twice" in finished[2].failure.error
    assert same(
        by_seed([row for f in finished for row in f.rows]), by_seed(run_all(Right().run, [j for j in JOBS if j["seed"] != 2]))
    )


def dies_once(job):
    mark = Path(job["mark"])
    if job["seed"] == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
    return {"seed": job["seed"]}


def test_a_worker_killed_once_loses_nothing_and_counts_nothing_twice(parallel, tmp_path):
    jobs = [{"seed": i, "mark": str(tmp_path / "mark")} for i in range(6)]
    summary = run_stored(dies_once, jobs, name="dies-once", folder=tmp_path / "run", engine=parallel, workers=2)
    assert [row["seed"] for row in summary.rows] == list(range(6))
    assert not summary.failures
    assert (tmp_path / "mark").exists()
    assert (tmp_path / "run" / "rows.jsonl").read_bytes().count(b"\n") == 6


def waits_to_be_killed(job):
    if job["seed"] == 1 and not Path(job["pid"]).exists():
        write_whole(Path(job["pid"]), str(os.getpid()).encode())
        time.sleep(60)
    return {"seed": job["seed"]}


def test_a_worker_killed_from_outside_loses_nothing(parallel, tmp_path):
    def kill():
        while not pid.exists():
            time.sleep(0.01)
        os.kill(int(pid.read_text()), signal.SIGKILL)

    pid = tmp_path / "pid"
    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    rows = list(run_all(waits_to_be_killed, [{"seed": i, "pid": str(pid)} for i in range(4)], engine=parallel, workers=2))
    assert sorted(row["seed"] for row in rows) == list(range(4))


def stays(job):
    write_whole(Path(job["pid"]), str(os.getpid()).encode())
    time.sleep(0.0 if job["seed"] == 0 else 60)
    return {"seed": job["seed"]}


def test_leaving_early_ends_what_runs(parallel, tmp_path):
    finished = finish_all(stays, [{"seed": i, "pid": str(tmp_path / f"{i}")} for i in range(3)], engine=parallel, workers=2)
    assert next(finished).job["seed"] == 0
    while not (tmp_path / "1").exists():
        time.sleep(0.01)
    finished.close()
    assert ended(int((tmp_path / "1").read_text()))
    time.sleep(0.2)
    assert not (tmp_path / "2").exists() or ended(int((tmp_path / "2").read_text()))


PARENT = """
import sys
from tests.unit.runners.test_engines import stays
from theodolite.runners import run_all
list(run_all(stays, [{"seed": i, "pid": f"{sys.argv[1]}/{i}"} for i in range(1, 3)], engine="joblib", workers=2))
"""


@pytest.mark.parametrize(("number", "moment"), [(signal.SIGKILL, "at work"), (signal.SIGTERM, "starting")])
def test_workers_end_with_their_parent(tmp_path, number, moment):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], start_new_session=True)
    left: list[int] = []
    while len(left) < 2 or (moment == "at work" and len(list(tmp_path.glob("[12]"))) < 2):
        assert parent.poll() is None
        listed = subprocess.run(
            ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(parent.pid)], capture_output=True, text=True, check=False
        )
        left = [int(line.split()[0]) for line in listed.stdout.splitlines() if "LokyProcess" in line]
        time.sleep(0.02)
    os.kill(parent.pid, number)
    assert parent.wait(10) == -number
    assert [pid for pid in left if not ended(pid)] == []


def ended(pid: int) -> bool:
    """Whether a process ends within ten seconds."""
    for _ in range(1000):
        try:
            if "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]:
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def test_threads_are_limited_and_given_back(engine):
    before = torch.get_num_threads()
    rows = list(run_all(lambda job: {"threads": torch.get_num_threads()}, [{}, {"x": 1}], engine=engine, workers=2, threads=1))
    assert [row["threads"] for row in rows] == [1, 1]
    assert torch.get_num_threads() == before


def meddles(job):
    draws = float(torch.rand(())), float(np.random.rand()), random.random()  # noqa: NPY002
    before = (torch.get_default_dtype(), torch.is_grad_enabled(), *draws)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)
    job["x"] = 99
    return {"x": job["seed"], "before": str(before)}


def test_what_a_job_changes_does_not_reach_the_next(parallel):
    """Defaults, random states, the job itself: rows are the same in any process, and the caller keeps their own."""
    jobs = [{"seed": i, "x": i} for i in range(4)]
    state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    serial = list(run_all(meddles, jobs))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() is dtype
    assert torch.is_grad_enabled()
    assert jobs == [{"seed": i, "x": i} for i in range(4)]
    assert all("float32, True" in row["before"] for row in serial)
    assert len({row["before"] for row in serial}) == 4
    parallel = sorted(run_all(meddles, jobs, engine=parallel, workers=1), key=lambda row: row["x"])
    assert parallel == serial


class UnspeakableError(Exception):
    def __str__(self):
        raise ValueError


def test_an_exception_that_cannot_speak_is_a_failure():
    def task(job):
        raise UnspeakableError

    assert [f.failure.error for f in finish_all(task, [{}])] == ["UnspeakableError"]


def test_a_result_that_cannot_travel_is_a_failure(parallel):
    finished = list(finish_all(lambda job: {"value": (i for i in range(3))}, [{}], engine=parallel, workers=1))
    assert "generator" in finished[0].failure.error


def test_a_task_or_a_job_that_cannot_travel_is_a_failure(parallel):
    lock = threading.Lock()
    finished = list(finish_all(lambda job: {"locked": lock.locked()}, [{}, {"x": 1}], engine=parallel, workers=2))
    assert ["lock" in f.failure.error or "pickle" in f.failure.error for f in finished] == [True, True]
    finished = sorted(finish_all(lambda job: {}, [{"x": lock}, {"x": 1}], engine=parallel, workers=2), key=lambda f: f.index)
    assert [f.failure is not None for f in finished] == [True, False]


def test_closures_travel(parallel):
    factor = 3
    rows = list(run_all(lambda job: {"y": factor * job["x"]}, [{"x": i} for i in range(4)], engine=parallel, workers=2))
    assert sorted(row["y"] for row in rows) == [0, 3, 6, 9]


def test_rows_belong_to_the_caller(parallel):
    (row,) = run_all(lambda job: {"many": np.zeros(200_000), "tensor": torch.zeros(200_000)}, [{}], engine=parallel, workers=1)
    row["many"] += 1
    row["tensor"] += 1
    assert row["many"].sum() == row["tensor"].sum() == 200_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engine": "jobli"}, "'joblib'"),
        ({"workers": 0}, "workers"),
        ({"workers": "2"}, "workers"),
        ({"threads": 0}, "threads"),
        ({"address": "auto"}, "engine='ray' alone. Got 'auto' with engine='serial'"),
        ({"engine": "joblib", "address": "auto"}, "engine='joblib'"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        finish_all(lambda job: {}, [{}], **arguments)
    with pytest.raises(ValueError, match=message):
        run_all(lambda job: {}, [{}], **arguments)
