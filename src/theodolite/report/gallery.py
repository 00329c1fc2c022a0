"""The gallery: for every experiment our figure, reported beside measured, and what became of each claim."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import Any

from theodolite.experiments import Coverage, ExperimentRun, State, coverage, load_run, names
from theodolite.experiments.claims import SIZES, show
from theodolite.experiments.running import target_of
from theodolite.files import write_whole
from theodolite.report.pages import environment
from theodolite.runners.store import FORMAT


@dataclass(frozen=True)
class Unreadable:
    """A run folder that could not be shown, and why."""

    folder: str
    reason: str


@dataclass(frozen=True)
class Card:
    """One experiment as the page shows it."""

    run: ExperimentRun
    svg: str
    figure_error: str
    rerun: str
    settings: dict[str, str]
    made: dict[str, str] = field(default_factory=dict)

    @property
    def anchor(self) -> str:
        return f"{self.run.id}-{self.run.size}".replace("/", "-").replace(":", "-")


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
    for path in sorted(Path(folder).rglob("manifest.json")):
        if not _is_run(path):
            continue
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
    page = Path(out or Path(folder) / "index.html")
    cards = [card(run, Path(folder), number) for number, run in enumerate(runs)]
    write_whole(page, gallery_html(cards, bad).encode())
    undrawn = [f"{c.run.id} ({c.run.size}): {c.figure_error}" for c in cards if c.figure_error]
    return Gallery(page, runs, bad, undrawn)


def gallery_html(cards: Sequence[Card], bad: Sequence[Unreadable] = ()) -> str:
    """The page as one self-contained text."""
    runs = [card.run for card in cards]
    verdicts = [v for run in runs for v in run.verdicts]
    counts = {state.value: sum(v.state is state for v in verdicts) for state in State}
    return (
        environment()
        .get_template("gallery.html.j2")
        .render(
            cards=cards,
            bad=bad,
            counts=counts,
            failed_jobs=sum(len(run.failures) for run in runs),
            coverage=coverage(),
            systems=_systems(coverage()),
            made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            show=show,
            slug={state.value: state.name.lower().replace("_", "-") for state in State},
        )
    )


def card(run: ExperimentRun, base: Path | None = None, number: int = 0) -> Card:
    """Draw and describe one run; a figure that cannot be drawn leaves its error instead."""
    from theodolite.plots import to_svg

    svg = error = ""
    try:
        svg = to_svg(run.experiment.draw(run.rows), prefix=f"figure-{number}")
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    parameters = run.settings["parameters"]  # those of the run: the code may say something else by now
    return Card(run, svg, error, _rerun(run, base), {k: show(v) for k, v in parameters.items()}, _made(run.folder))


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


def _systems(covered: Coverage) -> list[tuple[str, str, int, int]]:
    return [(system, SYSTEMS.get(system, ""), done, total) for system, (done, total) in covered.by_system().items()]


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
