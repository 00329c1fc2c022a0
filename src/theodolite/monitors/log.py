"""The log of a monitored training: JSON lines, each on its way to disk at once, so that they survive a crash.

One object per line, of the "kind":

    run         what is trained and how it is watched; a resumed training writes a second one and its steps go on
    step        loss, gradient norm, size of the update and learning rate, at every step
    look        a measurement on a batch or on the probe: critical rate, sharpness, shares
    spike       one rise of the loss and its cause; written again as it is better understood, the last line wins
    progress    is it learning: level, trend and best of the loss, a guess to compare with, living units, sizes of steps
    validation  a validation loss that the loop has given
    alert       something to act on, with what to change
    end         the counters of the whole run and the verdict

JSON has no infinity and no NaN: such a value is written as null and named in "nonfinite", as in {"loss": "nan"}. Other kinds
and keys are kept. This module needs nothing but the standard library: who watches a training does not load torch.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from theodolite.files import naming, other_version, write_all

Record: TypeAlias = dict[str, Any]

SCHEMA = 1
NAME = "monitor.jsonl"
_HEAD = 4096  # bytes from the start that tell one log from another
_LONGEST = 16_000_000  # bytes of a line
_DEEPEST = 32  # lists and mappings inside each other
_ENDINGS = (".jsonl", ".ndjson", ".json", ".log", ".txt")  # names that mean a file where nothing is there yet
_PLACE = {  # records that agree in these replace each other
    "step": ("step",), "look": ("step", "on"), "spike": ("start",), "progress": ("step",), "validation": ("step",),
    "alert": ("step", "alert"),
}  # fmt: skip


def log_path(path: str | os.PathLike[str]) -> Path:
    """The file that a file or a folder stands for.

    >>> str(log_path("runs/one")), str(log_path("runs/one.jsonl"))
    ('runs/one/monitor.jsonl', 'runs/one.jsonl')
    """
    path = Path(path)
    is_file = not path.is_dir() if path.exists() else path.suffix.lower() in _ENDINGS
    return path if is_file else path / NAME


class LogWriter(AbstractContextManager["LogWriter"]):
    """Appends records to the log at `path`, a file or a folder; folders are made.

    A line goes to the system in one piece, so it outlives the process. Half a line that a killed process left gets its end
    before anything else is written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = log_path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._torn = _ends_torn(self.path)
        self._handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, *, kind: str, **values: Any) -> None:
        """Append one record; tensors and NumPy scalars become plain numbers."""
        if self._handle < 0:
            raise ValueError(f"The log {self.path} is closed. Open another LogWriter to go on with it.")
        line = b"\n" * self._torn + encode({"kind": kind, **values})
        self._torn = True  # until the whole line is out: a full disk takes half of it
        with naming(self.path):
            write_all(self._handle, line)
        self._torn = False

    def close(self) -> None:
        """End writing; twice does no harm."""
        handle, self._handle = self._handle, -1  # first: a close that fails has closed all the same
        if handle >= 0:
            os.close(handle)

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True)
class MonitorLog:
    """A log as it stands.

    `run` is the last header and `runs` are all of them; `spikes` are in the order of their start, `steps`, `looks`, `progress`,
    `validation` and `alerts` in that of their step; `end` is None while the training runs or where it was cut off; `other` holds
    kinds this version does not know; `bad_lines` could not be read.
    """

    run: Record = field(default_factory=dict)
    runs: list[Record] = field(default_factory=list)
    steps: list[Record] = field(default_factory=list)
    looks: list[Record] = field(default_factory=list)
    spikes: list[Record] = field(default_factory=list)
    end: Record | None = None
    other: list[Record] = field(default_factory=list)
    bad_lines: int = 0
    progress: list[Record] = field(default_factory=list)
    validation: list[Record] = field(default_factory=list)
    alerts: list[Record] = field(default_factory=list)


@dataclass(frozen=True)
class Chunk:
    """What was read in one go.

    `offset` is where to go on, `token` tells one log from another that took its place, `more` that there are further whole lines.
    """

    records: list[Record]
    offset: int
    token: str
    bad_lines: int
    more: bool


def read_log(path: str | os.PathLike[str]) -> MonitorLog:
    """The log at `path`, a file or a folder, with values that are not finite put back in place."""
    chunk = read_chunk(existing(path))
    return fold((restored(record) for record in chunk.records), chunk.bad_lines)


def existing(path: str | os.PathLike[str]) -> Path:
    """The file of a log that must be there."""
    path = log_path(path)
    if not path.exists():
        raise FileNotFoundError(f"There is no monitor log at {path}. `th.Monitor(loss, log={str(path)!r})` writes one.")
    return path


def read_chunk(path: str | os.PathLike[str], offset: int = 0, token: str = "", limit: int | None = None) -> Chunk:
    """Whole lines after `offset`, about `limit` bytes of them; of a line without end pieces, which count as bad.

    A line that is still being written waits for the next call; a file that is not there yet is an empty one.
    Reading starts anew where the file is shorter than `offset`, or where `token` is that of another file.
    """
    try:
        with log_path(path).open("rb") as file:
            head, end, _ = file.read(_HEAD).partition(b"\n")
            now = f"{zlib.crc32(head):08x}" if end or len(head) == _HEAD else ""
            size = os.fstat(file.fileno()).st_size
            if not 0 <= offset <= size or (token and token != now):
                offset = 0
            file.seek(offset)
            data = file.read(limit)
            if limit is not None and not data.endswith(b"\n"):
                data += file.readline(_LONGEST)
    except (FileNotFoundError, NotADirectoryError):
        return Chunk([], 0, "", 0, more=False)
    whole = data[: data.rfind(b"\n") + 1]
    if not whole and len(data) >= _LONGEST:
        whole = data
    lines = [line for line in whole.split(b"\n") if line.strip()]
    parsed = [record for line in lines if (record := decode(line)) is not None]
    _refuse_other_versions(log_path(path), parsed)
    return Chunk(parsed, offset + len(whole), now, len(lines) - len(parsed), more=offset + len(data) < size)


def _refuse_other_versions(path: Path, records: Iterable[Record]) -> None:
    """Raise where a header is of a version that may mean something else by the same words; one without is of the first."""
    for record in records:
        if record["kind"] == "run" and (found := record.get("schema", SCHEMA)) != SCHEMA:
            raise ValueError(other_version(path, found, [SCHEMA], "Update theodolite; a training that runs is not disturbed."))


def fold(records: Iterable[Record], bad_lines: int = 0) -> MonitorLog:
    """Records in the order they were written, sorted by kind; of those about the same place the later one stays.

    >>> log = fold([{"kind": "step", "step": 1, "loss": 2.0}, {"kind": "run"}, {"kind": "step", "step": 1, "loss": 1.5}])
    >>> log.steps
    [{'kind': 'step', 'step': 1, 'loss': 1.5}]
    """
    runs: list[Record] = []
    other: list[Record] = []
    end: Record | None = None
    kept: dict[str, dict[tuple[Any, ...], Record]] = {kind: {} for kind in _PLACE}
    for record in records:
        kind = record["kind"]
        if kind in _PLACE:
            kept[kind][tuple(record.get(name, "") for name in _PLACE[kind])] = record
        elif kind == "run":
            runs.append(record)
            end = None  # it goes on
        elif kind == "end":
            end = record
        else:
            other.append(record)
    steps, looks, spikes, *more = ([kept[kind][place] for place in sorted(kept[kind])] for kind in _PLACE)
    return MonitorLog(runs[-1] if runs else {}, runs, steps, looks, spikes, end, other, bad_lines, *more)


# Lines


def encode(record: Mapping[str, Any]) -> bytes:
    r"""A record as one line.

    >>> encode({"kind": "step", "loss": float("inf")})
    b'{"kind":"step","loss":null,"nonfinite":{"loss":"inf"}}\n'
    """
    values = {name: _plain(value) for name, value in record.items()}
    lost = {name: str(value) for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    if lost:
        values = {**{name: None if name in lost else value for name, value in values.items()}, "nonfinite": lost}
    return json.dumps(values, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def decode(line: bytes) -> Record | None:
    """The record of a line, or None if the line is not one: torn, damaged, or without its place."""
    try:
        record = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    place, *words = _PLACE.get(record["kind"], ("",))
    good = (not place or _is_place(record.get(place))) and all(isinstance(record.get(name, ""), str) for name in words)
    return record if good and not _deeper_than(_DEEPEST, record) else None


def restored(record: Record) -> Record:
    """A record with NaN and infinity where JSON had to write null.

    >>> restored({"kind": "step", "loss": None, "nonfinite": {"loss": "-inf"}})["loss"]
    -inf
    """
    lost = record.get("nonfinite")
    if not isinstance(lost, dict):
        return record
    values = {name: float(text) for name, text in lost.items() if text in ("nan", "inf", "-inf") and record.get(name) is None}
    return {**record, **values}


def _plain(value: Any, depth: int = 0) -> Any:
    """A value as JSON holds it. Inside lists and mappings what is not finite becomes its name."""
    if isinstance(value, float):
        value = float(value)  # also NumPy's, which calls itself np.float64(...)
        return str(value) if depth and not math.isfinite(value) else value
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(v, depth + 1) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, depth + 1) for v in value]
    if hasattr(value, "tolist"):  # NumPy and torch
        return _plain(value.tolist(), depth)
    return str(value)


def _is_place(value: Any) -> bool:
    """Whether a value can be a step: a number that is finite and, in every language that reads the log, exact."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**53


def _deeper_than(levels: int, value: Any) -> bool:
    """Whether lists and mappings lie deeper inside each other than what is done with them can follow."""
    parts = value.values() if isinstance(value, dict) else value
    return any(levels == 0 or _deeper_than(levels - 1, part) for part in parts if isinstance(part, dict | list))


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _ends_torn(path: Path) -> bool:
    """Whether the last line of the file has no end."""
    try:
        with path.open("rb") as file:
            if not file.seek(0, os.SEEK_END):
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except FileNotFoundError:
        return False
