"""Jobs, an engine and a store together: do what is missing, keep what is done."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from os import PathLike
from typing import Any

import torch

from theodolite.results import Provenance, Row
from theodolite.runners.code_version import code_version, git_state
from theodolite.runners.engines import Finished, Job, Task, check_engine, finish_all
from theodolite.runners.store import Record, RunStore, iterate_rows, job_key, plain, plain_row


@dataclass(frozen=True)
class RunSummary:
    """A run at its end: rows in the order of the jobs, failures, and how much of it was done before."""

    rows: list[Row]
    failures: list[Record]
    jobs: int
    reused: int
    seconds: float
    torn: bool = False


def run_stored(
    task: Task,
    jobs: Iterable[Job],
    *,
    name: str,
    folder: str | PathLike[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    owners: tuple[object, ...] = (),
    resume: bool = False,
    fresh: bool = False,
    engine: str = "serial",
    workers: int | None = None,
    threads: int = 1,
    address: str | None = None,
    progress: bool | None = None,
) -> RunSummary:
    """Perform the jobs that `folder` does not hold yet and keep each as it finishes; without a folder, in memory only.

    `owners` are the classes or functions whose source decides whether an earlier result is still one. Failed jobs are
    tried again on `resume`; `fresh` forgets what the folder holds. A row that cannot be kept fails its job. Raises
    `RunBusyError` while another process holds the folder.
    """
    began = time.perf_counter()
    check_engine(engine, workers, threads, address)
    jobs = [plain(dict(job)) for job in jobs]
    if not jobs:
        raise ValueError(f"{name}: there are no jobs to do.")
    code = code_version(*(owners or (task,)), f"torch {torch.__version__}, {threads} threads")
    keys = [job_key(name, job, code) for job in jobs]
    if len(set(keys)) < len(keys):
        raise ValueError(f"{name}: two jobs are the same. Give each its own parameters or seed.")
    perform_all = partial(
        finish_all, _PlainRows(task), engine=engine, workers=workers, threads=threads, address=address, progress=progress
    )
    if folder is None:
        records = {keys[f.index]: _record(keys[f.index], f) for f in perform_all(jobs)}
        return _summary(records, keys, reused=0, seconds=time.perf_counter() - began)
    with RunStore.open(folder, _manifest(name, settings, code, threads, keys), resume=resume, fresh=fresh) as store:
        missing = [i for i, key in enumerate(keys) if key not in store.records or store.records[key].failed]
        with closing(perform_all([jobs[i] for i in missing])) as performed:
            for finished in performed:
                store.add(_record(keys[missing[finished.index]], finished))
        reused = len(keys) - len(missing)
        return _summary(store.records, keys, reused=reused, seconds=time.perf_counter() - began, torn=store.torn)


@dataclass(frozen=True)
class _PlainRows:
    """The task with its rows as they will be read back; what cannot be kept fails here, in the job that made it."""

    task: Task

    def __call__(self, job: Job) -> list[Row]:
        returned = self.task(job)
        return [plain_row(dict(row)) for row in ([returned] if isinstance(returned, Mapping) else returned)]


def _record(key: str, finished: Finished) -> Record:
    failure = finished.failure
    return Record(
        key,
        finished.job,
        finished.rows,
        finished.seconds,
        error=failure.error if failure else None,
        traceback=failure.traceback if failure else None,
    )


def _summary(records: Mapping[str, Record], keys: list[str], *, reused: int, seconds: float, torn: bool = False) -> RunSummary:
    mine = {key: records[key] for key in keys}
    failures = [record for record in mine.values() if record.failed]
    return RunSummary(list(iterate_rows(mine, keys)), failures, len(keys), reused, seconds, torn)


def _manifest(name: str, settings: Mapping[str, Any] | None, code: str, threads: int, keys: list[str]) -> dict[str, Any]:
    return {
        "name": name,
        "settings": dict(settings or {}),
        "threads": threads,
        "code": code,
        "git": git_state(),
        "provenance": asdict(Provenance()),
        "keys": keys,
    }
