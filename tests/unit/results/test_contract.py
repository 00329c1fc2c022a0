"""Every result class of the package keeps the contract."""

from __future__ import annotations

import importlib
import pkgutil

import theodolite as th
from theodolite.results import Result
from theodolite.testing import ResultContract

from .samples import samples

#: What only parents are; `ResultMapping` itself is used as well.
ABSTRACT = {"Result"}


def kinds(of: type[Result] = Result) -> set[type[Result]]:
    """All result classes of the package; importing a module makes its own known."""
    for module in pkgutil.walk_packages(th.__path__, "theodolite."):
        if ".adapters." not in module.name and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    return {kind for kind in _below(of) if kind.__module__.startswith("theodolite.")}


def _below(of: type) -> set[type]:
    return {kind for child in of.__subclasses__() for kind in {child, *_below(child)}}


KINDS = sorted(kind.__name__ for kind in kinds() if kind.__name__ not in ABSTRACT)


def suite(name: str) -> type[ResultContract]:
    return type(f"Test{name}", (ResultContract,), {"make": lambda self: samples()[name]})


for _name in KINDS:
    globals()[f"Test{_name}"] = suite(_name)


def test_every_result_has_a_case():
    """A new class needs a line in `samples.py`, unless another result already holds one of its kind."""
    assert [name for name in KINDS if name not in samples()] == []
    assert len(KINDS) >= 60
