"""`theodolite list`, `reproduce`, `report` and `info`: the experiments, their runs and the gallery."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from theodolite.cli.ctrl_c import exit_when_interrupted
from theodolite.cli.terminal import Address, EngineName, Threads, Workers, make_importable, print_json, say

Size = StrEnum("Size", {"TINY": "tiny", "LAPTOP": "laptop", "PAPER": "paper"})


def list_(
    pattern: Annotated[str, typer.Argument(help="A glob such as 'checks/*', or a word.")] = "*",
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """List the experiments."""
    from theodolite import experiments
    from theodolite.experiments.sources import cite_all

    found, broken = [], []
    for name in experiments.names(pattern):
        try:
            found.append(experiments.get(name))
        except experiments.UnknownExperimentError as error:  # of somebody else's package: no reason to hide the others
            broken.append(f"{name}: {error}")
    if not found and not broken:
        everything = ", ".join(experiments.names())
        raise ValueError(f"No experiment fits {pattern!r}. There are: {everything}.")
    for text in broken:
        say(f"cannot be used: {text}", err=True)
    if as_json:
        rows = [{"id": e.id, "title": e.title, "reproduces": e.items, "source": e.source} for e in found]
        print_json(rows)
        return
    width = max((len(e.id) for e in found), default=0)
    for e in found:
        rows_of = f" [{cite_all(e.items)}]" if e.items else ""
        say(f"{e.id:<{width}}  {e.title}{rows_of}")
    say(experiments.coverage())


def reproduce(
    ids: Annotated[list[str] | None, typer.Argument(help="Ids or globs; none means all. module:Class names your own.")] = None,
    size: Annotated[Size, typer.Option(help="tiny: seconds, laptop: minutes, paper: the source's setting.")] = Size.TINY,
    engine: EngineName = "serial",
    address: Address = None,
    workers: Workers = None,
    threads: Threads = 1,
    out: Annotated[Path, typer.Option(help="Folder for the runs and the page.")] = Path("gallery"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the runs in the folder.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Do runs that are there anew.")] = False,
    update: Annotated[bool, typer.Option("--update", help="Go on, and redo what older code made.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Verdicts as JSON.")] = False,
) -> None:
    """Run experiments, judge their claims and write the gallery page."""
    from theodolite import experiments
    from theodolite.report import write_gallery
    from theodolite.runners import Computations, Engine, kept_open

    if fresh and (resume or update):
        raise ValueError("--fresh does everything anew, --resume and --update go on: choose one of them.")
    runs = []
    computations = Computations(out / "computations", fresh=fresh)
    how: dict[str, Any] = {"resume": resume or update, "fresh": fresh, "update": update}
    instead = "--resume instead of --fresh" if fresh else "--resume"
    with exit_when_interrupted(f"Interrupted. What had finished is kept; the same command with {instead} goes on."):
        names = _choose(ids, out, size.value, may_exist=resume or fresh or update)
        chosen = Engine.of(engine, workers, threads, address)
        with kept_open(chosen):
            for name in names:
                run = experiments.run(name, size.value, engine=chosen, out=out, computations=computations, **how)
                runs.append(run)
                if not as_json:
                    say(run)
                    for record in run.failures:
                        say(f"  job failed: {record.error} {dict(record.job)}", err=True)
    page = write_gallery(out, known=[run.experiment for run in runs])
    mine = [text for text in page.undrawn if text.partition(" ")[0] in {run.id for run in runs}]
    for text in mine:
        say(f"no figure: {text}", err=True)
    if as_json:
        print_json([_as_json(run) for run in runs])
    else:
        say(f"The page is {page.path}")
    raise typer.Exit(0 if all(run.good for run in runs) and not mine else 1)


def report(
    folder: Annotated[Path, typer.Argument(help="A folder that holds runs.")],
    out: Annotated[Path | None, typer.Option(help="The page; default: index.html in the folder.")] = None,
    experiment: Annotated[list[str] | None, typer.Option(help="module:Class of your own experiment (again for more).")] = None,
) -> None:
    """Write the gallery page of finished runs.

    Code that the folder names is never run: an experiment that is not registered is named by --experiment.
    """
    from theodolite import experiments
    from theodolite.report import write_gallery

    page = write_gallery(folder, out, [experiments.get(name) for name in _own(experiment or [])])
    say(f"The page is {page.path}")
    for run in page.runs:
        say(run.sentence())
    for text in (*(f"unreadable: {run.folder}: {run.reason}" for run in page.bad), *(f"no figure: {t}" for t in page.undrawn)):
        say(text, err=True)
    raise typer.Exit(0 if page.good else 1)


def info() -> None:
    """Versions and machine, for bug reports."""
    from dataclasses import asdict

    from theodolite.results import Provenance
    from theodolite.runners.code_version import git_state, package_version

    facts = {**asdict(Provenance()), "code": package_version(), "git": git_state() or "no repository"}
    for name, value in facts.items():
        say(f"{name}: {value}")


def _choose(ids: list[str] | None, out: Path, size: str, *, may_exist: bool) -> list[str]:
    """Ids from ids and globs, all known and free to run before anything runs."""
    from theodolite import experiments
    from theodolite.experiments.running import run_folder
    from theodolite.runners.store import refuse_existing

    chosen: list[str] = []
    for wanted in _own(ids or ["*"]):
        fitting = experiments.names(wanted) if any(c in wanted for c in "*?[") else [wanted]
        if not fitting:
            raise ValueError(f"No experiment fits {wanted!r}. `theodolite list` shows all.")
        chosen += fitting
    for name in chosen:
        folder = run_folder(out, experiments.get(name).id, size)
        if not may_exist:
            refuse_existing(folder)
    return list(dict.fromkeys(chosen))


def _own(words: list[str]) -> list[str]:
    """The words; where one is module:Class, modules of this folder may be meant."""
    if any(":" in word for word in words):
        make_importable(Path.cwd())
    return words


def _as_json(run: Any) -> dict[str, Any]:
    return {
        "id": run.id,
        "size": run.size,
        "seconds": run.seconds,
        "failed_jobs": len(run.failures),
        "claims": [
            {"text": v.text, "state": v.state.value, "measured": v.measured, "error": v.error, "rule": v.rule} for v in run
        ],
    }
