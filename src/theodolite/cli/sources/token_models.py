"""Built-in language networks: GPT, BERT and the Llama of stories260k, on text or on random tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from theodolite import data as data_sets
from theodolite import models
from theodolite.cli.sources import text as tokens
from theodolite.cli.sources.batches import raw_batches
from theodolite.cli.sources.datasets import Source, load_data
from theodolite.cli.sources.losses import token_cross_entropy
from theodolite.cli.sources.parts import Parts
from theodolite.cli.sources.words import reason
from theodolite.problem.tensors import named_tensors

if TYPE_CHECKING:
    from theodolite.cli.sources.models import Wish

STORIES, SAMPLE_TEXT = "stories260k", "tinystories_sample"


@dataclass(frozen=True)
class _Vocabulary:
    """How text becomes tokens, how many there are, and the token that hides another one."""

    size: int
    encode: tokens.Encode | None = None
    note: str = ""

    @property
    def mask(self) -> int:
        return self.size - 1


def token_model(name: str, arguments: dict[str, Any], said: dict[str, Any], source: Source | None, wish: Wish) -> Parts:
    """A language network on text (the next token, for BERT the hidden ones), or on token data of the user's own."""
    if source is not None and source.text is None:
        if source.documents is not None or source.content is None:
            raise ValueError(f"--model {name} takes running text or tokens, not labelled texts like {source.name}.")
        return _on_own_data(name, arguments, said, source, wish)
    stored = _stored_stories(wish) if name == STORIES else None
    if source is None and name == STORIES:
        source = _sample_text(wish)
    masked = "BERT" in name
    words = _vocabulary(name, arguments, said, source, masked=masked)
    if stored is not None:
        model, weights, weight_notes = stored
    else:
        sizes = {} if "vocabulary" in said else {"vocabulary": words.size}
        model = models.build(name, **sizes, seed=wish.seed)
        weights, weight_notes = f"random, initialisation {model.initialisation}, seed {wish.seed}", _no_stored(name, wish)
    context = int(said.get("context", arguments["context"].default))
    data, population, notes = _token_data(source, words, context, masked, wish)
    return Parts(
        model,
        name,
        data,
        "random tokens" if source is None else source.name,
        loss=token_cross_entropy,
        population=population,
        facts={
            "model": f"{name}, built in",
            "weights": weights,
            "data": f"random tokens, seed {wish.seed}" if source is None else source.origin,
        },
        notes=(*weight_notes, *notes, *((words.note,) if words.note and source is not None else ())),
    )


def _token_data(
    source: Source | None, words: _Vocabulary, context: int, masked: bool, wish: Wish
) -> tuple[tuple[Tensor, Tensor], int | None, tuple[str, ...]]:
    """Pairs (tokens, targets), how many sequences there are in all, and notes."""
    length = min(context, tokens.LENGTH) + (0 if masked else 1)  # one token more: the first is never a target
    population = None
    if source is None:
        count = wish.samples or tokens.RANDOM_SEQUENCES
        ids = tokens.random_tokens(words.size, count, length, wish.seed, avoid=(words.mask,) if masked else ())
        notes: tuple[str, ...] = ("the data are random tokens, because no --data was given",)
    else:
        assert source.text is not None
        assert words.encode is not None
        count = wish.samples or tokens.TEXT_SEQUENCES
        ids, population = tokens.sequences(source.text.train, words.encode, length, count, source.name)
        notes = source.notes
    return (tokens.masked(ids, words.mask, wish.seed) if masked else tokens.next_tokens(ids)), population, notes


def _vocabulary(
    name: str, arguments: dict[str, Any], said: dict[str, Any], source: Source | None, *, masked: bool
) -> _Vocabulary:
    size = int(said.get("vocabulary", arguments["vocabulary"].default))
    if name == STORIES:
        try:
            tokenizer = data_sets.stories260k_tokenizer()
            return _Vocabulary(len(tokenizer), lambda text: tokenizer.encode(text, begin=False).tolist())
        except data_sets.MissingDataError:
            return _Vocabulary(size, tokens.byte_encoder(size), "the tokenizer of stories260k is not there: tokens are bytes")
    if source is None or source.text is None:
        return _Vocabulary(size)
    if "vocabulary" in said:
        return _Vocabulary(size, tokens.byte_encoder(size - 1), f"tokens are bytes: {name} comes without a tokenizer")
    alphabet = source.text.alphabet()
    note = f"tokens are the {len(alphabet)} different characters of the text"
    return _Vocabulary(max(2, len(alphabet) + masked), tokens.character_encoder(alphabet), note)


def _on_own_data(name: str, arguments: dict[str, Any], said: dict[str, Any], source: Source, wish: Wish) -> Parts:
    """A vocabulary and a context that are large enough for the user's tokens."""
    found = [t for batch in raw_batches(source.content) for _, t in named_tensors(batch)]
    if not found or any(t.is_floating_point() or t.ndim < 2 for t in found):
        raise ValueError(
            f"--model {name} takes integer tokens and targets of shape (sequences, tokens); --data {source.name} differs."
        )
    wanted = {"vocabulary": 1 + max(int(t.max()) for t in found), "context": max(int(t.shape[1]) for t in found)}
    sizes = {key: max(value, arguments[key].default) for key, value in wanted.items() if key not in said}
    model = models.build(name, **sizes, seed=wish.seed)
    facts = {
        "model": f"{name}, built in",
        "weights": f"random, initialisation {model.initialisation}, seed {wish.seed}",
        "data": source.origin,
    }
    return Parts(
        model, name, source.content, source.name, loss=token_cross_entropy, population=source.population, facts=facts,
        notes=source.notes,
    )  # fmt: skip


def _stored_stories(wish: Wish) -> tuple[nn.Module, str, tuple[str, ...]] | None:
    if not wish.stored:
        return None
    try:
        model = models.stories260k_from(data_sets.weights(STORIES), data_sets.stories260k_config())
    except data_sets.MissingDataError:
        return None
    return model, data_sets.where(STORIES).origin, ()


def _no_stored(name: str, wish: Wish) -> tuple[str, ...]:
    if name != STORIES or not wish.stored:
        return ()
    try:
        data_sets.where(STORIES)
    except data_sets.MissingDataError as error:
        return (f"weights are random, because the trained ones are not there ({reason(error)})",)
    return ()


def _sample_text(wish: Wish) -> Source | None:
    """The text that stories260k knows, if that and its tokenizer are there."""
    try:
        data_sets.where(STORIES)
        return load_data(SAMPLE_TEXT, samples=wish.samples, seed=wish.seed)
    except data_sets.MissingDataError:
        return None
