"""The live page of a monitored training, or of two: served to this machine only while lines are appended, or written for later.

The page gets the log as columns and draws them itself, so the same script serves a running training and a file that is
opened years later.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import sys
import threading
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import SplitResult, parse_qs, urlsplit

from theodolite.files import write_whole
from theodolite.monitors.log import (
    NAME,
    Chunk,
    MonitorLog,
    Record,
    encode,
    existing,
    fold,
    log_path,
    read_chunk,
    read_log,
    restored,
)
from theodolite.report.rendering import environment

Columns: TypeAlias = Mapping[str, Sequence[Any]]

COLUMNS = {
    "steps": ("loss", "gradient_norm", "update_norm", "rate"),
    "batch": ("rate", "critical_rate", "ratio", "exceeded", "sharpness", "converged", "seconds"),
    "probe": ("rate", "critical_rate", "ratio", "sharpness", "kernel_norm", "loss", "top_share", "agop_alignment", "seconds"),
    "progress": ("level", "best", "trivial", "alive", "update_ratio", "low_gradient", "high_gradient"),
    "validation": ("loss",),
}
BUCKETS = 1500  # parts of a long run of which a written page keeps the extremes: about the pixels of a wide screen
CHUNK = 4_000_000  # bytes of the log per answer: a page that comes late to a long run fills step by step
COMPARED = 50_000_000  # bytes of a log up to which the page says which run is ahead: the whole of it is held in memory for that
CALLERS = 32  # that are answered at once; a browser takes up to six
_DIGITS = 6  # of a number on the page
_LARGEST = 1e300  # of a number on the page
_HOSTS = ("127.0.0.1", "localhost")
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}


def watch_html(
    path: str | PathLike[str],
    log: MonitorLog | None = None,
    *,
    age: float | None = None,
    made: str = "",
    other: str | PathLike[str] | None = None,
    other_log: MonitorLog | None = None,
) -> str:
    """The page as one self-contained text: with logs inside, or, without, one that asks its server for them.

    `age` is how many seconds ago the last line was written. `other` is a second run, drawn beside the first.
    """
    given = [(path, log, age)] if other is None else [(path, log, age), (other, other_log, None)]
    runs = [_run(p, None if found is None else _whole_log(found), a) for p, found, a in given]
    return _page(runs, verdict=_verdict(log, other_log, names_of(path, other)) if log and other_log else (), made=made)


def write_watch(path: str | PathLike[str], out: str | PathLike[str], *, other: str | PathLike[str] | None = None) -> Path:
    """Write the page of the log at `path` (a file or a folder), and of another one beside it, to `out`; it needs no server."""
    runs = []
    for given in (path,) if other is None else (path, other):
        data = whole_data(existing(given), BUCKETS)
        runs.append(_run(given, data, max(0.0, time.time() - log_path(given).stat().st_mtime)))
    out = Path(out)
    write_whole(out, _page(runs, verdict=comparison(path, other)).encode(errors="replace"))
    return out


def _whole_log(log: MonitorLog) -> dict[str, Any]:
    return {**page_data(log, BUCKETS), "bad_lines": log.bad_lines}


def _run(path: str | PathLike[str], data: dict[str, Any] | None, age: float | None) -> dict[str, Any]:
    """What the page is told of one run; `data` is None where it asks for it."""
    return {"path": str(log_path(path)), "age": age, "data": data}


def names_of(*paths: str | PathLike[str] | None) -> tuple[str, ...]:
    """What the page calls the runs: their folders, or their files; two of one name are told apart by their place.

    >>> names_of("logs/small/monitor.jsonl", "large.jsonl"), names_of("a/run.jsonl", "b/run.jsonl"), names_of("run", None)
    (('small', 'large'), ('run (first)', 'run (second)'), ('run',))
    """
    files = [log_path(path) for path in paths if path is not None]
    names = [file.parent.name if file.name == NAME else file.stem for file in files]
    return tuple(names) if len(set(names)) == len(names) else (f"{names[0]} (first)", f"{names[1]} (second)")


def comparison(path: str | PathLike[str], other: str | PathLike[str] | None) -> Sequence[str]:
    """Sentences on which of two runs is ahead; none for one run, for a log that is still to come or is very long."""
    if other is None:
        return ()
    files = [log_path(path), log_path(other)]
    if not all(file.is_file() and file.stat().st_size <= COMPARED for file in files):
        return ()
    first, second = map(read_log, files)
    return _verdict(first, second, names_of(*files))


def _verdict(first: MonitorLog, second: MonitorLog, names: tuple[str, ...]) -> Sequence[str]:
    from theodolite.monitors.compare import compare_runs  # here: it is needed for two runs only

    if not first.steps or not second.steps:
        return ()
    return compare_runs(first, second, names=(names[0], names[1])).verdict()


def _page(runs: list[dict[str, Any]], *, verdict: Sequence[str] = (), made: str = "") -> str:
    from theodolite import __version__

    names = names_of(*(run["path"] for run in runs))
    setup = {
        "live": runs[0]["data"] is None,
        "runs": [{"name": name, **run} for name, run in zip(names, runs, strict=True)],
        "verdict": list(verdict),
        "made": made or datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": __version__,
    }
    return environment().get_template("watch.html.j2").render(setup=setup, script=_script())


def page_data(log: MonitorLog, buckets: int | None = None) -> dict[str, Any]:
    """What the page draws: tables of columns, and the few other records as they are; `standing` is the last word on progress.

    With `buckets` long tables are thinned to the extremes of that many parts; `counts` are those of all rows.
    """
    looks = {on: [look for look in log.looks if look.get("on") == on] for on in ("batch", "probe")}
    tables = {"steps": log.steps, **looks, "progress": log.progress, "validation": log.validation}
    columns = {name: _columns(rows, COLUMNS[name]) for name, rows in tables.items()}
    return {
        "tables": columns if buckets is None else {name: thinned(table, buckets) for name, table in columns.items()},
        "counts": _counts(columns),
        "nonfinite": _nonfinite(log.steps),
        "runs": _plain(log.runs),
        "spikes": _plain(log.spikes),
        "alerts": _plain(log.alerts),
        "standing": _plain(log.progress[-1:])[0] if log.progress else None,
        "end": None if log.end is None else _plain([log.end])[0],
    }


def whole_data(path: Path, buckets: int) -> dict[str, Any]:
    """What a page of the whole log draws, as `page_data` gives it, read piece by piece: the log may be larger than the memory.

    Numbers wait in arrays of eight bytes each; None is NaN there.
    """
    arrays = {name: {column: array("d") for column in ("step", *columns)} for name, columns in COLUMNS.items()}
    nonfinite: dict[str, set[float]] = {}
    runs: list[Record] = []
    spikes: dict[float, Record] = {}
    alerts: dict[tuple[Any, Any], Record] = {}
    standing: Record | None = None
    end, chunk, bad_lines = None, Chunk([], 0, "", 0, more=True), 0
    while chunk.more:
        chunk = read_chunk(path, chunk.offset, chunk.token, CHUNK)
        bad_lines += chunk.bad_lines
        part = page_data(fold(restored(record) for record in chunk.records))
        for name, table in part["tables"].items():
            for column, values in table.items():
                arrays[name][column].extend(math.nan if value is None else value for value in values)
        for name, steps in part["nonfinite"].items():  # a step that is done again replaces what was found of it
            nonfinite[name] = (nonfinite.get(name, set()) - set(part["tables"]["steps"]["step"])) | set(steps)
        runs += part["runs"]
        spikes |= {spike["start"]: spike for spike in part["spikes"]}
        alerts |= {(alert["step"], alert.get("alert", "")): alert for alert in part["alerts"]}
        if part["standing"] is not None and (standing is None or part["standing"]["step"] >= standing["step"]):
            standing = part["standing"]
        end = part["end"] if part["runs"] else part["end"] or end
    tables = {name: _last_of_each_step(table) for name, table in arrays.items()}
    return {
        "tables": {name: thinned(table, buckets) for name, table in tables.items()},
        "counts": _counts(tables),
        "nonfinite": {name: sorted(steps) for name, steps in nonfinite.items()},
        "runs": runs,
        "spikes": [spikes[start] for start in sorted(spikes)],
        "alerts": [alerts[place] for place in sorted(alerts)],
        "standing": standing,
        "end": end,
        "bad_lines": bad_lines,
    }


def thinned(table: Columns, buckets: int) -> Columns:
    """The rows that hold the smallest and the largest value of a column in one of `buckets` parts, so that spikes stay.

    >>> thinned({"step": list(range(8)), "loss": [1.0, 2.0, 9.0, 1.0, 1.0, 1.0, 0.5, 1.0]}, 1)
    {'step': [0, 2, 6, 7], 'loss': [1, 9, 0.5, 1]}
    """
    names = [name for name in table if name != "step"]
    size = len(table["step"])
    if size <= 2 * buckets * max(1, len(names)):
        return {name: [_shown(value) for value in values] for name, values in table.items()}
    kept = {0, size - 1}
    for part in range(buckets):
        inside = range(part * size // buckets, (part + 1) * size // buckets)
        for name in names:
            values = table[name]
            there = [i for i in inside if _shown(values[i]) is not None]
            if there:
                kept |= {min(there, key=values.__getitem__), max(there, key=values.__getitem__)}
            if len(there) < len(inside):  # a gap stays a gap
                kept.add(next(i for i in inside if _shown(values[i]) is None))
    return {name: [_shown(values[i]) for i in sorted(kept)] for name, values in table.items()}


def _shown(value: Any) -> Any:
    """A number as the page gets it: gaps, which are NaN in an array, are null, and whole numbers have no point."""
    if not isinstance(value, float):
        return value
    return None if math.isnan(value) else int(value) if value.is_integer() and abs(value) < 2**53 else value


class WatchServer(ThreadingHTTPServer):
    """Serves the page of the log at `path`, and of an `other` beside it, on the loopback address; `port` 0 takes a free one.

    It answers GET of a few paths, to whoever calls it by a loopback name: a web page elsewhere that points its own name at
    this machine is refused.
    """

    daemon_threads = True

    def __init__(self, path: str | PathLike[str], port: int = 0, *, other: str | PathLike[str] | None = None) -> None:
        self.path = log_path(path)
        self.other = None if other is None else log_path(other)
        self._free = threading.BoundedSemaphore(CALLERS)
        for log in filter(None, (self.path, self.other)):
            read_chunk(log, limit=CHUNK)  # a log that cannot be read is said here, not by an empty page
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OverflowError as error:
            raise ValueError(f"A port is a number from 0 to 65535; 0 takes a free one. Got {port}.") from error
        except OSError as error:
            raise ValueError(f"Port {port} of 127.0.0.1 cannot be used: {error.strerror}. --port 0 takes a free one.") from error

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own; a caller too many is hung up on."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that hangs up is no news."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def serve(self) -> None:
        """Answer until `stop` is called from another thread, or Ctrl-C."""
        self.serve_forever(poll_interval=0.2)

    def stop(self) -> None:
        self.shutdown()

    def close(self) -> None:
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    server_version = "theodolite"
    sys_version = ""
    timeout = 10  # seconds a silent caller may hold a thread

    def do_GET(self) -> None:
        if not _is_ours(self.headers.get("Host", ""), self.server.port):
            self._answer(HTTPStatus.FORBIDDEN, b"Only loopback names are served.\n", "text/plain")
            return
        try:
            self._answer_to(urlsplit(self.path))
        except ValueError as error:  # a log of another version has taken the place of the one before
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"{error}\n".encode(errors="replace"), "text/plain")

    def _answer_to(self, address: SplitResult) -> None:
        if address.path == "/":
            page = watch_html(self.server.path, other=self.server.other)
            self._answer(HTTPStatus.OK, page.encode(errors="replace"), "text/html; charset=utf-8")
        elif address.path == "/data":
            second = parse_qs(address.query).get("run", ["0"])[0] == "1"
            path = self.server.other if second and self.server.other is not None else self.server.path
            self._answer(HTTPStatus.OK, news(path, address.query), "application/json")
        elif address.path == "/comparison":
            said = comparison(self.server.path, self.server.other)
            self._answer(HTTPStatus.OK, json.dumps(list(said)).encode(), "application/json")
        elif address.path == "/favicon.ico":
            self._answer(HTTPStatus.NO_CONTENT, b"", "image/x-icon")
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"There is nothing here.\n", "text/plain")

    def _answer(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Security-Policy": policy(), "Content-Type": kind}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a request per second would bury the terminal."""


def news(path: Path, query: str) -> bytes:
    """The answer to a page that has read the log up to `offset`: what came since, as JSON."""
    asked = parse_qs(query)
    offset = asked.get("offset", ["0"])[0]
    token = asked.get("token", [""])[0]
    chunk = read_chunk(path, int(offset) if offset.isdecimal() and len(offset) < 19 else 0, token, CHUNK)
    try:
        age = max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        age = None
    data = page_data(fold(restored(record) for record in chunk.records))
    place = {"offset": chunk.offset, "token": chunk.token, "more": chunk.more, "bad_lines": chunk.bad_lines, "age": age}
    return json.dumps({**data, **place}, separators=(",", ":"), allow_nan=False).encode()


@cache
def policy() -> str:
    """What the page may do: run its own script, which is known by its hash, and ask its own server."""
    digest = base64.b64encode(hashlib.sha256(_script().encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


@cache
def _script() -> str:
    engine = environment()
    assert engine.loader is not None
    return engine.loader.get_source(engine, "watch.js")[0].strip()


def _is_ours(host: str, port: int) -> bool:
    """Whether the Host header is a loopback name with our port."""
    return host.lower() in {f"{name}:{port}" for name in _HOSTS} or (port == 80 and host.lower() in _HOSTS)


# Columns


def _counts(tables: dict[str, Columns]) -> dict[str, Any]:
    """How many rows there are, how many of them above the critical rate, and the seconds of measuring."""
    counts: dict[str, Any] = {name: len(tables[name]["step"]) for name in ("steps", "batch", "probe")}
    counts["exceeded"] = sum(bool(_shown(value)) for value in tables["batch"]["exceeded"])
    counts["seconds"] = sum(_shown(value) or 0 for name in ("batch", "probe") for value in tables[name]["seconds"])
    return counts


def _last_of_each_step(table: Columns) -> Columns:
    """Rows in the order of their step; of those at one step the last one stays."""
    steps = table["step"]
    if all(before < after for before, after in pairwise(steps)):
        return table
    order = sorted(range(len(steps)), key=steps.__getitem__)  # equal steps stay in their order
    kept = [i for i, after in zip(order, [*order[1:], None], strict=True) if after is None or steps[i] != steps[after]]
    return {name: array("d", (values[i] for i in kept)) for name, values in table.items()}


def _columns(rows: Sequence[Record], names: Iterable[str]) -> Columns:
    return {"step": [row["step"] for row in rows], **{name: [_number(row.get(name)) for row in rows] for name in names}}


def _number(value: Any) -> float | int | None:
    """A finite number with few digits, 1 and 0 for truth; None for everything else."""
    if not isinstance(value, bool | int | float) or not abs(value) < _LARGEST:
        return None
    if not isinstance(value, float):
        return int(value)
    return float(f"{value:.{_DIGITS}g}")


def _nonfinite(steps: Sequence[Record]) -> dict[str, list[Any]]:
    """Per watched column the steps where it is not a finite number."""
    return {
        name: [row["step"] for row in steps if isinstance(value := row.get(name), float) and not math.isfinite(value)]
        for name in ("loss", "gradient_norm")
    }


def _plain(records: Iterable[Record]) -> list[Record]:
    """Records as the log writes them: what is not finite is null and named."""
    return [json.loads(encode(record)) for record in records]
