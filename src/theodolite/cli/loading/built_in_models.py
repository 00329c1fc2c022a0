"""Built-in networks by name, their sizes taken from the data: of numbers, of images, of tokens."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite import data as data_sets
from theodolite import models
from theodolite.cli.loading import text as tokens
from theodolite.cli.loading.batches import first_parts, raw_batches, top_label, with_inputs, with_targets
from theodolite.cli.loading.datasets import SAMPLE_TEXT, STORIES, Share, Source, are_there, from_set, load_data
from theodolite.cli.loading.losses import token_cross_entropy, word_of
from theodolite.cli.loading.module_attribute import reason
from theodolite.cli.loading.subject import Subject
from theodolite.models import registry
from theodolite.problem.tensors import named_tensors
from theodolite.text import listed, nearest
from theodolite.training.fleets.recorder import eval_mode

SIDE = 32  # images too small for a network are enlarged to this
RESNET20 = ("resnet20_cifar10", "cifar10", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class BuildRequest:
    """A network by name and the words that matter when it is built; `stored` allows trained weights where there are some."""

    name: str
    loss: str | None
    samples: int | None
    seed: int
    stored: bool

    @cached_property
    def arguments(self) -> dict[str, inspect.Parameter]:
        """Those of its builder."""
        return builder_of(self.name)[0]

    @cached_property
    def said(self) -> dict[str, Any]:
        """Those that its name already gives."""
        return builder_of(self.name)[1]

    def build(self, **sizes: Any) -> nn.Module:
        """The network with these sizes where its name does not give others."""
        chosen = {key: value for key, value in sizes.items() if key in self.arguments and key not in self.said}
        model: nn.Module = models.build(self.name, **chosen, seed=self.seed)
        return model

    def load(self, data: str) -> Source:
        """The data called so, as many samples as were asked for."""
        return load_data(data, Share(self.samples, self.seed))

    def spec(self, model: nn.Module, data: Any, source: Source, weights: str = "", **more: Any) -> Subject:
        """The network on the data, with where both come from."""
        random = f"random, initialisation {getattr(model, 'initialisation', 'torch')}, seed {self.seed}"
        facts = {"model": f"{self.name}, built in", "weights": weights or random, "data": source.origin}
        return Subject(model, self.name, data, source.name, population=source.population, facts=facts, **more)


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


def named_model(request: BuildRequest, source: Source | None) -> Subject:
    """The network asked for on the data, or on data that suits it where there is none."""
    name = request.name
    if "vocabulary" in request.arguments:
        return token_model(request, source)
    stored = _stored_resnet(request, source)
    if stored is not None:
        return stored
    notes: tuple[str, ...] = ()
    if source is None:
        chosen = RESNET20[1] if name == "ResNet20" and are_there(RESNET20[1]) else "digits"
        source = request.load(chosen)
        notes = (f"the data are {chosen}, because no --data was given",)
    if source.documents is not None:
        source = from_set(source.documents.bag_of_words(), source.name, Share(request.samples, request.seed))
    if source.content is None:
        raise ValueError(f"--model {name} takes numbers, not text like {source.name}. Language networks: GPT-small, BERT-small.")
    return _sized(request, source, notes)


def _sized(request: BuildRequest, source: Source, notes: tuple[str, ...]) -> Subject:
    """Build with the sizes of the data; images that are too small for the network are enlarged."""
    name = request.name
    data, outputs = _targets(source, request)
    flat = "inputs" in request.arguments
    if flat:
        data = with_inputs(data, lambda x: x.flatten(1))
    try:
        model = _build(request, data, outputs)
    except (ValueError, RuntimeError) as error:
        x = first_parts(data)[0]
        if flat or source.own or x.ndim != 4 or max(x.shape[2:]) >= SIDE:
            raise ValueError(f"--model {name} does not fit the data {source.name}: {str(error).splitlines()[0]}") from error
        data = with_inputs(data, lambda x: F.interpolate(x, size=(SIDE, SIDE), mode="bilinear"))
        model = _build(request, data, outputs)
        sides = "×".join(map(str, x.shape[2:]))
        notes = (*notes, f"the images were enlarged from {sides} to {SIDE}×{SIDE} pixels, because {name} needs that")
    return request.spec(model, data, source, notes=(*notes, *source.notes))


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


def _build(request: BuildRequest, data: Any, outputs: int) -> nn.Module:
    """Build the network and let it try two samples, so that a misfit shows here."""
    x = first_parts(data)[0]
    shape = tuple(x.shape[1:])
    if "inputs" not in request.arguments and len(shape) != 3 and not (request.name.startswith("NTK-CNN") and len(shape) == 2):
        raise ValueError(f"it takes images (channels, height, width); the examples have shape {shape}.")
    model = request.build(inputs=x[0].numel(), image=shape, channels=shape[0], outputs=outputs, classes=outputs)
    with torch.no_grad(), eval_mode(model):
        model(x[:2].to(next(model.parameters()).dtype))
    return model


def _stored_resnet(request: BuildRequest, source: Source | None) -> Subject | None:
    """ResNet20 with its trained weights on CIFAR-10, where both are there and nothing else was asked for."""
    weights_name, data_name, mean, std = RESNET20
    if request.name != "ResNet20" or not request.stored or (source is not None and (source.name != data_name or source.own)):
        return None
    try:
        weights = data_sets.weights(weights_name)
        source = source or request.load(data_name)
    except data_sets.MissingDataError:
        return None
    shift, scale = (torch.tensor(v)[:, None, None] for v in (mean, std))
    data = with_inputs(source.content, lambda x: (x - shift) / scale)
    notes = ("the stored weights trained on CIFAR-10 were loaded; images are normalised as they want it", *source.notes)
    return request.spec(models.resnet20_from(weights), data, source, data_sets.where(weights_name).origin, notes=notes)


@dataclass(frozen=True)
class _Vocabulary:
    """How text becomes tokens, how many there are, and the token that hides another one."""

    size: int
    encode: tokens.Encode | None = None
    note: str = ""

    @property
    def mask(self) -> int:
        return self.size - 1


def token_model(request: BuildRequest, source: Source | None) -> Subject:
    """A language network on text (the next token, for BERT the hidden ones), or on token data of the user's own."""
    name = request.name
    if source is not None and source.text is None:
        if source.documents is not None or source.content is None:
            raise ValueError(f"--model {name} takes running text or tokens, not labelled texts like {source.name}.")
        return _on_own_data(request, source)
    if source is None and name == STORIES and are_there(STORIES, SAMPLE_TEXT):
        source = request.load(SAMPLE_TEXT)  # the text that it knows
    masked = "BERT" in name
    words = _vocabulary(request, source, masked=masked)
    model, weights, notes = _with_weights(request, words.size)
    context = int(request.said.get("context", request.arguments["context"].default))
    length = min(context, tokens.LENGTH) + (0 if masked else 1)  # one token more: the first is never a target
    if source is None:
        source = Source("random tokens", f"random tokens, seed {request.seed}")
        count = request.samples or tokens.RANDOM_SEQUENCES
        ids = tokens.random_tokens(words.size, count, length, request.seed, avoid=(words.mask,) if masked else ())
        notes = (*notes, "the data are random tokens, because no --data was given")
    else:
        assert source.text is not None
        assert words.encode is not None
        count = request.samples or tokens.TEXT_SEQUENCES
        ids, population = tokens.sequences(source.text.train, words.encode, length, count, source.name)
        notes = (*notes, *source.notes, *((words.note,) if words.note else ()))
        source = replace(source, population=population)
    data = tokens.masked(ids, words.mask, request.seed) if masked else tokens.next_tokens(ids)
    return request.spec(model, data, source, weights, loss=token_cross_entropy, notes=notes)


def _vocabulary(request: BuildRequest, source: Source | None, *, masked: bool) -> _Vocabulary:
    name, said = request.name, request.said
    size = int(said.get("vocabulary", request.arguments["vocabulary"].default))
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


def _on_own_data(request: BuildRequest, source: Source) -> Subject:
    """A vocabulary and a context that are large enough for the user's tokens."""
    found = [t for batch in raw_batches(source.content) for _, t in named_tensors(batch)]
    if not found or any(t.is_floating_point() or t.ndim < 2 for t in found):
        raise ValueError(
            f"--model {request.name} takes integer tokens and targets of shape (sequences, tokens); --data {source.name} differs."
        )
    wanted = {"vocabulary": 1 + max(int(t.max()) for t in found), "context": max(int(t.shape[1]) for t in found)}
    sizes = {key: max(value, request.arguments[key].default) for key, value in wanted.items() if key not in request.said}
    return request.spec(request.build(**sizes), source.content, source, loss=token_cross_entropy, notes=source.notes)


def _with_weights(request: BuildRequest, vocabulary: int) -> tuple[nn.Module, str, tuple[str, ...]]:
    """The network, with its trained weights where there are some, where these come from, and a note where they are missing."""
    notes: tuple[str, ...] = ()
    if request.name == STORIES and request.stored:
        try:
            model = models.stories260k_from(data_sets.weights(STORIES), data_sets.stories260k_config())
            return model, data_sets.where(STORIES).origin, ()
        except data_sets.MissingDataError as error:
            notes = (f"weights are random, because the trained ones are not there ({reason(error)})",)
    return request.build(vocabulary=vocabulary), "", notes
