"""A stored run is killed at random moments and goes on: nothing that was written is lost, nothing is done or counted twice."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from theodolite.results import Row
from theodolite.runners import Work, run_stored
from theodolite.runners.store import read_records
from theodolite.testing.experiment_contract import same

#: Processes that have imported everything already: a kill takes milliseconds, and may fall anywhere in the run.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.faults.test_kills"])


def task(job: Mapping[str, Any]) -> Row:
    """A cheap job that leaves a mark whenever it is done."""
    with Path(job["marks"]).open("a") as file:
        file.write(f"{job['seed']}\n")
    time.sleep(0.002)
    return {"seed": job["seed"], "value": job["seed"] ** 0.5, "tensor": torch.full((50,), float(job["seed"]))}


#: Known by a word instead of a digest of all its code, which would take longer than the jobs.
WORK = Work("kills", task, owners=("cheap",))


def jobs_of(folder: Path, count: int) -> list[dict[str, Any]]:
    return [{"seed": i, "marks": str(folder / "marks")} for i in range(count)]


def run(folder: Path, count: int) -> None:
    run_stored(WORK, jobs_of(folder, count), name="kills", folder=folder / "run", resume=True, progress=False)


def finished(folder: Path) -> dict[int, Any]:
    """Rows on disk by seed."""
    return {record.job["seed"]: record.rows for record in read_records(folder / "run").values()}


def marks(folder: Path) -> list[int]:
    path = folder / "marks"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def kill_until_done(folder: Path, kills: int, jobs: int) -> int:
    """Kill a run so many times, each time a little further on; returns how many kills fell into a living process."""
    moments = random.Random(kills)
    fell = 0
    for _ in range(kills):
        known, done = finished(folder), len(marks(folder))
        process = SERVER.Process(target=run, args=(folder, jobs))
        process.start()
        # One in five falls while the run opens its folder, the others while it works and writes.
        wanted = done + moments.randint(0, 4)
        while process.is_alive() and len(marks(folder)) < wanted:
            time.sleep(0.001)
        time.sleep(moments.uniform(0.0, 0.01))
        fell += process.is_alive()
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        now = finished(folder)
        assert all(same(now[seed], rows) for seed, rows in known.items())  # nothing is lost
        assert not set(known) & set(marks(folder)[done:])  # nothing is done again
    return fell


def check_kills(folder: Path, kills: int, jobs: int) -> None:
    fell = kill_until_done(folder, kills, jobs)
    summary = run_stored(WORK, jobs_of(folder, jobs), name="kills", folder=folder / "run", resume=True, progress=False)
    whole = run_stored(WORK, jobs_of(folder, jobs), name="kills", progress=False)
    assert same(summary.rows, whole.rows)
    lines = [json.loads(line)["key"] for line in (folder / "run" / "rows.jsonl").read_text().splitlines()]
    assert len(lines) == len(set(lines)) == jobs  # nothing is counted twice
    assert fell > kills / 2, f"{fell} of {kills} kills fell into a run"


def test_three_kills(tmp_path):
    check_kills(tmp_path, kills=3, jobs=30)


@pytest.mark.slow
def test_two_hundred_kills(tmp_path):
    check_kills(tmp_path, kills=200, jobs=1200)
