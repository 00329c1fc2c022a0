"""`theodolite compare` and `theodolite path`: what checkpoints of one model share, and what lies on the line between two."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from theodolite.cli.terminal import Data, Loss, Model, Samples, Seed, check_folder, show

if TYPE_CHECKING:
    from theodolite.cli.loading.datasets import Part
    from theodolite.cli.loading.subject import Subject

Statistics = StrEnum("Statistics", {"INTERPOLATE": "interpolate", "RECOMPUTE": "recompute", "BATCH": "batch"})


def compare(
    checkpoints: Annotated[list[Path], typer.Argument(help="Two or more checkpoints: safetensors, or what weights_only loads.")],
    model: Model,
    data: Data = None,
    loss: Loss = None,
    layers: Annotated[list[str] | None, typer.Option(help="Only these layers (globs; again for more).")] = None,
    k: Annotated[int, typer.Option(help="Sharp directions per layer.")] = 60,
    samples: Samples = None,
    path: Annotated[bool, typer.Option(help="Look along the straight line between each two.")] = True,
    out: Annotated[Path, typer.Option(help="Folder for the page.")] = Path("comparison"),
    as_json: Annotated[bool, typer.Option("--json", help="Findings as JSON on the standard output.")] = False,
    seed: Seed = 0,
) -> None:
    """Say which checkpoint is better at what: loss, accuracy, sharpness, the path between them, and what they share."""
    from theodolite.analyses.compare import compare as compare_problems
    from theodolite.cli.loading.subject import load_subject
    from theodolite.problem import Problem

    if len(checkpoints) < 2:
        raise ValueError(f"compare needs two checkpoints or more. Got {len(checkpoints)}.")
    check_folder(out)
    problems = {}
    for name, file in zip(_names(checkpoints), checkpoints, strict=True):
        subject = load_subject(model, data, loss, checkpoint=file, samples=samples, seed=seed)
        problems[name] = Problem(subject.model, subject.loss, subject.data)
    found = compare_problems(problems, layers, k=k, path=path, seed=seed)
    page = found.to_html(out / "index.html", facts=_facts(model, data, checkpoints))
    lines = [*found.verdict(), ""]
    lines += [finding.sentence for finding in found.findings if finding.label == "overlap"]
    lines += [f"{layer}: not compared, {why}" for layer, why in found.without.items()]
    everything = {
        "verdict": found.verdict(),
        "scores": list(found.scores),
        "contests": list(found.contests),
        "findings": [finding.row() for finding in found.findings],
        "page": str(page),
    }
    show(as_json, everything, *lines, f"The page is {page}")


def path(
    first: Annotated[Path, typer.Argument(help="A checkpoint: safetensors, or what weights_only loads. It is alpha = 1.")],
    second: Annotated[Path, typer.Argument(help="Another one of the same network. It is alpha = 0.")],
    model: Model,
    data: Data = None,
    test: Annotated[str | None, typer.Option(help="Test data, the same words; default: the test part of --data.")] = None,
    loss: Loss = None,
    batchnorm: Annotated[Statistics, typer.Option(help="Where BatchNorm statistics come from.")] = Statistics.INTERPOLATE,
    samples: Samples = None,
    points: Annotated[int, typer.Option(help="Points on the line; the two checkpoints are added.")] = 76,
    low: Annotated[float, typer.Option(help="Smallest alpha.")] = -1.0,
    high: Annotated[float, typer.Option(help="Largest alpha.")] = 2.0,
    out: Annotated[Path, typer.Option(help="Folder for the page.")] = Path("path"),
    as_json: Annotated[bool, typer.Option("--json", help="Finding and profile as JSON on the standard output.")] = False,
    seed: Seed = 0,
) -> None:
    """Say whether two checkpoints lie in one basin, so that their weights may be averaged."""
    import torch

    from theodolite.analyses.path import write_path
    from theodolite.cli.loading.subject import load_subject, load_test_part
    from theodolite.measures.mode_connectivity import path_between
    from theodolite.problem import Problem

    if points < 2 or not low < high:
        raise ValueError(f"--points must be at least 2 and --low below --high. Got {points}, {low:g} and {high:g}.")
    check_folder(out)

    def load(word: str | None, part: Part = "train", checkpoint: Path | None = None) -> Subject:
        return load_subject(model, word, loss, checkpoint=checkpoint, samples=samples, seed=seed, part=part)

    ends = [load(data, checkpoint=end) for end in (first, second)]
    tests = load_test_part(load, test, data)
    problems = [Problem(s.model, s.loss, s.data, params="*") for s in (ends[0], tests) if s is not None]
    found = path_between(
        problems[0],
        ends[0].model,
        ends[1].model,
        *problems[1:],
        batchnorm=batchnorm.value,
        alphas=torch.linspace(low, high, points, dtype=torch.float64),
    )
    one, other = _names((first, second))
    facts = {**_facts(model, data, (first, second)), "test data": "none" if tests is None else tests.facts.get("data", "")}
    page, finding = write_path(found, (one, other), out / "index.html", facts=facts)
    everything = {"finding": finding.row(), **found.summary(), "profile": found.rows(), "page": str(page)}
    show(as_json, everything, finding.sentence, *ends[0].notes, f"The page is {page}")


def _names(files: Sequence[Path]) -> list[str]:
    """What the page calls checkpoints: their names without folder and ending where these differ."""
    stems = [file.stem for file in files]
    return stems if len(set(stems)) == len(stems) else [str(file) for file in files]


def _facts(model: str, data: str | None, files: Sequence[Path]) -> dict[str, str]:
    return {"network": model, "data": data or "of the model", "checkpoints": ", ".join(map(str, files))}
