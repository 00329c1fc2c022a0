"""A run is a folder that survives being killed at any moment.

    run/manifest.json            what is being run: name, settings, versions, state of the code, check sum
    run/rows.jsonl               one line per finished job: key, job, rows or failure, check sum
    run/tensors/KEY.safetensors  tensors among a job's rows

A line is written whole and forced to disk before the next job is reported. A line that a kill or a full disk cut short
fails its check sum, is cut off when the run is opened again, and its job is done anew. A job is known by its content
(`job_key`), so nothing is counted twice, and results of other code or other settings are never taken for its own.
"""

from __future__ import annotations

import copy
import errno
import fcntl
import hashlib
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, Self

from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from theodolite.errors import TheodoliteError
from theodolite.files import check_sum, json_check_sum, make_folder, other_version, sync_folder, write_all, write_whole
from theodolite.results import Row

FORMAT = "theodolite-run"
#: Of the manifest, and those that are read; the first had no check sum.
VERSION, READ_VERSIONS = 2, (1, 2)
#: What its entries are, so that whoever reads one may rely on it.
_KINDS: dict[str, type] = {"name": str, "settings": dict, "threads": int, "code": str, "provenance": dict, "keys": list}


class RunBusyError(TheodoliteError, RuntimeError):
    """Another process is writing to the run."""


class RunExistsError(TheodoliteError, FileExistsError):
    """The folder already holds a run."""


class StoreError(TheodoliteError, OSError):
    """The run could not be written; what had finished is safe."""


@dataclass(frozen=True)
class Record:
    """One finished job: rows, or the failure with its traceback."""

    key: str
    job: Mapping[str, Any]
    rows: list[Row]
    seconds: float
    error: str | None = None
    traceback: str | None = None
    code: str = ""  # digest of the code that made it

    @property
    def failed(self) -> bool:
        return self.error is not None

    @property
    def provisional(self) -> bool:
        """Whether its rows say that something was missing which may be there next time: they are shown, never reused."""
        return any(row.get("provisional") for row in self.rows)


def job_key(name: str, job: Mapping[str, Any]) -> str:
    """A job's identity: the study, and the parameters with their seed. The code that made its rows stands in the record.

    >>> job_key("a", {"x": 1, "seed": 0}) == job_key("a", {"seed": 0, "x": 1})
    True
    """
    text = json.dumps([name, plain(dict(job))], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


class RunStore(AbstractContextManager["RunStore"]):
    """The open folder of one run; only one process at a time may hold it.

    Use as a context manager: `with RunStore.open(folder, manifest, resume=True) as store`.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], lock: int) -> None:
        self.folder, self.manifest = folder, manifest
        self._lock = lock
        self.records, self._end = _read_records(folder)
        self.torn = self._cut_torn_line()

    @classmethod
    def open(cls, folder: str | os.PathLike[str], manifest: Mapping[str, Any], *, resume: bool, fresh: bool = False) -> Self:
        """Create the run, go on with it (`resume`), or do it anew (`fresh`); `manifest` must hold its `name`."""
        folder = Path(folder)
        with _plain_os_errors(folder, 0):
            make_folder(folder)
            lock = _take_lock(folder)
        try:
            if fresh:
                (folder / "rows.jsonl").unlink(missing_ok=True)
            elif resume:
                _check_same(folder, manifest)
            else:
                refuse_existing(folder)
            current = {"format": FORMAT, "version": VERSION, **plain(dict(manifest))}
            store = cls(folder, current, lock)
            with _plain_os_errors(folder, len(store.records)):
                write_whole(folder / "manifest.json", json.dumps({**current, "crc": json_check_sum(current)}, indent=1).encode())
            return store
        except BaseException:
            os.close(lock)
            raise

    def add(self, record: Record) -> None:
        """Append a finished job; returns when it is on disk."""
        line, tensors = encode_record(record)
        with _plain_os_errors(self.folder, len(self.records)):
            if tensors:
                write_whole(self.folder / "tensors" / f"{record.key}.safetensors", tensors)
            self._append(line)
        self.records[record.key] = record

    def _append(self, line: bytes) -> None:
        """Write a line and force it to disk. Half a line must never stand before the next one."""
        handle = os.open(self.folder / "rows.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        start = self._end
        try:
            write_all(handle, line)
            self._end += len(line)
            os.fsync(handle)
            if start == 0:  # the name of a new file is part of its folder
                sync_folder(self.folder)
        except OSError:
            self._end = start
            os.ftruncate(handle, start)
            raise
        except BaseException:  # Ctrl-C: a line that is whole stays
            os.ftruncate(handle, self._end)
            raise
        finally:
            os.close(handle)

    def _cut_torn_line(self) -> bool:
        path = self.folder / "rows.jsonl"
        if not path.exists() or path.stat().st_size == self._end:
            return False
        os.truncate(path, self._end)
        return True

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __exit__(self, *exception: object) -> None:
        self.close()


class Computations:
    """What jobs computed, by key, for every figure and study that asks for the same: one file each, written whole.

    Without a folder they are kept in memory. Several processes and machines may share a folder. With `fresh` what was there
    before is forgotten as it is asked for, and done anew once.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, *, fresh: bool = False) -> None:
        self.folder = None if folder is None else Path(folder)
        self.fresh = fresh
        self._added: dict[str, Record | None] = {}  # the record itself only where there is no folder

    def get(self, key: str) -> Record | None:
        """A finished job, or None."""
        if self.folder is None:
            return copy.deepcopy(self._added.get(key))  # its rows belong to whoever asks
        path = self._path(key)
        if self.fresh and key not in self._added:
            path.unlink(missing_ok=True)
        return _parse(path.read_bytes(), path.with_suffix(".safetensors")) if path.exists() else None

    def add(self, record: Record) -> None:
        """Keep a job; failures and what is provisional are not worth sharing."""
        if record.failed or record.provisional:
            return
        if self.folder is not None:
            line, tensors = encode_record(record)
            path = self._path(record.key)
            with _plain_os_errors(self.folder, len(self._added)):
                if tensors:
                    write_whole(path.with_suffix(".safetensors"), tensors)
                write_whole(path, line)
        self._added[record.key] = copy.deepcopy(record) if self.folder is None else None

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / key[:2] / f"{key}.json"


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a run folder."""
    path = folder / "manifest.json"
    remedy = "Remove this file and run again with --resume: jobs that finished are kept."
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no plain file.")
    try:
        manifest = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}. {remedy}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{path} is not the manifest of a run of theodolite.")
    if (version := manifest.get("version", VERSION)) not in READ_VERSIONS:
        raise ValueError(other_version(path, version, READ_VERSIONS, "Update theodolite, or run in another folder."))
    if version != 1 and manifest.pop("crc", None) != json_check_sum(manifest):
        raise ValueError(f"{path} is damaged: its content does not have its check sum. {remedy}")
    if "name" not in manifest:
        raise ValueError(f"{path} is of version {version}, which must state the name of the run, and does not. {remedy}")
    for name, kind in _KINDS.items():
        if not isinstance(manifest.get(name, kind()), kind):
            raise ValueError(f"{path} is odd: {name} must be a {kind.__name__}. Got {type(manifest[name]).__name__}. {remedy}")
    return manifest


def read_records(folder: str | os.PathLike[str]) -> dict[str, Record]:
    """The finished jobs of a run by key, without opening it for writing; a torn last line is left out."""
    return _read_records(Path(folder))[0]


def plain(value: Any) -> Any:
    """A value as JSON holds it: NumPy and torch scalars become numbers, tuples become lists."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if hasattr(value, "tolist"):  # NumPy and torch
        return plain(value.tolist())
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise ValueError(f"A job or row may hold numbers, strings, lists and tensors. Got {type(value).__name__}: {value!r}.")


# Lines


def encode_record(record: Record) -> tuple[bytes, bytes]:
    """A record as a line with its check sum, and its tensors as safetensors (empty if it has none)."""
    tensors: dict[str, Tensor] = {}
    rows = [_encode_row(plain_row(row), i, tensors) for i, row in enumerate(record.rows)]
    content = {**vars(record), "job": plain(dict(record.job)), "rows": rows}
    packed = save_tensors(tensors) if tensors else b""
    if packed:
        content["tensors"] = check_sum(packed)
    return (json.dumps({**content, "crc": json_check_sum(content)}) + "\n").encode(), packed


def _read_records(folder: Path) -> tuple[dict[str, Record], int]:
    """All whole records by key, and where the last whole line ends."""
    path = folder / "rows.jsonl"
    records: dict[str, Record] = {}
    end = 0
    if not path.exists():
        return records, end
    place = 0
    with path.open("rb") as file:
        for line in file:
            place += len(line)
            record = _parse(line, folder / "tensors") if line.endswith(b"\n") else None
            if record is None:
                continue  # torn, or damaged in the middle: its job is done anew
            end = place
            records[record.key] = record  # the last word on a job
    return records, end


def _parse(line: bytes, tensors: Path) -> Record | None:
    """A record from its line; `tensors` is the file of its tensors, or the folder of such files."""
    try:
        content = json.loads(line)
        crc = content.pop("crc")
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return None
    if crc != json_check_sum(content):
        return None
    rows, crc = content.pop("rows"), content.pop("tensors", None)
    if crc is not None:
        path = tensors / f"{content['key']}.safetensors" if tensors.is_dir() else tensors
        packed = path.read_bytes() if path.exists() else b""
        if check_sum(packed) != crc:
            return None  # its tensors are gone or damaged
        rows = _decode_rows(rows, load_tensors(packed))
    return Record(rows=rows, **content)


def plain_row(row: Row) -> Row:
    """The row as it will be read back: plain values, and tensors that have a shape."""
    return {str(k): v.detach().cpu().clone() if isinstance(v, Tensor) and v.ndim else plain(v) for k, v in row.items()}


def _encode_row(row: Row, index: int, tensors: dict[str, Tensor]) -> dict[str, Any]:
    mine = {name: value for name, value in row.items() if isinstance(value, Tensor)}
    tensors.update({f"{index}.{name}": value.contiguous() for name, value in mine.items()})
    return {**row, **{name: {"$tensor": f"{index}.{name}"} for name in mine}}


def _decode_rows(rows: list[dict[str, Any]], tensors: dict[str, Tensor]) -> list[Row]:
    def decode(value: Any) -> Any:
        return tensors[value["$tensor"]] if isinstance(value, dict) and set(value) == {"$tensor"} else value

    return [{name: decode(value) for name, value in row.items()} for row in rows]


# Files


def _take_lock(folder: Path) -> int:
    """An exclusive lock that the system releases when the process ends, however it ends."""
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
    except BlockingIOError as error:
        holder = os.read(handle, 200).decode(errors="replace").strip() or "another process"
        os.close(handle)
        raise RunBusyError(f"{folder} is being written by {holder}. Wait for it to end, or choose another folder.") from error
    except BaseException:  # a full disk, a file system without locks, Ctrl-C: nobody must find it held
        os.close(handle)
        raise
    return handle


def refuse_existing(folder: Path) -> None:
    """Raise if a folder already holds a run."""
    if (folder / "manifest.json").exists():
        raise RunExistsError(
            f"{folder} already holds a run. Go on with it by --resume, do it anew by --fresh, or choose another folder."
        )


def _check_same(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Other parameters are other jobs of the same run; another name is another run."""
    if (folder / "manifest.json").exists() and (name := read_manifest(folder).get("name")) != manifest.get("name"):
        raise RunExistsError(f"{folder} holds a run of {name!r}. Choose another folder.")


@contextmanager
def _plain_os_errors(folder: Path, finished: int) -> Iterator[None]:
    """A full disk and its like become one clear sentence."""
    try:
        yield
    except TheodoliteError:
        raise
    except OSError as error:
        reason = "no space is left on the disk" if error.errno == errno.ENOSPC else str(error)
        raise StoreError(
            error.errno,
            f"{folder} could not be written: {reason}. {finished} finished jobs are safe there; "
            "mend the cause and run again with --resume.",
        ) from error
