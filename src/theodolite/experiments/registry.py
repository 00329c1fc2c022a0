"""The list of experiments, by id; a module is imported when its experiment is asked for."""

from __future__ import annotations

import fnmatch
import functools
import importlib
from importlib.metadata import entry_points

from theodolite.errors import TheodoliteError, nearest
from theodolite.experiments.base import Experiment, check_declaration

#: Others add theirs through this group of entry points: `id = "module:Class"`.
GROUP = "theodolite.experiments"

_CHECKS = "theodolite.experiments.checks"
_TARGETS: dict[str, str] = {
    "checks/stability-edge": f"{_CHECKS}.stability_edge:StabilityEdge",
    "checks/kronecker-identity": f"{_CHECKS}.kronecker_identity:KroneckerIdentity",
}
_CLASSES: dict[str, type[Experiment]] = {}


class UnknownExperimentError(TheodoliteError, ValueError):
    """No experiment has this id."""


def names(pattern: str = "*") -> list[str]:
    """Ids of the registered experiments that fit a glob, such as `"catapult/*"`; a bare word is looked for anywhere.

    >>> names("checks/*")
    ['checks/kronecker-identity', 'checks/stability-edge']
    """
    known = {**_TARGETS, **_third_party(), **dict.fromkeys(_CLASSES)}
    glob = pattern if any(c in pattern for c in "*?[") else f"*{pattern}*"
    return sorted(name for name in known if fnmatch.fnmatchcase(name, glob))


def get(name: str) -> Experiment:
    """The experiment with this id; `"module:Class"` names one that is not registered."""
    return _class_of(name)()


def register(experiment: type[Experiment]) -> type[Experiment]:
    """Add an experiment for this process; usable as a decorator."""
    check_declaration(experiment)
    _CLASSES[experiment.id] = experiment
    return experiment


def _class_of(name: str) -> type[Experiment]:
    if name in _CLASSES:
        return _CLASSES[name]
    target = {**_third_party(), **_TARGETS}.get(name, name)
    if ":" not in target:
        near = ", ".join(nearest(name, names(), 3))
        raise UnknownExperimentError(f"There is no experiment {name!r}. The nearest are: {near}. `theodolite list` shows all.")
    module, _, attribute = target.partition(":")
    try:
        found = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    except Exception as error:  # whatever the user's module does when it is imported
        reason = f"{type(error).__name__}: {error}"
        raise UnknownExperimentError(f"{target!r} could not be imported: {reason}. It must read module:Class.") from error
    if not (isinstance(found, type) and issubclass(found, Experiment)):
        raise UnknownExperimentError(f"{target!r} is no Experiment but {found!r}.")
    check_declaration(found)
    return found


def _third_party() -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group=GROUP)}
