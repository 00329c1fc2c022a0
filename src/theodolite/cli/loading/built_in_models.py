"""Built-in networks by name, their sizes taken from the data: of numbers, of images, of tokens."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite import data as data_sets
from theodolite import models
from theodolite.cli.loading import text as tokens
from theodolite.cli.loading.batches import first_parts, raw_batches, top_label, with_inputs, with_targets
from theodolite.cli.loading.datasets import Source, from_set, load_data
from theodolite.cli.loading.losses import token_cross_entropy, word_of
from theodolite.cli.loading.model_spec import ModelSpec
from theodolite.cli.loading.module_attribute import reason
from theodolite.models import registry
from theodolite.problem.tensors import named_tensors
from theodolite.text import listed, nearest

SIDE = 32  # images too small for a network are enlarged to this
RESNET20 = ("resnet20_cifar10", "cifar10", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class BuildRequest:
    """The words that matter when a network is built; `stored` allows trained weights where there are some."""

    loss: str | None
    samples: int | None
    seed: int
    stored: bool


def builder_of(name: str) -> tuple[dict[str, inspect.Parameter], dict[str, Any]]:
    """The arguments of the network's builder, and those that its name already gives."""
    found = registry.arguments_of(name)
    if found is not None:
        return found
    if Path(name).expanduser().is_dir():
        hint = f"For the Hugging Face model in that folder write hf:{name}."
    elif name.endswith(".py"):
        hint = f"Say what in the file it is: {name}:ATTRIBUTE."
    else:
        hint = f"Nearest names: {listed(nearest(name, models.names(), 3))}. theodolite.models.names() lists them all."
    raise ValueError(f"--model {name!r} must be the name of a built-in network, module:attribute, or hf:FOLDER. {hint}")


def named_model(name: str, source: Source | None, request: BuildRequest) -> ModelSpec:
    """The network called `name` on the data, or on data that suits it where there is none."""
    arguments, said = builder_of(name)
    if "vocabulary" in arguments:
        return token_model(name, arguments, said, source, request)
    stored = _stored_resnet(name, source, request)
    if stored is not None:
        return stored
    notes: tuple[str, ...] = ()
    if source is None:
        chosen = RESNET20[1] if name == "ResNet20" and _is_there(RESNET20[1]) else "digits"
        source = load_data(chosen, samples=request.samples, seed=request.seed)
        notes = (f"the data are {chosen}, because no --data was given",)
    if source.documents is not None:
        source = from_set(source.documents.bag_of_words(), source.name, request.samples, request.seed)
    if source.content is None:
        raise ValueError(f"--model {name} takes numbers, not text like {source.name}. Language networks: GPT-small, BERT-small.")
    return _sized(name, arguments, said, source, request, notes)


def _sized(
    name: str, arguments: dict[str, Any], said: dict[str, Any], source: Source, request: BuildRequest, notes: tuple[str, ...]
) -> ModelSpec:
    """Build with the sizes of the data; images that are too small for the network are enlarged."""
    data, outputs = _targets(source, request)
    flat = "inputs" in arguments
    if flat:
        data = with_inputs(data, lambda x: x.flatten(1))
    try:
        model = _build(name, arguments, said, data, outputs, request.seed)
    except (ValueError, RuntimeError) as error:
        x = first_parts(data)[0]
        if flat or source.own or x.ndim != 4 or max(x.shape[2:]) >= SIDE:
            raise ValueError(f"--model {name} does not fit the data {source.name}: {str(error).splitlines()[0]}") from error
        data = with_inputs(data, lambda x: F.interpolate(x, size=(SIDE, SIDE), mode="bilinear"))
        model = _build(name, arguments, said, data, outputs, request.seed)
        sides = "×".join(map(str, x.shape[2:]))
        notes = (*notes, f"the images were enlarged from {sides} to {SIDE}×{SIDE} pixels, because {name} needs that")
    return ModelSpec(
        model,
        name,
        data,
        source.name,
        population=source.population,
        facts={"model": f"{name}, built in", "weights": random_weights(model, request.seed), "data": source.origin},
        notes=(*notes, *source.notes),
    )


def random_weights(model: nn.Module, seed: int) -> str:
    """The fact about weights that were not loaded."""
    return f"random, initialisation {getattr(model, 'initialisation', 'torch')}, seed {seed}"


def _targets(source: Source, request: BuildRequest) -> tuple[Any, int]:
    """The data with targets as columns where they are real numbers, and how many outputs they ask for."""
    x, y = first_parts(source.content)
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        raise ValueError(f"Built-in networks take pairs of tensors (inputs, targets); --data {source.name} has another form.")
    if y.is_floating_point():
        column = with_targets(source.content, lambda t: t.unsqueeze(1)) if y.ndim == 1 else source.content
        return column, 1 if y.ndim == 1 else int(y.shape[1])
    if y.ndim != 1:
        raise ValueError(f"Built-in networks take one class label per example; the targets have shape {tuple(y.shape)}.")
    classes = source.classes or top_label(source.content) + 1
    return source.content, 1 if word_of(request.loss) == "bce" and classes == 2 else classes


def _build(name: str, arguments: dict[str, Any], said: dict[str, Any], data: Any, outputs: int, seed: int) -> nn.Module:
    """Build the network and let it try two samples, so that a misfit shows here."""
    x = first_parts(data)[0]
    shape = tuple(x.shape[1:])
    if "inputs" not in arguments and len(shape) != 3 and not (name.startswith("NTK-CNN") and len(shape) == 2):
        raise ValueError(f"it takes images (channels, height, width); the examples have shape {shape}.")
    sizes = {"inputs": x[0].numel(), "image": shape, "channels": shape[0], "outputs": outputs, "classes": outputs}
    chosen = {key: value for key, value in sizes.items() if key in arguments and key not in said}
    model = models.build(name, **chosen, seed=seed)
    training = model.training
    with torch.no_grad():
        model.eval()(x[:2].to(next(model.parameters()).dtype))
    return model.train(training)


def _is_there(name: str) -> bool:
    try:
        data_sets.where(name)
    except data_sets.MissingDataError:
        return False
    return True


def _stored_resnet(name: str, source: Source | None, request: BuildRequest) -> ModelSpec | None:
    """ResNet20 with its trained weights on CIFAR-10, where both are there and nothing else was asked for."""
    weights_name, data_name, mean, std = RESNET20
    if name != "ResNet20" or not request.stored or (source is not None and (source.name != data_name or source.own)):
        return None
    try:
        weights = data_sets.weights(weights_name)
        source = source or load_data(data_name, samples=request.samples, seed=request.seed)
    except data_sets.MissingDataError:
        return None
    shift, scale = (torch.tensor(v)[:, None, None] for v in (mean, std))
    return ModelSpec(
        models.resnet20_from(weights),
        name,
        with_inputs(source.content, lambda x: (x - shift) / scale),
        source.name,
        population=source.population,
        facts={"model": f"{name}, built in", "weights": data_sets.where(weights_name).origin, "data": source.origin},
        notes=("the stored weights trained on CIFAR-10 were loaded; images are normalised as they want it", *source.notes),
    )


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


def token_model(
    name: str, arguments: dict[str, Any], said: dict[str, Any], source: Source | None, request: BuildRequest
) -> ModelSpec:
    """A language network on text (the next token, for BERT the hidden ones), or on token data of the user's own."""
    if source is not None and source.text is None:
        if source.documents is not None or source.content is None:
            raise ValueError(f"--model {name} takes running text or tokens, not labelled texts like {source.name}.")
        return _on_own_data(name, arguments, said, source, request)
    stored = _stored_stories(request) if name == STORIES else None
    if source is None and name == STORIES:
        source = _sample_text(request)
    masked = "BERT" in name
    words = _vocabulary(name, arguments, said, source, masked=masked)
    if stored is not None:
        model, weights, weight_notes = stored
    else:
        sizes = {} if "vocabulary" in said else {"vocabulary": words.size}
        model = models.build(name, **sizes, seed=request.seed)
        weights, weight_notes = f"random, initialisation {model.initialisation}, seed {request.seed}", _no_stored(name, request)
    context = int(said.get("context", arguments["context"].default))
    data, population, notes = _token_data(source, words, context, masked, request)
    return ModelSpec(
        model,
        name,
        data,
        "random tokens" if source is None else source.name,
        loss=token_cross_entropy,
        population=population,
        facts={
            "model": f"{name}, built in",
            "weights": weights,
            "data": f"random tokens, seed {request.seed}" if source is None else source.origin,
        },
        notes=(*weight_notes, *notes, *((words.note,) if words.note and source is not None else ())),
    )


def _token_data(
    source: Source | None, words: _Vocabulary, context: int, masked: bool, request: BuildRequest
) -> tuple[tuple[Tensor, Tensor], int | None, tuple[str, ...]]:
    """Pairs (tokens, targets), how many sequences there are in all, and notes."""
    length = min(context, tokens.LENGTH) + (0 if masked else 1)  # one token more: the first is never a target
    population = None
    if source is None:
        count = request.samples or tokens.RANDOM_SEQUENCES
        ids = tokens.random_tokens(words.size, count, length, request.seed, avoid=(words.mask,) if masked else ())
        notes: tuple[str, ...] = ("the data are random tokens, because no --data was given",)
    else:
        assert source.text is not None
        assert words.encode is not None
        count = request.samples or tokens.TEXT_SEQUENCES
        ids, population = tokens.sequences(source.text.train, words.encode, length, count, source.name)
        notes = source.notes
    return (tokens.masked(ids, words.mask, request.seed) if masked else tokens.next_tokens(ids)), population, notes


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


def _on_own_data(name: str, arguments: dict[str, Any], said: dict[str, Any], source: Source, request: BuildRequest) -> ModelSpec:
    """A vocabulary and a context that are large enough for the user's tokens."""
    found = [t for batch in raw_batches(source.content) for _, t in named_tensors(batch)]
    if not found or any(t.is_floating_point() or t.ndim < 2 for t in found):
        raise ValueError(
            f"--model {name} takes integer tokens and targets of shape (sequences, tokens); --data {source.name} differs."
        )
    wanted = {"vocabulary": 1 + max(int(t.max()) for t in found), "context": max(int(t.shape[1]) for t in found)}
    sizes = {key: max(value, arguments[key].default) for key, value in wanted.items() if key not in said}
    model = models.build(name, **sizes, seed=request.seed)
    facts = {
        "model": f"{name}, built in",
        "weights": f"random, initialisation {model.initialisation}, seed {request.seed}",
        "data": source.origin,
    }
    return ModelSpec(
        model, name, source.content, source.name, loss=token_cross_entropy, population=source.population, facts=facts,
        notes=source.notes,
    )  # fmt: skip


def _stored_stories(request: BuildRequest) -> tuple[nn.Module, str, tuple[str, ...]] | None:
    if not request.stored:
        return None
    try:
        model = models.stories260k_from(data_sets.weights(STORIES), data_sets.stories260k_config())
    except data_sets.MissingDataError:
        return None
    return model, data_sets.where(STORIES).origin, ()


def _no_stored(name: str, request: BuildRequest) -> tuple[str, ...]:
    if name != STORIES or not request.stored:
        return ()
    try:
        data_sets.where(STORIES)
    except data_sets.MissingDataError as error:
        return (f"weights are random, because the trained ones are not there ({reason(error)})",)
    return ()


def _sample_text(request: BuildRequest) -> Source | None:
    """The text that stories260k knows, if that and its tokenizer are there."""
    try:
        data_sets.where(STORIES)
        return load_data(SAMPLE_TEXT, samples=request.samples, seed=request.seed)
    except data_sets.MissingDataError:
        return None
