"""Which code made a result: a digest of the sources, and what git says about them."""

from __future__ import annotations

import functools
import hashlib
import inspect
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import theodolite

PACKAGE = Path(theodolite.__file__).resolve().parent


def code_version(*owners: object) -> str:
    """A digest of this package's sources and of the user's modules behind `owners` (classes, functions, or plain text).

    Those are the modules that define them and their parents, and what these import, as far as it is the user's own and
    not installed. Code without a file (typed into a console) is taken by its byte code.
    """
    parts = [package_version().encode()]
    modules: dict[str, ModuleType] = {}
    for owner in owners:
        if isinstance(owner, str):
            parts.append(owner.encode())
            continue
        for module in _modules_of(owner):
            _collect(module, modules)
        parts += _byte_code(owner)
    return _digest([*parts, *(Path(str(modules[name].__file__)).read_bytes() for name in sorted(modules))])


def _modules_of(owner: Any) -> Iterator[ModuleType]:
    """Modules of a function, a method's class, a class with its parents, or a callable object."""
    while isinstance(owner, functools.partial):
        owner = owner.func
    if inspect.ismethod(owner):
        owner = type(owner.__self__)
    elif not isinstance(owner, type) and not inspect.isfunction(owner):
        owner = type(owner)
    for part in owner.__mro__ if isinstance(owner, type) else [owner]:
        module = sys.modules.get(part.__module__)
        if module is not None:
            yield module


def _collect(module: ModuleType, found: dict[str, ModuleType]) -> None:
    """Add a module of the user and the user's modules that it names."""
    if module.__name__ in found or not is_users_own(module):
        return
    found[module.__name__] = module
    for value in list(vars(module).values()):
        other = value if isinstance(value, ModuleType) else sys.modules.get(getattr(value, "__module__", None) or "")
        if other is not None:
            _collect(other, found)


def is_users_own(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if not file or not Path(file).is_file():
        return False
    path = Path(file).resolve()
    installed = [Path(sysconfig.get_paths()[name]).resolve() for name in ("stdlib", "purelib", "platlib")]
    return path.suffix == ".py" and not any(path.is_relative_to(place) for place in (PACKAGE, *installed))


def _byte_code(owner: Any) -> list[bytes]:
    """The code of functions that no file holds."""
    functions = (
        [owner]
        if inspect.isfunction(owner)
        else [f for f in vars(owner).values() if inspect.isfunction(f)]
        if isinstance(owner, type)
        else []
    )
    missing = [f for f in functions if not Path(f.__code__.co_filename).is_file()]
    return [f.__code__.co_code + repr(f.__code__.co_consts).encode() for f in missing]


@cache
def package_version() -> str:
    """A digest of every source file of the package, read once."""
    return _digest(part for f in sorted(PACKAGE.rglob("*.py")) for part in (str(f.relative_to(PACKAGE)).encode(), f.read_bytes()))


def git_state(folder: Path = PACKAGE) -> str | None:
    """The commit of the sources, with a `+` where files were changed since; None where git does not track them."""
    try:
        _git(folder, "ls-files", "--error-unmatch", "__init__.py")
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
