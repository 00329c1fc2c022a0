"""The log of a monitor: every line outlives the process, a torn one does no harm, and nothing that was written is lost."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.monitors.logs import SPIKES, fake_run, header, write_lines
from theodolite.monitors import log as module
from theodolite.monitors.log import Chunk, LogWriter, fold, log_path, read_chunk, read_log


def step(t: int, loss: float | None = 1.0, **more):
    return {"kind": "step", "step": t, "loss": loss, **more}


def test_what_is_written_is_read(tmp_path):
    with LogWriter(tmp_path / "runs" / "one") as log:
        for record in fake_run(1000):
            log.write(**record)
    assert log.path == tmp_path / "runs" / "one" / "monitor.jsonl"
    found = read_log(tmp_path / "runs" / "one")
    assert found.run == header()
    assert found.steps == [record for record in fake_run(1000) if record["kind"] == "step"]
    assert found.looks == sorted((r for r in fake_run(1000) if r["kind"] == "look"), key=lambda r: (r["step"], r["on"]))
    assert [(spike["cause"], spike["end"] is not None) for spike in found.spikes] == [(cause, True) for _, cause, *_ in SPIKES]
    assert found.end is not None
    assert found.end["catapults"] == 2
    assert (found.other, found.bad_lines) == ([], 0)


def test_a_file_or_a_folder(tmp_path):
    (tmp_path / "there.v1").mkdir()
    (tmp_path / "plain").touch()
    for given_path, wanted in {
        "new": "new/monitor.jsonl",
        "run.1": "run.1/monitor.jsonl",
        "a/b.jsonl": "a/b.jsonl",
        "train.log": "train.log",
        "there.v1": "there.v1/monitor.jsonl",
        "plain": "plain",
    }.items():
        assert log_path(tmp_path / given_path) == tmp_path / wanted


def test_numbers_of_torch_and_numpy_are_plain(tmp_path):
    with LogWriter(tmp_path) as log:
        loss = torch.tensor(0.5, requires_grad=True)
        more = {
            "rate": np.float32(0.25),
            "update_norm": np.float64(0.1),
            "flag": np.bool_(True),
            "half": torch.tensor(2.0).bfloat16(),
        }
        log.write(kind="step", step=torch.tensor(3), loss=loss, several=torch.tensor([1.0, math.nan]), device=loss.device, **more)
    line = log.path.read_text()
    assert json.loads(line) == {
        "kind": "step",
        "step": 3,
        "loss": 0.5,
        "several": [1.0, "nan"],
        "device": "cpu",
        "rate": 0.25,
        "update_norm": 0.1,
        "flag": True,
        "half": 2.0,
    }


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, torch.tensor(math.nan), np.float32(math.inf)])
def test_what_is_not_finite_is_named_and_comes_back(tmp_path, value):
    with LogWriter(tmp_path) as log:
        log.write(kind="step", step=1, loss=value, rate=0.1)
    (raw,) = [json.loads(line, parse_constant=pytest.fail) for line in log.path.read_text().splitlines()]
    assert raw["loss"] is None
    assert raw["nonfinite"] == {"loss": str(float(value))}
    (back,) = read_log(tmp_path).steps
    assert back["loss"] == float(value) or (math.isnan(float(value)) and math.isnan(back["loss"]))
    assert back["rate"] == 0.1


def test_a_killed_process_loses_no_whole_line(tmp_path):
    program = (
        "import os, sys; from theodolite.monitors.log import LogWriter\n"
        "log = LogWriter(sys.argv[1])\n"
        "for t in range(100): log.write(kind='step', step=t, loss=1.0)\n"
        "os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False).returncode == -9
    assert [row["step"] for row in read_log(tmp_path).steps] == list(range(100))


def test_a_torn_line_is_skipped_then_mended(tmp_path):
    path = write_lines(tmp_path / "monitor.jsonl", [header(), step(0), step(1)])
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    assert [row["step"] for row in read_log(path).steps] == [0]
    assert read_log(path).bad_lines == 0  # it may still be being written
    with LogWriter(path) as log:
        log.write(**step(1, 2.0))
    found = read_log(path)
    assert [(row["step"], row["loss"]) for row in found.steps] == [(0, 1.0), (1, 2.0)]
    assert found.bad_lines == 1


def test_a_full_disk_costs_one_line(tmp_path, monkeypatch):
    log = LogWriter(tmp_path)
    log.write(**step(0))

    def half(handle: int, content: bytes) -> None:
        os.write(handle, content[: len(content) // 2])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(module, "write_all", half)
        with pytest.raises(OSError, match="No space"):
            log.write(**step(1))
    log.write(**step(2))
    log.close()
    log.close()
    assert [row["step"] for row in read_log(tmp_path).steps] == [0, 2]
    with pytest.raises(ValueError, match="is closed"):
        log.write(**step(3))


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe",
        b"[1]",
        b"{}",
        b'{"kind": 3}',
        b'{"kind": "step"}',
        b'{"kind": "step", "step": "1"}',
        b'{"kind": "step", "step": 1e999}',
        b'{"kind": "step", "step": true}',
        b'{"kind": "look", "step": 1, "on": []}',
        b'{"kind": "step", "step": 1, "loss": NaN}',
        b"[" * 100_000,
    ],
)
def test_lines_that_are_none_of_ours_are_counted(tmp_path, line):
    (tmp_path / "monitor.jsonl").write_bytes(line + b"\n" + json.dumps(step(1)).encode() + b"\n\n")
    found = read_log(tmp_path)
    assert (len(found.steps), found.bad_lines) == (1, 1)


def test_unknown_kinds_and_keys_are_kept():
    found = fold([step(1, colour="red"), {"kind": "weather", "sun": True}])
    assert found.steps[0]["colour"] == "red"
    assert found.other == [{"kind": "weather", "sun": True}]


def test_a_resumed_run_goes_on_and_later_lines_win():
    first = [*fake_run(100, end=True)]
    second = [header(optimizer="SGD"), *(step(t, 9.0) for t in range(90, 120))]
    found = fold([*first, *second])
    assert [row["step"] for row in found.steps] == list(range(120))
    assert {row["loss"] for row in found.steps[90:]} == {9.0}
    assert (len(found.runs), found.run["optimizer"], found.end) == (2, "SGD", None)
    looks = [{"kind": "look", "step": 5, "on": on, "sharpness": s} for on, s in [("batch", 1), ("probe", 2), ("batch", 3)]]
    assert [(row["on"], row["sharpness"]) for row in fold(looks).looks] == [("batch", 3), ("probe", 2)]


def test_a_missing_log_says_how_to_get_one(tmp_path):
    with pytest.raises(FileNotFoundError, match="Monitor"):
        read_log(tmp_path)
    assert read_chunk(tmp_path / "none" / "monitor.jsonl") == Chunk([], 0, "", 0, more=False)
    (tmp_path / "file").touch()
    assert read_chunk(tmp_path / "file" / "below") == Chunk([], 0, "", 0, more=False)


@given(cuts=st.lists(st.integers(0, 2000), max_size=12), limit=st.integers(1, 400))
@settings(max_examples=40, deadline=None)
def test_following_sees_every_record_once(tmp_path_factory, cuts, limit):
    """However the writes and the reads fall."""
    path = tmp_path_factory.mktemp("log") / "monitor.jsonl"
    records = [{**step(t), "text": "é\u2028" * (t % 7)} for t in range(12)]
    whole = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    places = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    seen, offset = [], 0
    limited, place, token = [], 0, ""
    for start, end in pairwise(places):
        with path.open("ab") as file:
            file.write(whole[start:end])
        chunk = read_chunk(path, offset)
        new, offset = chunk.records, chunk.offset
        seen += new
        more = True
        while more:
            chunk = read_chunk(path, place, token, limit)
            limited += chunk.records
            place, token, more = chunk.offset, chunk.token, chunk.more
    assert seen == limited == records
    assert offset == place == len(whole)


def test_another_log_in_the_same_place_is_read_from_its_start(tmp_path):
    path = write_lines(tmp_path / "monitor.jsonl", [header(), step(0), step(1)])
    chunk = read_chunk(path)
    assert read_chunk(path, chunk.offset, chunk.token).records == []
    path.unlink()
    write_lines(path, [header(model="LeNet"), *(step(t) for t in range(9))])
    again = read_chunk(path, chunk.offset, chunk.token)
    assert len(again.records) == 10
    path.write_bytes(b"")
    assert read_chunk(path, again.offset, again.token).offset == 0
    for far in (-5, 10**9):
        assert read_chunk(path, far).offset == 0


def test_reading_and_writing_need_no_torch():
    program = "import sys, theodolite.monitors.log; sys.exit(str({'torch', 'numpy', 'matplotlib'} & set(sys.modules) or '') or 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
