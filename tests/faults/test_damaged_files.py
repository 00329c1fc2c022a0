"""Bits flip in every kind of file that is written: what is read back is the same, or an error that names the file."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import theodolite as th
from theodolite.report import collect_runs
from theodolite.results import Result
from theodolite.runners import Computations, Record, RunStore
from theodolite.runners.store import read_manifest, read_records
from theodolite.training.interruption import load_state, save_state


def plain_text(value: Any) -> str:
    """All that a value holds, every digit of it."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {value.tolist()}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {plain_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(map(plain_text, value))})"
    if isinstance(value, Result | Record):
        return type(value).__name__ + plain_text({f.name: getattr(value, f.name) for f in fields(value)})
    return repr(value)


@dataclass(frozen=True)
class Kind:
    """A kind of file: how it is written, which one is damaged, and how it is read; parts may be missing, never others."""

    write: Callable[[Path], None]
    damaged: str
    read: Callable[[Path], dict[str, Any]]


def write_result(folder: Path) -> None:
    matrix = torch.diag(torch.arange(1.0, 7.0)).double()
    th.top_eigenpairs({"first": matrix, "second": 2 * matrix}, 2).save(folder / "pairs")


def write_checkpoint(folder: Path) -> None:
    moments = {i: {"exp_avg": torch.linspace(0, i + 1, 5), "step": torch.tensor(3.0)} for i in range(2)}
    optimizer = {"state": moments, "param_groups": [{"lr": 0.01, "betas": (0.9, 0.999), "params": [0, 1]}]}
    random_state = torch.arange(40, dtype=torch.uint8)
    save_state(folder, {"model": nn.Linear(2, 1).state_dict(), "optimizer": optimizer, "random": [random_state], "seed": 0})


def record(i: int) -> Record:
    row = {"i": i, "value": 0.1 * i, "nan": float("nan"), "tensor": torch.linspace(0, i + 1, 4)}
    return Record(f"key{i}", {"seed": i}, [row, {"text": "ä"}], 0.5, code="c")


def write_run(folder: Path) -> None:
    with RunStore.open(folder, {"name": "flips", "settings": {"size": "tiny"}, "keys": ["key0", "key1"]}, resume=False) as store:
        for i in range(3):
            store.add(record(i))


def read_run(folder: Path) -> dict[str, Any]:
    return {"manifest": read_manifest(folder), **read_records(folder)}


def write_computation(folder: Path) -> None:
    Computations(folder).add(record(1))


KINDS = {
    "result": Kind(write_result, "pairs.json", lambda folder: {"result": th.load(folder / "pairs")}),
    "tensors of a result": Kind(write_result, "pairs.safetensors", lambda folder: {"result": th.load(folder / "pairs")}),
    "checkpoint": Kind(write_checkpoint, "checkpoint.safetensors", lambda folder: {"state": load_state(folder)}),
    "manifest of a run": Kind(write_run, "manifest.json", read_run),
    "rows of a run": Kind(write_run, "rows.jsonl", read_run),
    "tensors of a run": Kind(write_run, "tensors/*.safetensors", read_run),
    "computation": Kind(write_computation, "*/*.json", lambda folder: {"key1": Computations(folder).get("key1")}),
    "tensors of a computation": Kind(
        write_computation, "*/*.safetensors", lambda folder: {"key1": Computations(folder).get("key1")}
    ),
}


def damaged_contents(content: bytes, count: int, moments: random.Random) -> Iterator[bytes]:
    """The content with one to three of its bits flipped, or, one time in ten, cut short."""
    for _ in range(count):
        changed = bytearray(content)
        for _ in range(moments.randint(1, 3)):
            place = moments.randrange(8 * len(content))
            changed[place // 8] ^= 1 << place % 8
        yield bytes(changed if moments.random() < 0.9 else content[: moments.randrange(len(content))])


def check_flips(kind: Kind, folder: Path, count: int) -> None:
    """Damage files of a kind so many times in all; each time reading raises, leaves out what is lost, or gives the same."""
    kind.write(folder)
    whole = {name: plain_text(value) for name, value in kind.read(folder).items()}
    files = sorted(folder.glob(kind.damaged))
    moments = random.Random(count)
    raised = left_out = 0
    for number, path in enumerate(files):
        content = path.read_bytes()
        for changed in damaged_contents(content, len(range(number, count, len(files))), moments):
            path.write_bytes(changed)
            try:
                found = {name: plain_text(value) for name, value in kind.read(folder).items() if value is not None}
            except ValueError as error:
                if path.name not in str(error):
                    raise  # an error must name the file
                raised += 1
                continue
            assert found == {name: whole[name] for name in found}, f"{path.name} was read as another value"
            left_out += len(found) < len(whole)
        path.write_bytes(content)
    assert {name: plain_text(value) for name, value in kind.read(folder).items()} == whole
    assert raised + left_out > count / 2  # the flips were seen


@pytest.mark.parametrize("kind", KINDS)
def test_no_flipped_bit_is_read_as_another_value(kind, tmp_path):
    check_flips(KINDS[kind], tmp_path / "files", 12)


def test_odd_and_damaged_manifests_do_not_hide_the_other_runs(tmp_path):
    th.experiments.run("checks/kronecker-identity", out=tmp_path, progress=False)
    (good,) = (path.parent for path in tmp_path.rglob("manifest.json"))
    whole = {**json.loads((good / "manifest.json").read_text()), "version": 1}  # which has no check sum
    odd = [{**whole, name: value} for name in ("name", "settings", "provenance", "keys") for value in (None, 3, ["x"], {"x": 1})]
    odd = [manifest for manifest in odd if manifest["keys"] != ["x"] and manifest["provenance"] != {"x": 1}]  # are as they may be
    texts = [*map(json.dumps, odd), "[" * 100_000, "{", (good / "manifest.json").read_text()[:-9]]
    for number, text in enumerate(texts):
        shutil.copytree(good, tmp_path / f"odd{number}")
        (tmp_path / f"odd{number}" / "manifest.json").write_text(text)
    runs, bad = collect_runs(tmp_path)
    assert [run.folder for run in runs] == [good]
    assert len(bad) == len(texts)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_none_of_five_hundred_flips_is_read_as_another_value(kind, tmp_path):
    check_flips(KINDS[kind], tmp_path / "files", 500)
