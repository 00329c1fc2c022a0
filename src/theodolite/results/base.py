"""`Result`: a frozen record that prints as a sentence, becomes tidy rows and saves without pickle."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, Self

from theodolite._names import room
from theodolite.arguments import a_mapping, count, sequence
from theodolite.results.provenance import Cost, Outcome, Provenance

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

Row = dict[str, Any]


def type_key(name: str, module: str) -> str:
    """What saved files call a class by default; classes of other packages have the package in front.

    >>> type_key("CriticalRate", "theodolite.measures"), type_key("PLReport", "theodolite"), type_key("Knots", "sailing.ropes")
    ('critical-rate', 'pl-report', 'sailing:knots')
    """
    key = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name).lower()
    package = module.split(".")[0]
    return key if package == "theodolite" else f"{package}:{key}"


def fields_of(thing: object, names: str) -> Row:
    """A row, or a part of one, from attributes of the same names.

    >>> fields_of(3 + 4j, "real imag")
    {'real': 3.0, 'imag': 4.0}
    """
    return {name: getattr(thing, name) for name in names.split()}


@dataclass(frozen=True, eq=False, kw_only=True)
class Result:
    """Parent of all results.

    A subclass is a frozen dataclass that writes `rows` and `sentence`; printing, notebook display,
    tables, saving and loading come with it.

    >>> @dataclass(frozen=True, kw_only=True)
    ... class Mean(Result):
    ...     value: float
    ...     def rows(self):
    ...         return [{"value": self.value}]
    ...     def sentence(self):
    ...         return f"The mean is {self.value:g}."
    >>> print(Mean(value=2.5))
    The mean is 2.5.
    """

    schema: ClassVar[int] = 1
    #: What saved files call the class: its name in lower case, such as "critical-rate". A class that is renamed states it.
    type_key: ClassVar[str] = "result"
    #: The classes imported so far, by that key.
    registry: ClassVar[dict[str, type[Result]]] = {}

    outcome: Outcome = Outcome.CONVERGED
    seed: int | None = None
    cost: Cost = field(default_factory=Cost)
    provenance: Provenance = field(default_factory=Provenance)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.type_key = vars(cls).get("type_key") or type_key(cls.__name__, cls.__module__)
        Result.registry[cls.type_key] = cls

    def rows(self) -> list[Row]:
        """One flat dictionary per observation."""
        raise NotImplementedError(f"{type(self).__name__} must write rows().")

    def sentence(self) -> str:
        """The result as one plain sentence."""
        raise NotImplementedError(f"{type(self).__name__} must write sentence().")

    def to_frame(self) -> pandas.DataFrame:
        """The rows as a pandas DataFrame."""
        import pandas

        return pandas.DataFrame(self.rows())

    def plot(self) -> Figure:
        """The picture of the result, as a matplotlib figure: shown where it stands in a notebook, or saved by `savefig`.

        Raises:
            ValueError: where this kind of result has no picture.
        """
        figure: Figure = room("plots.results").draw(self)
        return figure

    def save(self, path: str | PathLike[str]) -> None:
        """Write `path`.json and, where there are tensors, `path`.safetensors."""
        from theodolite.results.storage import save

        save(self, path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read what `save` wrote."""
        from theodolite.results.storage import load

        result = load(path)
        if not isinstance(result, cls):
            raise ValueError(f"{path} holds a {type(result).__name__}, not a {cls.__name__}.")
        return result

    def __str__(self) -> str:
        return self.sentence()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.sentence()}>"

    def _repr_html_(self) -> str:
        """A card: the sentence, how it ended, what it took; the rows unfold."""
        took = f"{self.cost.seconds:.3g} s" if self.cost.seconds else ""
        facts = " · ".join(html.escape(text) for text in (type(self).__name__, self.outcome.value, took) if text)
        rows = self.rows()
        table = f"<details><summary>{len(rows)} rows</summary>{html_table(rows)}</details>" if rows else ""
        frame = "border-left:4px solid #5b6670;padding:0.2em 1em;max-width:60em"
        sentence = html.escape(self.sentence()).replace("\n", "<br>")
        return f'<div style="{frame}"><p><b>{sentence}</b></p><p style="opacity:0.7"><small>{facts}</small></p>{table}</div>'


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ResultMapping(Result, Mapping[str, Any]):
    """Results of the same kind by name (one per layer, say); rows gain the column `key`."""

    results: dict[str, Result]
    key: str = "layer"

    def __getitem__(self, name: str) -> Any:
        return self.results[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def rows(self) -> list[Row]:
        return [{self.key: name, **row} for name, result in self.results.items() for row in result.rows()]

    def sentence(self) -> str:
        return "\n".join(f"{name}: {result.sentence()}" for name, result in self.results.items())


def html_table(rows: list[Row], limit: int = 50) -> str:
    """Rows as an HTML table, every cell escaped."""
    limit = count("limit", limit)
    rows = [a_mapping(f"rows[{i}]", row) for i, row in enumerate(sequence("rows", rows))]
    if not rows:
        return ""

    def cell(value: Any) -> str:
        return html.escape(f"{value:.6g}" if isinstance(value, float) else str(value))

    head = "".join(f"<th>{html.escape(str(name))}</th>" for name in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{cell(v)}</td>" for v in row.values()) + "</tr>" for row in rows[:limit])
    more = f"<p>{len(rows) - limit} more rows</p>" if len(rows) > limit else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"
