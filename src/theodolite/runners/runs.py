"""Jobs, an engine and stores together: find what was computed before, do what is missing, keep what is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import chain
from os import PathLike
from typing import Any

import torch

from theodolite.results import Provenance, Row
from theodolite.runners.code_version import code_version, git_state
from theodolite.runners.engines import Engine, Failure, Finished, Job, Task, finish_all
from theodolite.runners.store import Computations, Record, RunStore, iterate_rows, job_key, plain, plain_row


@dataclass(frozen=True)
class Work:
    """What performs jobs.

    A name that stored rows are known by, the task, the classes or functions whose code decides the rows, and for each job the
    jobs of other work whose rows the task takes after the job.
    """

    name: str
    task: Callable[..., Row | Iterable[Row]]
    owners: tuple[object, ...] = ()
    needs: Callable[[Job], Iterable[tuple[Work, Job]]] | None = None


@dataclass(frozen=True)
class RunSummary:
    """A run at its end: rows in the order of the jobs, failures, how much was done before, and how much by older code."""

    rows: list[Row]
    failures: list[Record]
    jobs: int
    reused: int
    seconds: float
    torn: bool = False
    outdated: int = 0


def run_stored(
    work: Work | Task,
    jobs: Iterable[Job],
    *,
    name: str,
    folder: str | PathLike[str] | None = None,
    computations: Computations | None = None,
    settings: Mapping[str, Any] | None = None,
    owners: tuple[object, ...] = (),
    resume: bool = False,
    fresh: bool = False,
    update: bool = False,
    engine: str | Engine = "serial",
    workers: int | None = None,
    threads: int = 1,
    address: str | None = None,
    progress: bool | None = None,
) -> RunSummary:
    """Perform the jobs that neither `folder` nor `computations` holds, and keep each as it finishes.

    `name` is that of the run in its folder; a plain task as `work` is known by it too, and by its `owners`. Rows that older
    code made are kept and counted as such, unless `update` has them done anew. Failed jobs are tried again on `resume`;
    `fresh` forgets what the folder holds. A row that cannot be kept fails its job. Raises `RunBusyError` while another
    process holds the folder.
    """
    began = time.perf_counter()
    chosen = Engine.of(engine, workers, threads, address)
    work = work if isinstance(work, Work) else Work(name, work, owners or (work,))
    jobs = [plain(dict(job)) for job in jobs]
    if not jobs:
        raise ValueError(f"{name}: there are no jobs to do.")
    keys = [job_key(work.name, job) for job in jobs]
    if len(set(keys)) < len(keys):
        raise ValueError(f"{name}: two jobs are the same. Give each its own parameters or seed.")
    shared = computations if computations is not None else Computations()
    performer = _Performer(shared, chosen, update, progress)
    if folder is None:
        records, reused = performer.records(work, jobs)
        return _summary(records, keys, code_of(work, chosen.threads), reused=reused, seconds=time.perf_counter() - began)
    code = code_of(work, chosen.threads)
    with RunStore.open(folder, _manifest(name, settings, code, chosen.threads, keys), resume=resume, fresh=fresh) as store:
        usable = {k: r for k, r in store.records.items() if not r.failed and (r.code == code or not update)}
        missing = [i for i, key in enumerate(keys) if key not in usable]
        reused = len(keys) - len(missing)
        if missing:
            _, found = performer.records(work, [jobs[i] for i in missing], store.add)
            reused += found
        seconds = time.perf_counter() - began
        return _summary(store.records, keys, code, reused=reused, seconds=seconds, torn=store.torn)


def code_of(work: Work, threads: int) -> str:
    """The digest of all that decides the rows of a work beside its jobs."""
    return code_version(*(work.owners or (work.task,)), f"torch {torch.__version__}, {threads} threads")


@dataclass(frozen=True)
class _Performer:
    """Records of jobs: from the shared computations where they are there, else computed, needs first."""

    shared: Computations
    engine: Engine
    update: bool
    progress: bool | None

    def records(
        self, work: Work, jobs: list[Job], keep: Callable[[Record], None] = lambda record: None
    ) -> tuple[dict[str, Record], int]:
        """The records by key, and how many were there already; `keep` gets each as it is known."""
        code = code_of(work, self.engine.threads)
        keys = [job_key(work.name, job) for job in jobs]
        found: dict[str, Record] = {}
        for key in keys:
            record = self.shared.get(key)
            if record is not None and (record.code == code or not self.update):
                found[key] = record
                keep(record)
        missing = [(key, job) for key, job in zip(keys, jobs, strict=True) if key not in found]
        reused = len(found)
        loaded, failed = self._with_inputs(work, missing)
        for record in chain(failed, self._performed(work, loaded, code)):  # each is kept as soon as it is done
            self.shared.add(record)
            keep(record)
            found[record.key] = record
        return found, reused

    def _performed(self, work: Work, jobs: list[_JobWithInputs], code: str) -> Iterable[Record]:
        if not jobs:
            return
        with closing(finish_all(_PlainRows(work.task), jobs, engine=self.engine, progress=self.progress)) as performed:
            for finished in performed:
                yield replace(_record(job_key(work.name, jobs[finished.index]), finished), code=code)

    def _with_inputs(self, work: Work, missing: list[tuple[str, Job]]) -> tuple[list[_JobWithInputs], list[Record]]:
        """The jobs with the rows they need, and records of those whose needs failed; every need is computed once."""
        if work.needs is None:
            return [_JobWithInputs(job) for _, job in missing], []
        needs = {key: [(w, plain(dict(j))) for w, j in work.needs(job)] for key, job in missing}
        wanted: dict[str, tuple[Work, dict[str, Job]]] = {}
        for needed in needs.values():
            for other, job in needed:
                wanted.setdefault(other.name, (other, {}))[1][job_key(other.name, job)] = job
        known: dict[str, Record] = {}
        for other, others_jobs in wanted.values():
            known |= self.records(other, list(others_jobs.values()))[0]
        loaded, failed = [], []
        for key, job in missing:
            inputs = [known[job_key(other.name, j)] for other, j in needs[key]]
            bad = next((record for record in inputs if record.failed), None)
            if bad is None:
                loaded.append(_JobWithInputs(job, tuple(record.rows for record in inputs)))
            else:
                failure = Failure(f"What it needs failed: {bad.error}", bad.traceback or "")
                failed.append(_record(key, Finished(0, job, [], 0.0, failure)))
        return loaded, failed


class _JobWithInputs(dict[str, Any]):
    """A job that carries the rows it needs to wherever it is performed."""

    def __init__(self, job: Job, inputs: tuple[list[Row], ...] = ()) -> None:
        super().__init__(job)
        self.inputs = inputs


@dataclass(frozen=True)
class _PlainRows:
    """The task with its rows as they will be read back; what cannot be kept fails here, in the job that made it."""

    task: Callable[..., Row | Iterable[Row]]

    def __call__(self, job: Job) -> list[Row]:
        returned = self.task(dict(job), *getattr(job, "inputs", ()))
        return [plain_row(dict(row)) for row in ([returned] if isinstance(returned, Mapping) else returned)]


def _record(key: str, finished: Finished) -> Record:
    failure = finished.failure
    return Record(
        key,
        dict(finished.job),
        finished.rows,
        finished.seconds,
        error=failure.error if failure else None,
        traceback=failure.traceback if failure else None,
    )


def _summary(
    records: Mapping[str, Record], keys: list[str], code: str, *, reused: int, seconds: float, torn: bool = False
) -> RunSummary:
    mine = {key: records[key] for key in keys}
    failures = [record for record in mine.values() if record.failed]
    outdated = sum(record.code != code and not record.failed for record in mine.values())
    return RunSummary(list(iterate_rows(mine, keys)), failures, len(keys), reused, seconds, torn, outdated)


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
