"""The sources: papers and theses with their figures and tables, and which of these are registered as experiments."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

#: Kinds of items that an experiment can reproduce; the others illustrate.
REPRODUCIBLE = ("experiment", "settings")


@dataclass(frozen=True)
class Item:
    """A figure or table: `key` is "zhu-2024 Figure 3.3", `same_as` the key of its twin in another source."""

    key: str
    line: int
    system: str
    kind: str
    same_as: str | None = None


@dataclass(frozen=True)
class Source:
    """A paper or thesis; `label` is how readers cite it."""

    key: str
    label: str
    title: str = ""
    authors: tuple[str, ...] = ()
    year: int = 0
    kind: str = "paper"
    published: str = ""
    link: str = ""
    items: tuple[Item, ...] = ()

    def __str__(self) -> str:
        parts = (", ".join(self.authors), self.title, self.published, str(self.year) if self.year else "", self.link)
        return ". ".join(part for part in parts if part)


@cache
def sources() -> dict[str, Source]:
    """The sources of this package by key, from `sources.toml`."""
    tables = tomllib.loads((files("theodolite.experiments") / "sources.toml").read_text(encoding="utf-8"))
    return {key: _source(key, **table) for key, table in tables.items()}


def _source(key: str, items: dict[str, dict[str, object]], authors: list[str], **facts: object) -> Source:
    found = tuple(Item(f"{key} {name}", **item) for name, item in items.items())  # type: ignore[arg-type]
    return Source(key, authors=tuple(authors), items=found, **facts)  # type: ignore[arg-type]


#: Keys of version 0.1, when sources had numbers.
_NUMBERS = {"000": "wu-2023", "001": "step-size-2021", "002": "wu-zhu-2020", "003": "zhu-2024", "004": "karp-2024"}


def current_key(item: str) -> str:
    """An item's key, also from one of version 0.1.

    >>> current_key("003 Figure 3.3")
    'zhu-2024 Figure 3.3'
    """
    source, space, place = item.partition(" ")
    return f"{_NUMBERS.get(source, source)}{space}{place}"


def source_of(item: str) -> Source:
    """The source of an item's key; one that is not known is its own label.

    >>> source_of("zhu-2024 Figure 3.3").title
    'Toward Understanding the Dynamics of Over-parameterized Neural Networks'
    >>> source_of("lee-2031 Figure 1").label
    'lee-2031'
    """
    key = item.partition(" ")[0]
    return sources().get(key) or Source(key, key)


def cite(item: str) -> str:
    """An item as a reader cites it.

    >>> cite("zhu-2024 Figure 3.3")
    'Zhu 2024, Figure 3.3'
    """
    place = item.partition(" ")[2]
    return source_of(item).label + (f", {place}" if place else "")


def cite_all(items: Sequence[str]) -> str:
    """Several items, each source named once.

    >>> cite_all(["zhu-2024 Figure 4.2", "zhu-2024 Figure 4.3", "wu-2023 Table C.1"])
    'Zhu 2024, Figure 4.2, Figure 4.3; Wu 2023, Table C.1'
    """
    by_source: dict[str, list[str]] = {}
    for item in items:
        by_source.setdefault(source_of(item).label, []).append(item.partition(" ")[2])
    return "; ".join(", ".join([label, *filter(None, places)]) for label, places in by_source.items())


@dataclass(frozen=True)
class Coverage:
    """Which items are registered: `registered` maps an item's key to the experiments that reproduce it.

    `others` are items that no source of this package lists, such as those of somebody else's paper.
    """

    items: tuple[Item, ...]
    registered: dict[str, tuple[str, ...]]
    others: tuple[str, ...] = ()

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
        more = f", and {len(self.others)} of other sources" if self.others else ""
        return f"{self.count} of {self.total} figures and tables are registered as experiments{more}."


def coverage() -> Coverage:
    """Which figures and tables are registered; a twin counts with the item it equals."""
    from theodolite.experiments.registry import all_figures

    items = tuple(item for source in sources().values() for item in source.items)
    owners: dict[str, list[str]] = {}
    for figure in all_figures():
        for key in figure.items:
            owners.setdefault(key, []).append(figure.id)
    for item in items:
        if item.same_as in owners:
            owners.setdefault(item.key, []).extend(o for o in owners[item.same_as] if o not in owners.get(item.key, []))
    known = {item.key for item in items}
    others = tuple(key for key in owners if key not in known and key.partition(" ")[0] not in sources())
    return Coverage(items, {key: tuple(found) for key, found in owners.items()}, others)
