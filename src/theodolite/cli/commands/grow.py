"""`theodolite grow`: more layers for a trained model, put where a short trial says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from theodolite.cli.ctrl_c import exit_when_interrupted
from theodolite.cli.terminal import Seed, check_counts, check_folder, say, show, with_notes

if TYPE_CHECKING:
    from theodolite.cli.loading.growing import Streams
    from theodolite.cli.loading.hugging_face import HuggingFaceModel
    from theodolite.measures.growth import Grown, GrowthChoice, GrowthOperator

#: Sequences of the validation text, and steps that training text is read for at most.
SEQUENCES, MOST_READ = 64, 4000


def grow(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder with a Hugging Face model, made by save_pretrained.")
    ],
    layers: Annotated[int, typer.Option(help="Layers to grow to, at most twice as many as there are.")],
    strategies: Annotated[
        str,
        typer.Option(
            help="all, or with commas: last, identity, interleave, upscale, double, random-top, START/BLOCK/INIT as 8/4/copy, or "
            "a list of layers as 0,1,1,2/copy."
        ),
    ] = "all",
    lag: Annotated[
        str, typer.Option(help="Steps of the trial, or auto: until the ranks have settled. 0 takes no step.")
    ] = "auto",
    data: Annotated[str | None, typer.Option(help="Training text: a .txt file (also .gz) or a data set's NAME.")] = None,
    validation: Annotated[
        str | None, typer.Option(help="Text that was not trained on, the same words; default: the test part of --data.")
    ] = None,
    optimizer: Annotated[
        str, typer.Option(help="sgd, adam, adamw; settings as adamw:betas=0.9/0.95; module:attribute.")
    ] = "adamw",
    lr: Annotated[float | None, typer.Option(help="Learning rate at which training goes on.")] = None,
    optimizer_state: Annotated[
        Path | None, typer.Option(help="State of the small model's optimizer: safetensors, or what weights_only loads.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="How long the grown model will be trained. With --lag auto all trials take no longer.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences in a step.")] = 8,
    context: Annotated[int | None, typer.Option(help="Tokens in a sequence. Default: the model's own, at most 512.")] = None,
    samples: Annotated[int, typer.Option(help="Sequences of the validation text.")] = SEQUENCES,
    baseline: Annotated[bool, typer.Option(help="Also train the small model on, at equal FLOPs.")] = True,
    prune: Annotated[bool, typer.Option(help="Drop candidates that cannot be the best any more.")] = True,
    body: Annotated[str | None, typer.Option(help="Name of the list of layers, where there are several.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the grown model and the page.")] = Path("grown"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a trial that was interrupted.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what it will take: FLOPs, memory, time.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Findings and numbers as JSON on the standard output.")] = False,
    seed: Seed = 0,
) -> None:
    """Grow a trained model by every strategy, train each a little on the same batches, and keep the best.

    Writes a folder that transformers loads, with tokenizer, optimizer state, growth.json and a page. One strategy with --lag 0 or
    auto takes no data. An interrupted trial is kept in the folder, and --resume goes on with it.
    """
    from theodolite.cli.loading.growing import check_target, read_folder, strategies_of
    from theodolite.measures.growth import find_body
    from theodolite.measures.growth.search import some_operators

    check_counts(layers=layers, steps=steps, batch_size=batch_size, context=context, samples=samples)
    check_counts(0, seed=seed)
    length, wanted = _lag(lag), strategies_of(strategies)
    check_folder(out)
    check_target(directory, out)
    loaded = read_folder(directory, seed)
    operators = some_operators(wanted, find_body(loaded.model, body).layers, layers)
    trial = len(operators) > 1 or (length != "auto" and length > 0)
    if trial and data is None:
        raise ValueError(
            "--data and --validation are needed: a trial takes steps on text and tells strategies apart on other text. One "
            "strategy without steps, as --strategies last --lag 0, needs none."
        )
    given: dict[str, Any] = {"optimizer": optimizer, "lr": lr, "state_file": optimizer_state}
    moving = _optimizer(loaded, needed=trial, **given)
    streams = None
    if data is not None:
        count = _batches(length, steps, len(operators), baseline=baseline)
        read = {"batches": count, "batch_size": batch_size, "samples": samples, "context": context, "seed": seed}
        streams = _streams(loaded, data, validation, read)
    if dry_run:
        priced = {"lag": length, "steps": steps, "baseline": baseline, "as_json": as_json, "seed": seed}
        _price(loaded, operators, layers, moving, streams if trial else None, **priced)
        raise typer.Exit(0)
    with exit_when_interrupted("Interrupted. What had been tried is kept; the same command with --resume goes on."):
        if trial:
            assert streams is not None
            options = {"lag": length, "steps": steps, "prune": prune, "body": body, "seed": seed, "resume": resume}
            found: Any = _tried(loaded, operators, layers, moving, streams, out / "search", options, baseline=baseline)
        else:
            found = _grown(loaded, operators[0], moving, streams, body, seed)
        _finish(found, loaded, directory, out, streams, operators[0], as_json=as_json)


def _lag(text: str) -> Any:
    """`auto`, or a number of steps."""
    if text == "auto":
        return text
    if not text.isdecimal():
        raise ValueError(f"--lag must be auto, or a number of steps of at least 0. Got {text!r}.")
    return int(text)


def _optimizer(loaded: HuggingFaceModel, *, needed: bool, optimizer: str, lr: float | None, state_file: Path | None) -> Any:
    """The optimizer of the small model; None where nothing is trained and none was asked for."""
    from theodolite.cli.loading.growing import optimizer_of

    if not needed and lr is None and state_file is None:
        return None
    return optimizer_of(loaded.model, optimizer, lr, state_file)


def _batches(lag: Any, steps: int | None, candidates: int, *, baseline: bool) -> int:
    """Training batches to read: those of a candidate, or of the small model, which is trained on for as long as all together."""
    from theodolite.measures.growth.choice import MOST_STEPS

    longest = (steps or MOST_STEPS) if lag == "auto" else max(1, lag)
    return int(min(MOST_READ, longest * (2 * candidates if baseline else 1)))


def _streams(loaded: HuggingFaceModel, data: str, validation: str | None, read: dict[str, Any]) -> Streams:
    from theodolite.cli.loading.growing import read_streams

    return read_streams(loaded, data, validation, **read)


def _price(
    loaded: HuggingFaceModel, operators: list[GrowthOperator], layers: int, moving: Any, streams: Streams | None, *, lag: Any,
    steps: int | None, baseline: bool, as_json: bool, seed: int,
) -> None:  # fmt: skip
    """What it will take; nothing is written."""
    from theodolite.analyses.growing import price_trial
    from theodolite.measures.growth.choice import MOST_STEPS, USUAL_EVERY

    if streams is None:
        share = layers / operators[0].layers
        size = sum(p.numel() * p.element_size() for p in loaded.model.parameters())
        text = f"No step is taken: 0 FLOPs, some {(1 + share) * size / 2**30:.3g} GiB for both models, seconds."
        show(as_json, {"candidates": len(operators), "steps": 0, "flops": 0.0, "bytes": round((1 + share) * size)}, text)
        return
    longest = (steps or MOST_STEPS) if lag == "auto" else lag
    looks = 1 + (longest // USUAL_EVERY if lag == "auto" else min(10, lag))
    found = price_trial(
        loaded.model, streams.training, moving, validation=streams.validation, operators=operators, layers=layers, lag=lag,
        steps=steps, looks=looks, baselines=int(baseline), seed=seed,
    )  # fmt: skip
    names = ", ".join(operator.name for operator in operators)
    show(as_json, {**found.row(), "operators": [operator.name for operator in operators]}, found, f"Candidates: {names}.")


def _tried(
    loaded: HuggingFaceModel, operators: list[GrowthOperator], layers: int, moving: Any, streams: Streams, kept: Path,
    options: dict[str, Any], *, baseline: bool,
) -> GrowthChoice:  # fmt: skip
    from theodolite.measures.growth import landscape_aware_growth

    return landscape_aware_growth(
        loaded.model, None, streams.training, moving, layers=layers, operators=operators, validation=streams.validation,
        baselines=("small",) if baseline else (), checkpoint=kept, **options,
    )  # fmt: skip


def _grown(
    loaded: HuggingFaceModel, operator: GrowthOperator, moving: Any, streams: Streams | None, body: str | None, seed: int
) -> Grown:
    from theodolite import grow as grow_model

    data = None if streams is None else streams.validation
    return grow_model(loaded.model, operator, optimizer=moving, body=body, data=data, seed=seed)


def _finish(
    found: Any,
    loaded: HuggingFaceModel,
    directory: Path,
    out: Path,
    streams: Streams | None,
    first: GrowthOperator,
    *,
    as_json: bool,
) -> None:
    """Write the folder and the page, and say what was found."""
    import shutil

    from theodolite.analyses.growing import growth_verdict, layer_rows, write_growth
    from theodolite.cli.loading.growing import write_folder
    from theodolite.measures.growth import GrowthChoice
    from theodolite.results import Outcome

    chosen = found.best if isinstance(found, GrowthChoice) else first
    tried = isinstance(found, GrowthChoice)
    lost = found.outcome is Outcome.DIVERGED
    notes = [*loaded.notes, *(() if streams is None else streams.notes), *found.notes]
    facts = {
        "model": f"{type(loaded.model).__name__} from {directory}",
        "layers": f"{chosen.layers} to {chosen.depth}",
        **({} if streams is None else streams.facts),
    }
    page, findings = write_growth(found, out / "index.html", name=loaded.name, facts=with_notes(facts, notes))
    record = {
        "verdict": growth_verdict(found),
        "operator": chosen.name,
        "picture": chosen.picture(),
        "layers": chosen.depth,
        "layers_before": chosen.layers,
        "map": layer_rows(chosen),
        "lag": found.lag if tried else 0,
        "seed": found.seed,
        "from": str(directory),
        "trial": found.rows() if tried else [],
        "theodolite": found.provenance.theodolite,
    }
    if not lost:
        write_folder(directory, out, found.model, found.optimizer, found.next_step if tried else 0, record)
    if (out / "search").exists():
        shutil.rmtree(out / "search")  # a finished trial is no longer needed
    everything = {
        **record,
        "findings": [finding.row() for finding in findings],
        "notes": notes,
        "model": None if lost else str(out),
        "page": str(page),
    }
    lines = [finding for finding in findings if not finding.headline]
    end = f"The page is {page}" if lost else f"The grown model is in {out}, the page is {page}"
    show(as_json, everything, growth_verdict(found), *lines, *notes, end)
    if lost:
        say("No model was written.", err=True)
    raise typer.Exit(1 if lost else 0)
