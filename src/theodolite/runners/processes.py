"""The joblib engine: worker processes that may die without taking the run with them.

When a worker dies its pool is lost, and with it every job in flight; nothing says whose fault it was. So all of them
become suspects and are tried once more, one at a time: a job that kills its worker when alone is guilty and is
reported, the innocent finish, and the run goes on.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from joblib.externals.loky.process_executor import BrokenProcessPool, ProcessPoolExecutor

from theodolite.runners.engines import Failure, Finished, Job, Task, failure_of, perform, worker_environment

#: Seconds given to the other futures of a broken pool to learn of it.
GRACE = 10.0
DEATH = "The worker process died twice while it performed this job alone (killed, out of memory, or crashed in native code)."


class ProcessRun:
    """All jobs in worker processes, at most `workers` of them in flight; see `finished`."""

    def __init__(self, task: Task, jobs: Sequence[Job], workers: int, threads: int) -> None:
        self.task, self.jobs, self.threads = task, jobs, threads
        self.workers = min(workers, max(1, len(jobs)))
        self._waiting = deque(range(len(jobs)))
        self._suspects: deque[int] = deque()
        self._died: set[int] = set()
        self._running: dict[Future[Finished], int] = {}
        self._pool = self._new_pool()

    def finished(self) -> Iterator[Finished]:
        """The jobs as they finish; leaving early ends the workers."""
        try:
            while self._waiting or self._suspects or self._running:
                self._fill()
                wait(self._running, return_when=FIRST_COMPLETED)
                yield from self._collect()
        finally:
            self._pool.shutdown(wait=True, kill_workers=True)

    def _fill(self) -> None:
        on_trial = bool(self._suspects) or any(index in self._died for index in self._running.values())
        queue, room = (self._suspects, 1) if on_trial else (self._waiting, self.workers)
        while queue and len(self._running) < room:
            index = queue.popleft()
            self._running[self._submit(index)] = index

    def _submit(self, index: int) -> Future[Finished]:
        arguments = (perform, self.task, index, self.jobs[index], self.threads)
        future: Future[Finished]
        try:
            future = self._pool.submit(*arguments)
        except BrokenProcessPool:  # a worker died while idle
            self._restart()
            future = self._pool.submit(*arguments)
        return future

    def _collect(self) -> Iterator[Finished]:
        broken = any(_lost(future) for future in self._running if future.done())
        if broken:
            wait(self._running, timeout=GRACE)
        for future, index in list(self._running.items()):
            if not future.done() and not broken:
                continue
            del self._running[future]
            if future.done() and not _lost(future):
                yield self._result(future, index)
            elif index in self._died:
                yield Finished(index, self.jobs[index], [], 0.0, Failure(DEATH, DEATH))
            else:
                self._died.add(index)
                self._suspects.append(index)
        if broken:
            self._restart()

    def _result(self, future: Future[Finished], index: int) -> Finished:
        error = future.exception()
        if error is None:
            return future.result()
        return Finished(index, self.jobs[index], [], 0.0, failure_of(error))

    def _restart(self) -> None:
        self._pool.shutdown(wait=True, kill_workers=True)
        self._pool = self._new_pool()

    def _new_pool(self) -> ProcessPoolExecutor:
        # No timeout: a worker that idles away between two jobs would be started, and torch imported, again.
        return ProcessPoolExecutor(
            self.workers, timeout=None, initializer=_ignore_interrupts, env=worker_environment(self.threads)
        )


def _lost(future: Future[Finished]) -> bool:
    return isinstance(future.exception(), BrokenProcessPool)


def _ignore_interrupts() -> None:
    """Ctrl-C reaches the whole process group; the parent alone decides what it means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
