"""Files that are complete or absent."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside its place, force it to disk and move it there; folders are made.

    Whoever reads meets the old file or the new one, never half of it, also after a crash or on a full disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".part")
    part = Path(name)
    try:
        try:
            write_all(handle, content)
            os.fsync(handle)
        finally:
            os.close(handle)
        part.chmod(0o644)  # mkstemp makes it private
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


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
