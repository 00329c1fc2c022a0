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
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from theodolite.arguments import optional_integer
from theodolite.progress import counting
from theodolite.results import Row
from theodolite.text import nearest

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


Performed = Generator[Finished, None, None]


@dataclass(frozen=True)
class Engine:
    """What performs jobs: its name, worker processes (None: the cores), threads per worker, address of a cluster.

    >>> Engine.of("serial") == Engine()
    True
    """

    name: str = "serial"
    workers: int | None = None
    threads: int = 1
    address: str | None = None

    @classmethod
    def of(cls, engine: str | Engine, workers: int | None = None, threads: int = 1, address: str | None = None) -> Engine:
        """An engine from its name and settings, or the engine itself; raises unless it can be started so."""
        if isinstance(engine, Engine) and (workers, threads, address) != (None, 1, None):
            raise ValueError("workers, threads and address are part of an Engine: give them there.")
        found = engine if isinstance(engine, Engine) else cls(engine, workers, threads, address)
        check_engine(found)
        return found


def run_all(
    task: Task,
    jobs: Iterable[Job],
    *,
    engine: str | Engine = "serial",
    workers: int | None = None,
    threads: int = 1,
    address: str | None = None,
    progress: bool | None = None,
) -> Iterator[Row]:
    """Perform `task(job)` for all jobs and yield the rows as jobs finish.

    A job that raises yields one row with `outcome="failed"`, its `error` and `traceback`, beside the job's own entries;
    the others go on. `workers` defaults to the number of cores, `threads` is per worker. With `engine="ray"` an `address`
    ("auto", "ray://HOST:PORT") names the cluster to use, and `workers` defaults to what it has room for; without one, jobs
    go to the Ray of this process, or to one started for them.

    >>> list(run_all(lambda job: {"square": job["x"] ** 2}, [{"x": 2}, {"x": 3}]))
    [{'square': 4}, {'square': 9}]
    """
    finished = finish_all(task, jobs, engine=engine, workers=workers, threads=threads, address=address, progress=progress)
    return (row for one in finished for row in (one.rows if one.failure is None else [_failed_row(one.job, one.failure)]))


def _failed_row(job: Job, failure: Failure) -> Row:
    return {**job, "outcome": "failed", **asdict(failure)}


def finish_all(
    task: Task,
    jobs: Iterable[Job],
    *,
    engine: str | Engine = "serial",
    workers: int | None = None,
    threads: int = 1,
    address: str | None = None,
    progress: bool | None = None,
) -> Performed:
    """As `run_all`, one `Finished` per job, with what failed and how long it took; closing it ends what still runs."""
    chosen = Engine.of(engine, workers, threads, address)
    jobs = list(jobs)
    return _counted(ENGINES[chosen.name](task, jobs, chosen), len(jobs), progress)


def check_engine(engine: Engine) -> None:
    """Raise unless an engine can be started so, before any work is done."""
    if engine.name not in ENGINES:
        known = ", ".join(map(repr, ENGINES))
        near = nearest(engine.name, ENGINES, 1)[0]
        raise ValueError(f"engine must be one of {known}; the nearest is {near!r}. Got {engine.name!r}.")
    for name, value in (("workers", engine.workers), ("threads", engine.threads)):
        optional_integer(name, value, least=1)
    if engine.name == "ray":
        from theodolite.runners.cluster import check_address, import_ray

        import_ray()
        if engine.address is not None:
            check_address(engine.address)
    elif engine.address is not None:
        raise ValueError(f"address is for engine='ray' alone. Got {engine.address!r} with engine={engine.name!r}.")


@contextmanager
def kept_open(engine: str | Engine, workers: int | None = None, threads: int = 1, address: str | None = None) -> Iterator[None]:
    """What an engine starts, once for all runs within the block; runs outside of one start it each for itself."""
    chosen = Engine.of(engine, workers, threads, address)
    if chosen.name != "ray":
        yield
        return
    from theodolite.runners.cluster import connected

    with connected(chosen.address, chosen.workers, chosen.threads):
        yield


def _counted(performed: Performed, jobs: int, progress: bool | None) -> Performed:
    with counting("jobs", progress=progress, total=jobs) as count, closing(performed):
        for finished in performed:
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
        return Finished(index, dict(job), [], time.perf_counter() - began, failure_of(error))
    return Finished(index, dict(job), rows, time.perf_counter() - began)  # the job alone: what it was given stays where it is


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

    from theodolite.problem.state_guard import random_states_kept

    seed = zlib.crc32(repr(sorted(job.items(), key=repr)).encode())
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    with random_states_kept():
        for set_seed in (torch.manual_seed, numpy.random.seed, random.seed):
            set_seed(seed)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            torch.set_grad_enabled(grad)


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


def _serial(task: Task, jobs: Sequence[Job], engine: Engine) -> Performed:
    from theodolite.training.matrix_products import fix_matrix_products

    fix_matrix_products()  # as in a worker process, where this one has not begun to multiply
    for index, job in enumerate(jobs):
        yield perform(task, index, job, engine.threads)


def _joblib(task: Task, jobs: Sequence[Job], engine: Engine) -> Performed:
    from theodolite.runners.processes import ProcessRun

    yield from ProcessRun(task, jobs, engine.workers or max(1, cores() // engine.threads), engine.threads).finished()


def _ray(task: Task, jobs: Sequence[Job], engine: Engine) -> Performed:
    from theodolite.runners.cluster import RayRun

    yield from RayRun(task, jobs, engine.workers, engine.threads, engine.address).finished()


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_environment(threads: int) -> dict[str, str]:
    """Environment of a worker process; only what stands there before torch is imported binds all of its libraries.

    Numbers of a job must not depend on what the worker computed before: matrix products do not depend on memory.
    """
    from theodolite.training.matrix_products import VARIABLE, WANTED

    limits = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return {**limits, VARIABLE: os.environ.get(VARIABLE, WANTED)}


ENGINES: dict[str, Callable[[Task, Sequence[Job], Engine], Performed]] = {"serial": _serial, "joblib": _joblib, "ray": _ray}
