"""`theodolite survey`: the main job from the command line."""

from __future__ import annotations

import shutil
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from theodolite.cli.terminal import Samples, Seed, check_folder, exit_when_interrupted, print_json, with_notes

if TYPE_CHECKING:
    from theodolite.cli.loading.subject import Subject
    from theodolite.instruments import Plan, Survey

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
        Path | None, typer.Option(help="Weights for the model: safetensors, or what weights_only loads.")
    ] = None,
    samples: Samples = None,
    batch_size: Annotated[int | None, typer.Option(help="Cut the data into batches of this size, to save memory.")] = None,
    train: Annotated[int, typer.Option(help="First train for so many steps, in batches of 64.")] = 0,
    budget: Annotated[str, typer.Option(help="Time allowed, such as 60s or 5m, or none: efforts are chosen to fit.")] = "10m",
    only: Annotated[list[str] | None, typer.Option(help="Only this instrument (again for more).")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be measured and what it would take.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the page.")] = Path("survey"),
    save: Annotated[bool, typer.Option("--save", help="Also save every result (eigenvectors included) for th.load.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Findings as JSON on the standard output.")] = False,
    seed: Seed = 0,
) -> None:
    """Survey a model: measure its loss surface, say what was found, write a page.

    Without arguments a small network is trained on handwritten digits and surveyed. Exit code 1 if something critical was
    found or an instrument failed.
    """
    began = time.perf_counter()
    from theodolite.cli.loading.subject import embedded_example, load_subject
    from theodolite.instruments import plan_survey
    from theodolite.instruments import survey as survey_problem
    from theodolite.instruments.survey_run import seconds_of

    allowed = None if budget == "none" else seconds_of(budget)
    if model is not None or data is not None or checkpoint is not None:
        subject = load_subject(model, data, loss, checkpoint=checkpoint, samples=samples, batch_size=batch_size, seed=seed)
    elif loss or samples or batch_size:
        raise ValueError("--loss, --samples and --batch-size go with --model or --data; the embedded example has its own.")
    else:
        subject = embedded_example(seed)
    form = (subject.problem,) if subject.problem is not None else (subject.model, subject.loss, subject.data)
    given = {**_arguments(subject, lr, optimizer, train, seed), "budget": _left(allowed, began), "only": only, "seed": seed}
    if dry_run:
        _show_plan(plan_survey(*form, **given), as_json)
        raise typer.Exit(0)
    check_folder(out)
    facts = with_notes(subject.facts, subject.notes)
    with exit_when_interrupted("Interrupted; nothing was written."):
        found = survey_problem(*form, **given, name=subject.name, population=subject.population, facts=facts)
    page = found.to_html(out / "index.html")
    if save:
        found.save(out / "survey")
    if as_json:
        facts_of = {"title": found.title, "good": found.good, "findings": found.rows(), "facts": found.facts}
        print_json({**facts_of, "plan": [*found.plan], "page": str(page)})
    else:
        _show(found)
        typer.echo(f"The page is {page}")
    raise typer.Exit(0 if found.good else 1)


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


def _show(found: Survey) -> None:
    """Findings as text, the worst first, wrapped to the terminal."""
    width = min(110, shutil.get_terminal_size((100, 24)).columns)
    counts = {word: sum(f.severity.value == word for f in found.findings) for word in _SIGNS}
    typer.secho(
        f"Survey of {found.title}: "
        + ", ".join(f"{n} {word if n == 1 or word in ('critical', 'good') else word + 's'}" for word, n in counts.items() if n),
        bold=True,
    )
    if "notes" in found.facts:
        typer.echo(textwrap.fill(f"({found.facts['notes']})", width))
    for finding in found.findings:
        sign, colour = _SIGNS[finding.severity.value]
        head = typer.style(f"{sign} {finding.severity.value:<8} ", fg=colour, bold=True)
        lines = textwrap.wrap(finding.sentence, width - 11) or [""]
        typer.echo(head + ("\n" + " " * 11).join(lines))
        for line in textwrap.wrap(finding.advice, width - 13):
            typer.echo(" " * 13 + line)
    skipped = [row for row in found.plan if row["state"] == "skipped"]
    for row in skipped:
        typer.echo(textwrap.fill(f"not measured: {row['instrument']}, {row['reason']}", width, subsequent_indent="  "))
    _show_cost(found)


def _show_cost(found: Survey) -> None:
    expected = sum(row["seconds"] or 0.0 for row in found.plan if row.get("took") is not None and row.get("seconds") is not None)
    took = sum(row["took"] for row in found.plan if row.get("took") is not None)
    if expected:
        typer.echo(f"Measuring took {took:.2g} s; expected {expected:.2g} s.")


def _show_plan(plan: Plan, as_json: bool) -> None:
    if as_json:
        print_json({"seconds": plan.seconds, "gradients": plan.gradients, "peak_bytes": plan.peak_bytes, "steps": plan.rows()})
        return
    typer.echo(f"{'instrument':<14}{'gradients':>11}{'seconds':>10}{'MiB':>9}  ")
    for row in plan.rows():
        if row["state"] == "planned":
            numbers = f"{row['gradients']:>11.4g}{row['seconds']:>10.2g}{row['MiB']:>9.3g}"
            typer.echo(f"{row['instrument']:<14}{numbers}  {row['effort']}")
        else:
            typer.echo(f"{row['instrument']:<14}{'':>30}  skipped: {row['reason']}")
    typer.echo(str(plan))
