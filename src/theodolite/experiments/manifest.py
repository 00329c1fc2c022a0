"""The manifest: every figure and table of the sources, and which of them are registered as experiments."""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

#: Kinds of rows that an experiment can reproduce; the others illustrate or list settings.
REPRODUCIBLE = ("experiment", "settings")


@dataclass(frozen=True)
class Item:
    """A figure or table: `key` is "003 Figure 3.3", `same_as` the key of its twin in another source."""

    key: str
    line: int
    system: str
    kind: str
    same_as: str | None


@dataclass(frozen=True)
class Coverage:
    """Which items are registered: `registered` maps an item's key to the experiments that reproduce it."""

    items: tuple[Item, ...]
    registered: dict[str, tuple[str, ...]]

    @property
    def missing(self) -> tuple[str, ...]:
        """Items that could be reproduced and are not yet."""
        return tuple(i.key for i in self.items if i.kind in REPRODUCIBLE and i.key not in self.registered)

    @property
    def total(self) -> int:
        return sum(i.kind in REPRODUCIBLE for i in self.items)

    @property
    def count(self) -> int:
        return self.total - len(self.missing)

    @property
    def fraction(self) -> float:
        return self.count / self.total

    def by_system(self) -> dict[str, tuple[int, int]]:
        """System -> (registered, all) of the items that can be reproduced."""
        counted = [i for i in self.items if i.kind in REPRODUCIBLE]
        done = Counter(i.system for i in counted if i.key in self.registered)
        return {system: (done[system], n) for system, n in sorted(Counter(i.system for i in counted).items())}

    def __str__(self) -> str:
        return f"{self.count} of {self.total} figures and tables are registered as experiments."


@cache
def items() -> tuple[Item, ...]:
    """All rows of the manifest."""
    with (files("theodolite.experiments") / "manifest.csv").open() as file:
        return tuple(
            Item(f"{row['seed']} {row['item']}", int(row["line"]), row["system"], row["kind"], row["same_as"] or None)
            for row in csv.DictReader(file)
        )


def coverage() -> Coverage:
    """Which rows of the manifest are registered; a twin counts with the item it equals."""
    from theodolite.experiments.registry import get, names

    owners: dict[str, list[str]] = {}
    for name in names():
        for key in get(name).reproduces:
            owners.setdefault(key, []).append(name)
    for item in items():
        if item.same_as in owners:
            owners.setdefault(item.key, []).extend(o for o in owners[item.same_as] if o not in owners.get(item.key, []))
    known = {item.key for item in items()}
    unknown = [key for key in owners if key not in known]
    if unknown:
        raise ValueError(f"{owners[unknown[0]][0]} reproduces {unknown[0]!r}, which is no row of the manifest.")
    return Coverage(items(), {key: tuple(found) for key, found in owners.items()})
