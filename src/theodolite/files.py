"""Files that are complete or absent."""

from __future__ import annotations

import glob
import os
import socket
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside its place, force it to disk and move it there; folders are made.

    Whoever reads meets the old file or the new one, never half of it, also after a crash or on a full disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _clear_orphans(path)
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
    sync_folder(path.parent)


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


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the system lets a folder be opened."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
