"""Every function that writes files, on a disk that fills up and at places that cannot be written to.

What stood there before is unchanged or the new file is whole, nothing half lies about, and the error names the place.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from safetensors.torch import load as load_tensors
from torch import nn

import theodolite as th
from tests.unit.monitors.logs import fake_run, write_lines
from theodolite.analyses.page import write_analysis
from theodolite.monitors.log import LogWriter, read_log
from theodolite.report import write_gallery
from theodolite.report.watch import write_watch
from theodolite.runners import Computations, Record, RunStore
from theodolite.training.interruption import save_state


@dataclass(frozen=True)
class Writer:
    """`write` makes the files named, relative to the folder it is given; those that are appended to grow by lines."""

    write: Callable[[Path], object]
    files: tuple[str, ...]


def pairs(scale: float = 1.0) -> th.results.Result:
    return th.top_eigenpairs(scale * torch.diag(torch.arange(1.0, 7.0)).double(), 2)


@cache
def small_survey() -> th.results.Result:
    torch.manual_seed(0)
    problem = th.Problem(nn.Linear(3, 2), nn.MSELoss(), (torch.randn(8, 3), torch.randn(8, 2)))
    return th.survey(problem, only=["curvature"])


def drawing() -> Figure:
    figure = Figure()
    figure.add_subplot().plot([1, 2, 3])
    return figure


def write_log(folder: Path) -> None:
    with LogWriter(folder / "monitor.jsonl") as log:
        for record in fake_run(5):
            log.write(**record)


def write_run(folder: Path) -> None:
    with RunStore.open(folder, {"name": "one", "settings": {}, "keys": ["key0"]}, resume=True) as store:
        store.add(a_record())


def a_record() -> Record:
    return Record("key0", {"seed": 0}, [{"i": 0, "tensor": torch.linspace(0, 1, 40)}], 0.5, code="c")


def write_a_page(folder: Path) -> None:
    write_analysis(pairs(), folder / "page.html", "name", "kind", [], [], {}, "source")


def watched(folder: Path) -> None:
    log = folder.parent / "watched" / "monitor.jsonl"
    if not log.exists():
        write_lines(log, fake_run(50))
    write_watch(log, folder / "watch.html")


def gallery(folder: Path) -> None:
    runs = folder.parent / "runs"
    if not runs.exists():
        th.experiments.run("checks/kronecker-identity", out=runs, progress=False)
    write_gallery(runs, folder / "index.html")


WRITERS = {
    "result": Writer(lambda folder: pairs().save(folder / "pairs"), ("pairs.json", "pairs.safetensors")),
    "survey": Writer(lambda folder: small_survey().to_html(folder / "survey.html"), ("survey.html",)),
    **{
        f"figure as {kind}": Writer(lambda folder, kind=kind: th.plots.save(drawing(), folder / f"x.{kind}"), (f"x.{kind}",))
        for kind in ("svg", "pdf", "png")
    },
    "monitor log": Writer(write_log, ("monitor.jsonl",)),
    "run": Writer(write_run, ("manifest.json", "rows.jsonl", "tensors/key0.safetensors")),
    "computation": Writer(lambda folder: Computations(folder).add(a_record()), ("ke/key0.json", "ke/key0.safetensors")),
    "page of an analysis": Writer(write_a_page, ("page.html",)),
    "page of a log": Writer(watched, ("watch.html",)),
    "page of runs": Writer(gallery, ("index.html",)),
    "checkpoint": Writer(lambda folder: save_state(folder, nn.Linear(2, 1).state_dict()), ("checkpoint.safetensors",)),
}
#: Takes seconds, and writes as the other pages are written.
NAMES = [pytest.param(name, marks=pytest.mark.slow if name == "page of runs" else ()) for name in WRITERS]
#: Where a file is a folder; a log may be given as one, and is written inside.
PLACES = [
    (name, file) for name, writer in WRITERS.items() for file in writer.files if name not in ("page of runs", "monitor log")
]
#: The end of a file of each kind.
ENDS = {".html": b"</html>", ".svg": b"</svg>", ".pdf": b"%%EOF", ".png": b"IEND\xaeB`\x82"}


def is_whole(path: Path) -> bool:
    content = path.read_bytes()
    if path.suffix in ENDS:
        return content.rstrip().endswith(ENDS[path.suffix])
    if path.suffix == ".safetensors":
        return bool(load_tensors(content))
    lines = content.splitlines() if path.suffix == ".jsonl" else [content]
    return all(json.loads(line) is not None for line in lines)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def check_files(writer: Writer, folder: Path, before: dict[str, bytes]) -> None:
    """Each file is the old one or a whole new one; of a log that is appended to, all that was there is still read."""
    after = contents(folder)
    assert set(before) <= set(after) <= {*before, *writer.files}
    for name, content in after.items():
        if name == "monitor.jsonl":
            assert content.startswith(before.get(name, b""))
            assert read_log(folder).bad_lines == 0  # half a line has no end yet, and gets it before the next
        else:
            assert content == before.get(name) or is_whole(folder / name), name


@pytest.fixture
def disk(monkeypatch):
    """A disk of so many bytes; `written` counts what goes there."""
    real = os.write

    class Disk:
        written, room = 0, 10**12

        def write(self, handle: int, content: bytes) -> int:
            left = self.room - self.written
            if left <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done = real(handle, bytes(content)[:left])
            self.written += done
            return done

    found = Disk()
    monkeypatch.setattr(os, "write", found.write)
    return found


def names_a_file(error: OSError, writer: Writer, folder: Path) -> bool:
    """Whether the error says where: the file, or the folder of a run."""
    return any(str(folder / name) in str(error) for name in writer.files) or f"{folder} could not be written" in str(error)


@pytest.mark.parametrize("old", [pytest.param(False, id="new", marks=pytest.mark.slow), pytest.param(True, id="over an old one")])
@pytest.mark.parametrize("name", NAMES)
def test_a_disk_that_fills_up(name, old, tmp_path, disk):
    writer, folder = WRITERS[name], tmp_path / "out"
    writer.write(tmp_path / "first")
    disk.written = 0
    writer.write(tmp_path / "first")  # how much it takes once what it needs is there
    total = disk.written
    assert all(is_whole(tmp_path / "first" / file) for file in writer.files)
    for share in (0.0, 0.3, 0.7, 0.98):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if old:
            shutil.copytree(tmp_path / "first", folder, dirs_exist_ok=True)
        before = contents(folder)
        disk.written, disk.room = 0, int(share * total)
        with pytest.raises(OSError, match=r"[Nn]o space") as raised:
            writer.write(folder)
        disk.room = 10**12
        assert raised.value.errno == errno.ENOSPC
        assert names_a_file(raised.value, writer, folder), str(raised.value)
        check_files(writer, folder, before)
        writer.write(folder)  # there is room again
        assert all(is_whole(folder / file) for file in writer.files if file != "monitor.jsonl")


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_that_may_not_be_written_to(name, tmp_path, monkeypatch):
    """The system is asked in the name of a user who may read only: the tests may run as one who may do everything."""
    writer, folder = WRITERS[name], tmp_path / "out"
    writer.write(folder)
    before, real = contents(folder), os.open

    def refused(path, flags, *more, **named):
        if flags & (os.O_WRONLY | os.O_RDWR) and Path(path).is_relative_to(folder):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(OSError, match="Permission denied") as raised:
        writer.write(folder)
    assert names_a_file(raised.value, writer, folder), str(raised.value)
    assert contents(folder) == before


@pytest.mark.parametrize(("name", "file"), PLACES)
def test_a_folder_where_the_file_belongs(name, file, tmp_path):
    writer, folder = WRITERS[name], tmp_path / "out"
    (folder / file).mkdir(parents=True)
    (folder / file / "kept").write_text("mine")
    with pytest.raises((OSError, ValueError), match=r"directory|is no plain file") as raised:
        writer.write(folder)
    assert any(str(folder / name) in str(raised.value) for name in writer.files), str(raised.value)
    assert (folder / file / "kept").read_text() == "mine"
    assert not list(folder.rglob("*.part"))
