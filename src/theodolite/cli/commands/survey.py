"""`theodolite survey`: the main job from the command line."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from theodolite.cli.ctrl_c import Interrupted, exit_when_interrupted
from theodolite.cli.terminal import Samples, Seed, check_folder, print_json, say, with_notes
from theodolite.text import duration, listed, plural, printable

if TYPE_CHECKING:
    from theodolite.cli.loading.datasets import Part
    from theodolite.cli.loading.subject import Subject
    from theodolite.instruments import Plan, Survey
    from theodolite.results import Finding

#: Seconds of a budget kept for drawing and writing the page.
PAGE_SECONDS = 4.0
_SIGNS = {"critical": ("✗", "red"), "warning": ("!", "yellow"), "note": ("·", "blue"), "good": ("✓", "green")}


def survey(
    model: Annotated[
        str | None, typer.Option(help="A built-in NAME, module:attribute, or hf:DIRECTORY. Default: the embedded example.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="A data set's NAME, module:attribute, or a file (.npz, .pt, .txt).")] = None,
    loss: Annotated[
        str | None, typer.Option(help="cross-entropy, mse, bce, l1 or module:attribute. Default: what fits the targets.")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Your learning rate: the survey says what it will do.")] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(help="sgd, momentum, nesterov, adam, adamw; settings as adamw:weight_decay=0.1; module:attribute."),
    ] = None,
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option(help="Weights for the model: safetensors, or what weights_only loads. Of several the last is surveyed."),
    ] = None,
    samples: Samples = None,
    batch_size: Annotated[int | None, typer.Option(help="Cut the data into batches of this size, to save memory.")] = None,
    valid: Annotated[str | None, typer.Option(help="Validation data, as --data; default: the test part of the data.")] = None,
    train: Annotated[int, typer.Option(help="First train for so many steps, in batches of 64.")] = 0,
    budget: Annotated[str, typer.Option(help="Time allowed, such as 60s or 5m, or none: efforts are chosen to fit.")] = "10m",
    depth: Annotated[
        str, typer.Option(help="quick (the answer), normal (and what explains it) or deep (everything that applies).")
    ] = "normal",
    only: Annotated[list[str] | None, typer.Option(help="Only this instrument (again for more).")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be measured and what it would take.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the page.")] = Path("survey"),
    everything: Annotated[bool, typer.Option("--all", help="Print every finding, by section.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Also save every result (eigenvectors included) for th.load.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Findings as JSON on the standard output.")] = False,
    seed: Seed = 0,
) -> None:
    """Survey a model: is it learning, what is wrong, what to change? Try the advice, print the answer, write a page.

    Without arguments a small network is trained on handwritten digits and surveyed. Exit code 1 if something critical was
    found or an instrument failed, 130 if it was interrupted; what was finished by then is printed and written.
    """
    began = time.perf_counter()
    from theodolite.cli.loading.subject import embedded_example, load_subject, load_test_part
    from theodolite.instruments import SurveyInterrupted, plan_survey
    from theodolite.instruments import survey as survey_problem
    from theodolite.instruments.survey_run import seconds_of

    weights = checkpoint[-1] if checkpoint else None
    allowed = None if budget == "none" else seconds_of(budget)
    if not dry_run:
        check_folder(out)
    if model is not None or data is not None or checkpoint:

        def load(word: str | None, part: Part = "train") -> Subject:
            return load_subject(
                model,
                word,
                loss,
                checkpoint=weights if part == "train" else None,
                samples=samples,
                batch_size=batch_size,
                seed=seed,
                part=part,
            )

        subject, held = load(data), load_test_part(load, valid, data)
        subject = replace(subject, valid=None if held is None else held.data)
        if subject.why_loss:
            say(f"Loss: {subject.why_loss}.", err=True)
    elif loss or samples or batch_size or valid:
        raise ValueError(
            "--loss, --samples, --batch-size and --valid go with --model or --data; the embedded example has its own."
        )
    else:
        subject = embedded_example(seed)
    form = (subject.problem,) if subject.problem is not None else (subject.model, subject.loss, subject.data)
    given = {**_arguments(subject, lr, optimizer, train, seed), "budget": _left(allowed, began), "only": only, "seed": seed}
    given["depth"] = depth
    if dry_run:
        _show_plan(plan_survey(*form, **given), as_json)
        raise typer.Exit(0)
    facts, broken_off = with_notes(subject.facts, subject.notes), False
    given |= {
        "checkpoints": (checkpoint or [])[:-1],
        "valid": subject.valid,
        "batch_size": batch_size,
        "population": subject.population,
    }
    try:
        found = survey_problem(*form, **given, name=subject.name, facts=facts, progress=_progress())
    except SurveyInterrupted as interrupted:
        say("Interrupted; what was finished follows.", err=True)
        found, broken_off = interrupted.survey, True
    page = out / "index.html"
    with exit_when_interrupted("Interrupted; the page was not written."):
        if as_json:  # printed before anything is written, which may fail
            print_json({**_document(found), "page": str(page)})
        else:
            _show(found, everything, time.perf_counter() - began)
        found.to_html(page)
    if save:
        with exit_when_interrupted(f"Interrupted; the page is {page}, the results were not saved."):
            found.save(out / "survey")
    if not as_json:
        say(f"The page is {page}")
    if broken_off:
        raise Interrupted
    raise typer.Exit(0 if found.sound and found.learning is not False else 1)


def _document(found: Survey) -> dict[str, Any]:
    """A survey for machines."""
    answer = {name: getattr(found, name) for name in ("title", "verdict", "lr", "causes", "learning", "good", "facts")}
    return {**answer, "findings": found.rows(), "plan": [*found.plan]}


def _progress() -> Any:
    """A bar on a terminal, else a line for each instrument."""
    return None if sys.stderr.isatty() else lambda title: say(title, err=True)


def _arguments(subject: Subject, lr: float | None, optimizer: str | None, steps: int, seed: int) -> dict[str, Any]:
    """The learning rate and optimizer as `th.survey` takes them, after so many steps of training."""
    from theodolite import train
    from theodolite.cli.loading.optimizers import make_optimizer

    if steps < 0:
        raise ValueError(f"--train must be a number of steps. Got {steps}.")
    parameters = [p for p in subject.model.parameters() if p.requires_grad] or list(subject.model.parameters())
    made = subject.optimizer
    if optimizer or (made is None and subject.optimizer_state is not None):
        made = make_optimizer(optimizer, parameters, lr, state=subject.optimizer_state)
    rate = lr if lr is not None else subject.lr if made is None else None
    if steps:
        rule: Any = made or make_optimizer(None, parameters, rate or 1e-2)
        size = 64 if isinstance(subject.data, tuple) and len(subject.data) == 2 else None
        train(subject.model, subject.loss, subject.data, rule, steps=steps, batch_size=size, seed=seed)
    return {"lr": rate, "optimizer": made}


def _left(allowed: float | None, began: float) -> float | None:
    """The part of a budget that is left for measuring, once loading and the page are taken off."""
    if allowed is None:
        return None
    return max(0.1 * allowed, allowed - (time.perf_counter() - began) - min(PAGE_SECONDS, allowed / 4))


def _show(found: Survey, everything: bool, took: float) -> None:
    """The verdict and the few findings that matter, or all of them by section, wrapped to the terminal."""
    width = min(110, shutil.get_terminal_size((100, 24)).columns)
    colour = "red" if found.causes or found.learning is False else "green" if found.good else "yellow"
    say("", head=typer.style(printable(f"Survey of {found.title}"), bold=True))
    say(textwrap.fill(found.verdict, width), head="")
    if found.lr is not None:
        say("", head=typer.style(f"lr={found.lr:.3g}", fg=colour, bold=True))
    if "notes" in found.facts and everything:
        say(textwrap.fill(f"({found.facts['notes']})", width))
    if everything:
        for section in dict.fromkeys(f.instrument for f in found.findings):
            say("", head=typer.style(printable(section), bold=True))
            for finding in found.of(section):
                _show_finding(finding, width, whole=True)
    else:
        for finding in found.shown:
            _show_finding(finding, width, whole=False)
    _show_rest(found, width, everything, took)


def _show_finding(finding: Finding, width: int, *, whole: bool) -> None:
    """One finding; where not all of it is wanted, what fits on one line."""
    sign, colour = _SIGNS[finding.severity.value]
    head = typer.style(f"{sign} ", fg=colour, bold=True)
    if not whole:
        say(textwrap.shorten(finding.sentence, width - 2, placeholder=" …"), head=head)
        return
    say("\n  ".join(textwrap.wrap(finding.sentence, width - 2) or [""]), head=head)
    for line in textwrap.wrap(finding.advice, width - 4):
        say(" " * 4 + line)


def _show_rest(found: Survey, width: int, everything: bool, took: float) -> None:
    """What is not on the screen: further findings, instruments that were left out, and the seconds of the whole command."""
    skipped = [row for row in found.plan if row["state"] == "skipped"]
    if everything:
        for row in skipped:
            say(textwrap.fill(f"not measured: {row['instrument']}, {row['reason']}", width, subsequent_indent="  "))
    elif skipped:
        names = listed([row["instrument"] for row in skipped])
        say(textwrap.shorten(f"not measured: {names} (--all says why)", width, placeholder=" … (--all says why)"))
    done = sum(row["state"] == "done" for row in found.plan)
    more = len(found.findings) - len(found.shown)
    further = f"; {plural(more, 'further finding')} with --all and on the page" if more > 0 and not everything else ""
    say(f"{plural(done, 'instrument')} in {duration(took)}{further}.")


def _show_plan(plan: Plan, as_json: bool) -> None:
    if as_json:
        print_json({"seconds": plan.seconds, "gradients": plan.gradients, "peak_bytes": plan.peak_bytes, "steps": plan.rows()})
        return
    say(f"{'instrument':<14}{'gradients':>11}{'seconds':>10}{'MiB':>9}  ")
    for row in plan.rows():
        if row["state"] == "planned":
            numbers = f"{row['gradients']:>11.4g}{row['seconds']:>10.2g}{row['MiB']:>9.3g}"
            say(f"{row['instrument']:<14}{numbers}  {row['effort']}")
        else:
            say(f"{row['instrument']:<14}{'':>30}  skipped: {row['reason']}")
    say(plan)
