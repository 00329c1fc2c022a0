"""Running an experiment: jobs of its study to an engine, rows to a store, rows to verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, overload

from theodolite.experiments.claims import SIZES, State, Verdict
from theodolite.experiments.figure import Figure, check_declaration
from theodolite.experiments.registry import UnknownExperimentError, get
from theodolite.results import Row
from theodolite.runners import Computations, Engine, Record, run_stored
from theodolite.runners.runs import Codes
from theodolite.runners.store import read_manifest, read_records


@dataclass(frozen=True, repr=False)
class ExperimentRun(Sequence[Verdict]):
    """An experiment after its run; as a sequence, its verdicts."""

    experiment: Figure
    size: str
    rows: list[Row]
    verdicts: list[Verdict]
    failures: list[Record]
    jobs: int
    done: int
    reused: int
    seconds: float
    folder: Path | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    torn: bool = False  # a line cut short by a kill was found
    outdated: int = 0  # jobs whose rows were made by older code

    @property
    def id(self) -> str:
        return self.experiment.id

    @property
    def unfinished(self) -> int:
        """Jobs that are neither done nor failed: the run was interrupted."""
        return self.jobs - self.done

    @property
    def good(self) -> bool:
        """Whether every job finished and no claim failed."""
        return not self.failures and not self.unfinished and not any(v.failed for v in self.verdicts)

    def count(self, state: object) -> int:
        """How many verdicts are of a state."""
        return sum(v.state is state for v in self.verdicts)

    @overload
    def __getitem__(self, index: int) -> Verdict: ...
    @overload
    def __getitem__(self, index: slice) -> list[Verdict]: ...
    def __getitem__(self, index: int | slice) -> Verdict | list[Verdict]:
        return self.verdicts[index]

    def __len__(self) -> int:
        return len(self.verdicts)

    def sentence(self) -> str:
        parts = [f"{n} {state.value}" for state in State if (n := self.count(state))]
        failed = f"; {len(self.failures)} of {self.jobs} jobs failed" if self.failures else ""
        before = f"; {self.reused} of {self.jobs} jobs were there already" if self.reused else ""
        before += ", a line cut short was found and mended" if self.torn else ""
        if self.outdated:
            before += (
                f"; {self.outdated} of {self.jobs} jobs were made by older code (or other threads or torch), --update redoes them"
            )
        missing = f"; {self.unfinished} of {self.jobs} jobs are not done" if self.unfinished else ""
        return f"{self.id} ({self.size}): {', '.join(parts) or 'no claims'}{failed}{missing}{before}; {self.seconds:.1f} s."

    def __str__(self) -> str:
        return "\n".join([self.sentence(), *(f"  {v}" for v in self.verdicts)])

    def __repr__(self) -> str:
        return f"<ExperimentRun: {self.sentence()}>"


def run(
    id: str | Figure | type[Figure],
    size: str = "tiny",
    *,
    engine: str | Engine = "serial",
    workers: int | None = None,
    threads: int = 1,
    address: str | None = None,
    out: str | PathLike[str] | None = None,
    resume: bool = False,
    fresh: bool = False,
    update: bool = False,
    computations: Computations | None = None,
    progress: bool | None = None,
) -> ExperimentRun:
    """Run an experiment and judge its claims.

    With `out` the run is kept in `out/ID/SIZE` job by job and survives being killed: `resume=True` goes on with it,
    `fresh=True` does it anew, `update=True` redoes what older code made. What a job computed is also kept in
    `out/computations`, where every other figure of the same study finds it.

    >>> verdicts = run("checks/kronecker-identity", size="tiny")
    >>> all(v.holds for v in verdicts)
    True
    """
    figure = id() if isinstance(id, type) else id if isinstance(id, Figure) else get(id)
    check_declaration(type(figure))
    folder = None if out is None else run_folder(Path(out), figure.id, size)
    if computations is None:
        computations = Computations(None if out is None else Path(out) / "computations", fresh=fresh)
    elif fresh and not computations.fresh:
        computations = Computations(computations.folder, fresh=True)
    summary = run_stored(
        figure.study.work(),
        figure.chosen_jobs(size),
        name=figure.id,
        folder=folder,
        computations=computations,
        settings={**figure.settings(size), "target": target_of(figure)},
        resume=resume or update,
        fresh=fresh,
        update=update,
        engine=Engine.of(engine, workers, threads, address),
        progress=progress,
    )
    return ExperimentRun(
        figure,
        size,
        rows := figure.view.of(summary.rows),
        figure.judge(rows, size),
        summary.failures,
        jobs=summary.jobs,
        done=summary.jobs,
        reused=summary.reused,
        seconds=summary.seconds,
        folder=folder,
        settings=figure.settings(size),
        torn=summary.torn,
        outdated=summary.outdated,
    )


def load_run(folder: str | PathLike[str]) -> ExperimentRun:
    """A run from its folder, judged anew from the rows that finished."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    settings = manifest["settings"]
    figure = get(_known_target(manifest["name"], settings.get("target")))
    keys = manifest["keys"]
    records = read_records(folder)
    mine = {key: records[key] for key in keys if key in records}
    rows = [row for key in keys if key in mine for row in mine[key].rows]
    if any(record.code for record in mine.values()):  # folders of version 0.1 hold the rows of one figure, and no others
        rows = figure.view.of(rows)
    return ExperimentRun(
        figure,
        settings["size"],
        rows,
        figure.judge(rows, settings["size"]),
        [record for record in mine.values() if record.failed],
        jobs=len(keys),
        done=len(mine),
        reused=0,
        seconds=sum(record.seconds for record in mine.values()),
        folder=folder,
        settings=settings,
        outdated=Codes(manifest.get("threads", 1)).outdated(figure.study.work(), mine.values()),
    )


def run_folder(out: Path, name: str, size: str) -> Path:
    """Where a run lives."""
    if size not in SIZES:
        raise ValueError(f"size must be one of {', '.join(SIZES)}. Got {size!r}.")
    return out.joinpath(*name.split("/"), size)


def target_of(figure: Figure) -> str:
    """`module:Class`, by which an unregistered experiment is found again."""
    return f"{type(figure).__module__}:{type(figure).__qualname__}"


def _known_target(name: str, target: str | None) -> str:
    try:
        get(name)
    except UnknownExperimentError:
        return target or name
    return name
