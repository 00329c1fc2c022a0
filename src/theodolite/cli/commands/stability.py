"""`theodolite stability`: how much one training example matters, on the user's own model and data."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from theodolite.cli.terminal import (
    Address,
    EngineName,
    Seed,
    Threads,
    Workers,
    check_counts,
    check_folder,
    exit_when_interrupted,
    show,
    whole_numbers,
    with_notes,
)

if TYPE_CHECKING:
    from theodolite.cli.loading.stability_study import Plan, Study
    from theodolite.runners import Engine, RunSummary

STEPS = 1000
LONG = 60.0  # seconds from which the estimate is shown before the run


def stability(
    model: Annotated[
        str | None,
        typer.Option(help="What builds the model: a built-in NAME, module:attribute, or hf:DIRECTORY. Default: a small example."),
    ] = None,
    data: Annotated[str | None, typer.Option(help="A data set's NAME, module:attribute, or a file (.npz, .pt, .txt).")] = None,
    test: Annotated[
        str | None, typer.Option(help="Test data, the same words; default: the test part of --data, or a fifth held out.")
    ] = None,
    loss: Annotated[
        str | None, typer.Option(help="cross-entropy, mse, bce, l1 or module:attribute. Default: what fits the targets.")
    ] = None,
    weights: Annotated[str | None, typer.Option(help="A checkpoint to start from; default: weights by the seed.")] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="sgd, adam, adamw; settings as adamw:eps=1e-6; module:attribute. Default: sgd.")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate. Default: 0.1 for sgd, torch's own for Adam.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Of sgd.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="As in torch.")] = None,
    batch_size: Annotated[int, typer.Option(help="Examples in a step.")] = 32,
    samples: Annotated[int | None, typer.Option(help="Take this many examples of the data; default: all.")] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Training sizes, as 200,400,800. Default: four, doubling, up to 80 % of the data.")
    ] = None,
    pairs: Annotated[int, typer.Option(help="Pairs of training sets per size.")] = 8,
    steps: Annotated[int | None, typer.Option(help=f"Updates of every run. Default: {STEPS}.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Train for so many epochs instead.")] = None,
    loss_target: Annotated[
        float | None,
        typer.Option(help="End each run when its mean loss over an epoch is at most this, after --steps at the latest."),
    ] = None,
    trials: Annotated[int, typer.Option(help="Seeds of start and order; each gives laws of its own.")] = 1,
    checkpoints: Annotated[str | None, typer.Option(help="Also measure after so many updates, as 100,300.")] = None,
    paths: Annotated[int, typer.Option(help="Pairs of the smallest and the largest size to draw a line between.")] = 2,
    engine: EngineName = "serial",
    workers: Workers = None,
    threads: Threads = 1,
    address: Address = None,
    out: Annotated[Path, typer.Option(help="Folder for the run and the page.")] = Path("stability"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Do a run that is there anew.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say how long it would take, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Findings, laws and rows as JSON on the standard output.")] = False,
    seed: Seed = 0,
) -> None:
    """Exchange one training example, train again, and say how far the model moved; and whether that falls with more data.

    Pairs of models are trained on sets that differ in one example, at several sizes. Without arguments a small network learns
    handwritten digits. Exit code 1 if a job failed or all pairs diverged.
    """
    from theodolite.cli.loading.stability_study import Plan, StudyOptions, default_sizes, open_study
    from theodolite.measures.stability.training_pairs import check_size
    from theodolite.runners import Engine
    from theodolite.runners.store import refuse_existing

    check_counts(pairs=pairs, trials=trials, batch_size=batch_size, samples=samples, steps=steps, epochs=epochs)
    check_counts(0, paths=paths, seed=seed)
    _check_length(steps, epochs, loss_target)
    check_folder(out)
    if not (resume or fresh or dry_run):
        refuse_existing(out / "run")
    chosen = Engine.of(engine, workers, threads, address)
    wanted = None if sizes is None else whole_numbers("--sizes", sizes, least=1, example="200,400,800")
    looks = () if checkpoints is None else whole_numbers("--checkpoints", checkpoints, least=0, example="100,1000")
    options = StudyOptions(
        model, data, test, loss, weights, optimizer, lr, momentum, weight_decay, batch_size, samples,
        (steps or STEPS) if epochs is None else None, epochs, loss_target, seed,
    )  # fmt: skip
    with exit_when_interrupted("Interrupted. What had finished is kept; the same command with --resume goes on."):
        study = open_study(options)
        used = default_sizes(len(study.bench.train)) if wanted is None else wanted
        for m in used:
            check_size(m, len(study.bench.train))
        plan = Plan(options, used, pairs, trials, looks, paths)
        _show_estimate(plan, study, chosen, dry_run=dry_run, as_json=as_json)
        summary = _run(plan, study, out, chosen, resume=resume, fresh=fresh)
    for record in summary.failures:
        typer.echo(f"m = {record.job['m']}, trial {record.job['trial']} failed: {record.error}", err=True)
    if not summary.rows:
        raise typer.Exit(1)
    good = _report(plan, study, summary, out, as_json)
    raise typer.Exit(0 if good and not summary.failures else 1)


def _check_length(steps: int | None, epochs: int | None, loss_target: float | None) -> None:
    if epochs is not None and (steps is not None or loss_target is not None):
        raise ValueError("--epochs goes without --steps and --loss-target: give one way to end a run.")
    if loss_target is not None and not (math.isfinite(loss_target) and loss_target > 0):
        raise ValueError(f"--loss-target must be a positive loss. Got {loss_target:g}.")


def _show_estimate(plan: Plan, study: Study, engine: Engine, *, dry_run: bool, as_json: bool) -> None:
    """How long it will take, if that is long or all that is wanted."""
    from theodolite.cli.loading.stability_study import estimate_seconds
    from theodolite.runners.engines import cores, limited_threads

    with limited_threads(engine.threads):
        seconds = estimate_seconds(plan, study)
    jobs = len(plan.sizes) * plan.trials
    at_once = {"serial": 1, "joblib": engine.workers or max(1, cores() // engine.threads)}.get(engine.name, engine.workers)
    shared = min(jobs, at_once or 1)
    time = _duration(seconds / shared) + (f" with {shared} workers" if shared > 1 else "")
    what = f"{2 * plan.pairs} models at each of {len(plan.sizes)} sizes ({', '.join(map(str, plan.sizes))})"
    what += f" in {plan.trials} trials" if plan.trials > 1 else ""
    if dry_run:
        facts = {"seconds": seconds / shared, "sizes": list(plan.sizes), "pairs": plan.pairs, "trials": plan.trials, "jobs": jobs}
        show(as_json, facts, f"It would train {what}, and take about {time}.", *study.notes)
        raise typer.Exit(0)
    if seconds / shared > LONG:
        typer.echo(f"Training {what}; this takes about {time}.", err=True)


def _duration(seconds: float) -> str:
    """A time in words, to one or two digits.

    >>> _duration(0.4), _duration(75), _duration(5000)
    ('1 s', '75 s', '1.4 hours')
    """
    if seconds < 120:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.2g} minutes" if seconds < 3600 else f"{seconds / 3600:.2g} hours"


def _run(plan: Plan, study: Study, out: Path, engine: Engine, *, resume: bool, fresh: bool) -> RunSummary:
    from theodolite.cli.loading.stability_study import measure_job
    from theodolite.runners import run_stored

    return run_stored(
        measure_job,
        plan.jobs(study),
        name="stability",
        folder=out / "run",
        settings={**asdict(plan.options), "sizes": list(plan.sizes), "pairs": plan.pairs, "trials": plan.trials},
        owners=(measure_job, *plan.options.owners()),
        resume=resume,
        fresh=fresh,
        update=True,  # a model that was edited is another model
        engine=engine,
    )


def _report(plan: Plan, study: Study, summary: RunSummary, out: Path, as_json: bool) -> bool:
    """Write the page and say what was found; whether there is something to say."""
    from theodolite.analyses.stability import write_stability
    from theodolite.cli.loading.stability_study import result_of
    from theodolite.results import Outcome

    found = result_of(plan, study, summary.rows, summary.seconds)
    places = None if study.places is None else study.places.tolist()
    test = f"{len(study.bench.test)} examples" + ("" if places is None else " held out")
    facts = with_notes({**study.facts, "test data": test}, study.notes)
    page, findings = write_stability(found, out / "index.html", name=study.name, facts=facts, places=places)
    notes = [*study.notes, *found.notes]
    everything = {
        "findings": [finding.row() for finding in findings],
        "verdict": found.verdict,
        "laws": found.explanation.rows(),
        "paths": {name: path.summary() for name, path in found.paths.items()},
        "notes": notes,
        "rows": found.rows(),
        "page": str(page),
    }
    reused = [f"{summary.reused} of {summary.jobs} jobs were there already."] if summary.reused else []
    show(as_json, everything, *findings, *notes, *reused, f"The page is {page}")
    return found.outcome is not Outcome.DIVERGED
