"""The anchor probe of a whole model: run it over the data, catch what enters the output layer, hand it to the stream."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.measures.anchors.heads import OutputHead, find_head, states_of
from theodolite.measures.anchors.probe import AnchorProbe, new_stream, summarise
from theodolite.measures.anchors.reading import Reading, Source, read, windows_for
from theodolite.measures.anchors.stream import ProbeStream
from theodolite.problem.calling import left_as_found, unwrap
from theodolite.problem.tensors import map_tensors, named_tensors
from theodolite.progress import counting


def anchor_probe(
    model: nn.Module,
    data: Any,
    *,
    top: int | Iterable[int] | None = None,
    tokenizer: Any = None,
    head: str | nn.Module | None = None,
    exclude: Iterable[int] | Tensor | None = None,
    anchors: int = 1,
    held_out: float = 0.2,
    context: int | None = None,
    stride: int | None = None,
    drop_first: int = 0,
    max_positions: int | None = None,
    batch_size: int | None = None,
    restrict_vocab: int | None = None,
    chunk: int | None = None,
    mask_token: int | None = None,
    every: int = 7,
    geometry: bool = True,
    sample: int | None = None,
    seed: int = 0,
    progress: bool | None = False,
) -> AnchorProbe:
    """Whether the log bulk partition function of a language model is linear in its last hidden state: ⟨h, v₀⟩ ≈ log Z_bulk.

    h is what enters the output layer, whatever the model does before. The model runs in eval mode, once over the data, and is
    left as found; logits are computed in float32 or better and never held for more than a chunk of positions; sums are in
    float64. Memory does not grow with the data.

    Parameters
    ----------
    model : a Hugging Face causal or masked language model or encoder-decoder, or any module with a linear output layer.
    data : text (with `tokenizer`), token ids (N,) or (B, T), or batches (tensors, pairs (inputs, targets), mappings) from a list,
        a DataLoader or any iterable. Text is cut into windows. A masked model sees each window `every` times, with each
        `every`-th token replaced by `mask_token`; an encoder-decoder reads half of a window and predicts the other half.
    top : numbers of most probable words to remove; by default 0, 10, 100, 1000, 10000, or the same shares of other vocabularies.
    head : the output layer or its name, where it is not found by itself.
    exclude : token numbers that are in no bulk (label words).
    anchors : with K > 1 also K anchors, each for a cluster of positions (`AnchorProbe.clusters`).
    held_out : the share of the positions, the last ones, that the held-out error is from; of each batch where the length of the
        data is not known beforehand.
    context, stride, drop_first : length of the windows (the model's own, at most 1024), distance of their starts (the length;
        less, and only new positions count), and positions at their start to leave out.
    max_positions : stop after so many.
    batch_size : windows, or samples of other inputs, per forward pass.
    restrict_vocab : use only so many rows of the output layer (`len(tokenizer)` leaves out padding rows).
    chunk : positions whose logits are held at a time.
    sample : positions kept for quantiles, largest errors and clusters; 8192 where they take at most 2²⁵ numbers.

    >>> model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 50))
    >>> probe = anchor_probe(model, torch.randn(400, 6), top=(0, 5))
    >>> probe.positions, probe.biased, tuple(probe.vectors.shape)
    (400, True, (2, 9))
    """
    began = time.perf_counter()
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module. Got {type(model).__name__}; states and weights go to probe_states.")
    if max_positions is not None and max_positions < 1:
        raise ValueError(f"max_positions must be 1 or more. Got {max_positions}.")
    model = unwrap(model)
    windows = windows_for(
        model,
        tokenizer,
        context=context,
        stride=stride,
        drop_first=drop_first,
        batch_size=batch_size,
        mask_token=mask_token,
        every=every,
    )
    with left_as_found(model, "eval"), torch.no_grad(), _outside_embeddings(model):
        source = read(model, data, windows, tokenizer)
        readings = _placed(source, model)
        first = next(readings, None)
        if first is None:
            raise ValueError("data is empty: give at least one batch.")
        layer = find_head(model, *first.glance(), head)
        _check_tokenizer(tokenizer, layer)
        layer = layer.restricted(restrict_vocab)
        total = _least(source.total, max_positions)
        stream = new_stream(layer.weight, layer.bias, top, exclude, held_out, chunk, sample, seed, total=total)
        with counting("positions", progress=progress, total=total) as advance:
            for states, targets, places in _states(model, layer, first, readings, source, max_positions, stream):
                stream.add(states, targets, places)
                advance(len(states))
    return summarise(stream, anchors, geometry, seed, began, layer.notes)


@contextmanager
def _outside_embeddings(model: nn.Module) -> Iterator[None]:
    """Torch's word for a number that has no row in an embedding is no help."""
    try:
        yield
    except IndexError as error:
        if "index out of range" not in str(error):
            raise
        tables = ", ".join(f"{name} {m.num_embeddings}" for name, m in model.named_modules() if isinstance(m, nn.Embedding))
        raise ValueError(
            f"A token or a position lies outside the embeddings of {type(model).__name__} (rows: {tables or 'unknown'}). Encode "
            "the text with the model's own tokenizer; context= shortens the windows."
        ) from error


def _placed(source: Source, model: nn.Module) -> Iterator[Reading]:
    """Readings on the device of the model."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def move(tree: Any) -> Any:
        return map_tensors(lambda t: t.to(device), tree)

    for r in source:
        yield Reading(move(r.args), dict(move(r.kwargs)), move(r.keep), move(r.targets))


def _states(
    model: nn.Module,
    layer: OutputHead,
    first: Reading,
    readings: Iterator[Reading],
    source: Source,
    limit: int | None,
    stream: ProbeStream,
) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
    """States (N, d), targets and places in the windows of the positions wanted, reading by reading."""
    reading: Reading | None = first
    while reading is not None and (limit is None or stream.positions < limit):
        caught = states_of(model, layer.module, reading.args, reading.kwargs)
        shape = caught.shape[:-1]
        if stream.cut is None and source.samples is not None and reading is first:
            total = _least(_length(source, reading, math.prod(shape)), limit)
            stream.cut = None if total is None else math.ceil((1 - stream.held_out) * total)
        places = torch.arange(shape[-1], device=caught.device).expand(shape).reshape(-1)
        states, targets = layer.states(caught), _aligned(reading.targets, shape)
        keep = _aligned(reading.keep, shape)
        if keep is not None:
            states, places, targets = states[keep], places[keep], None if targets is None else targets[keep]
        room = len(states) if limit is None else limit - stream.positions
        yield states[:room], None if targets is None else targets[:room], places[:room]
        reading = next(readings, None)


def _length(source: Source, first: Reading, positions: int) -> int | None:
    """Positions that batches will give, judged by the first, which has so many before any is left out; None if it does not tell.

    Only batches that can be looked at twice are asked.
    """
    readings = list(source)
    if all(r.keep is None for r in readings):
        widths = {tuple(t.shape[1:]) for r in readings for _, t in named_tensors((r.args, r.kwargs)) if t.ndim}
        return round(sum(r.samples for r in readings) * positions / first.samples) if len(widths) == 1 else None
    if first.keep is not None and first.keep.numel() == positions and all(r.keep is not None for r in readings):
        return sum(int(r.keep.sum()) for r in readings if r.keep is not None)
    return None


def _aligned(tensor: Tensor | None, shape: torch.Size) -> Tensor | None:
    """One entry per position, flat; None where the tensor is about something else."""
    return tensor.reshape(-1) if tensor is not None and tensor.numel() == math.prod(shape) else None


def _least(total: int | None, limit: int | None) -> int | None:
    return total if total is None or limit is None else min(total, limit)


def _check_tokenizer(tokenizer: Any, layer: OutputHead) -> None:
    size = len(tokenizer) if hasattr(tokenizer, "__len__") else None
    if size is not None and size > len(layer.weight):
        raise ValueError(
            f"The tokenizer knows {size} tokens, but the output layer has {len(layer.weight)} rows: it is not that of this "
            "model. Load both from one checkpoint, or resize the model's embeddings."
        )
