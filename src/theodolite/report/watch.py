"""The live page of a monitored training: served to this machine only while lines are appended, or written once for later.

The page gets the log as columns and draws them itself, so the same script serves a running training and a file that is
opened years later.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import parse_qs, urlsplit

from theodolite.files import write_whole
from theodolite.monitors.log import MonitorLog, Record, encode, fold, log_path, read_chunk, read_log, restored
from theodolite.report.rendering import environment

Columns: TypeAlias = dict[str, list[Any]]

COLUMNS = {
    "steps": ("loss", "gradient_norm", "update_norm", "rate"),
    "batch": ("rate", "critical_rate", "ratio", "exceeded", "sharpness", "converged", "seconds"),
    "probe": ("rate", "critical_rate", "ratio", "sharpness", "kernel_norm", "loss", "top_share", "agop_alignment", "seconds"),
}
BUCKETS = 1500  # parts of a long run of which a written page keeps the extremes: about the pixels of a wide screen
CHUNK = 4_000_000  # bytes of the log per answer: a page that comes late to a long run fills step by step
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


def watch_html(path: str | PathLike[str], log: MonitorLog | None = None, *, age: float | None = None, made: str = "") -> str:
    """The page as one self-contained text: with `log` inside, or, without, one that asks its server for it.

    `age` is how many seconds ago the last line was written.
    """
    from theodolite import __version__

    setup = {
        "live": log is None,
        "path": str(log_path(path)),
        "age": age,
        "made": made or datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": __version__,
        "data": None if log is None else {**page_data(log, BUCKETS), "bad_lines": log.bad_lines},
    }
    return environment().get_template("watch.html.j2").render(setup=setup, script=_script())


def write_watch(path: str | PathLike[str], out: str | PathLike[str]) -> Path:
    """Write the page of the log at `path` (a file or a folder) to `out`; it needs no server."""
    log = read_log(path)
    age = max(0.0, time.time() - log_path(path).stat().st_mtime)
    out = Path(out)
    write_whole(out, watch_html(path, log, age=age).encode(errors="replace"))
    return out


def page_data(log: MonitorLog, buckets: int | None = None) -> dict[str, Any]:
    """What the page draws: three tables of columns, and the few other records as they are.

    With `buckets` long tables are thinned to the extremes of that many parts; `counts` are those of all rows.
    """
    looks = {on: [look for look in log.looks if look.get("on") == on] for on in ("batch", "probe")}
    tables = {"steps": log.steps, **looks}
    columns = {name: _columns(rows, COLUMNS[name]) for name, rows in tables.items()}
    counts = {name: len(rows) for name, rows in tables.items()}
    counts["exceeded"] = sum(bool(value) for value in columns["batch"]["exceeded"])
    counts["seconds"] = sum(value for name in ("batch", "probe") for value in columns[name]["seconds"] if value)
    if buckets is not None:
        columns = {name: thinned(table, buckets) for name, table in columns.items()}
    return {
        "tables": columns,
        "counts": counts,
        "nonfinite": _nonfinite(log.steps),
        "runs": _plain(log.runs),
        "spikes": _plain(log.spikes),
        "end": None if log.end is None else _plain([log.end])[0],
    }


def thinned(table: Columns, buckets: int) -> Columns:
    """The rows that hold the smallest and the largest value of a column in one of `buckets` parts, so that spikes stay.

    >>> thinned({"step": list(range(8)), "loss": [1.0, 2.0, 9.0, 1.0, 1.0, 1.0, 0.5, 1.0]}, 1)
    {'step': [0, 2, 6, 7], 'loss': [1.0, 9.0, 0.5, 1.0]}
    """
    names = [name for name in table if name != "step"]
    size = len(table["step"])
    if size <= 2 * buckets * max(1, len(names)):
        return table
    kept = {0, size - 1}
    for part in range(buckets):
        inside = range(part * size // buckets, (part + 1) * size // buckets)
        for name in names:
            values = table[name]
            there = [i for i in inside if values[i] is not None]
            if there:
                kept |= {min(there, key=values.__getitem__), max(there, key=values.__getitem__)}
            if len(there) < len(inside):  # a gap stays a gap
                kept.add(next(i for i in inside if values[i] is None))
    return {name: [values[i] for i in sorted(kept)] for name, values in table.items()}


class WatchServer(ThreadingHTTPServer):
    """Serves the page of the log at `path` on the loopback address; `port` 0 takes a free one.

    It answers GET of three paths, to whoever calls it by a loopback name: a web page elsewhere that points its own name at
    this machine is refused.
    """

    daemon_threads = True

    def __init__(self, path: str | PathLike[str], port: int = 0) -> None:
        self.path = log_path(path)
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OverflowError as error:
            raise ValueError(f"A port is a number from 0 to 65535; 0 takes a free one. Got {port}.") from error
        except OSError as error:
            raise ValueError(f"Port {port} of 127.0.0.1 cannot be used: {error.strerror}. --port 0 takes a free one.") from error

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
    timeout = 20  # seconds a silent caller may hold a thread

    def do_GET(self) -> None:
        if not _is_ours(self.headers.get("Host", ""), self.server.port):
            self._answer(HTTPStatus.FORBIDDEN, b"Only loopback names are served.\n", "text/plain")
            return
        address = urlsplit(self.path)
        if address.path == "/":
            self._answer(HTTPStatus.OK, watch_html(self.server.path).encode(errors="replace"), "text/html; charset=utf-8")
        elif address.path == "/data":
            self._answer(HTTPStatus.OK, news(self.server.path, address.query), "application/json")
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
