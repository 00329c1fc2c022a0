"""A run survives kills, torn lines and full disks; nothing is lost, nothing is counted twice."""

from __future__ import annotations

import errno
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.experiments.samples import Failing, Right
from theodolite.runners import Record, RunStore, run_stored
from theodolite.runners.store import RunBusyError, RunExistsError, StoreError, job_key, plain, read_records
from theodolite.testing.experiment_contract import same

MANIFEST = {"name": "test", "settings": {"size": "tiny"}}


def record(i: int) -> Record:
    row = {"i": i, "value": 0.1 * i, "nan": float("nan"), "flag": True, "none": None, "t": torch.full((3,), float(i))}
    return Record(f"key{i}", {"seed": i}, [row, {"i": -i}], 0.5)


def filled(folder, count=4):
    with RunStore.open(folder, MANIFEST, resume=False) as store:
        for i in range(count):
            store.add(record(i))
    return (folder / "rows.jsonl").read_bytes()


def test_what_was_added_is_read_back(tmp_path):
    filled(tmp_path)
    records = read_records(tmp_path)
    assert list(records) == [f"key{i}" for i in range(4)]
    assert all(same(records[f"key{i}"].rows, record(i).rows) for i in range(4))


def test_a_line_torn_at_any_byte_is_cut_off_and_the_rest_kept(tmp_path):
    content = filled(tmp_path)
    lines = content.splitlines(keepends=True)
    start = len(content) - len(lines[-1])
    for cut in range(start, len(content)):
        (tmp_path / "rows.jsonl").write_bytes(content[:cut])
        with RunStore.open(tmp_path, MANIFEST, resume=True) as store:
            assert list(store.records) == ["key0", "key1", "key2"]
            assert store.torn == (cut > start)
            store.add(record(3))
        assert (tmp_path / "rows.jsonl").read_bytes() == content


def test_a_line_damaged_in_the_middle_is_done_anew(tmp_path):
    content = filled(tmp_path)
    (tmp_path / "rows.jsonl").write_bytes(content.replace(b'"i": 1,', b'"i": 9,'))
    assert list(read_records(tmp_path)) == ["key0", "key2", "key3"]
    with RunStore.open(tmp_path, MANIFEST, resume=True) as store:
        store.add(record(1))
    assert set(read_records(tmp_path)) == {f"key{i}" for i in range(4)}


def test_lost_tensors_make_the_job_undone(tmp_path):
    filled(tmp_path)
    (tmp_path / "tensors" / "key2.safetensors").unlink()
    assert "key2" not in read_records(tmp_path)


def test_a_full_disk_is_a_clear_error_and_loses_nothing(tmp_path, monkeypatch):
    filled(tmp_path, 2)
    real = os.write

    def full(handle, content):
        real(handle, bytes(content)[:10])  # part of the line gets through
        raise OSError(errno.ENOSPC, "No space left on device")

    with RunStore.open(tmp_path, MANIFEST, resume=True) as store:
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(StoreError, match=r"no space is left .* 2 finished jobs are safe .* --resume"):
            store.add(Record("key9", {}, [{"a": 1}], 0.0))
        monkeypatch.undo()
        store.add(record(3))
    assert list(read_records(tmp_path)) == ["key0", "key1", "key3"]


def test_a_full_disk_at_the_tensors_leaves_no_half_file(tmp_path, monkeypatch):
    def full(handle, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    filled(tmp_path, 1)
    with RunStore.open(tmp_path, MANIFEST, resume=True) as store:
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(StoreError, match="no space"):
            store.add(record(5))
    assert sorted(p.name for p in (tmp_path / "tensors").iterdir()) == ["key0.safetensors"]


@pytest.mark.parametrize(("moment", "kept"), [("write", 2), ("fsync", 3)])
def test_ctrl_c_while_writing_leaves_whole_lines_only(tmp_path, monkeypatch, moment, kept):
    filled(tmp_path, 2)
    real = os.write

    def interrupted(handle, *content):
        if content:
            real(handle, bytes(content[0])[:10])
        raise KeyboardInterrupt

    with RunStore.open(tmp_path, MANIFEST, resume=True) as store:
        monkeypatch.setattr(os, moment, interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.add(Record("key2", {}, [{"a": 1}], 0.0))
    monkeypatch.undo()
    assert len(read_records(tmp_path)) == kept
    with RunStore.open(tmp_path, MANIFEST, resume=True) as store:
        assert not store.torn


def test_a_really_full_disk(tmp_path):
    """A file-size limit of the system stands in for the disk: writes beyond it fail for real."""
    code = f"""
import resource, signal, sys
sys.path.insert(0, {str(os.getcwd())!r})
from theodolite.runners import RunStore, Record
from theodolite.runners.store import StoreError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = RunStore.open({str(tmp_path / "run")!r}, {MANIFEST!r}, resume=False)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
done = 0
try:
    for i in range(100):
        store.add(Record(f"k{{i}}", {{"seed": i}}, [{{"value": i}}], 0.0))
        done += 1
except StoreError as error:
    assert "finished jobs are safe" in str(error)
    print(done)
"""
    done = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 3 < done < 100
    assert list(read_records(tmp_path / "run")) == [f"k{i}" for i in range(done)]
    with RunStore.open(tmp_path / "run", MANIFEST, resume=True) as store:
        assert not store.torn


def test_only_one_process_may_write(tmp_path):
    with RunStore.open(tmp_path, MANIFEST, resume=False):
        code = f"""
from theodolite.runners import RunStore
RunStore.open({str(tmp_path)!r}, {MANIFEST!r}, resume=True)
"""
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert other.returncode != 0
        assert f"RunBusyError: {tmp_path} is being written by process {os.getpid()}" in other.stderr
        with pytest.raises(RunBusyError):
            RunStore.open(tmp_path, MANIFEST, resume=True)
    RunStore.open(tmp_path, MANIFEST, resume=True).close()


def test_a_lock_that_could_not_be_written_is_released(tmp_path, monkeypatch):
    def full(handle, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(StoreError, match=r"no space is left .* 0 finished jobs"):
            RunStore.open(tmp_path, MANIFEST, resume=False)
    RunStore.open(tmp_path, MANIFEST, resume=False).close()  # in this very process


def test_a_file_system_without_locks_is_not_called_another_process(tmp_path, monkeypatch):
    def none(handle, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", none)
    with pytest.raises(StoreError, match="No locks available"):
        RunStore.open(tmp_path, MANIFEST, resume=False)


def test_the_name_of_a_new_file_of_rows_is_on_disk_with_its_first_line(tmp_path, monkeypatch):
    real, synced = os.fsync, []

    def noting(handle):
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    with RunStore.open(tmp_path / "run", MANIFEST, resume=False) as store:
        monkeypatch.setattr(os, "fsync", noting)
        store.add(Record("key", {}, [{"a": 1}], 0.0))
        assert synced == [str(tmp_path / "run" / "rows.jsonl"), str(tmp_path / "run")]


@pytest.mark.parametrize(("old", "new"), [("tiny", "tinx"), ('"crc"', '"crb"'), ("theodolite-run", "theodolite-rum")])
def test_a_damaged_manifest_is_named_and_its_rows_are_kept(tmp_path, old, new):
    filled(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ValueError, match=r"manifest.json is (damaged|not the manifest)"):
        RunStore.open(tmp_path, MANIFEST, resume=True)
    path.unlink()  # what the error advises
    with RunStore.open(tmp_path, MANIFEST, resume=True) as store:
        assert len(store.records) == 4


def test_an_existing_run_is_not_overwritten(tmp_path):
    filled(tmp_path)
    with pytest.raises(RunExistsError, match="--resume"):
        RunStore.open(tmp_path, MANIFEST, resume=False)
    with pytest.raises(RunExistsError, match="a run of 'test'"):
        RunStore.open(tmp_path, {"name": "other"}, resume=True)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        RunStore.open(tmp_path, MANIFEST, resume=True)


def test_a_fresh_run_forgets_the_old_one(tmp_path):
    filled(tmp_path)
    with RunStore.open(tmp_path, MANIFEST, resume=False, fresh=True) as store:
        assert store.records == {}
        store.add(record(7))
    assert list(read_records(tmp_path)) == ["key7"]


@pytest.mark.parametrize("damage", [b"", b"nonsense", "flip"])
def test_damaged_tensors_make_the_job_undone(tmp_path, damage):
    filled(tmp_path)
    path = tmp_path / "tensors" / "key2.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 255
    path.write_bytes(bytes(content) if damage == "flip" else damage)
    assert list(read_records(tmp_path)) == ["key0", "key1", "key3"]


def test_keys_follow_content():
    base = job_key("a", {"x": 1.0, "seed": 0})
    others = [("b", {"x": 1.0, "seed": 0}), ("a", {"x": 1.5, "seed": 0}), ("a", {"x": 1.0, "seed": 1})]
    assert len({base, *(job_key(*other) for other in others)}) == 4
    assert plain({"a": torch.tensor(2.0), "b": (1, 2)}) == {"a": 2.0, "b": [1, 2]}
    with pytest.raises(ValueError, match="object"):
        plain({"a": object()})


JOBS = [{"seed": i, "pause": 0.0} for i in range(6)]


def test_a_run_goes_on_where_it_was(tmp_path):
    whole = run_stored(Right().run, JOBS, name="r")
    first = run_stored(Right().run, JOBS[:3], name="r", folder=tmp_path)
    rest = run_stored(Right().run, JOBS, name="r", folder=tmp_path, resume=True)
    assert (first.reused, rest.reused, rest.jobs) == (0, 3, 6)
    assert same(rest.rows, whole.rows)
    again = run_stored(Right().run, list(reversed(JOBS)), name="r", folder=tmp_path, resume=True)
    assert again.reused == 6
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 6


def fails_at_first(job):
    mark = Path(job["mark"])
    if not mark.exists():
        mark.touch()
        raise RuntimeError("not yet")
    return {"seed": job["seed"]}


def test_failed_jobs_are_recorded_and_tried_again(tmp_path):
    first = run_stored(Failing().run, JOBS, name="r", folder=tmp_path / "a")
    assert len(first.failures) == 3
    assert "is odd" in first.failures[0].traceback
    again = run_stored(Failing().run, JOBS, name="r", folder=tmp_path / "a", resume=True)
    assert (again.reused, len(again.failures)) == (3, 3)
    jobs = [{"seed": i, "mark": str(tmp_path / f"mark{i}")} for i in range(3)]
    assert len(run_stored(fails_at_first, jobs, name="r", folder=tmp_path / "b").failures) == 3
    mended = run_stored(fails_at_first, jobs, name="r", folder=tmp_path / "b", resume=True)
    assert (mended.rows, mended.failures) == ([{"seed": 0}, {"seed": 1}, {"seed": 2}], [])
    assert run_stored(fails_at_first, jobs, name="r", folder=tmp_path / "b", resume=True).reused == 3


@pytest.mark.parametrize("engine", ["serial", "joblib"])
def test_a_row_that_cannot_be_kept_fails_its_job_only(tmp_path, engine):
    def task(job):
        shared = torch.arange(4.0)
        odd = {0: {1, 2}, 1: 1j, 2: object()}.get(job["seed"], "fine")
        return [{"odd": odd, "one": shared, "two": shared[1:]}]

    jobs = [{"seed": i} for i in range(4)]
    done = run_stored(task, jobs, name="r", folder=tmp_path, engine=engine, workers=2)
    assert [record.job["seed"] for record in done.failures] == [0, 1, 2]
    assert "may hold numbers" in done.failures[0].error
    (row,) = done.rows
    assert row["two"].tolist() == [1.0, 2.0, 3.0]
    assert same(list(read_records(tmp_path).values())[-1].rows or [row], [row])


MODULE = "FACTOR = {factor}\ndef scaled(x):\n    return FACTOR * x\n"
OWNER = """
from helper_module import scaled
class Base:
    def run(self, job):
        return {{"value": scaled(job["x"]) + {shift}}}
"""


def test_results_follow_the_code_that_made_them(tmp_path):
    """A helper module, the class's own file and its parent's: a change in any of them makes rows older, a comment does not."""
    run = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import owner_module, child_module
from theodolite.runners import run_stored
done = run_stored(child_module.Child().run, [{{"x": 1}}, {{"x": 2}}], name="r", folder={str(tmp_path / "run")!r},
                  owners=(child_module.Child,), resume=True, update=bool(int(sys.argv[1])))
print(done.reused, done.outdated, [row["value"] for row in done.rows])
"""
    (tmp_path / "child_module.py").write_text("from owner_module import Base\nclass Child(Base):\n    pass\n")

    def write_and_run(factor, shift, *, update=False, comment=""):
        (tmp_path / "helper_module.py").write_text(MODULE.format(factor=factor) + comment)
        (tmp_path / "owner_module.py").write_text(comment + OWNER.format(shift=shift))
        options = {"capture_output": True, "text": True, "check": True, "env": {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}}
        return subprocess.run([sys.executable, "-c", run, str(int(update))], **options).stdout.strip()

    assert write_and_run(10, 0) == "0 0 [10, 20]"
    assert write_and_run(10, 0, comment="# no change of meaning\n") == "2 0 [10, 20]"
    assert write_and_run(30, 0) == "2 2 [10, 20]"  # kept, and counted as older
    assert write_and_run(30, 0, update=True) == "0 0 [30, 60]"
    assert write_and_run(30, 1, update=True) == "0 0 [31, 61]"
    assert write_and_run(30, 1, update=True) == "2 0 [31, 61]"


def test_other_threads_are_other_conditions(tmp_path):
    run_stored(Right().run, JOBS, name="r", folder=tmp_path)
    assert run_stored(Right().run, JOBS, name="r", folder=tmp_path, resume=True, threads=2).outdated == 6
    assert run_stored(Right().run, JOBS, name="r", folder=tmp_path, resume=True, update=True, threads=2).reused == 0


def test_tasks_without_a_file_have_a_version_too():
    from theodolite.runners.code_version import code_version

    space: dict = {}
    exec("def one(job):\n    return {'a': 1}\ndef two(job):\n    return {'a': 2}\n", space)
    assert code_version(space["one"]) != code_version(space["two"])
    assert code_version(functools.partial(fails_at_first)) == code_version(fails_at_first)


def test_no_jobs_are_no_run():
    with pytest.raises(ValueError, match="jobs must hold at least one"):
        run_stored(Right().run, [], name="r")


def test_results_of_other_code_are_marked_and_redone_when_asked(tmp_path, monkeypatch):
    run_stored(Right().run, JOBS, name="r", folder=tmp_path)
    monkeypatch.setattr("theodolite.runners.runs.code_version", lambda *owners: "other")
    kept = run_stored(Right().run, JOBS, name="r", folder=tmp_path, resume=True)
    assert (kept.reused, kept.outdated) == (6, 6)
    redone = run_stored(Right().run, JOBS, name="r", folder=tmp_path, resume=True, update=True)
    assert (redone.reused, redone.outdated) == (0, 0)
    assert same(redone.rows, kept.rows)
    assert json.loads((tmp_path / "manifest.json").read_text())["code"] == "other"
    assert {record.code for record in read_records(tmp_path).values()} == {"other"}


def test_equal_jobs_are_refused():
    with pytest.raises(ValueError, match="two jobs are the same"):
        run_stored(Right().run, [JOBS[0], JOBS[0]], name="r")
