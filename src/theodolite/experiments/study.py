"""`Study`: a computation that figures look at. Parameters by size, jobs, rows."""

from __future__ import annotations

import itertools
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from theodolite.results import Row
from theodolite.runners import Work
from theodolite.runners.store import plain


class Params(Mapping[str, Any]):
    """Named parameters of a size, read as attributes; `p.but(steps=10)` is a copy with other values.

    >>> p = Params(width=100, steps=50)
    >>> p.width, p.but(steps=10).steps
    (100, 10)
    """

    def __init__(self, **values: Any) -> None:
        if taken := [name for name in values if hasattr(Params, name)]:
            raise ValueError(f"A parameter cannot be called {taken[0]!r}: a mapping has that already.")
        self._values = values

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(f"there is no parameter {name!r}") from None

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Params({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"

    def but(self, **changes: Any) -> Params:
        """The same with other values."""
        return Params(**{**self._values, **changes})


def sizes(
    table: Mapping[str, tuple[Any, Any, Any]] | None = None,
    *,
    tiny: Mapping[str, Any] | None = None,
    laptop: Mapping[str, Any] | None = None,
    paper: Mapping[str, Any] | None = None,
    **shared: Any,
) -> dict[str, Params]:
    """The three sizes: what they share, and what each has of its own, by parameter (a table of three values each) or by size.

    >>> sizes(width=5, tiny={"steps": 1}, laptop={"steps": 9}, paper={"steps": 99, "width": 50})["paper"]
    Params(width=50, steps=99)
    >>> sizes({"steps": (1, 9, 99)}, width=5)["laptop"]
    Params(width=5, steps=9)
    """
    own = {"tiny": tiny, "laptop": laptop, "paper": paper}
    columns = {size: {name: values[i] for name, values in (table or {}).items()} for i, size in enumerate(own)}
    return {size: Params(**{**shared, **columns[size], **(values or {})}) for size, values in own.items()}


def grid(p: Mapping[str, Any], *names: str, **lists: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """A job for each combination of the values in `lists`, the last changing fastest, with those parameters that are named.

    >>> list(grid({"steps": 9, "width": 5}, "steps", rate=(0.1, 0.2), seed=range(1)))
    [{'steps': 9, 'rate': 0.1, 'seed': 0}, {'steps': 9, 'rate': 0.2, 'seed': 0}]
    """
    shared = {name: p[name] for name in names}
    for values in itertools.product(*lists.values()):
        yield {**shared, **dict(zip(lists, values, strict=True))}


@dataclass(frozen=True)
class Computation:
    """One job of a study: what is stored, and what another study may need."""

    study: Study
    job: Mapping[str, Any]


#: Names that a study or a figure has anyway: annotated or not, they are no options.
NO_OPTIONS = ("sizes", "claims", "id", "item", "source", "reproduces", "departs", "where", "view", "only", "study", "name")


class Study(ABC):
    """A computation: `jobs` says what has to be computed, `run` computes the rows of one job.

    Annotated attributes of a subclass are options and part of what is computed: `Line(frozen=True)`. `sizes` holds the
    parameters for tiny (seconds), laptop (minutes on two cores) and paper (the source's own setting); `sizes=` replaces them,
    so that figures with other parameters are views of the same study. Rows are stored by study, options, job and seed: figures
    whose jobs are equal share them.
    """

    sizes: Mapping[str, Any] = {}

    def __init__(self, *, sizes: Mapping[str, Any] | None = None, **options: Any) -> None:
        known = self._option_names()
        for name, value in options.items():
            if name not in known:
                raise TypeError(f"{type(self).__name__} has no option {name!r}. It has: {', '.join(known) or 'none'}.")
            setattr(self, name, value)
        if sizes is not None:
            self.sizes = sizes

    def jobs(self, p: Any) -> Iterable[dict[str, Any]]:
        """What has to be computed with these parameters: one dictionary of plain values each, with its seed. Pure.

        None for a study whose jobs are only ever needed by others.
        """
        return ()

    @abstractmethod
    def run(self, *args: Any, **kwargs: Any) -> Iterable[Row] | Row:
        """`run(job, *inputs)`: the rows of one job, from the job and the rows of what it needs alone.

        Pure; it may run in a process of its own.
        """

    def needs(self, job: Mapping[str, Any]) -> Sequence[Computation]:
        """Jobs of other studies whose rows this job takes, such as trained networks; `run` gets them in this order."""
        return ()

    def job(self, **job: Any) -> Computation:
        """A job of this study, for the `needs` of another one."""
        return Computation(self, job)

    @classmethod
    def _option_names(cls) -> list[str]:
        own = [part for part in reversed(cls.__mro__) if issubclass(part, Study) and part is not Study]
        hints = {name: str(hint) for part in own for name, hint in vars(part).get("__annotations__", {}).items()}
        return sorted(name for name, hint in hints.items() if "ClassVar" not in hint and name not in NO_OPTIONS)

    @property
    def name(self) -> str:
        """Chapter and class, with the options: what stored rows are known by."""
        module = type(self).__module__
        if module == "__main__":  # every script is: known by its file
            module = str(getattr(sys.modules[module], "__file__", module))
        parts = module.split(".")
        chapter = parts[2] if parts[:2] == ["theodolite", "experiments"] and len(parts) > 3 else module
        options = {name: plain(getattr(self, name)) for name in self._option_names() if hasattr(self, name)}
        return f"{chapter}.{type(self).__qualname__}" + (f"({json.dumps(options, sort_keys=True)})" if options else "")

    def work(self) -> Work:
        """The study as the runners take it."""
        return Work(Study.name.fget(self), self.run, (type(self),), self._needed_work)  # type: ignore[attr-defined]

    def _needed_work(self, job: Mapping[str, Any]) -> list[tuple[Work, Mapping[str, Any]]]:
        return [(needed.study.work(), needed.job) for needed in self.needs(job)]

    def parameters(self, size: str) -> Any:
        if size not in self.sizes:
            raise ValueError(f"size must be one of {', '.join(self.sizes)}. Got {size!r}.")
        return self.sizes[size]

    def settings(self, size: str) -> dict[str, Any]:
        """The parameters as a dictionary, for the manifest of a run."""
        return {"size": size, "parameters": plain(self.parameters(size))}


class InParts(Study):
    """A study of several computations: a job names one of `parts`, which computes its rows, and they say which and their seed."""

    parts: ClassVar[Mapping[str, Callable[[Mapping[str, Any]], Iterable[Row]]]]

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        for row in self.parts[job["part"]](job):
            yield {"part": job["part"], "seed": job["seed"], **row}
