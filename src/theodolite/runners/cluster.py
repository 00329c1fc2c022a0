"""The ray engine: jobs in workers of a Ray cluster, or of a Ray started here for the run.

Ray tells which job a dead worker was at, so nobody else comes under suspicion: the job is tried once more, on whatever
worker is free, and reported when that one dies too. Ray's own retries are off, or they would not be counted.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import sys
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from theodolite.errors import TheodoliteError
from theodolite.interrupts import unbroken_context
from theodolite.runners.code_version import is_users_own, package_version
from theodolite.runners.engines import Failure, Finished, Job, Task, cores, failure_of, perform, worker_environment

#: Settings of the caller that decide what a job computes or where its data lies; workers get them too.
PASSED_ON = ("MKL_CBWR", "THEODOLITE_DATA")
#: How often a worker may die at a job before the job is reported.
DEATHS = 2
#: Seconds that the machine at an address may take to answer.
PATIENCE = 10.0
#: What a raylet prints on the caller's stdout when a worker dies; the rows say it already.
DEATH_NOTICE = "worker died or was killed|killed due to memory pressure"


class RayMissingError(TheodoliteError, ImportError):
    """The package ray is not installed."""


class RayUnreachableError(TheodoliteError, ConnectionError):
    """No Ray could be started, or none answers at the address."""


class RayRun:
    """All jobs as tasks of Ray, at most `workers` of them in flight; see `finished`."""

    def __init__(self, task: Task, jobs: Sequence[Job], workers: int | None, threads: int, address: str | None) -> None:
        self.task, self.jobs, self.workers, self.threads, self.address = task, jobs, workers, threads, address
        self._waiting = deque(range(len(jobs)))
        self._deaths: Counter[int] = Counter()
        self._running: dict[Any, int] = {}  # object reference of Ray: index of the job
        self._ray = import_ray()

    def finished(self) -> Iterator[Finished]:
        """The jobs as they finish; leaving early cancels what runs, and ends a Ray that was started here."""
        if not self.jobs:
            return
        with connected(self.address, self.workers, self.threads):
            try:
                task = self._packed_task()
            except Exception as error:  # cannot travel: as with any engine, that is a failure of every job
                yield from (Finished(index, job, [], 0.0, failure_of(error)) for index, job in enumerate(self.jobs))
                return
            yield from self._performed(self._ray.put(task), self._remote())

    def _performed(self, task: Any, remote: Any) -> Iterator[Finished]:
        try:
            while self._waiting or self._running:
                yield from self._fill(task, remote)
                if self._running:
                    done, _ = self._ray.wait(list(self._running), num_returns=1)
                    if (finished := self._collect(done[0])) is not None:
                        yield finished
        except ConnectionError as error:
            raise RayUnreachableError(f"The connection to Ray was lost: {_one_line(error)}") from error
        finally:
            with suppress(Exception):  # nothing runs any more, or Ray is gone
                for reference in self._running:
                    self._ray.cancel(reference, force=True)

    def _fill(self, task: Any, remote: Any) -> Iterator[Finished]:
        room = self.workers or max(1, int(self._ray.cluster_resources().get("CPU", 0)) // self.threads)
        while self._waiting and len(self._running) < room:
            index = self._waiting.popleft()
            try:
                job = self._ray.cloudpickle.dumps(self.jobs[index])
            except Exception as error:
                yield Finished(index, self.jobs[index], [], 0.0, failure_of(error))
            else:
                self._running[remote.remote(task, index, job)] = index

    def _collect(self, reference: Any) -> Finished | None:
        """The job behind a reference, or None if it is to be tried again."""
        index, exceptions = self._running.pop(reference), self._ray.exceptions
        try:
            packed = self._ray.get(reference)
        except exceptions.RayTaskError as error:  # raised before `perform` could catch it, such as a missing package
            return Finished(index, self.jobs[index], [], 0.0, failure_of(error.cause or error))
        except exceptions.RayError as error:
            self._deaths[index] += 1
            if self._deaths[index] < DEATHS:
                self._waiting.appendleft(index)
                return None
            return Finished(index, self.jobs[index], [], 0.0, _death(error))
        try:
            finished: Finished = pickle.loads(packed)
        except Exception as error:  # rows that travelled but cannot be read here
            finished = Finished(index, {}, [], 0.0, failure_of(error))
        return replace(finished, job=self.jobs[index])

    def _packed_task(self) -> bytes:
        """The task as bytes; where it may land on another machine, with the user's own modules inside."""
        dumps: Callable[[Task], bytes] = self._ray.cloudpickle.dumps
        if _opened != [None]:
            # What is not plain enough to travel whole may still be found by its name.
            with suppress(Exception), _by_value(self._ray.cloudpickle):
                return dumps(self.task)
        return dumps(self.task)

    def _remote(self) -> Any:
        passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        # Without the last, older versions of Ray hide the accelerators of a machine from a job that reserves none.
        environment = {**worker_environment(self.threads), **passed, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        options = {"num_cpus": self.threads, "max_retries": 0, "runtime_env": {"env_vars": environment}}
        return self._ray.remote(**options)(_bootstrap(self.threads, package_version()))


def _bootstrap(threads: int, version: str) -> Callable[[bytes, int, bytes], bytes]:
    """What a worker calls. It travels by value: this package may lie on a path that the worker has yet to learn."""
    home, path = (socket.gethostname(), sys.prefix), list(sys.path)

    def perform_job(task: bytes, index: int, job: bytes) -> bytes:
        import os
        import socket
        import sys

        # Here the order of the caller, in which the working folder does not hide modules of Python (Ray puts it first).
        here = (socket.gethostname(), sys.prefix) == home
        first, then = (path, sys.path) if here else (sys.path, path)
        before = list(sys.path)
        sys.path[:] = [*first, *(folder for folder in then if folder not in first and os.path.isdir(folder))]
        try:
            from theodolite.runners.cluster import perform_packed

            return perform_packed(task, index, job, threads, None if here else version)
        finally:
            sys.path[:] = before

    return perform_job


def perform_packed(task: bytes, index: int, job: bytes, threads: int, version: str | None) -> bytes:
    """One job in a worker, all of it as bytes, so that rows do not remain views of memory that Ray takes back.

    `version` is that of the caller's package, which another machine must have too.
    """
    cloudpickle = import_ray().cloudpickle
    try:
        if version not in (None, package_version()):
            raise RuntimeError(f"{socket.gethostname()} has another version of theodolite. Install the caller's there.")
        finished = perform(pickle.loads(task), index, pickle.loads(job), threads)
        packed: bytes = cloudpickle.dumps(replace(finished, job={}))
    except (Exception, KeyboardInterrupt) as error:  # the task is not known here, or its rows cannot travel
        packed = pickle.dumps(Finished(index, {}, [], 0.0, failure_of(error)))
    return packed


def _death(error: Exception) -> Failure:
    text = "The worker process died twice while it performed this job (killed, out of memory, or crashed in native code)."
    said = f"{type(error).__name__}: {_one_line(error)}"
    return Failure(text if type(error).__name__ == "WorkerCrashedError" else f"{text} {said}", f"{text}\n{error}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


@unbroken_context
def _by_value(cloudpickle: Any) -> Iterator[None]:
    """Functions and classes of the user's own modules are pickled whole instead of by their name."""
    modules = [module for name, module in list(sys.modules.items()) if name != "__main__" and is_users_own(module)]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


# The connection


def import_ray() -> Any:
    """The package ray, told to be quiet, or an error that says how to get it."""
    with _variables(RAY_DEDUP_LOGS_SKIP_REGEX=DEATH_NOTICE):
        try:
            import ray
        except Exception as error:  # a broken installation raises what it likes
            raise RayMissingError(f"engine='ray' needs the package ray ({error}): pip install 'theodolite[ray]'") from error
    return ray


#: The address of the connection made here, None for a Ray started here; empty while there is none, or it is the user's.
_opened: list[str | None] = []


@contextmanager
def connected(address: str | None, workers: int | None, threads: int) -> Iterator[None]:
    """A Ray to work with: that of this process, else that at `address`, else one started here, which ends with the block."""
    ray = import_ray()
    if ray.is_initialized():
        _check_same(ray, address)
        _check_size(ray, threads)
        yield
        return
    level = logging.getLogger("ray").level
    _opened.append(address)
    try:
        with _process_as_found():
            _start(ray, address, (workers or max(1, cores() // threads)) * threads)
        _check_size(ray, threads)
        yield
    finally:
        ray.shutdown()
        _opened.clear()
        logging.getLogger("ray").setLevel(level)


@unbroken_context
def _process_as_found() -> Iterator[None]:
    """Undo what starting Ray does to this process.

    It moves to a process group of its own, where Ctrl-C at a terminal does not reach it behind a pipe or `make`, and it
    answers SIGTERM by a dump of its stack.
    """
    group, on_term = os.getpgrp(), signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if os.getpgrp() != group:
            with suppress(OSError):  # the group has ended meanwhile
                os.setpgid(0, group)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_term)


def _start(ray: Any, address: str | None, cpus: int) -> None:
    options = {"num_cpus": cpus, "include_dashboard": False} if address is None else {}
    what = "A local Ray could not be started"
    if address is not None:
        what = f"There is no Ray to be reached at {address!r} (one that asks for a token needs RAY_AUTH_MODE=token here too)"
    try:
        with _variables(RAY_USAGE_STATS_ENABLED="0"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Ray Client connection timed out")  # said below
            ray.init(address or "local", log_to_driver=False, logging_level=logging.CRITICAL, **options)
    except Exception as error:
        raise RayUnreachableError(f"{what}: {_one_line(error)}") from error


def _check_same(ray: Any, address: str | None) -> None:
    present = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", present, *_opened):
        raise ValueError(
            f"address is {address!r}, but this process is connected to the Ray at {present!r} already. "
            "Leave the address out to use that one, or call ray.shutdown() first."
        )


def _check_size(ray: Any, threads: int) -> None:
    """A job that fits no machine would wait for ever. A cluster of no CPUs at all may be about to grow."""
    largest = max((int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]), default=0)
    if 0 < largest < threads:
        raise ValueError(f"threads must be at most {largest}, the CPUs of the largest machine of this Ray. Got {threads}.")


def check_address(address: str) -> None:
    """Raise unless something listens there; Ray itself would take minutes to give up."""
    if address == "auto":
        if not import_ray().is_initialized():
            with connected("auto", None, 1):
                pass
        return
    place = urlsplit(address if "://" in address else f"//{address}")
    try:
        host, port = place.hostname, place.port
    except ValueError:
        host = port = None
    if place.scheme not in ("", "ray") or not host or not port:
        raise ValueError(f"address must be 'auto', 'ray://HOST:PORT' or 'HOST:PORT'. Got {address!r}.")
    try:
        socket.create_connection((host, port), timeout=PATIENCE).close()
    except OSError as error:
        raise RayUnreachableError(f"There is no Ray to be reached at {address!r}: {error.strerror or error}") from error


@unbroken_context
def _variables(**values: str) -> Iterator[None]:
    """Environment variables for the time of a block, unless the user has set them."""
    mine = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(mine)
    try:
        yield
    finally:
        for name in mine:
            os.environ.pop(name, None)
