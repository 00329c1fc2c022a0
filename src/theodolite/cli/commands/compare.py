"""`theodolite compare`: what checkpoints of one model share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from theodolite.cli.terminal import Data, Loss, Model, Samples, Seed, check_folder, show


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
    """Compare checkpoints: sharp directions layer by layer, what their factors predict, and the paths between them."""
    from theodolite.analyses.compare import compare as compare_problems
    from theodolite.cli.loading.subject import load_subject
    from theodolite.problem import Problem

    if len(checkpoints) < 2:
        raise ValueError(f"compare needs two checkpoints or more. Got {len(checkpoints)}.")
    check_folder(out)
    names = [path.stem for path in checkpoints]
    if len(set(names)) < len(names):
        names = [str(path) for path in checkpoints]
    problems = {}
    for name, file in zip(names, checkpoints, strict=True):
        subject = load_subject(model, data, loss, checkpoint=file, samples=samples, seed=seed)
        problems[name] = Problem(subject.model, subject.loss, subject.data)
    found = compare_problems(problems, layers, k=k, path=path, seed=seed)
    facts = {"network": model, "data": data or "of the model", "checkpoints": ", ".join(map(str, checkpoints))}
    page = found.to_html(out / "index.html", facts=facts)
    lines = [finding.sentence for finding in found.findings]
    lines += [f"{layer}: not compared, {why}" for layer, why in found.without.items()]
    everything = {"findings": [finding.row() for finding in found.findings], "page": str(page)}
    show(as_json, everything, *lines, f"The page is {page}")
