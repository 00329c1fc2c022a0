"""The anchor probe of a whole model: run it over the data, catch what enters the output layer, hand it to the stream."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.measures.anchors.probing.heads import OutputHead, find_head, states_of
from theodolite.measures.anchors.probing.inputs import Reading, Source, read, windows_for
from theodolite.measures.anchors.probing.probe import AnchorProbe, summarise
from theodolite.measures.anchors.probing.streams import ProbeStream
from theodolite.problem.calling import unwrap
from theodolite.problem.state_guard import left_as_found
from theodolite.problem.tensors import map_tensors, named_tensors
from theodolite.progress import counting


def anchor_probe(
    model: nn.Module,
    data: Any,
    *,
    top: int | Iterable[int] | None = None,
    tokenizer: Any = None,
    head: str | nn.Module | None = None,
    exclude: int | Iterable[int] | Tensor | None = None,
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

    Args:
        model: a Hugging Face causal or masked language model or encoder-decoder, or any module with a linear output layer.
        data: text (with `tokenizer`), token ids (N,) or (B, T), or batches (tensors, pairs (inputs, targets), mappings) from a
            list, a DataLoader or any iterable; numbers may also be in lists or NumPy arrays, and a list of ids (N,) is one of
            texts. Text is cut into windows. A masked model sees each window `every` times, with each `every`-th token replaced by
            `mask_token`; an encoder-decoder reads half of a window and predicts the other half. A tuple of two tensors is always
            (inputs, targets), also if both are token ids: put two batches of ids into a list. The targets of a pair are taken as
            they are, one per position (−100: leave it out), not shifted; ids alone, and `labels` in mappings for a causal model,
            are.
        top: numbers of most probable words to remove; by default 0, 10, 100, 1000, 10000, or the same shares of other
            vocabularies.
        head: the output layer or its name, where it is not found by itself.
        exclude: token numbers that are in no bulk (label words), or a mask over the vocabulary. The bulk is what is neither
            excluded nor among the most probable of all words, excluded ones counted.
        anchors: with K > 1 also K anchors, each for a cluster of positions (`AnchorProbe.clusters`).
        held_out: the share of the positions, the last ones, that the held-out error is from; of each batch where the length of
            the data is not known beforehand. Windows of a masked model are held out as a whole.
        context, stride: length of the windows that running text is cut into (the model's own, at most 1024) and distance of their
            starts (the length; less, and only new positions count). Rows (B, T) and batches stay as they are.
        drop_first: positions to leave out at the start of each window or sequence.
        max_positions: stop after so many.
        batch_size: windows, or samples of other inputs, per forward pass; rows of windows for a masked model.
        restrict_vocab: use only so many rows of the output layer (`len(tokenizer)` leaves out padding rows).
        chunk: positions whose logits are held at a time.
        sample: positions kept for quantiles, largest errors and clusters; 8192 where they take at most 2²⁵ numbers.

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
        caught = states_of(model, layer.module, first.args, first.kwargs, layer.call)
        total = _length(source, first, math.prod(caught.shape[:-1]))
        if total is not None and max_positions is not None:
            total = min(total, max_positions)
        _check_places(first, caught, drop_first)
        known: dict[str, Any] = {"total": total, "ends": source.ends, "cap": layer.cap}
        given: dict[str, Any] = {"held_out": held_out, "chunk": chunk, "sample": sample, "seed": seed}
        stream = ProbeStream(layer.weight, layer.bias, top, exclude, **given, **known)
        with counting("positions", progress=progress, total=total) as advance:
            for reading, entered in _passes(model, layer, first, caught, readings):
                states, targets, places = _wanted(layer, reading, entered, _room(stream, max_positions))
                stream.add(states, targets, places)
                advance(len(states))
                if _room(stream, max_positions) == 0:
                    break
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


def _passes(
    model: nn.Module, layer: OutputHead, first: Reading, caught: Tensor, readings: Iterator[Reading]
) -> Iterator[tuple[Reading, Tensor]]:
    """Readings with what enters the head; that of the first is known already."""
    yield first, caught
    del first, caught
    for reading in readings:
        yield reading, states_of(model, layer.module, reading.args, reading.kwargs, layer.call)


def _room(stream: ProbeStream, limit: int | None) -> int | None:
    return None if limit is None else limit - stream.positions


def _wanted(layer: OutputHead, reading: Reading, caught: Tensor, room: int | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """States (N, d), targets and places in the windows of the positions of a reading that are wanted, `room` at most."""
    shape = caught.shape[:-1]
    places = torch.arange(shape[-1], device=caught.device).expand(shape).reshape(-1)
    states, targets, keep = layer.states(caught), _aligned(reading.targets, shape), _aligned(reading.keep, shape)
    if keep is not None:
        states, places, targets = states[keep], places[keep], None if targets is None else targets[keep]
    return states[:room], None if targets is None else targets[:room], places[:room]


def _length(source: Source, first: Reading, positions: int) -> int | None:
    """Positions that the data will give, judged by the first reading, which has so many before any is left out.

    None if it does not tell. Only readings that can be looked at twice are asked.
    """
    if source.total is not None and _per_position(first, positions):
        return source.total
    if source.total is None and source.samples is None:
        return None
    readings = list(source)
    if not _per_position(first, positions) and positions == first.samples:  # one state per sequence
        return sum(r.samples for r in readings)
    if all(r.keep is None for r in readings):
        widths = {tuple(t.shape[1:]) for r in readings for _, t in named_tensors((r.args, r.kwargs)) if t.ndim}
        return round(sum(r.samples for r in readings) * positions / first.samples) if len(widths) == 1 else None
    if first.keep is not None and first.keep.numel() == positions and all(r.keep is not None for r in readings):
        return sum(int(r.keep.sum()) for r in readings if r.keep is not None)
    return None


def _per_position(reading: Reading, positions: int) -> bool:
    """Whether there are as many states as positions that the reading speaks of."""
    spoken = reading.targets if reading.targets is not None else reading.keep
    return spoken is not None and spoken.numel() == positions


def _check_places(reading: Reading, caught: Tensor, drop_first: int) -> None:
    if drop_first and reading.keep is not None and _aligned(reading.keep, caught.shape[:-1]) is None:
        raise ValueError(
            f"drop_first={drop_first} leaves out positions of sequences {tuple(reading.keep.shape)}, but the head reads "
            f"{tuple(caught.shape)}, not a state for each of them: leave it out."
        )


def _aligned(tensor: Tensor | None, shape: torch.Size) -> Tensor | None:
    """One entry per position, flat; None where the tensor is about something else."""
    return tensor.reshape(-1) if tensor is not None and tensor.numel() == math.prod(shape) else None


def _check_tokenizer(tokenizer: Any, layer: OutputHead) -> None:
    size = len(tokenizer) if hasattr(tokenizer, "__len__") else None
    if size is not None and size > len(layer.weight):
        raise ValueError(
            f"The tokenizer knows {size} tokens, but the output layer has {len(layer.weight)} rows: it is not that of this "
            "model. Load both from one checkpoint, or resize the model's embeddings."
        )
