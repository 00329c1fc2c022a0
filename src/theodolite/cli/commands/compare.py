"""`theodolite compare`: what checkpoints of one model share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def compare(
    checkpoints: Annotated[list[Path], typer.Argument(help="Two or more checkpoints: safetensors, or what weights_only loads.")],
    model: Annotated[str, typer.Option(help="A built-in NAME, module:attribute, or hf:DIRECTORY.")],
    data: Annotated[str | None, typer.Option(help="A data set's NAME, module:attribute, or a file.")] = None,
    loss: Annotated[str | None, typer.Option(help="cross-entropy, mse, bce, l1 or module:attribute.")] = None,
    layers: Annotated[list[str] | None, typer.Option(help="Only these layers (globs; again for more).")] = None,
    k: Annotated[int, typer.Option(help="Sharp directions per layer.")] = 60,
    samples: Annotated[int | None, typer.Option(help="Measure on this many samples.")] = None,
    path: Annotated[bool, typer.Option(help="Look along the straight line between each two.")] = True,
    out: Annotated[Path, typer.Option(help="Folder for the page.")] = Path("comparison"),
    as_json: Annotated[bool, typer.Option("--json", help="Findings as JSON on the standard output.")] = False,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
) -> None:
    """Compare checkpoints: sharp directions layer by layer, what their factors predict, and the paths between them."""
    from theodolite.analyses.compare import compare as compare_problems
    from theodolite.cli.loading import load_subject
    from theodolite.problem import Problem

    if len(checkpoints) < 2:
        raise ValueError(f"compare needs two checkpoints or more. Got {len(checkpoints)}.")
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
    if as_json:
        typer.echo(json.dumps({"findings": [f.row() for f in found.findings], "page": str(page)}, indent=1))
        return
    for finding in found.findings:
        typer.echo(finding.sentence)
    for layer, why in found.without.items():
        typer.echo(f"{layer}: not compared, {why}")
    typer.echo(f"The page is {page}")
