"""The same rows from every engine; failures and deaths stay with their job."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.experiments.samples import Deadly, Failing, Right
from theodolite.runners import ENGINES, finish_all, run_all
from theodolite.testing.experiment_contract import same

JOBS = [{"seed": i, "pause": 0.0} for i in range(8)]


def by_seed(rows):
    return sorted(rows, key=lambda row: (row["seed"], row["part"]))


@pytest.fixture(scope="module")
def serial_rows():
    return by_seed(run_all(Right().run, JOBS))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_same_rows_from_serial_and_joblib(serial_rows, workers):
    assert same(by_seed(run_all(Right().run, JOBS, engine="joblib", workers=workers)), serial_rows)


def test_a_task_may_return_one_row():
    assert list(run_all(lambda job: {"twice": 2 * job["x"]}, [{"x": 1}, {"x": 5}])) == [{"twice": 2}, {"twice": 10}]


@pytest.mark.parametrize("engine", ENGINES)
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


def test_a_dead_worker_is_tried_again_then_reported_while_the_others_go_on():
    finished = sorted(finish_all(Deadly().run, JOBS, engine="joblib", workers=2), key=lambda f: f.index)
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


def test_a_worker_killed_once_loses_nothing(tmp_path):
    jobs = [{"seed": i, "mark": str(tmp_path / "mark")} for i in range(6)]
    rows = list(run_all(dies_once, jobs, engine="joblib", workers=2))
    assert sorted(row["seed"] for row in rows) == list(range(6))


@pytest.mark.parametrize("engine", ENGINES)
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


def test_what_a_job_changes_does_not_reach_the_next():
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
    parallel = sorted(run_all(meddles, jobs, engine="joblib", workers=1), key=lambda row: row["x"])
    assert parallel == serial


class UnspeakableError(Exception):
    def __str__(self):
        raise ValueError


def test_an_exception_that_cannot_speak_is_a_failure():
    def task(job):
        raise UnspeakableError

    assert [f.failure.error for f in finish_all(task, [{}])] == ["UnspeakableError"]


def test_a_result_that_cannot_travel_is_a_failure():
    finished = list(finish_all(lambda job: {"value": (i for i in range(3))}, [{}], engine="joblib", workers=1))
    assert finished[0].failure is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"engine": "jobli"}, "'joblib'"), ({"workers": 0}, "workers"), ({"workers": "2"}, "workers"), ({"threads": 0}, "threads")],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        finish_all(lambda job: {}, [{}], **arguments)
    with pytest.raises(ValueError, match=message):
        run_all(lambda job: {}, [{}], **arguments)
