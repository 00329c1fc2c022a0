"""`module:attribute`: find what a word of the command line names in the user's own files, and call it if it is a function."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from theodolite.cli.terminal import make_importable
from theodolite.errors import TheodoliteError
from theodolite.text import listed, nearest


def names_code(word: str) -> bool:
    """Whether a word has the form `module:attribute`.

    >>> names_code("train:make_model"), names_code("LeNet5"), names_code("hf:folder")
    (True, False, False)
    """
    module, colon, attribute = word.rpartition(":")
    return bool(colon and module and attribute) and not word.startswith("hf:")


def reason(error: BaseException) -> str:
    """An exception in one line: its type and the first line of its message.

    >>> reason(KeyError("x"))
    "KeyError: 'x'"
    """
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def load_attribute(target: str, option: str, seed: int = 0) -> Any:
    """What `module:attribute` or `path/to/file.py:attribute` names; `option` is the option it was given to.

    A file is run under the seed, when it is first named, and leaves the global random state alone.
    """
    from theodolite.models.initialisation import seeded  # brings torch, which `--help` can do without

    module_name, _, attribute = target.rpartition(":")
    if not module_name or not all(part.isidentifier() for part in attribute.split(".")):
        raise ValueError(f"{option} {target!r} must read module:attribute or path/to/file.py:attribute.")
    with seeded(seed):
        module = _module(module_name, target, option)
    try:
        return functools.reduce(getattr, attribute.split("."), module)
    except AttributeError:
        near = listed(nearest(attribute, [n for n in vars(module) if not n.startswith("_")], 3))
        raise ValueError(f"{option} {target!r}: {module_name} has no {attribute!r}. Nearest names: {near}.") from None


def call(target: str, function: Callable[..., Any], seed: int = 0) -> Any:
    """Call the user's function under the seed, which it is given if it takes one; what it raises becomes one line."""
    from theodolite.models.initialisation import seeded

    accepted, required = _arguments(function)
    lacking = [name for name in required if name != "seed"]
    if lacking:
        raise ValueError(
            f"{target!r} needs {listed(lacking)}, which the command line cannot give. Name a function without required arguments."
        )
    try:
        with seeded(seed):
            return function(seed=seed) if "seed" in accepted else function()
    except TheodoliteError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's function does
        raise ValueError(f"{target} failed: {reason(error)}") from error


def _arguments(function: Callable[..., Any]) -> tuple[set[str], list[str]]:
    """Names that a function takes as keywords, and those it cannot do without."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions do not say
        return set(), []
    plain = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    accepted = {p.name for p in plain if p.kind is not p.POSITIONAL_ONLY}
    return accepted, [p.name for p in plain if p.default is p.empty]


def _module(name: str, target: str, option: str) -> ModuleType:
    if name.endswith(".py") or "/" in name:
        path = Path(name).expanduser()
        return _from_file(path if path.is_file() else path.with_suffix(".py"), target, option)
    here = Path.cwd()
    make_importable(here)
    local = here / f"{name.replace('.', '/')}.py"
    if local.is_file() and not _is_found_at(name, local):
        return _from_file(local, target, option)  # the file in this folder is meant, whatever else has its name
    return _imported(lambda: importlib.import_module(name), name, target, option)


def _is_found_at(name: str, path: Path) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return False
    except (Exception, SystemExit):  # its package failed: the import says it in full
        return True
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == path.resolve()


def _from_file(path: Path, target: str, option: str) -> ModuleType:
    """The module in a file, under a name of its own: a user's `code.py` must not stand in for Python's."""
    if not path.is_file():
        raise FileNotFoundError(f"{option} {target!r}: there is no file {path}.")
    path = path.resolve()
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    name = f"_theodolite_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    make_importable(path.parent)  # what it imports from beside itself
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{option} {target!r}: {path} is no Python file. Its name must end in .py.")
    module, loader = importlib.util.module_from_spec(spec), spec.loader

    def run() -> ModuleType:
        sys.modules[name] = module  # dataclasses look themselves up there
        try:
            loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module

    return _imported(run, str(path), target, option)


def _imported(run: Callable[[], ModuleType], name: str, target: str, option: str) -> ModuleType:
    try:
        return run()
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise ValueError(f"{option} {target!r} could not be imported: {reason(error)}.") from error
        near = listed(nearest(name, [p.stem for p in Path.cwd().glob("*.py")], 3))
        raise ValueError(
            f"{option} {target!r}: there is no module {error.name!r} here or among the installed ones. Python files here: {near}."
        ) from error
    except (Exception, SystemExit) as error:  # whatever the user's module does when it is imported
        raise ValueError(f"{option} {target!r} could not be imported: {reason(error)}.") from error
