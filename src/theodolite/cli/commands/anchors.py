"""`theodolite anchors`: has a language model an anchor vector, so that its logits can be compared across contexts?"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from theodolite.cli.terminal import (
    Seed,
    check_counts,
    check_folder,
    exit_when_interrupted,
    show,
    whole_numbers,
    with_notes,
)

if TYPE_CHECKING:
    from torch import Tensor

    from theodolite.cli.loading.language_models import LanguageModel
    from theodolite.measures.anchors import AnchorProbe

POSITIONS = 20_000
ENOUGH = 2  # positions per dimension below which nothing can be said


def anchors(
    directory: Annotated[
        str | None,
        typer.Argument(
            metavar="DIR",
            help="A folder with a Hugging Face checkpoint or one .gguf file, such a file, stories260k or smollm2. "
            "Default: stories260k if it is there, else a small GPT trained in seconds.",
        ),
    ] = None,
    text: Annotated[str | None, typer.Option(help="A text file, also .gz, or the name of a text data set.")] = None,
    top: Annotated[
        str | None, typer.Option(help="Most probable words to remove, as 0,10,100,1000,10000. Default: these, or such shares.")
    ] = None,
    anchors: Annotated[int, typer.Option(help="With K above 1 also K anchors, one per cluster of positions.")] = 1,
    context: Annotated[int | None, typer.Option(help="Tokens in a window. Default: the model's own, at most 1024.")] = None,
    max_positions: Annotated[
        int | None, typer.Option(help=f"Positions to look at, from the start. Default: {POSITIONS}.")
    ] = None,
    exclude: Annotated[str | None, typer.Option(help="Words that are in no bulk, such as label words: good,bad.")] = None,
    drop_first: Annotated[bool, typer.Option("--drop-first", help="Leave out the first position of every window.")] = False,
    held_out: Annotated[float, typer.Option(help="Share of the positions, the last ones, that the anchor is tested on.")] = 0.2,
    out: Annotated[Path, typer.Option(help="Folder for the page and the rows.")] = Path("anchors"),
    save: Annotated[bool, typer.Option("--save", help="Also save the result with its anchor vectors for th.load.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Findings and rows as JSON on the standard output.")] = False,
    seed: Seed = 0,
) -> None:
    """Say whether a language model has an anchor vector.

    That is a linear function of its last hidden state that gives the logarithm of the bulk partition function. Where it has one,
    anchored logits can be compared across contexts. Writes a page and a table. Nothing is downloaded.
    """
    tops = None if top is None else whole_numbers("--top", top, least=0, example="0,10,100")
    check_counts(anchors=anchors, context=context, max_positions=max_positions)
    check_folder(out)
    limit = max_positions or POSITIONS
    with exit_when_interrupted("Interrupted; nothing was written."):
        subject = _subject(directory, text, seed)
        ids, facts, notes = _tokens(subject, text, limit)
        words, excluded = _excluded(subject, exclude)
        probe = _probe(
            subject, ids, top=tops, anchors=anchors, context=context, max_positions=limit, exclude=words,
            drop_first=int(drop_first), held_out=held_out, seed=seed,
        )  # fmt: skip
    facts |= {"excluded words": excluded} if excluded else {}
    _report(probe, subject, facts, (*subject.notes, *notes), out, save=save, as_json=as_json)


def _subject(directory: str | None, text: str | None, seed: int) -> LanguageModel:
    from theodolite.cli.loading import language_models as sources
    from theodolite.cli.loading.datasets import SAMPLE_TEXT, STORIES, are_there

    if directory is not None:
        return sources.load_language_model(directory, seed)
    if are_there(STORIES, SAMPLE_TEXT):
        return sources.load_language_model(STORIES, seed)
    if text is not None:
        raise ValueError("--text needs a model: name a folder with a Hugging Face checkpoint.")
    return sources.trained_example(seed)


def _tokens(subject: LanguageModel, text: str | None, limit: int) -> tuple[Tensor, dict[str, str], tuple[str, ...]]:
    """The tokens (N,) to read, what they are, and what the user should know of them."""
    import torch

    from theodolite.cli.loading import language_models as sources
    from theodolite.cli.loading.datasets import SAMPLE_TEXT, STORIES

    if subject.ids is not None:
        return subject.ids, {}, ()
    if text is None:
        if subject.name != STORIES:
            raise ValueError(f"--text is needed: a text file that {subject.name} is read on, or the name of a text data set.")
        text = SAMPLE_TEXT
    content, origin = sources.load_text(text)
    assert subject.tokens is not None
    ids = subject.tokens.first(content, limit + 1)
    if len(ids) < sources.SHORTEST:
        raise ValueError(f"--text {text}: the text gives {len(ids)} tokens; at least {sources.SHORTEST} are needed.")
    kept = () if len(ids) <= limit else (f"the first {limit} tokens of the text were read; --max-positions reads more",)
    return torch.tensor(ids[:limit]), {"text": origin}, kept


def _excluded(subject: LanguageModel, words: str | None) -> tuple[list[int] | None, str]:
    """The tokens of words that must not be in the bulk, and the words."""
    if words is None:
        return None, ""
    wanted = [word.strip() for word in words.split(",") if word.strip()]
    if subject.tokens is None or not wanted:
        raise ValueError("--exclude takes words with commas between them, of a model with a tokenizer.")
    found = {word: subject.tokens.single(word) for word in wanted}
    lost = [word for word, ids in found.items() if not ids]
    if lost:
        raise ValueError(f"--exclude: {', '.join(map(repr, lost))} is no single token of {subject.name}. Take words that are.")
    return sorted({i for ids in found.values() for i in ids}), ", ".join(wanted)


def _probe(subject: LanguageModel, ids: Tensor, **settings: Any) -> AnchorProbe:
    from theodolite.errors import NumericalWarning
    from theodolite.measures.anchors import anchor_probe

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)  # the same stands in the notes
        probe = anchor_probe(subject.model, ids, tokenizer=subject.tokens, progress=None, **settings)
    if probe.positions < ENOUGH * probe.hidden:
        raise ValueError(
            f"The text is too short: {probe.positions} positions for a hidden state of {probe.hidden} numbers. Give at least "
            f"{ENOUGH * probe.hidden} tokens, better {10 * probe.hidden}."
        )
    return probe


def _report(
    probe: AnchorProbe,
    subject: LanguageModel,
    facts: dict[str, str],
    notes: tuple[str, ...],
    out: Path,
    *,
    save: bool,
    as_json: bool,
) -> None:
    """Write the page and the table, and say what was found."""
    from theodolite.analyses.anchors import write_anchors
    from theodolite.files import write_whole

    shown = with_notes({**subject.facts, **facts}, notes)
    page, findings = write_anchors(probe, out / "index.html", name=subject.name, facts=shown)
    table = out / "rows.csv"
    write_whole(table, probe.to_frame().to_csv(index=False).encode())
    if save:
        probe.save(out / "probe")
    notes = (*notes, *probe.notes)
    everything = {
        "model": subject.name,
        "findings": [finding.row() for finding in findings],
        "rows": probe.rows(),
        "clusters": [row for found in probe.clusters for row in found.rows()],
        "notes": notes,
        "page": str(page),
        "table": str(table),
    }
    show(as_json, everything, *findings, *(f"({note})" for note in notes), f"The page is {page}, the table {table}")
