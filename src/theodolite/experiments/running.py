"""Running an experiment: jobs to an engine, rows to a store, rows to verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, overload

from theodolite.experiments.base import Experiment, check_declaration
from theodolite.experiments.claims import SIZES, State, Verdict
from theodolite.experiments.registry import get
from theodolite.results import Row
from theodolite.runners import Record, run_stored
from theodolite.runners.store import iterate_rows, read_manifest, read_records


@dataclass(frozen=True, repr=False)
class ExperimentRun(Sequence[Verdict]):
    """An experiment after its run; as a sequence, its verdicts."""

    experiment: Experiment
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
    torn: bool = False  # a line cut short by a kill was found, and its job done anew

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

    def __iter__(self) -> Iterator[Verdict]:
        return iter(self.verdicts)

    def sentence(self) -> str:
        parts = [f"{n} {state.value}" for state in State if (n := self.count(state))]
        failed = f"; {len(self.failures)} of {self.jobs} jobs failed" if self.failures else ""
        before = f"; {self.reused} of {self.jobs} jobs were there already" if self.reused else ""
        before += ", a line cut short was found and its job done anew" if self.torn else ""
        missing = f"; {self.unfinished} of {self.jobs} jobs are not done" if self.unfinished else ""
        return f"{self.id} ({self.size}): {', '.join(parts) or 'no claims'}{failed}{missing}{before}; {self.seconds:.1f} s."

    def __str__(self) -> str:
        return "\n".join([self.sentence(), *(f"  {v}" for v in self.verdicts)])

    def __repr__(self) -> str:
        return f"<ExperimentRun: {self.sentence()}>"


def run(
    id: str | Experiment | type[Experiment],
    size: str = "tiny",
    *,
    engine: str = "serial",
    workers: int | None = None,
    threads: int = 1,
    address: str | None = None,
    out: str | PathLike[str] | None = None,
    resume: bool = False,
    fresh: bool = False,
    progress: bool | None = None,
) -> ExperimentRun:
    """Run an experiment and judge its claims.

    With `out` the run is kept in `out/ID/SIZE` job by job and survives being killed: `resume=True` goes on with it,
    `fresh=True` does it anew.

    >>> verdicts = run("checks/kronecker-identity", size="tiny")
    >>> all(v.holds for v in verdicts)
    True
    """
    experiment = id() if isinstance(id, type) else id if isinstance(id, Experiment) else get(id)
    check_declaration(type(experiment))
    folder = None if out is None else run_folder(Path(out), experiment.id, size)
    summary = run_stored(
        experiment.run,
        experiment.jobs(experiment.parameters(size)),
        name=experiment.id,
        folder=folder,
        settings={**experiment.settings(size), "target": target_of(experiment)},
        owners=(type(experiment),),
        resume=resume,
        fresh=fresh,
        engine=engine,
        workers=workers,
        threads=threads,
        address=address,
        progress=progress,
    )
    verdicts = experiment.judge(summary.rows, size)
    return ExperimentRun(
        experiment,
        size,
        summary.rows,
        verdicts,
        summary.failures,
        jobs=summary.jobs,
        done=summary.jobs,
        reused=summary.reused,
        seconds=summary.seconds,
        folder=folder,
        settings=experiment.settings(size),
        torn=summary.torn,
    )


def load_run(folder: str | PathLike[str]) -> ExperimentRun:
    """A run from its folder, judged anew from the rows that finished."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    settings = manifest["settings"]
    experiment = get(_known_target(manifest["name"], settings.get("target")))
    keys = manifest["keys"]
    records = read_records(folder)
    mine = {key: records[key] for key in keys if key in records}
    rows = list(iterate_rows(mine, keys))
    failures = [record for record in mine.values() if record.failed]
    seconds = sum(record.seconds for record in mine.values())
    verdicts = experiment.judge(rows, settings["size"])
    return ExperimentRun(
        experiment,
        settings["size"],
        rows,
        verdicts,
        failures,
        jobs=len(keys),
        done=len(mine),
        reused=0,
        seconds=seconds,
        folder=folder,
        settings=settings,
    )


def run_folder(out: Path, name: str, size: str) -> Path:
    """Where a run lives."""
    if size not in SIZES:
        raise ValueError(f"size must be one of {', '.join(SIZES)}. Got {size!r}.")
    return out.joinpath(*name.split("/"), size)


def target_of(experiment: Experiment) -> str:
    """`module:Class`, by which an unregistered experiment is found again."""
    return f"{type(experiment).__module__}:{type(experiment).__qualname__}"


def _known_target(name: str, target: str | None) -> str:
    from theodolite.experiments.registry import names

    return name if name in names() or target is None else target
