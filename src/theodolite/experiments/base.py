"""`Experiment`: a figure or table of a source as something that can be run and can fail."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from theodolite.experiments.claims import SIZES, Claim, Verdict
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Experiment(ABC):
    """Parent of all reproductions.

    A subclass states `id`, `reproduces` (rows of the manifest such as "003 Figure 3.3"; empty for a check of a
    theorem), `source`, `sizes` (parameters for tiny: seconds, laptop: minutes on two cores, paper: the source's own
    setting) and `claims`; its docstring is what the gallery shows, first line as title. `departs` says where the
    experiment follows a corrected form of the source.
    """

    id: ClassVar[str]
    source: ClassVar[str]
    reproduces: ClassVar[Sequence[str]] = ()
    sizes: ClassVar[Mapping[str, Any]]
    claims: ClassVar[Sequence[Claim]]
    departs: ClassVar[str] = ""

    @abstractmethod
    def jobs(self, p: Any) -> Iterable[dict[str, Any]]:
        """What has to be computed with these parameters: one dictionary of plain values each, with its seed. Pure."""

    @abstractmethod
    def run(self, job: Mapping[str, Any]) -> Iterable[Row] | Row:
        """The rows of one job. Pure given the job; one job may run in its own process."""

    @abstractmethod
    def figure(self, rows: list[Row]) -> Figure:
        """Rows in, drawing out; nothing is computed here."""

    @property
    def title(self) -> str:
        return (type(self).__doc__ or self.id).strip().splitlines()[0].rstrip(".")

    @property
    def description(self) -> str:
        """What the docstring says after its first line."""
        lines = (type(self).__doc__ or "").strip().splitlines()[1:]
        return " ".join(line.strip() for line in lines if line.strip())

    def parameters(self, size: str) -> Any:
        """The parameters of a size."""
        if size not in self.sizes:
            raise ValueError(f"size must be one of {', '.join(self.sizes)}. Got {size!r}.")
        return self.sizes[size]

    def settings(self, size: str) -> dict[str, Any]:
        """The parameters as a dictionary, for the manifest of a run."""
        p = self.parameters(size)
        return {"size": size, "parameters": asdict(p) if is_dataclass(p) and not isinstance(p, type) else dict(p)}

    def judge(self, rows: list[Row], size: str) -> list[Verdict]:
        """A verdict for each claim."""
        return [claim.judge(rows, size) for claim in self.claims]


def check_declaration(experiment: type[Experiment]) -> None:
    """Raise unless a class states all that an experiment must."""
    name = experiment.__name__
    for part in ("id", "source", "sizes", "claims"):
        if not getattr(experiment, part, None):
            raise ValueError(f"{name} must state {part!r}.")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)*", experiment.id):
        raise ValueError(f"{name}: an id is made of letters, digits, '-', '.', '_' and single '/'. Got {experiment.id!r}.")
    if set(experiment.sizes) != set(SIZES):
        raise ValueError(f"{name} must state the sizes {', '.join(SIZES)}. Got {', '.join(experiment.sizes)}.")
    if not (experiment.__doc__ or "").strip():
        raise ValueError(f"{name} must have a docstring: its first line is the title in the gallery.")
