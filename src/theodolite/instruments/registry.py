"""The instruments in the order in which they run; the first ones matter most when time is short."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import entry_points

from theodolite.errors import nearest
from theodolite.instruments.base import Instrument

#: Others add theirs through this group of entry points: `name = "module:Class"`.
GROUP = "theodolite.instruments"

_HERE = "theodolite.instruments"
_TARGETS = (
    f"{_HERE}.batches:Batches",
    f"{_HERE}.weighting:Weighting",
    f"{_HERE}.parameters:Parameters",
    f"{_HERE}.inputs:Inputs",
    f"{_HERE}.noise:Noise",
    f"{_HERE}.curvature:Curvature",
    f"{_HERE}.rate:Rate",
    f"{_HERE}.negative:NegativeCurvature",
    f"{_HERE}.layers:Layers",
    f"{_HERE}.structure:Structure",
    f"{_HERE}.alignment:GradientAlignment",
    f"{_HERE}.trace:Trace",
    f"{_HERE}.density:Spectrum",
    f"{_HERE}.conditioning:ConditionOfCurvature",
    f"{_HERE}.features:Features",
    f"{_HERE}.kernel:Kernel",
    f"{_HERE}.anchors:Anchors",
    f"{_HERE}.linearity:Linearity",
    f"{_HERE}.regimes:Regimes",
    f"{_HERE}.spikes:Spikes",
)


_OWN: dict[str, type[Instrument]] = {}


def register(instrument: type[Instrument]) -> type[Instrument]:
    """Add an instrument for this process; usable as a decorator."""
    _OWN[instrument.name] = instrument
    return instrument


def _classes() -> dict[str, type[Instrument]]:
    return {**_installed(), **_OWN}


@cache
def _installed() -> dict[str, type[Instrument]]:
    targets = [*_TARGETS, *(point.value for point in entry_points(group=GROUP))]
    found: dict[str, type[Instrument]] = {}
    for target in targets:
        module, _, attribute = target.partition(":")
        kind: type[Instrument] = getattr(importlib.import_module(module), attribute)
        found[kind.name] = kind
    return found


def all_instruments() -> list[Instrument]:
    """One of each, in the order in which they run."""
    return [kind() for kind in _classes().values()]


def names() -> list[str]:
    """Names of all instruments.

    >>> names()[:3]
    ['batches', 'weighting', 'parameters']
    """
    return list(_classes())


def get(name: str) -> Instrument:
    """The instrument with this name."""
    if name not in _classes():
        raise ValueError(f"No instrument is called {name!r}. Nearest: {', '.join(nearest(name, names(), count=3))}.")
    return _classes()[name]()
