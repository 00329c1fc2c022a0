"""`run_all`: the same rows from every engine.

A task is a function of one job (a dictionary of plain values, with its seed) that returns rows. Every engine performs
jobs with the same number of threads, because the order of a sum changes its last digits.
"""

from __future__ import annotations

import copy
import os
import random
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from theodolite.errors import nearest
from theodolite.progress import counting
from theodolite.results import Row

Job = Mapping[str, Any]
Task = Callable[[Job], Row | Iterable[Row]]


@dataclass(frozen=True)
class Failure:
    """Why a job gave no rows."""

    error: str
    traceback: str


@dataclass(frozen=True)
class Finished:
    """One job at its end: its place among the jobs, its rows or its failure."""

    index: int
    job: Job
    rows: list[Row]
    seconds: float
    failure: Failure | None = None


def run_all(
    task: Task,
    jobs: Iterable[Job],
    *,
    engine: str = "serial",
    workers: int | None = None,
    threads: int = 1,
    progress: bool | None = None,
) -> Iterator[Row]:
    """Perform `task(job)` for all jobs and yield the rows as jobs finish.

    A job that raises yields one row with `outcome="failed"`, its `error` and `traceback`, beside the job's own entries;
    the others go on. `workers` defaults to the number of cores, `threads` is per worker.

    >>> list(run_all(lambda job: {"square": job["x"] ** 2}, [{"x": 2}, {"x": 3}]))
    [{'square': 4}, {'square': 9}]
    """
    finished = finish_all(task, jobs, engine=engine, workers=workers, threads=threads, progress=progress)
    return (row for one in finished for row in _rows_of(one))


def _rows_of(finished: Finished) -> list[Row]:
    if finished.failure is None:
        return finished.rows
    return [{**finished.job, "outcome": "failed", "error": finished.failure.error, "traceback": finished.failure.traceback}]


def finish_all(
    task: Task,
    jobs: Iterable[Job],
    *,
    engine: str = "serial",
    workers: int | None = None,
    threads: int = 1,
    progress: bool | None = None,
) -> Iterator[Finished]:
    """As `run_all`, one `Finished` per job, with what failed and how long it took."""
    check_engine(engine, workers, threads)
    return _counted(ENGINES[engine], task, list(jobs), workers or max(1, _cores() // threads), threads, progress)


def check_engine(engine: str, workers: int | None, threads: int) -> None:
    """Raise unless an engine of this name can be started so."""
    if engine not in ENGINES:
        known = ", ".join(map(repr, ENGINES))
        raise ValueError(f"engine must be one of {known}; the nearest is {nearest(engine, ENGINES, 1)[0]!r}. Got {engine!r}.")
    for name, value in (("workers", workers), ("threads", threads)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a positive integer. Got {value!r}.")


def _counted(
    engine: Engine, task: Task, jobs: Sequence[Job], workers: int, threads: int, progress: bool | None
) -> Iterator[Finished]:
    with counting("jobs", progress=progress, total=len(jobs)) as count:
        for finished in engine(task, jobs, workers, threads):
            count(1)
            yield finished


def perform(task: Task, index: int, job: Job, threads: int) -> Finished:
    """One job, here and now; whatever it raises becomes its failure, whatever it changes is given back."""
    began = time.perf_counter()
    try:
        with limited_threads(threads), isolated(job):
            returned = task(copy.deepcopy(job))
            rows = [dict(returned)] if isinstance(returned, Mapping) else [dict(row) for row in returned]
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit: a job must not end the run
        return Finished(index, job, [], time.perf_counter() - began, failure_of(error))
    return Finished(index, job, rows, time.perf_counter() - began)


def failure_of(error: BaseException) -> Failure:
    """An exception as text, also one that cannot say what it is."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    return Failure(text, "".join(traceback.format_exception(error)))


@contextmanager
def isolated(job: Job) -> Iterator[None]:
    """Random states that follow from the job alone, and global settings of torch given back afterwards.

    Jobs bring their own seeds; one that forgets, or that sets a default, must still give the same rows in any process.
    """
    import numpy
    import torch

    seed = zlib.crc32(repr(sorted(job.items(), key=repr)).encode())
    before = random.getstate(), numpy.random.get_state(), torch.get_default_dtype(), torch.is_grad_enabled()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        numpy.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            numpy.random.set_state(before[1])  # noqa: NPY002
            torch.set_default_dtype(before[2])
            torch.set_grad_enabled(before[3])


@contextmanager
def limited_threads(threads: int) -> Iterator[None]:
    """At most so many threads for torch and for BLAS, restored afterwards."""
    import torch
    from threadpoolctl import threadpool_limits

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with threadpool_limits(limits=threads):
            yield
    finally:
        torch.set_num_threads(before)


def _serial(task: Task, jobs: Sequence[Job], workers: int, threads: int) -> Iterator[Finished]:
    for index, job in enumerate(jobs):
        yield perform(task, index, job, threads)


def _joblib(task: Task, jobs: Sequence[Job], workers: int, threads: int) -> Iterator[Finished]:
    from theodolite.runners.processes import ProcessRun

    yield from ProcessRun(task, jobs, workers, threads).finished()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


Engine = Callable[[Task, Sequence[Job], int, int], Iterator[Finished]]
ENGINES: dict[str, Engine] = {"serial": _serial, "joblib": _joblib}
