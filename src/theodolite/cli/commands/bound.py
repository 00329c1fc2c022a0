"""`theodolite bound`: how often a classifier will be wrong on new data, at most."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from theodolite.cli.ctrl_c import exit_when_interrupted
from theodolite.cli.terminal import Data, Loss, Model, Samples, Seed, check_folder, show, with_notes

if TYPE_CHECKING:
    from theodolite.cli.loading.datasets import Part
    from theodolite.cli.loading.subject import Subject

EPOCHS, PASSES = 20, 10


def bound(
    model: Model,
    data: Data = None,
    weights: Annotated[
        Path | None, typer.Option(help="The trained weights: safetensors, or what weights_only loads. Not for --split.")
    ] = None,
    start: Annotated[
        Path | None, typer.Option(help="The weights before training: the prior is around them, --data may be the training data.")
    ] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="The prior is around the trained weights; --data had no part in them.")
    ] = False,
    split: Annotated[
        float | None, typer.Option(help="Train anew on this share of --data, as 0.5, and certify on the rest.")
    ] = None,
    test: Annotated[
        str | None,
        typer.Option(help="Test data, the same words; default: the test part of --data. They bound the network without noise."),
    ] = None,
    trained_on: Annotated[
        str | None,
        typer.Option(help="With --held-out: the training data, the same words; default: the other part of --data."),
    ] = None,
    loss: Loss = None,
    samples: Samples = None,
    budget: Annotated[
        str, typer.Option(help="Time allowed, such as 60 or 5m, or none: the fit is made shorter to keep it.")
    ] = "none",
    out: Annotated[Path, typer.Option(help="Folder for the page, and for the fit under way.")] = Path("bound"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the fit in the folder that was broken off.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Do a fit that was broken off anew.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Findings and numbers as JSON on the standard output.")] = False,
    seed: Seed = 0,
) -> None:
    """Say how often a classifier will be wrong on new data, at most, with stated confidence; or that nothing can be said.

    One of --start, --held-out and --split says where the prior comes from. Exit code 1 if the bound is vacuous.
    """
    from theodolite.analyses.bound import going_on, within, write_bound
    from theodolite.instruments.survey_run import seconds_of
    from theodolite.measures.bounds import pac_bayes_bound
    from theodolite.measures.bounds.checkpoints import fit_length, forget_fit
    from theodolite.problem import Problem

    kind = _prior(start, held_out, split, weights)
    if trained_on is not None and kind != "held-out":
        raise ValueError("--trained-on belongs to --held-out: with --start and --split the data may be the training data.")
    allowed = None if budget == "none" else seconds_of(budget)
    check_folder(out)
    folder = _folder(out, resume=resume, fresh=fresh)
    subject, tests, trained, notes = _subjects(kind, model, data, test, trained_on, loss, weights, samples, seed)
    problem = subject.problem or Problem(subject.model, subject.loss, subject.data)
    given: dict[str, Any] = {"prior": kind, "test": None if tests is None else problem.on(tests.data), "seed": seed}
    given["trained_on"] = None if trained is None else problem.on(trained.data)
    if start is not None:
        given["start"] = _weights_before(start, subject)
    if split is not None:
        given["split"] = split
    with exit_when_interrupted("Interrupted. The fit is kept; the same command with --resume goes on."):
        length = fit_length(folder)
        if length is None:
            epochs, passes, shorter = within(allowed, problem, split=split, epochs=EPOCHS, passes=PASSES)
        else:
            epochs, passes, shorter = going_on(length, epochs=EPOCHS, passes=PASSES)
        given |= {"epochs": epochs, "passes": passes}
        found = pac_bayes_bound(problem, **given, checkpoint=folder, resume=True)
        notes = [*subject.notes, *notes, *([shorter] if shorter else [])]
        facts = with_notes({**subject.facts, "test data": "none" if tests is None else tests.facts.get("data", "")}, notes)
        page, findings = write_bound(found, out / "index.html", name=subject.name, facts=facts)
        forget_fit(folder)
    everything = {
        "verdict": found.sentence(),
        "vacuous": found.vacuous,
        "findings": [finding.row() for finding in findings],
        **_numbers(found),
        "notes": notes,
        "page": str(page),
    }
    lines = [finding for finding in findings if finding.sentence != found.sentence()]
    show(as_json, everything, found.sentence(), *lines, *notes, f"The page is {page}")
    raise typer.Exit(1 if found.vacuous else 0)


def _folder(out: Path, *, resume: bool, fresh: bool) -> Path:
    """Where the fit is kept while it is under way; a finished one leaves nothing behind."""
    from theodolite.measures.bounds.checkpoints import forget_fit, holds_fit

    folder = out / "fit"
    if resume and fresh:
        raise ValueError("--fresh does the fit anew, --resume goes on with it: choose one of them.")
    if fresh:
        forget_fit(folder)
    if holds_fit(folder) and not resume:
        raise ValueError(
            f"{folder} holds a fit that was broken off. Go on with it by --resume, do it anew by --fresh, or give another --out."
        )
    return folder


def _prior(start: Path | None, held_out: bool, split: float | None, weights: Path | None) -> str:
    """Which prior the options ask for; exactly one."""
    chosen = [name for name, asked in (("start", start), ("held-out", held_out or None), ("split", split)) if asked is not None]
    if len(chosen) != 1:
        given = " and ".join(f"--{name}" for name in chosen) or "none"
        raise ValueError(
            "Say where the prior comes from, by one of --start FILE (the weights before training), --held-out (--data had no "
            f"part in training) and --split SHARE (train here on a part). Got {given}."
        )
    if chosen == ["split"] and weights is not None:
        raise ValueError("--split trains anew, so --weights have no part in it. Leave one of them out.")
    return chosen[0]


def _subjects(
    kind: str,
    model: str,
    data: str | None,
    test: str | None,
    trained_on: str | None,
    loss: str | None,
    weights: Path | None,
    samples: int | None,
    seed: int,
) -> tuple[Subject, Subject | None, Subject | None, list[str]]:
    """What is certified, the test data, what was trained on, and what the user must know of them.

    Held-out samples are the test part of the data where they have one: the other part is what networks are trained on.
    """
    from theodolite.cli.loading.datasets import NoTestPartError
    from theodolite.cli.loading.subject import load_subject, load_test_part

    def load(word: str | None, part: Part = "train", most: int | None = samples) -> Subject:
        return load_subject(model, word, loss, checkpoint=weights, samples=most, seed=seed, part=part, everything=most is None)

    if kind != "held-out":
        return load(data), load_test_part(load, test, data), None, []
    tests = None if test is None else load_test_part(load, test, data)
    trained = None if trained_on is None else load(trained_on, most=None)
    try:
        subject = load(data, "test")
    except NoTestPartError:
        return load(data), tests, trained, []
    said = "What is certified is the test part of the data: the other part is for training."
    return subject, tests, trained or load(data, most=None), [said]


def _weights_before(file: Path, subject: Subject) -> dict[str, Any]:
    """The weights before training by the names of the model."""
    from theodolite.cli.loading.checkpoints import read_checkpoint, unprefixed
    from theodolite.problem.calling import unwrap

    return unprefixed(read_checkpoint(file).weights, unwrap(subject.model).state_dict())


def _numbers(found: Any) -> dict[str, Any]:
    names = (
        "value confidence empirical empirical_upper kl n draws bounds prior_value guessing prior held_out mean_error start_hash "
        "trained_on"
    )
    numbers = {name: getattr(found, name) for name in names.split()}
    fitted = found.fitted and {name: getattr(found.fitted, name) for name in ("value", "empirical", "empirical_upper", "kl")}
    return {**numbers, "fitted": fitted, "seconds": found.cost.seconds, "trace": [dict(row) for row in found.trace]}
