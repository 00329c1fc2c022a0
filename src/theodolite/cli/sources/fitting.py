"""Data sets fitted to a network that was not built for them: flat images, targets as numbers, text as tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.cli.sources import text as tokens
from theodolite.cli.sources.batches import first_parts, with_inputs, with_targets
from theodolite.cli.sources.datasets import Source
from theodolite.problem.calling import main_output


def trial(model: nn.Module, inputs: Any) -> Tensor | None:
    """The output for two samples, in eval mode and without a trace; None where the model refuses them."""
    if not isinstance(inputs, Tensor):
        return None
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model.eval()
            return main_output(model(inputs[:2]))
    except Exception:  # any refusal is told in full when the survey calls the model
        return None
    finally:
        for module, training in modes:
            module.training = training


def fit_inputs(model: nn.Module, source: Source) -> Source:
    """Flat images for a model that wants them; other data as it is."""
    if source.own:
        return source
    x = first_parts(source.content)[0]
    if not isinstance(x, Tensor) or x.ndim < 3 or trial(model, x) is not None or trial(model, x.flatten(1)) is None:
        return source
    flat = with_inputs(source.content, lambda t: t.flatten(1))
    return replace(source, content=flat, notes=(*source.notes, "the images were flattened, because the model takes vectors"))


def fit_targets(model: nn.Module, data: Any) -> tuple[Any, str]:
    """Targets for a loss that compares number by number: class labels one-hot, numbers as a column where there is one output."""
    inputs, target = first_parts(data)
    output = trial(model, inputs)
    if not isinstance(target, Tensor) or output is None:
        return data, ""
    kind, columns = output.dtype, output.shape[-1]
    if target.ndim == 1 and output.ndim == 2 and columns > 1 and not target.is_floating_point():
        return with_targets(data, lambda t: F.one_hot(t, columns).to(kind)), "class labels were turned into vectors of 0 and 1"
    if target.ndim == 1 and output.ndim == 2 and columns == 1:
        return with_targets(data, lambda t: t.unsqueeze(1).to(kind)), "the targets were turned into one column"
    if not target.is_floating_point():
        return with_targets(data, lambda t: t.to(kind)), "the targets were turned into real numbers"
    return data, ""


def text_for_any_model(model: nn.Module, source: Source, samples: int | None) -> Source:
    """Text as bytes for a network with an embedding: it is to tell the next one."""
    embedding = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if embedding is None or source.text is None:
        raise ValueError(f"--data {source.name} is text, but the model has no embedding of tokens. Name data of numbers.")
    count = samples or tokens.TEXT_SEQUENCES
    encode = tokens.byte_encoder(embedding.num_embeddings)
    ids, population = tokens.sequences(source.text.train, encode, tokens.LENGTH, count, source.name)
    note = "tokens are bytes modulo the vocabulary, and each is to tell the next: the model's own tokenizer is not known"
    return replace(source, content=tokens.next_tokens(ids), population=population, notes=(*source.notes, note))
