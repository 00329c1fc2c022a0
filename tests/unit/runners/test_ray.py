"""What only the ray engine has: a Ray to find, start, share and end, and other machines."""

from __future__ import annotations

import importlib
import os
import pickle
import socket
import subprocess
import sys
import time
import zlib
from collections import deque
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from theodolite.cli import main
from theodolite.experiments import load_run
from theodolite.runners import cluster, run_all, run_stored
from theodolite.runners.cluster import RayMissingError, RayUnreachableError
from theodolite.testing.experiment_contract import same

MODULE = """
FACTOR = 10

def times(x):
    return FACTOR * x

class Task:
    def __call__(self, job):
        import sys
        return {"y": times(job["x"]), "imported": __name__ in sys.modules}
"""


def run(**arguments):
    return list(run_all(lambda job: {"x": job["x"]}, [{"x": 1}], engine="ray", **arguments))


@pytest.fixture
def outside_module(tmp_path, monkeypatch):
    """A module found through the caller's `sys.path` alone."""
    name = f"module_of_the_user_{zlib.crc32(bytes(tmp_path))}"  # another for each test: the workers stay
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module(name)
    del sys.modules[name]


@pytest.fixture
def listening():
    """The address of something that listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


# Tasks and what they see


def test_a_module_that_only_the_caller_can_find(open_ray, outside_module):
    assert list(run_all(outside_module.Task(), [{"x": 2}], engine="ray", workers=1)) == [{"y": 20, "imported": True}]


def test_a_worker_finds_the_modules_of_the_caller_for_as_long_as_the_job_takes(monkeypatch, tmp_path):
    as_worker = list(sys.path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    perform_job = cluster._bootstrap(1, "any")
    sys.path[:] = as_worker
    finished = pickle.loads(perform_job(pickle.dumps(last_folder), 0, pickle.dumps({})))
    assert finished.rows == [{"last": str(tmp_path)}]
    assert sys.path == as_worker


def last_folder(job):
    return {"last": sys.path[-1]}


def test_a_module_that_another_machine_cannot_find_travels_inside(open_ray, outside_module, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "_opened", [])  # as if the cluster were the user's
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != str(tmp_path)])
    assert list(run_all(outside_module.Task(), [{"x": 2}], engine="ray", workers=1)) == [{"y": 20, "imported": False}]


def test_the_environment_reaches_the_workers_before_torch_starts(open_ray, tmp_path, monkeypatch):
    monkeypatch.setenv("THEODOLITE_DATA", str(tmp_path))
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    names = ("THEODOLITE_DATA", "MKL_CBWR", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    (row,) = run_all(lambda job: {name: os.environ.get(name) for name in names}, [{}], engine="ray", workers=1, threads=2)
    assert row == dict(zip(names, (str(tmp_path), "COMPATIBLE", "2", "2"), strict=True))


def test_at_most_so_many_jobs_at_a_time(open_ray):
    def timed(job):
        began = time.time()
        time.sleep(0.1)
        return {"began": began, "ended": time.time()}

    rows = sorted(run_all(timed, [{"x": i} for i in range(4)], engine="ray", workers=1), key=lambda row: row["began"])
    assert all(first["ended"] <= then["began"] for first, then in pairwise(rows))


def test_no_jobs_need_no_ray():
    assert list(run_all(lambda job: {}, [], engine="ray", workers=2)) == []


def test_another_version_of_the_package_on_a_machine_is_said():
    packed = pickle.dumps(len)
    finished = pickle.loads(cluster.perform_packed(packed, 3, pickle.dumps({}), 1, "other"))
    assert finished.index == 3
    assert "another version of theodolite" in finished.failure.error


@pytest.mark.parametrize("name", ["OutOfMemoryError", "NodeDiedError", "WorkerCrashedError", "RuntimeEnvSetupError"])
def test_what_ray_itself_raises_is_tried_again_then_reported(name):
    ray = cluster.import_ray()
    error = (
        getattr(ray.exceptions, name)("the node is gone") if name != "WorkerCrashedError" else ray.exceptions.WorkerCrashedError()
    )

    def get(reference):
        raise error

    jobs = cluster.RayRun(len, [{"x": 0}, {"x": 1}], 2, 1, None)
    jobs._ray = SimpleNamespace(get=get, exceptions=ray.exceptions)
    jobs._waiting = deque([1])
    jobs._running = {"first": 0}
    assert jobs._collect("first") is None
    assert list(jobs._waiting) == [0, 1]
    jobs._running = {"second": 0}
    finished = jobs._collect("second")
    assert finished.job == {"x": 0}
    assert "died twice" in finished.failure.error
    assert ("the node is gone" in finished.failure.error) == (name != "WorkerCrashedError")


def test_a_lost_connection_ends_the_run_and_says_so():
    def wait(references, num_returns):
        raise ConnectionError("the client is gone")

    jobs = cluster.RayRun(len, [{"x": 0}], 1, 1, None)
    jobs._ray = SimpleNamespace(wait=wait, cloudpickle=pickle, exceptions=jobs._ray.exceptions)
    with pytest.raises(RayUnreachableError, match="connection to Ray was lost: the client is gone"):
        list(jobs._performed("task", SimpleNamespace(remote=lambda *arguments: "reference")))


# Where Ray is


def test_ray_that_is_not_installed_is_said_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RayMissingError, match=r"pip install 'theodolite\[ray\]'"):
        run_all(len, [{}], engine="ray")
    with pytest.raises(ImportError):
        run_stored(len, [{}], name="n", folder=tmp_path / "run", engine="ray")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("address", ["nonsense", "http://host:1", "ray://host", "host:port", ""])
def test_addresses_that_are_none(address):
    with pytest.raises(ValueError, match="address must be 'auto'"):
        run(address=address)


@pytest.mark.parametrize("protocol", ["", "ray://"])
def test_an_address_where_nobody_listens(tmp_path, protocol):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(RayUnreachableError, match=f"no Ray to be reached at '{protocol}127.0.0.1:{port}'.*refused"):
        run_stored(len, [{}], name="n", folder=tmp_path / "run", engine="ray", address=f"{protocol}127.0.0.1:{port}")
    assert not (tmp_path / "run").exists()


def test_the_ray_of_this_process_is_joined_and_left_running(open_ray):
    ray = cluster.import_ray()
    assert run() == run(address="auto") == run(address=ray.get_runtime_context().gcs_address) == [{"x": 1}]
    assert ray.is_initialized()


def test_an_address_other_than_that_of_this_process(open_ray, listening):
    with pytest.raises(ValueError, match=f"address is '{listening}', but this process is connected"):
        run(address=listening)


def test_more_threads_than_any_machine_has(open_ray):
    with pytest.raises(ValueError, match="threads must be at most 2"):
        run(threads=3)


# Commands


def reproduce(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", "checks/kronecker-identity", *map(str, arguments)])
    return ended.value.code


def test_reproduce_gives_the_rows_of_a_serial_run(open_ray, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert reproduce("--out", tmp_path / "serial") == 0
    assert reproduce("--out", tmp_path / "ray", "--engine", "ray", "--workers", 2) == 0
    serial, parallel = (load_run(tmp_path / name / "checks/kronecker-identity/tiny").rows for name in ("serial", "ray"))
    assert same(parallel, serial)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--address", "auto"], "engine='ray' alone"),
        (["--engine", "ray", "--address", "nonsense"], "address must be 'auto'"),
        (["--engine", "ray", "--address", "ray://127.0.0.1:1"], "no Ray to be reached at 'ray://127.0.0.1:1'"),
    ],
)
def test_an_address_that_cannot_be_used_is_one_line(tmp_path, capsys, monkeypatch, options, message):
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert reproduce("--out", tmp_path / "out", *options) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


# A Ray of its own

SCRIPT = """
import os, signal, sys
from itertools import pairwise
from pathlib import Path
import torch
from theodolite.runners import finish_all, run_all

def draw(job):
    if job["seed"] == 1 and not Path("mark").exists():
        Path("mark").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return {"seed": job["seed"], "draw": torch.rand(3).tolist()}

before = os.getpgrp(), signal.getsignal(signal.SIGTERM), {k for k in os.environ if k != "RAY_AUTH_MODE"}
jobs = [{"seed": i} for i in range(4)]
rows = sorted(run_all(draw, jobs, engine="ray", workers=2), key=lambda row: row["seed"])
import ray
assert not ray.is_initialized()
assert (os.getpgrp(), signal.getsignal(signal.SIGTERM), {k for k in os.environ if k != "RAY_AUTH_MODE"}) == before
assert rows == list(run_all(draw, jobs)), rows
print("done")
"""


@pytest.mark.slow
def test_a_ray_of_its_own_is_quiet_and_ends(tmp_path):
    """A task of `__main__`, a worker that dies, and nothing left of Ray: no output, no process, no setting."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "statistics.py").write_text("raise RuntimeError('the wrong module')")
    program = "import sys; sys.path[:] = [p for p in sys.path if p]; exec(open('script.py').read())"
    environment = {**os.environ, "MARK_OF_THIS_TEST": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
    for _ in range(500):
        if not (left := processes_with(str(tmp_path))):
            break
        time.sleep(0.02)
    assert left == []


def processes_with(mark: str) -> list[str]:
    """Processes that inherited an environment that holds `mark`, by their names."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "comm").read_text().strip())
        except OSError:
            continue
    return found
