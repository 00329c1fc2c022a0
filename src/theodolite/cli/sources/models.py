"""Built-in networks by name, their sizes taken from the data."""

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
from theodolite.cli.sources.batches import first_parts, top_label, with_inputs, with_targets
from theodolite.cli.sources.datasets import Source, from_set, load_data
from theodolite.cli.sources.losses import word_of
from theodolite.cli.sources.parts import Parts
from theodolite.cli.sources.words import listed
from theodolite.errors import nearest
from theodolite.models import registry

SIDE = 32  # images too small for a network are enlarged to this
RESNET20 = ("resnet20_cifar10", "cifar10", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class Wish:
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


def named_model(name: str, source: Source | None, wish: Wish) -> Parts:
    """The network called `name` on the data, or on data that suits it where there is none."""
    arguments, said = builder_of(name)
    if "vocabulary" in arguments:
        from theodolite.cli.sources.token_models import token_model

        return token_model(name, arguments, said, source, wish)
    stored = _stored_resnet(name, source, wish)
    if stored is not None:
        return stored
    notes: tuple[str, ...] = ()
    if source is None:
        chosen = RESNET20[1] if name == "ResNet20" and _is_there(RESNET20[1]) else "digits"
        source = load_data(chosen, samples=wish.samples, seed=wish.seed)
        notes = (f"the data are {chosen}, because no --data was given",)
    if source.documents is not None:
        source = from_set(source.documents.bag_of_words(), source.name, wish.samples, wish.seed)
    if source.content is None:
        raise ValueError(f"--model {name} takes numbers, not text like {source.name}. Language networks: GPT-small, BERT-small.")
    return _sized(name, arguments, said, source, wish, notes)


def _sized(
    name: str, arguments: dict[str, Any], said: dict[str, Any], source: Source, wish: Wish, notes: tuple[str, ...]
) -> Parts:
    """Build with the sizes of the data; images that are too small for the network are enlarged."""
    data, outputs = _targets(source, wish)
    flat = "inputs" in arguments
    if flat:
        data = with_inputs(data, lambda x: x.flatten(1))
    try:
        model = _build(name, arguments, said, data, outputs, wish.seed)
    except (ValueError, RuntimeError) as error:
        x = first_parts(data)[0]
        if flat or source.own or x.ndim != 4 or max(x.shape[2:]) >= SIDE:
            raise ValueError(f"--model {name} does not fit the data {source.name}: {str(error).splitlines()[0]}") from error
        data = with_inputs(data, lambda x: F.interpolate(x, size=(SIDE, SIDE), mode="bilinear"))
        model = _build(name, arguments, said, data, outputs, wish.seed)
        sides = "×".join(map(str, x.shape[2:]))
        notes = (*notes, f"the images were enlarged from {sides} to {SIDE}×{SIDE} pixels, because {name} needs that")
    return Parts(
        model,
        name,
        data,
        source.name,
        population=source.population,
        facts={"model": f"{name}, built in", "weights": random_weights(model, wish.seed), "data": source.origin},
        notes=(*notes, *source.notes),
    )


def random_weights(model: nn.Module, seed: int) -> str:
    """The fact about weights that were not loaded."""
    return f"random, initialisation {getattr(model, 'initialisation', 'torch')}, seed {seed}"


def _targets(source: Source, wish: Wish) -> tuple[Any, int]:
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
    return source.content, 1 if word_of(wish.loss) == "bce" and classes == 2 else classes


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


def _stored_resnet(name: str, source: Source | None, wish: Wish) -> Parts | None:
    """ResNet20 with its trained weights on CIFAR-10, where both are there and nothing else was asked for."""
    weights_name, data_name, mean, std = RESNET20
    if name != "ResNet20" or not wish.stored or (source is not None and (source.name != data_name or source.own)):
        return None
    try:
        weights = data_sets.weights(weights_name)
        source = source or load_data(data_name, samples=wish.samples, seed=wish.seed)
    except data_sets.MissingDataError:
        return None
    shift, scale = (torch.tensor(v)[:, None, None] for v in (mean, std))
    return Parts(
        models.resnet20_from(weights),
        name,
        with_inputs(source.content, lambda x: (x - shift) / scale),
        source.name,
        population=source.population,
        facts={"model": f"{name}, built in", "weights": data_sets.where(weights_name).origin, "data": source.origin},
        notes=("the stored weights trained on CIFAR-10 were loaded; images are normalised as they want it", *source.notes),
    )
