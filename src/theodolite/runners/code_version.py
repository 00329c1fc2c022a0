"""Which code made a result: a digest of the sources, and what git says about them."""

from __future__ import annotations

import ast
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


#: Rooms and files of this package that decide no rows: how results are drawn, shown, judged and asked for.
NO_ROWS = ("plots", "report", "instruments", "analyses", "cli", "testing")
JUDGING = (
    *(f"theodolite.experiments.{name}" for name in ("claims", "figure", "query", "registry", "running", "sources")),
    "theodolite.runners.code_version",
)


def code_version(*owners: object) -> str:
    """A digest of the code that can decide what `owners` (classes, functions, or plain text) compute.

    That is the import closure of the modules that define them and their parents: this package's, without what only draws or
    judges, and the user's own. Comments, docstrings, layout, claims and drawings do not count. Code without a file (typed into a
    console) is taken by its byte code.
    """
    parts: list[bytes] = []
    modules: dict[str, Path] = {}
    for owner in owners:
        if isinstance(owner, str):
            parts.append(owner.encode())
            continue
        for module in _modules_of(owner):
            _collect(module, modules)
            if module.__name__ not in modules and _is_installed(module):  # somebody's package: its own file at least
                modules[module.__name__] = Path(str(module.__file__))
        parts += _byte_code(owner)
    if "theodolite.data" in modules:  # stand-ins may take the place of what is missing
        from theodolite import data

        parts.append(",".join(listed.name for listed in data.listing() if listed.found).encode())
    return _digest([*parts, *(part for name in sorted(modules) for part in (name.encode(), _meaning_of(modules[name])))])


def _collect(module: ModuleType, found: dict[str, Path]) -> None:
    """Add a module and what it imports, as far as it is this package's or the user's own."""
    file = getattr(module, "__file__", None)
    if module.__name__ in found or not file:
        return
    if Path(file).resolve().is_relative_to(PACKAGE):
        _collect_own(module.__name__, found)
    elif is_users_own(module):
        found[module.__name__] = Path(file)
        for value in list(vars(module).values()):
            other = value if isinstance(value, ModuleType) else sys.modules.get(getattr(value, "__module__", None) or "")
            if other is not None:
                _collect(other, found)


def _collect_own(name: str, found: dict[str, Path]) -> None:
    """Add a module of this package by name, and the modules that its imports name, read from the sources."""
    room, todo = name.split(".")[1:2], [name]
    while todo:
        name = todo.pop()
        here = name.split(".")[1:2]
        path = _file_of(name)
        if path is None or name in found or name in JUDGING or (here != room and here and here[0] in NO_ROWS):
            continue
        found[name] = path
        todo += _below(path, name) if _is_lazy(path) else _imports_of(path, name)


def _is_lazy(path: Path) -> bool:
    """Whether a package imports its parts when they are named: then it may stand for any of them."""
    return path.name == "__init__.py" and "def __getattr__(" in path.read_text(encoding="utf-8")


def _below(path: Path, name: str) -> list[str]:
    """All modules of a package."""
    return [
        ".".join([name, *file.relative_to(path.parent).with_suffix("").parts]).removesuffix(".__init__")
        for file in sorted(path.parent.rglob("*.py"))
    ]


def _file_of(name: str) -> Path | None:
    """The source of a module of this package, None if there is no such module."""
    place = PACKAGE.joinpath(*name.split(".")[1:])
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return file if file.is_file() else None


def _imports_of(path: Path, name: str) -> tuple[str, ...]:
    return _imports(path, name, path.stat().st_mtime_ns)


@cache
def _imports(path: Path, name: str, changed: int) -> tuple[str, ...]:
    """Modules of this package that a source file imports, wherever in the file; names that are no modules are left out."""
    found: list[str] = []
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*above, *([node.module] if node.module else [])]) if node.level else node.module or ""
            found += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return tuple(module for module in dict.fromkeys(found) if module.startswith("theodolite.") and _file_of(module))


def _meaning_of(path: Path) -> bytes:
    return _meaning(path, path.stat().st_mtime_ns)


@cache
def _meaning(path: Path, changed: int) -> bytes:
    """What a source file says to Python: its syntax tree without docstrings, and without what only states or draws a figure."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            node.body = [part for part in node.body if not _is_view(part)] or [ast.Pass()]
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
                node.body = node.body[1:]
    return ast.dump(tree).encode()


#: What a class says of a figure: nothing of it decides rows.
VIEW = {"claims", "item", "where", "departs", "view", "only", "id", "source", "reproduces", "draw", "figure"}


def _is_view(part: ast.stmt) -> bool:
    """Whether a statement of a class only says what a figure shows, claims or looks like."""
    if isinstance(part, ast.FunctionDef):
        return part.name in VIEW
    targets = part.targets if isinstance(part, ast.Assign) else [part.target] if isinstance(part, ast.AnnAssign) else []
    names = [name for target in targets for name in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return bool(names) and all(isinstance(name, ast.Name) and name.id in VIEW for name in names)


def _is_installed(module: ModuleType) -> bool:
    """Whether a module is of an installed package that is neither Python's nor ours."""
    file = getattr(module, "__file__", None)
    if not file or not file.endswith(".py"):
        return False
    path, standard = Path(file).resolve(), Path(sysconfig.get_paths()["stdlib"]).resolve()
    own = path.is_relative_to(PACKAGE)
    return not own and (not path.is_relative_to(standard) or "site-packages" in path.parts)


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


def is_users_own(module: ModuleType) -> bool:
    """Whether a module is the user's code and no installed package."""
    file = getattr(module, "__file__", None)
    if not file or not Path(file).is_file():
        return False
    path = Path(file).resolve()
    installed = [Path(sysconfig.get_paths()[name]).resolve() for name in ("stdlib", "purelib", "platlib")]
    return path.suffix == ".py" and not any(path.is_relative_to(place) for place in (PACKAGE, *installed))


def _byte_code(owner: Any) -> list[bytes]:
    """The code of functions that no file holds."""
    parts = vars(owner).values() if isinstance(owner, type) else [owner]
    missing = [f for f in parts if inspect.isfunction(f) and not Path(f.__code__.co_filename).is_file()]
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
