"""Bytes, text and arrays from files, where whatever is wrong with a file becomes one error that names it."""

from __future__ import annotations

import bz2
import gzip
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from theodolite.data.base import DamagedDataError

Array = npt.NDArray[Any]

# What the standard library and NumPy raise on cut or foreign files.
_BROKEN = (
    *(OSError, EOFError, ValueError, KeyError, TypeError, RuntimeError),
    *(zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError),
)


@contextmanager
def blaming(path: Path, problem: str, *also: type[Exception]) -> Iterator[None]:
    """Turn what reading a broken file raises into a `DamagedDataError` about `path`."""
    kinds: tuple[type[Exception], ...] = (*_BROKEN, *also)
    try:
        yield
    except (FileNotFoundError, PermissionError, DamagedDataError):
        raise
    except kinds as error:
        raise DamagedDataError(path, f"{problem} ({str(error).rstrip('.') or type(error).__name__})") from error


def read_bytes(path: Path) -> bytes:
    """The content of a plain, .gz or .bz2 file."""
    with blaming(path, "it cannot be unpacked"):
        if path.suffix == ".gz":
            with gzip.open(path) as packed:
                return packed.read()
        return bz2.decompress(path.read_bytes()) if path.suffix == ".bz2" else path.read_bytes()


def read_text(path: Path) -> str:
    """The UTF-8 content of a plain, .gz or .bz2 file, with `\\n` at line ends."""
    with blaming(path, "it is not UTF-8"):
        return read_bytes(path).decode("utf-8").replace("\r\n", "\n")


def read_arrays(path: Path) -> dict[str, Array]:
    """All arrays of an .npz; pickled content is refused."""
    # Opened here, because NumPy leaves a file that it cannot read open.
    with blaming(path, "it is not a sound .npz"), path.open("rb") as file, np.load(file, allow_pickle=False) as content:
        return {key: content[key] for key in content}


def read_tar(path: Path) -> dict[str, bytes]:
    """The files of a .tar.gz by their last name; nothing is unpacked to disk."""
    found = {}
    with blaming(path, "it cannot be unpacked"), tarfile.open(path, "r:gz") as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None:
                found[Path(member.name).name] = content.read()
    return found
