"""Files that are complete or absent, and the check sums by which damaged ones are known."""

from __future__ import annotations

import glob
import json
import os
import socket
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside its place, force it to disk and move it there; folders are made.

    Whoever reads meets the old file or the new one, never half of it, also after a crash or on a full disk. Errors name `path`.
    """
    with naming(path):
        make_folder(path.parent)
        _clear_orphans(path)
        _write_and_move(path, content)
        sync_folder(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the system name this path: by itself that of a full disk names none, and that of a part the part."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


def _write_and_move(path: Path, content: bytes) -> None:
    part = path.with_name(f"{path.name}.{_host()}.{os.getpid()}.part")
    try:
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            write_all(handle, content)
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _clear_orphans(path: Path) -> None:
    """Remove what processes of this machine that were killed while writing left behind."""
    for old in path.parent.glob(f"{glob.escape(path.name)}.{_host()}.*.part"):
        pid = old.name.removesuffix(".part").rpartition(".")[2]
        if pid.isdigit() and int(pid) != os.getpid() and not _is_alive(int(pid)):
            old.unlink(missing_ok=True)


def _host() -> str:
    """This machine, in letters that a file name may have."""
    return "".join(c if c.isalnum() else "-" for c in socket.gethostname())


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True


def write_all(handle: int, content: bytes) -> None:
    """`os.write` until everything is written."""
    view = memoryview(content)
    while view:
        view = view[os.write(handle, view) :]


def make_folder(folder: Path) -> None:
    """Make a folder and those above it that are missing; their names are on disk when it returns."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for place in missing:
        sync_folder(place.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the system lets a folder be opened."""
    if os.name != "posix":
        return
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:  # one may write into it and not list it
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def other_version(what: object, found: object, read: Iterable[int], remedy: str) -> str:
    """What to say of a file, or of a part of one, whose version is none of those that are read.

    >>> other_version("run/manifest.json", 7, (1, 2), "Update theodolite.")
    'run/manifest.json is of version 7; this theodolite reads 1, 2: written by a newer one, or damaged. Update theodolite.'
    """
    known = ", ".join(map(str, read))
    return f"{what} is of version {found!r}; this theodolite reads {known}: written by a newer one, or damaged. {remedy}"


def check_sum(content: bytes) -> str:
    """Eight digits that tell a damaged content from what was written."""
    return f"{zlib.crc32(content):08x}"


def json_check_sum(document: Any) -> str:
    """That of a JSON document, whatever the spaces in its file."""
    return check_sum(json.dumps(document).encode())
