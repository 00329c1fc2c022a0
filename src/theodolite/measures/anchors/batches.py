"""Batches as the user has them, a call of the model each."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from theodolite.measures.anchors.running_text import Windows, from_ids
from theodolite.measures.anchors.source import IGNORED, Reading, Source, check_ids, following
from theodolite.problem.tensors import map_tensors, named_tensors

#: Samples of inputs that are not tokens per forward pass.
SAMPLES = 256


def is_one_batch(data: Any) -> bool:
    """A mapping, or a tuple (inputs, targets) of tensors."""
    if isinstance(data, Mapping):
        return True
    return isinstance(data, tuple) and len(data) == 2 and isinstance(data[1], Tensor)


def as_tensors(data: Any) -> Any:
    """Numbers in (nested) lists and arrays of NumPy as tensors, alone, in tuples and in mappings; sequences of different
    lengths as a list of tensors.

    >>> as_tensors([[1, 2], [3, 4]])
    tensor([[1, 2],
            [3, 4]])
    """
    if isinstance(data, Tensor):
        return data
    if hasattr(data, "__array__"):
        array = torch.tensor(np.asarray(data))
        return array if array.is_floating_point() or array.dtype == torch.bool else array.long()
    if isinstance(data, Mapping):
        return {name: as_tensors(value) for name, value in data.items()}
    if not isinstance(data, list | tuple) or not data:
        return data
    if all(isinstance(one, numbers.Real) for one in data):
        return torch.tensor(data)
    if isinstance(data, tuple) or not all(isinstance(row, list | tuple) and row for row in data):
        return tuple(map(as_tensors, data)) if isinstance(data, tuple) else data
    if not all(isinstance(one, numbers.Real) for row in data for one in row):
        return data
    rows = [torch.tensor(row) for row in data]
    return torch.stack(rows) if len({len(row) for row in rows}) == 1 else rows


def from_batches(batches: Iterable[Any], model: nn.Module, windows: Windows, *, cut: bool) -> Source:
    """Each batch as one reading; a single large one is cut into smaller ones of the same number of samples."""

    def readings() -> Iterator[Reading]:
        for index, given in enumerate(batches):
            raw = _unpacked(as_tensors(given))
            raw = _rows(raw, index) if isinstance(raw, Mapping) else raw
            if isinstance(raw, Tensor) and raw.ndim == 1 and not raw.is_floating_point():  # a text of its own
                check_ids(raw, model)
                yield from from_ids(raw, windows)
                continue
            for part in _parts(raw, windows) if cut else (raw,):
                yield _reading(part, index, model, windows)

    samples = None
    if isinstance(batches, Sequence):
        samples = sum(next((len(t) for _, t in named_tensors(as_tensors(batch)) if t.ndim), 0) for batch in batches)
        if not samples:
            raise ValueError("data is empty: give at least one batch.")
    return Source(readings, None, samples)


def _unpacked(raw: Any) -> Any:
    """What a DataLoader of a data set without targets wraps in a list of one."""
    return raw[0] if isinstance(raw, tuple | list) and len(raw) == 1 else raw


def _parts(raw: Any, windows: Windows) -> Iterator[Any]:
    size = next((len(t) for _, t in named_tensors(raw) if t.ndim), 0)
    tokens = any(_are_sequences(t) for _, t in named_tensors(raw))
    step = windows.batch_size if tokens else max(windows.batch_size, SAMPLES)

    def cut(t: Tensor, start: int) -> Tensor:
        return t[start : start + step] if t.ndim and len(t) == size else t

    for start in range(0, size, step):
        yield map_tensors(partial(cut, start=start), raw)


def _reading(raw: Any, index: int, model: nn.Module, windows: Windows) -> Reading:
    """One batch: a tensor, a pair (inputs, targets), or a mapping with the names of the model's arguments."""
    if isinstance(raw, Mapping):
        reading = _from_mapping(dict(raw), windows.kind)
    elif isinstance(raw, Tensor):
        follow = windows.kind == "causal" and not raw.is_floating_point() and raw.ndim == 2
        reading = Reading((raw,), {}, None, following(raw) if follow else None)
    elif isinstance(raw, tuple | list) and raw and isinstance(raw[0], Tensor | Mapping):
        target = raw[1] if len(raw) > 1 and isinstance(raw[1], Tensor) and not raw[1].is_floating_point() else None
        inputs = _rows(raw[0], index) if isinstance(raw[0], Mapping) else {}
        reading = Reading(() if inputs else (raw[0],), inputs, None if target is None else target != IGNORED, target)
    else:
        raise TypeError(
            f"A batch must be a tensor, a pair (inputs, targets) or a mapping. Batch {index} is a {type(raw).__name__}."
        )
    if not reading.samples:
        raise ValueError(f"Batch {index} is empty: give at least one sample.")
    for _, ids in named_tensors((reading.args, reading.kwargs.get("input_ids"))):
        if _are_sequences(ids):
            check_ids(ids, model)
    return _without_first(reading, windows, index) if windows.drop_first else reading


def _are_sequences(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and not tensor.is_floating_point() and tensor.ndim == 2


def _rows(fields: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The fields as tensors; those of a single text, which a tokenizer gives without a batch, as one row."""
    for name, value in fields.items():
        if isinstance(value, list) and value and isinstance(value[0], Tensor):
            raise ValueError(
                f"{name!r} of batch {index} holds sequences of different lengths. Pad them (padding=True and "
                "return_tensors='pt' of a Hugging Face tokenizer), or give a list of token ids, a sequence each."
            )
    alone = getattr(fields.get("input_ids"), "ndim", 0) == 1
    return {name: t[None] if alone and isinstance(t, Tensor) and t.ndim == 1 else t for name, t in fields.items()}


def _without_first(reading: Reading, windows: Windows, index: int) -> Reading:
    """Without the first positions of each sequence; those of padding before it do not count."""
    fields = [reading.kwargs.get(name) for name in ("decoder_input_ids", "input_ids")]
    about = [t for _, t in named_tensors((reading.keep, reading.targets, reading.args, fields)) if _are_sequences(t)]
    if not about:
        raise ValueError(
            f"drop_first={windows.drop_first} leaves out the first positions of sequences of tokens (B, T), but batch {index} "
            "has none: leave it out."
        )
    shape = about[0].shape
    present = _present(reading.kwargs.get("attention_mask"))
    if present is None or present.shape != shape or windows.kind == "encoder-decoder":
        present = torch.ones(shape, dtype=torch.bool, device=about[0].device)
    later = present.cumsum(1) > windows.drop_first
    return replace(reading, keep=later if reading.keep is None else later & reading.keep)


def _from_mapping(fields: dict[str, Any], kind: str) -> Reading:
    labels, seen = fields.pop("labels", None), fields.get("attention_mask")
    if kind == "encoder-decoder":
        if labels is not None and "decoder_input_ids" not in fields:
            fields["labels"] = labels  # the model turns them into the decoder's input
        return Reading((), fields, None if labels is None else labels != IGNORED, labels)
    if kind == "masked":
        return Reading((), fields, labels != IGNORED if labels is not None else _present(seen), labels)
    targets = labels if labels is not None else fields.get("input_ids")
    return Reading((), fields, _present(seen), None if targets is None else following(targets, _present(seen)))


def _present(attention_mask: Tensor | None) -> Tensor | None:
    return attention_mask.bool() if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2 else None
