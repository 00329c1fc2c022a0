"""The gallery: for every experiment our figure, reported beside measured, and what became of each claim."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from theodolite.experiments import ExperimentRun, State, coverage, load_run, names
from theodolite.experiments.claims import SIZES, Verdict, show
from theodolite.experiments.running import target_of
from theodolite.report.page import MOST, Badge, Cell, Fold, Note, Page, Section, write_page
from theodolite.results import Row
from theodolite.runners.store import FORMAT


@dataclass(frozen=True)
class Unreadable:
    """A run folder that could not be shown, and why."""

    folder: str
    reason: str


@dataclass(frozen=True)
class Gallery:
    """A page that was written: where, what it shows, and what could not be shown."""

    path: Path
    runs: list[ExperimentRun]
    bad: list[Unreadable]
    undrawn: list[str]

    @property
    def good(self) -> bool:
        """Whether everything could be read and drawn and no claim or job failed."""
        return not self.bad and not self.undrawn and all(run.good for run in self.runs)


def collect_runs(folder: str | PathLike[str]) -> tuple[list[ExperimentRun], list[Unreadable]]:
    """All runs below a folder in the order of their ids, and those that cannot be read."""
    runs: list[ExperimentRun] = []
    bad: list[Unreadable] = []
    for path in filter(_is_run, sorted(Path(folder).rglob("manifest.json"))):
        try:
            runs.append(load_run(path.parent))
        except Exception as error:  # one bad run must not hide the others
            bad.append(Unreadable(str(path.parent), f"{type(error).__name__}: {error}"))
    return sorted(runs, key=lambda run: (run.id, SIZES.index(run.size))), bad


def write_gallery(folder: str | PathLike[str], out: str | PathLike[str] | None = None) -> Gallery:
    """Write `index.html` for all runs below `folder`."""
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"There is no folder {folder}. `theodolite reproduce --out {folder}` makes one.")
    runs, bad = collect_runs(folder)
    if not runs and not bad:
        raise ValueError(f"{folder} holds no runs. `theodolite reproduce --out {folder}` makes some.")
    sections = [section_of(run, Path(folder), number) for number, run in enumerate(runs)]
    path = write_page(gallery_page(runs, sections, bad), Path(out or Path(folder) / "index.html"))
    drawn = zip(runs, sections, strict=True)
    undrawn = [f"{run.id} ({run.size}): {section.figure_error}" for run, section in drawn if section.figure_error]
    return Gallery(path, runs, bad, undrawn)


def gallery_page(runs: Sequence[ExperimentRun], sections: Sequence[Section], bad: Sequence[Unreadable] = ()) -> Page:
    """The page of these runs: coverage, what became of all claims, a table of the experiments, and a section for each."""
    covered = coverage()
    systems = [
        {"system": system, "": SYSTEMS.get(system, ""), "registered": f"{done} of {total}", " ": Cell(share=done / total)}
        for system, (done, total) in covered.by_system().items()
    ]
    failures = sum(len(run.failures) for run in runs)
    unreadable = [Badge(f"{len(bad)} unreadable runs", "failed")] if bad else []
    rule = "A claim compares what was measured here with what the source reports, by the rule that stands beside it."
    return Page(
        title="Reproductions",
        kind="gallery",
        part="experiment",
        sections=sections,
        badges=[*_counts([verdict for run in runs for verdict in run.verdicts]), *_failed(failures), *unreadable],
        facts={"coverage of the sources": str(covered)},
        folds=[Fold(title="by system", rows=systems)],
        notes=[
            Note(text=rule),
            *(Note(badge=Badge("unreadable", "failed"), text=f"{run.folder}: {run.reason}") for run in bad),
        ],
        contents=[
            {
                "experiment": Cell(text=run.id, link=section.name, note=run.experiment.title),
                "size": run.size,
                "claims": Cell(badges=[*_counts(run.verdicts), *_failed(len(run.failures)), *_incomplete(run)]),
                "time": f"{run.seconds:.1f} s",
            }
            for run, section in zip(runs, sections, strict=True)
        ],
    )


def section_of(run: ExperimentRun, base: Path | None = None, number: int = 0) -> Section:
    """Draw and describe one run; a figure that cannot be drawn leaves its error instead."""
    from theodolite.plots import to_svg

    svg = error = ""
    try:
        svg = to_svg(run.experiment.draw(run.rows), prefix=f"figure-{number}")
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    parameters = run.settings["parameters"]  # those of the run: the code may say something else by now
    return Section(
        name=f"{run.id}-{run.size}",
        title=run.experiment.title,
        about=_about(run),
        sentence=run.experiment.description,
        notes=_remarks(run),
        svg=svg,
        figure_error=error,
        rows=[_claim(verdict) for verdict in run.verdicts],
        shown=MOST,
        more=[
            *_failures(run),
            Note(text=f"{run.jobs} jobs, {run.seconds:.1f} s. Run it again:", command=_rerun(run, base)),
            Fold(title="settings and provenance", facts={k: show(v) for k, v in parameters.items()} | _made(run.folder)),
        ],
    )


#: How a state of a claim looks.
_TONES = {State.HOLDS: "good", State.FAILS: "failed", State.NOT_REPRODUCED: "warning", State.MEASURED: "note"}


def _counts(verdicts: Sequence[Verdict]) -> list[Badge]:
    counts = {state: sum(verdict.state is state for verdict in verdicts) for state in State}
    return [Badge(f"{n} {state.value}", _TONES[state]) for state, n in counts.items() if n]


def _failed(jobs: int) -> list[Badge]:
    return [Badge(f"{jobs} failed jobs", "failed")] if jobs else []


def _incomplete(run: ExperimentRun) -> list[Badge]:
    missing = [Badge(f"{run.unfinished} jobs to do", "warning")] if run.unfinished else []
    return [*missing, *([Badge("older code", "warning")] if run.outdated else [])]


def _about(run: ExperimentRun) -> list[Cell]:
    """Id, size and source; titles and authors of the sources, with their links."""
    sources = [
        Cell(text=", ".join([source.title, *source.authors]), link=source.link)
        for source in run.experiment.sources
        if source.title
    ]
    return [Cell(text=text) for text in (run.id, run.size, run.experiment.source)] + sources


def _remarks(run: ExperimentRun) -> list[Note]:
    found = []
    if run.experiment.departs:
        found.append(Note(title="Departs from the source:", text=run.experiment.departs))
    if run.unfinished:
        text = f"{run.unfinished} of {run.jobs} jobs are not done; the same command with --resume goes on."
        found.append(Note(badge=Badge("unfinished", "warning"), text=text))
    if run.outdated:
        text = (
            f"The rows of {run.outdated} of {run.jobs} jobs were made by older code; the same command with --update redoes them."
        )
        found.append(Note(badge=Badge("older code", "warning"), text=text))
    return found


def _failures(run: ExperimentRun) -> list[Note | Fold]:
    folds = [Fold(title=f"{record.error} · {record.job}", text=str(record.traceback)) for record in run.failures]
    return [Note(title=f"{len(folds)} of {run.jobs} jobs failed"), *folds] if folds else []


def _claim(verdict: Verdict) -> Row:
    said = verdict.reported
    reported = Cell(text=show(said.value), note=said.origin) if said else Cell(note="no value")
    error = "" if verdict.error is None else f" ± {verdict.error:.2g}"
    expected = "expected to fail at this size, and holds" if verdict.surprising else "expected at this size"
    remarks = [verdict.note, f"{expected}: {verdict.reason}" if verdict.reason else ""]
    return {
        "": Cell(badges=[Badge(verdict.state.value, _TONES[verdict.state])]),
        "claim": verdict.text,
        "reported": reported,
        "measured": Cell(text=f"{show(verdict.measured)}{error}", note=" · ".join(filter(None, remarks))),
        "rule": verdict.rule,
    }


def _rerun(run: ExperimentRun, base: Path | None) -> str:
    out = f" --out {shlex.quote(str(base))}" if base is not None else ""
    name = run.id if run.id in names() else target_of(run.experiment)
    return f"theodolite reproduce {shlex.quote(name)} --size {run.size}{out} --fresh"


def _made(folder: Path | None) -> dict[str, str]:
    """Facts of the manifest that a reader may want: versions, machine, threads, state of the code."""
    if folder is None:
        return {}
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    facts = {k: str(v) for k, v in manifest.get("provenance", {}).items()}
    return {**facts, "code": str(manifest.get("code", "")), "git": str(manifest.get("git") or "no repository")}


def _is_run(path: Path) -> bool:
    try:
        document = json.loads(path.read_text())
    except (ValueError, OSError):
        return False
    return isinstance(document, dict) and document.get("format") == FORMAT


SYSTEMS = {
    "A": "masked sparse coding",
    "B": "anchor vectors in language models",
    "C1": "layer-wise Hessian structure",
    "C2": "PAC-Bayes bounds from the Hessian",
    "D": "learning the step size",
    "E": "transition to linearity",
    "F": "catapult dynamics",
    "G": "spikes and feature learning",
    "H": "algorithmic stability",
    "I": "local signal adaptivity",
    "J": "transformers learning decision lists",
    "K": "landscape-aware growing",
}
