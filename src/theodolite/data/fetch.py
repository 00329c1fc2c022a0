"""`fetch`: download the published files of a data set, verified and whole or not at all."""

from __future__ import annotations

import hashlib
import http.client
import os
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from theodolite.data import catalog
from theodolite.data.base import DamagedDataError, FetchError
from theodolite.data.catalog import Entry, File
from theodolite.data.loading import remedy, roots
from theodolite.files import sync_folder
from theodolite.progress import counting

_BLOCK = 1 << 20
_TIMEOUT = 30.0  # seconds without an answer
_MOST = 4 << 30  # bytes of a file whose size is not stated
_STALE = 3600.0  # seconds after which an untouched .part file belongs to nobody


@dataclass(frozen=True)
class Fetched:
    """One file after `fetch`: where it is, and whether it was downloaded now or was there already."""

    path: Path
    downloaded: bool
    size: int

    def __str__(self) -> str:
        return f"{self.path}: {'fetched' if self.downloaded else 'already there'}, {self.size} bytes, checksum right"


def fetch(
    name: str | Entry, *, folder: str | Path | None = None, base_url: str | None = None, progress: bool | None = None
) -> list[Fetched]:
    """Download the published files of a data set into `folder/NAME`, and verify their checksums.

    Without a folder they go to `$THEODOLITE_DATA` if that can be written, else to the user's cache folder.
    A file that is there and right is left alone; a wrong one is replaced. `base_url` takes the place of
    scheme and host, for a mirror.
    """
    entry = name if isinstance(name, Entry) else catalog.get(name)
    files = [file for file in entry.files if file.url]
    if not files:
        if not entry.files and not entry.bring:
            raise FetchError(f"{entry.name} needs no files.")
        raise FetchError(f"{entry.name} cannot be fetched. {remedy(entry)}")
    home = _home(folder) / entry.name
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FetchError(f"{home} cannot be written: {error.strerror or error}.") from error
    return [_fetch_file(file, home / file.name, base_url, progress) for file in files]


def digest(path: Path, algorithm: str) -> str:
    """The checksum of a file, `algorithm:hex`."""
    with path.open("rb") as file:
        return f"{algorithm}:{hashlib.file_digest(file, lambda: _hash(algorithm)).hexdigest()}"


def _hash(algorithm: str) -> hashlib._Hash:
    return hashlib.new(algorithm, usedforsecurity=False)  # md5 is what some publish


def _home(folder: str | Path | None) -> Path:
    if folder is not None:
        return Path(folder).expanduser()
    first, last = roots()[0], roots()[-1]
    existing = next(path for path in (first, *first.parents) if path.exists())
    return first if os.access(existing, os.W_OK) else last


def _fetch_file(file: File, path: Path, base_url: str | None, progress: bool | None) -> Fetched:
    algorithm = file.digest.partition(":")[0]
    if path.is_file() and digest(path, algorithm) == file.digest:
        return Fetched(path, False, path.stat().st_size)
    url = _address(file.url or "", base_url)
    handle, part = _part(path)
    try:
        with os.fdopen(handle, "wb") as target:
            found = _download(url, target.write, algorithm, file, progress)
            target.flush()
            os.fsync(target.fileno())
        if found != file.digest:
            raise DamagedDataError(url, f"its checksum is {found}, it should be {file.digest}", "Nothing was kept.")
        part.chmod(0o644)  # mkstemp makes it private
        os.replace(part, path)
        sync_folder(path.parent)
    except (DamagedDataError, FetchError):
        raise
    except OSError as error:
        raise FetchError(f"{path} could not be written: {error.strerror or error}. Nothing was kept.") from error
    finally:
        part.unlink(missing_ok=True)
    return Fetched(path, True, path.stat().st_size)


def _part(path: Path) -> tuple[int, Path]:
    """A fresh file beside `path`, of a name of its own because two may fetch at once; orphans are cleared."""
    for old in path.parent.glob(f"{path.name}.*.part"):
        if time.time() - old.stat().st_mtime > _STALE:
            old.unlink(missing_ok=True)
    try:
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".part")
    except OSError as error:
        raise FetchError(f"{path.parent} cannot be written: {error.strerror or error}.") from error
    return handle, Path(part)


def _download(url: str, write: Callable[[bytes], int], algorithm: str, file: File, progress: bool | None) -> str:
    """Stream `url` into `write`; the checksum of what came."""
    seen, received = _hash(algorithm), 0
    with _open(url) as response, counting(file.name, progress=progress, total=file.size) as count:
        length, most = response.headers.get("Content-Length", ""), file.size or _MOST
        if length.isdecimal() and int(length) > most + _BLOCK:  # of little more the check sum says what is wrong
            raise FetchError(f"{url} has {length} bytes where {most} are expected. Nothing was kept.")
        while block := _next(response, url):
            write(block)
            seen.update(block)
            received += len(block)
            if received > most + _BLOCK:
                raise FetchError(f"{url} sends more than the {most} bytes that are expected. Nothing was kept.")
            count(len(block))
    if length.isdecimal() and received != int(length):
        raise FetchError(f"{url} broke off after {received} of {length} bytes. Nothing was kept.")
    return f"{algorithm}:{seen.hexdigest()}"


def _open(url: str) -> http.client.HTTPResponse:
    request = urllib.request.Request(url, headers={"User-Agent": "theodolite"})
    try:
        response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=_TIMEOUT)
        return response
    except urllib.error.HTTPError as error:
        error.close()
        raise FetchError(f"{url} answered {error.code} {error.reason}.") from error
    except (OSError, http.client.HTTPException) as error:
        raise FetchError(f"{url} could not be reached: {getattr(error, 'reason', error)}.") from error


def _next(response: http.client.HTTPResponse, url: str) -> bytes:
    try:
        return response.read(_BLOCK)
    except (OSError, http.client.HTTPException) as error:
        raise FetchError(f"{url} broke off: {error!r}. Nothing was kept.") from error


def _address(url: str, base_url: str | None) -> str:
    """The address of a file at another server.

    >>> _address("https://example.org/data/a.gz", "http://localhost:8000")
    'http://localhost:8000/data/a.gz'
    """
    return url if base_url is None else base_url.rstrip("/") + urllib.parse.urlsplit(url).path
