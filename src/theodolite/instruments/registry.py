"""Which instruments there are, in the order in which they run; the first ones matter most when time is short.

Those of this package are found in its sub-folders: a class in any file there is an instrument of every survey.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points

import theodolite.instruments
from theodolite.instruments.base import Instrument
from theodolite.text import nearest

#: Others add theirs through this group of entry points: `name = "module:Class"`.
GROUP = "theodolite.instruments"

_OWN: dict[str, type[Instrument]] = {}


def register(instrument: type[Instrument]) -> type[Instrument]:
    """Add an instrument for this process; usable as a decorator."""
    _OWN[instrument.name] = instrument
    return instrument


def _classes() -> dict[str, type[Instrument]]:
    found = {**_installed(), **_OWN}
    return dict(sorted(found.items(), key=lambda item: item[1].order))  # of equal order: as they were found


@cache
def _installed() -> dict[str, type[Instrument]]:
    """The classes in our sub-folders and those that other packages name."""
    ours = {kind.name: kind for kind in _ours()}
    theirs: dict[str, type[Instrument]] = {}
    for point in entry_points(group=GROUP):
        try:
            kind: type[Instrument] = point.load()
            theirs[kind.name] = kind
        except Exception as error:  # of somebody else's package: no reason to measure nothing
            package = point.dist.name if point.dist else "a package"
            reason = f"{type(error).__name__}: {error}"
            warnings.warn(f"The instrument {point.name!r} of {package} cannot be used: {reason}", UserWarning, stacklevel=2)
    return ours | theirs


def _ours() -> Iterator[type[Instrument]]:
    for found in pkgutil.walk_packages(theodolite.instruments.__path__, f"{GROUP}."):
        if found.name.count(".") > GROUP.count(".") + 1:  # in a sub-folder
            for kind in vars(importlib.import_module(found.name)).values():
                own = isinstance(kind, type) and issubclass(kind, Instrument) and kind.__module__ == found.name
                if own and not inspect.isabstract(kind):
                    yield kind


def all_instruments() -> list[Instrument]:
    """One of each, in the order in which they run."""
    return [kind() for kind in _classes().values()]


def names() -> list[str]:
    """Names of all instruments.

    >>> names()[:3]
    ['batches', 'learning_rate', 'progress']
    """
    return list(_classes())


def get(name: str) -> Instrument:
    """The instrument with this name."""
    if name not in _classes():
        raise ValueError(f"No instrument is called {name!r}. Nearest: {', '.join(nearest(name, names(), count=3))}.")
    return _classes()[name]()
