"""`theodolite tune`: which learning rate, momentum, weight decay, on the user's own model and data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from theodolite.cli.ctrl_c import exit_when_interrupted
from theodolite.cli.terminal import Data, Loss, Model, Samples, Seed, check_counts, check_folder, show, with_notes

if TYPE_CHECKING:
    from theodolite.cli.loading.subject import Subject
    from theodolite.problem import Problem

#: Share of the data that is held out where there are no others.
HELD_OUT = 0.2


def tune(
    model: Model,
    data: Data = None,
    valid: Annotated[
        str | None,
        typer.Option(help="Held-out data, the same words; default: the test part of --data, or a fifth of them."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of each run.")] = 500,
    hyper: Annotated[
        str, typer.Option(help="What to tune, as lr,momentum: lr, lr:LAYER, momentum, weight_decay, beta1, beta2, alpha.")
    ] = "lr",
    optimizer: Annotated[
        str, typer.Option(help="sgd, momentum, nesterov, adam, adamw, rmsprop; settings as sgd:momentum=0.9; module:attribute.")
    ] = "sgd",
    lr: Annotated[float | None, typer.Option(help="Learning rate to start from, or to keep where it is not tuned.")] = None,
    batch_size: Annotated[int, typer.Option(help="Samples in a step.")] = 32,
    search: Annotated[str, typer.Option(help="auto, sweep, gradient or smoothed.")] = "auto",
    seeds: Annotated[int, typer.Option(help="Weights and orders on which every setting is tried.")] = 3,
    compare: Annotated[bool, typer.Option(help="Also run the other searches, at the same number of gradients.")] = True,
    loss: Loss = None,
    weights: Annotated[
        Path | None, typer.Option(help="Weights that every run starts from; default: new ones by the seed.")
    ] = None,
    samples: Samples = None,
    budget: Annotated[str, typer.Option(help="Time allowed, such as 60 or 5m, or none: fewer settings are tried.")] = "none",
    out: Annotated[Path, typer.Option(help="Folder for the page.")] = Path("tune"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a search that was interrupted.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Findings and numbers as JSON on the standard output.")] = False,
    seed: Seed = 0,
) -> None:
    """Find the step size: a sweep, random search and the meta-gradient at equal cost, decided by fresh seeds on held-out data.

    An interrupted search is kept in the folder, and --resume goes on with it.
    """
    from theodolite.analyses.step_size import write_step_size
    from theodolite.instruments.survey_run import seconds_of
    from theodolite.measures.stepsize import tune_step_size
    from theodolite.measures.stepsize.search.tuning import SWEPT, usual_settings

    check_counts(steps=steps, batch_size=batch_size, seeds=seeds, samples=samples)
    check_counts(0, seed=seed)
    allowed = None if budget == "none" else seconds_of(budget)
    check_folder(out)
    kept = out / "search"
    if kept.exists() and not resume:
        raise ValueError(
            f"{out} holds a search that was interrupted. Go on with it by --resume, or begin anew in another folder (--out)."
        )
    names = [name.strip() for name in hyper.split(",") if name.strip()]
    subject, problem, train, held_out, notes = _subjects(model, data, valid, loss, weights, samples, seed)
    factory, more = _factory(problem, weights)
    chosen = _optimizer(optimizer, lr)
    given: dict[str, Any] = {"steps": steps, "batch_size": batch_size, "seeds": seeds, "loss": problem.loss_function}
    searches, walks = (3, True) if compare else (1, search not in ("auto", "sweep") or (search == "auto" and len(names) > SWEPT))
    usual = usual_settings(names) * seeds
    runs = _runs(allowed, usual, factory, (train, held_out), given, chosen, searches=searches, walks=walks)
    with exit_when_interrupted("Interrupted. What had finished is kept; the same command with --resume goes on."):
        found = tune_step_size(
            factory, chosen, train, held_out, hyper=names, search=search, lr=lr, budget=runs, compare=compare,  # type: ignore[arg-type]
            checkpoint=kept, resume=resume, seed=seed, **given,
        )  # fmt: skip
        all_notes = [*subject.notes, *notes, *more, *found.cost.notes]
        facts = subject.facts if weights is not None or more else {**subject.facts, "weights": "new ones for each seed"}
        page, findings = write_step_size(found, out / "index.html", name=subject.name, facts=with_notes(facts, all_notes))
    _forget(kept)
    everything = {
        "verdict": found.sentence(),
        "best": found.best,
        "findings": [finding.row() for finding in findings],
        **_numbers(found),
        "notes": all_notes,
        "page": str(page),
    }
    lines = [finding for finding in findings if finding.sentence != found.sentence()]
    show(as_json, everything, found.sentence(), *lines, *all_notes, f"The page is {page}")
    raise typer.Exit(0)


def _subjects(
    model: str, data: str | None, valid: str | None, loss: str | None, weights: Path | None, samples: int | None, seed: int
) -> tuple[Subject, Problem, Any, Any, list[str]]:
    """What is trained, on which data, what is held out, and what the user must know of them."""
    from theodolite.analyses.step_size import split_off
    from theodolite.cli.loading.subject import load_subject, load_test_part
    from theodolite.measures.dynamics.sweep import joined_data
    from theodolite.problem import Problem

    def load(word: str | None, part: Any = "train") -> Subject:
        return load_subject(
            model, word, loss, checkpoint=weights, samples=samples, seed=seed, part=part, everything=samples is None
        )

    subject = load(data)
    problem = subject.problem or Problem(subject.model, subject.loss, subject.data)
    train = joined_data(problem)
    other = load_test_part(load, valid, data)
    if other is not None:
        return subject, problem, train, joined_data(problem.on(other.data)), []
    if subject.valid is not None:
        return subject, problem, train, joined_data(problem.on(subject.valid)), []
    train, held_out = split_off(train, HELD_OUT, seed)
    return subject, problem, train, held_out, [f"{HELD_OUT:.0%} of the data were held out, for there are no others"]


def _factory(problem: Problem, weights: Path | None) -> tuple[Any, list[str]]:
    """New weights by the seed; the given ones where there are some, or where layers cannot draw theirs anew."""
    from theodolite.measures.dynamics.sweep import reseeded
    from theodolite.measures.kernel.problem_views import measured_copy

    if weights is not None:
        return lambda seed: measured_copy(problem), []
    anew = reseeded(problem)
    try:
        anew(1)
    except ValueError as error:
        why = str(error).partition(" Pass factory")[0]
        return lambda seed: measured_copy(problem), [f"Every run starts from the same weights: {why}"]
    return lambda seed: anew(1), []  # it is torch's generator, seeded before each call, that tells them apart


def _optimizer(word: str, lr: float | None) -> Any:
    """A name that tuning knows as it is; else a function that makes what the word says."""
    from theodolite.cli.loading.optimizers import make_optimizer
    from theodolite.measures.stepsize.meta_gradients.hyperparameters import OPTIMIZERS

    if word in OPTIMIZERS:
        return word
    return lambda parameters: make_optimizer(word, parameters, lr)


def _runs(
    allowed: float | None,
    usual: int,
    factory: Any,
    data: tuple[Any, Any],
    given: dict[str, Any],
    optimizer: Any,
    *,
    searches: int,
    walks: bool,
) -> int | None:
    """Runs of each search within the time allowed; None where all can be taken."""
    from theodolite.analyses.step_size import runs_within
    from theodolite.measures.stepsize.search.tuning import fleet_optimizer_of

    if allowed is None:
        return None
    made, (train, held_out) = fleet_optimizer_of(optimizer), data
    found = runs_within(allowed, train, held_out, factory=factory, optimizer=made, searches=searches, walks=walks, **given)
    return None if found >= usual else found


def _forget(folder: Path) -> None:
    """A finished search is no longer needed: the same command begins anew."""
    from theodolite.training.interruption import NAME

    (folder / NAME).unlink(missing_ok=True)
    folder.rmdir()


def _numbers(found: Any) -> dict[str, Any]:
    names = (
        "search score error fresh fresh_error split steps runs by_train by_valid ratio overfits critical gradients health curve "
        "compared trace"
    )
    numbers = {name: getattr(found, name) for name in names.split()}
    return {**numbers, "seconds": found.cost.seconds}
