"""Jobs, an engine and stores together: find what was computed before, do what is missing, keep what is done."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import chain
from os import PathLike
from typing import Any

import torch

from theodolite.results import Provenance, Row
from theodolite.runners.code_version import code_version, git_state
from theodolite.runners.engines import Engine, Failure, Finished, Job, Task, failure_of, finish_all, kept_open
from theodolite.runners.store import Computations, Record, RunStore, job_key, plain, plain_row


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
    codes = Codes(chosen.threads)
    performer = _Performer(computations if computations is not None else Computations(), chosen, codes, update, progress)
    with kept_open(chosen):
        if folder is None:
            records, reused = performer.records(work, jobs)
            return performer.summary(work, records, keys, reused, began)
        manifest = _manifest(name, settings, codes.of(work), chosen.threads, keys)
        with RunStore.open(folder, manifest, resume=resume, fresh=fresh) as store:
            _adopt_old_records(store, work)
            usable = [key for key, job in zip(keys, jobs, strict=True) if performer.is_usable(work, job, store.records.get(key))]
            missing = [job for key, job in zip(keys, jobs, strict=True) if key not in usable]
            _, found = performer.records(work, missing, store.add)
            return performer.summary(work, store.records, keys, len(usable) + found, began, torn=store.torn)


def _adopt_old_records(store: RunStore, work: Work) -> None:
    """Rows of versions whose keys held the code too are kept under the keys of today, as rows of older code."""
    for record in [record for record in store.records.values() if not record.code and not record.failed]:
        key = job_key(work.name, record.job)
        if key not in store.records:
            store.add(replace(record, key=key))


class Codes:
    """Digests of all that decides rows beside the jobs; that of a work is read once."""

    def __init__(self, threads: int) -> None:
        self._conditions = f"torch {torch.__version__}, {threads} threads"
        self._known: dict[str, str] = {}

    def of(self, work: Work) -> str:
        """The code of a work."""
        if work.name not in self._known:
            self._known[work.name] = code_version(*(work.owners or (work.task,)), self._conditions)
        return self._known[work.name]

    def of_job(self, work: Work, job: Job) -> str:
        """The code of a job, with that of what the job needs."""
        needed = [] if work.needs is None else [self.of_job(other, other_job) for other, other_job in work.needs(job)]
        return _joined(self.of(work), needed)

    def outdated(self, work: Work, records: Iterable[Record]) -> int:
        """How many records were made by other code than today's, or from rows that were, or with other threads or torch."""
        return sum(not record.failed and record.code != self.of_job(work, record.job) for record in records)


def _joined(own: str, needed: Sequence[str]) -> str:
    """The code of a job: its own, and that of the rows it was given."""
    return hashlib.sha256("+".join([own, *needed]).encode()).hexdigest()[:16] if needed else own


@dataclass(frozen=True)
class _Performer:
    """Records of jobs: from the shared computations where they are there, else computed, needs first."""

    shared: Computations
    engine: Engine
    codes: Codes
    update: bool
    progress: bool | None

    def is_usable(self, work: Work, job: Job, record: Record | None) -> bool:
        """Whether a record of the run's own folder will do: it is current, or nothing better is known and none is asked for."""
        if record is None or record.failed or record.provisional:
            return False
        code = self.codes.of_job(work, job)
        if record.code == code:
            return True
        known = self.shared.get(record.key)
        return not self.update and (known is None or known.code != code)

    def records(
        self, work: Work, jobs: list[Job], keep: Callable[[Record], None] = lambda record: None
    ) -> tuple[dict[str, Record], int]:
        """The records by key, and how many were there already; `keep` gets each as it is known."""
        found: dict[str, Record] = {}
        missing = []
        for job in jobs:
            record = self.shared.get(job_key(work.name, job))
            if record is None or (self.update and record.code != self.codes.of_job(work, job)):
                missing.append(job)
                continue
            found[record.key] = record
            keep(record)
        reused = len(found)
        loaded, failed = self._with_inputs(work, missing)
        for record in chain(failed, self._performed(work, loaded)):  # each is kept as soon as it is done
            keep(record)
            self.shared.add(record)
            found[record.key] = record
        return found, reused

    def _performed(self, work: Work, jobs: list[_JobWithInputs]) -> Iterable[Record]:
        if not jobs:
            return
        own = self.codes.of(work)
        with closing(finish_all(_PlainRows(work.task), jobs, engine=self.engine, progress=self.progress)) as performed:
            for finished in performed:
                yield _record(work, finished, _joined(own, jobs[finished.index].codes))

    def _with_inputs(self, work: Work, missing: list[Job]) -> tuple[list[_JobWithInputs], list[Record]]:
        """The jobs with the rows they need, and records of those whose needs failed; every need is computed once."""
        if work.needs is None:
            return [_JobWithInputs(job) for job in missing], []
        loaded: list[_JobWithInputs] = []
        failed: list[Record] = []
        needs: list[tuple[Job, list[tuple[Work, Job]]]] = []
        for job in missing:
            try:
                needs.append((job, [(other, plain(dict(needed))) for other, needed in work.needs(job)]))
            except Exception as error:  # of this job alone
                failed.append(_record(work, Finished(0, job, [], 0.0, failure_of(error))))
        wanted: dict[str, tuple[Work, dict[str, Job]]] = {}
        for other, job in (need for _, needed in needs for need in needed):
            wanted.setdefault(other.name, (other, {}))[1][job_key(other.name, job)] = job
        known: dict[str, Record] = {}
        for other, others_jobs in wanted.values():
            known |= self.records(other, list(others_jobs.values()))[0]
        for job, needed in needs:
            inputs = [known[job_key(other.name, other_job)] for other, other_job in needed]
            bad = next((record for record in inputs if record.failed), None)
            if bad is None:
                loaded.append(_JobWithInputs(job, tuple(r.rows for r in inputs), tuple(r.code for r in inputs)))
            else:
                why = Failure(f"What it needs failed: {bad.error}", bad.traceback or "")
                failed.append(_record(work, Finished(0, job, [], 0.0, why)))
        return loaded, failed

    def summary(
        self, work: Work, records: Mapping[str, Record], keys: list[str], reused: int, began: float, *, torn: bool = False
    ) -> RunSummary:
        """The run at its end."""
        mine = {key: records[key] for key in keys}
        failures = [record for record in mine.values() if record.failed]
        rows = [row for record in mine.values() for row in record.rows]
        outdated = self.codes.outdated(work, mine.values())
        return RunSummary(rows, failures, len(keys), reused, time.perf_counter() - began, torn, outdated)


class _JobWithInputs(dict[str, Any]):
    """A job that carries the rows it needs to wherever it is performed."""

    def __init__(self, job: Job, inputs: tuple[list[Row], ...] = (), codes: tuple[str, ...] = ()) -> None:
        super().__init__(job)
        self.inputs, self.codes = inputs, codes


@dataclass(frozen=True)
class _PlainRows:
    """The task with its rows as they will be read back; what cannot be kept fails here, in the job that made it."""

    task: Callable[..., Row | Iterable[Row]]

    def __call__(self, job: Job) -> list[Row]:
        returned = self.task(dict(job), *getattr(job, "inputs", ()))
        return [plain_row(dict(row)) for row in ([returned] if isinstance(returned, Mapping) else returned)]


def _record(work: Work, finished: Finished, code: str = "") -> Record:
    failure = asdict(finished.failure) if finished.failure else {}
    key = job_key(work.name, finished.job)
    return Record(key, dict(finished.job), finished.rows, finished.seconds, code=code, **failure)


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
