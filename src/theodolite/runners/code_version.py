"""Which code made a result: a digest of the sources, and what git says about them."""

from __future__ import annotations

import hashlib
import inspect
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import theodolite

PACKAGE = Path(theodolite.__file__).parent


def code_version(*owners: object) -> str:
    """A digest of this package's sources and of the files that define `owners` (classes or functions)."""
    files = {Path(inspect.getfile(owner)) for owner in owners}  # type: ignore[arg-type]
    outside = sorted(f for f in files if f.exists() and not f.resolve().is_relative_to(PACKAGE.resolve()))
    return _digest([package_version().encode(), *(f.read_bytes() for f in outside)])


@cache
def package_version() -> str:
    """A digest of every source file of the package, read once."""
    return _digest(part for f in sorted(PACKAGE.rglob("*.py")) for part in (str(f.relative_to(PACKAGE)).encode(), f.read_bytes()))


def git_state(folder: Path = PACKAGE) -> str | None:
    """The commit of the sources, with a `+` where files were changed since; None outside a repository."""
    try:
        commit = _git(folder, "rev-parse", "--short", "HEAD")
        return commit + ("+" if _git(folder, "status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:16]
