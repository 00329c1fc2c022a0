"""The figures by id. A chapter is a folder of this package; importing its modules finds its figures.

Others add theirs through entry points of the group `theodolite.experiments`: `id = "module:Class"`.
"""

from __future__ import annotations

import fnmatch
import functools
import importlib
import pkgutil
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

from theodolite.errors import TheodoliteError
from theodolite.experiments.figure import Figure, check_declaration
from theodolite.experiments.study import Study
from theodolite.text import nearest

GROUP = "theodolite.experiments"
#: Folders of this package that hold no figures.
NO_CHAPTERS = ("lab",)
_REGISTERED: dict[str, type[Figure]] = {}


class UnknownExperimentError(TheodoliteError, ValueError):
    """No experiment has this id."""


def names(pattern: str = "*") -> list[str]:
    """Ids of the registered experiments that fit a glob, such as `"catapult/*"`; a bare word is looked for anywhere.

    >>> names("checks/*")
    ['checks/kronecker-identity', 'checks/stability-edge']
    """
    known = {*(figure for chapter in chapters() for figure in figures_of(chapter)), *_third_party(), *_REGISTERED}
    glob = pattern if any(c in pattern for c in "*?[") else f"*{pattern}*"
    return sorted(name for name in known if fnmatch.fnmatchcase(name, glob))


def get(name: str) -> Figure:
    """The experiment with this id; `"module:Class"` names one that is not registered, and is imported."""
    return _made(name, otherwise=name)


def registered(name: str) -> Figure:
    """The registered experiment with this id. Nothing else is imported, whatever the name: it may come from a stranger's file."""
    return _made(name, otherwise="")


def _made(name: str, otherwise: str) -> Figure:
    found = _class_of(name, otherwise)
    try:
        return found()
    except Exception as error:  # of somebody else's class
        raise UnknownExperimentError(f"{name!r} could not be made: {type(error).__name__}: {error}") from error


def all_figures() -> Iterator[Figure]:
    """Every registered experiment that can be imported; a package that is broken must not hide the others."""
    for name in names():
        try:
            yield get(name)
        except UnknownExperimentError:
            continue


def register(figure: type[Figure]) -> type[Figure]:
    """Add an experiment for this process; usable as a decorator."""
    check_declaration(figure)
    _REGISTERED[figure.id] = figure
    return figure


def chapters() -> list[str]:
    """The folders of this package that hold figures."""
    found = pkgutil.iter_modules([str(Path(__file__).parent)])
    return [module.name for module in found if module.ispkg and module.name not in NO_CHAPTERS]


@functools.cache
def figures_of(chapter: str) -> dict[str, type[Figure]]:
    """The figures of a chapter by id: classes of its modules that state an id and claims."""
    package = importlib.import_module(f"theodolite.experiments.{chapter}")
    modules = [importlib.import_module(m.name) for m in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")]
    classes = [c for module in modules for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
    studies = [c.__qualname__ for c in classes if issubclass(c, Study)]
    if twice := sorted({name for name in studies if studies.count(name) > 1}):
        raise ValueError(f"Two studies of {chapter} are called {twice[0]}: their rows would be taken for each other's.")
    figures = [c for c in classes if issubclass(c, Figure) and isinstance(getattr(c, "id", None), str) and hasattr(c, "claims")]
    found: dict[str, type[Figure]] = {}
    for figure in figures:
        check_declaration(figure)
        if found.setdefault(figure.id, figure) is not figure:
            raise ValueError(f"{found[figure.id].__qualname__} and {figure.__qualname__} have the same id {figure.id!r}.")
    return found


def _class_of(name: str, otherwise: str) -> type[Figure]:
    """The class that is registered by this name, here or as an entry point, or else the one that `otherwise` names."""
    if name in _REGISTERED:
        return _REGISTERED[name]
    for chapter in chapters():
        package = importlib.import_module(f"theodolite.experiments.{chapter}")
        if name.startswith(getattr(package, "CHAPTER", chapter).replace("_", "-") + "/") and name in figures_of(chapter):
            return figures_of(chapter)[name]
    target = _third_party().get(name, otherwise)
    if ":" not in target:
        near = ", ".join(nearest(name, names(), 3))
        raise UnknownExperimentError(
            f"There is no experiment of the id {name!r}. The nearest are: {near}. `theodolite list` shows all."
        )
    module, _, attribute = target.partition(":")
    try:
        found = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    except Exception as error:  # whatever the user's module does when it is imported
        reason = f"{type(error).__name__}: {error}"
        raise UnknownExperimentError(f"{target!r} could not be imported: {reason}. It must read module:Class.") from error
    if not (isinstance(found, type) and issubclass(found, Figure)):
        raise UnknownExperimentError(f"{target!r} is no Experiment but {found!r}.")
    try:
        check_declaration(found)
    except ValueError as error:
        raise UnknownExperimentError(f"{target!r} is not declared as it must be: {error}") from error
    if target != name and found.id != name:
        raise UnknownExperimentError(f"{target!r} has the id {found.id!r}. Its entry point must have the same name.")
    return found


def _third_party() -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group=GROUP)}
