"""`Figure`: a figure, table or theorem of a source as a view of a study, with claims that can fail."""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from theodolite.experiments.claims import SIZES, Verdict, cited
from theodolite.experiments.query import Query, fits
from theodolite.experiments.query import rows as all_rows
from theodolite.experiments.sources import Source, cite, cite_all, current_key, source_of
from theodolite.experiments.study import Study
from theodolite.results import Row

if TYPE_CHECKING:
    import matplotlib.figure


class Figure(ABC):
    """Parent of all reproductions: which study, which of its jobs and rows, what is claimed, how it is drawn.

    A subclass states `study`, `item` (such as "zhu-2024 Figure 3.3"; several where one view shows them all; a source or item
    that `sources.toml` does not know is welcome) and `claims`; its docstring is what the gallery shows, first line as title.
    `id` follows from chapter and item unless it is stated. `only` selects jobs and `view` rows of the study, `where` names
    further places of the source, `cites` the one where reported values stand whose claim does not say, if that is not the item,
    and `departs` says where the experiment follows a corrected form of it.
    """

    study: Study
    item: str | Sequence[str] = ()
    id: str
    only: Mapping[str, Any] | Callable[[Mapping[str, Any]], bool] = {}
    view: Query = all_rows
    where: str = ""
    claims: Any  # claims, or statements with their claims; a tuple of claims once the class stands
    cites: ClassVar[str] = ""
    departs: ClassVar[str] = ""

    @abstractmethod
    def draw(self, rows: list[Row]) -> matplotlib.figure.Figure:
        """Rows in, drawing out; nothing is computed here."""

    def figure(self, rows: list[Row]) -> matplotlib.figure.Figure:
        """An older name of `draw`."""
        return self.draw(rows)

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        if "id" not in vars(cls) and vars(cls).get("item"):
            cls.id = f"{chapter_of(cls)}/{_slug(_items(cls)[0])}"
        if not isinstance(vars(cls).get("claims", cls), property | type):
            cls.claims = cited(cls.cites, vars(cls)["claims"] or ())

    # What it shows

    @property
    def items(self) -> list[str]:
        """Keys of the figures and tables that it reproduces."""
        return _items(type(self))

    reproduces = items

    @property
    def source(self) -> str:
        """What it reproduces, as a reader cites it: "Zhu 2024, Figure 3.3"."""
        return "; ".join(part for part in (cite_all(self.items), self.where) if part)

    @property
    def sources(self) -> list[Source]:
        """The papers and theses it reproduces."""
        return list({source.key: source for source in map(source_of, self.items)}.values())

    @property
    def title(self) -> str:
        return (type(self).__doc__ or self.id).strip().splitlines()[0].rstrip(".")

    @property
    def description(self) -> str:
        """What the docstring says after its first line."""
        lines = (type(self).__doc__ or "").strip().splitlines()[1:]
        return " ".join(line.strip() for line in lines if line.strip())

    # What it computes

    @property
    def sizes(self) -> Mapping[str, Any]:
        return self.study.sizes

    def parameters(self, size: str) -> Any:
        return self.study.parameters(size)

    def settings(self, size: str) -> dict[str, Any]:
        """The parameters as a dictionary, for the manifest of a run."""
        return self.study.settings(size)

    def chosen_jobs(self, size: str) -> list[dict[str, Any]]:
        """The jobs of the study that it looks at."""
        jobs = self.study.jobs(self.parameters(size))
        only = self.only
        return [dict(job) for job in jobs if (only(job) if callable(only) else fits(job, only))]

    def judge(self, rows: list[Row], size: str) -> list[Verdict]:
        """A verdict for each claim."""
        where = cite(self.items[0]) if self.items else ""
        return [claim.judge(rows, size, where) for claim in self.claims]


class Experiment(Study, Figure):
    """A study with a single figure, in one class: what both state."""

    @property
    def study(self) -> Study:  # type: ignore[override]
        return self

    def draw(self, rows: list[Row]) -> matplotlib.figure.Figure:
        """Rows in, drawing out; `figure` is an older name of it."""
        if type(self).figure is Figure.figure:
            raise NotImplementedError(f"{type(self).__name__} must say how it is drawn: def draw(self, rows).")
        return self.figure(rows)


def chapter_of(figure: type) -> str:
    """The chapter that a class stands in, as ids name it: the folder's name, or what the folder calls itself."""
    parts = figure.__module__.split(".")
    own = parts[:2] == ["theodolite", "experiments"]
    package, folder = (".".join(parts[:3]), parts[2]) if own else (parts[0], parts[0])
    return str(getattr(sys.modules.get(package), "CHAPTER", folder)).replace("_", "-")


def _items(figure: type[Figure]) -> list[str]:
    stated = figure.item or getattr(figure, "reproduces", ())  # the latter is an older name
    items = [stated] if isinstance(stated, str) else list(stated) if isinstance(stated, Sequence) else []
    return [current_key(item) for item in items]


def _slug(item: str) -> str:
    """The last part of an id.

    >>> _slug("zhu-2024 Figure B.10")
    'figure-B.10'
    """
    word, _, number = item.partition(" ")[2].partition(" ")
    return f"{word.lower()}-{number}" if number else word.lower()


def check_declaration(figure: type[Figure]) -> None:
    """Raise unless a class states all that a figure must."""
    name = figure.__name__
    alone = issubclass(figure, Study)
    for part in ("id", "claims", "sizes" if alone else "study"):
        stated = getattr(figure, part, None)
        if not stated or (isinstance(stated, property) and part == "sizes"):
            raise ValueError(f"{name} must state {part!r}.")
    if not alone and not isinstance(figure.study, Study):
        raise ValueError(f"{name}: study must be a Study, such as Line(). Got {figure.study!r}.")
    if not (figure.item or isinstance(figure.source, str) or getattr(figure, "where", "")):
        raise ValueError(f"{name} must state 'item', the figure or table it reproduces, or 'where' its statement stands.")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)*", figure.id):
        raise ValueError(f"{name}: an id is made of letters, digits, '-', '.', '_' and single '/'. Got {figure.id!r}.")
    sizes: Any = figure.sizes if alone else figure.study.sizes
    if set(sizes) != set(SIZES):
        raise ValueError(f"{name} must state the sizes {', '.join(SIZES)}. Got {', '.join(sizes)}.")
    if not (figure.__doc__ or "").strip():
        raise ValueError(f"{name} must have a docstring: its first line is the title in the gallery.")
