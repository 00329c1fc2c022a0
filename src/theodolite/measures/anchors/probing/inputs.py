"""Text, tokens or batches into what a model is called with, and the positions whose states are wanted."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from theodolite.problem.calling import unwrap
from theodolite.problem.tensors import map_tensors, named_tensors

#: Positions of one sequence, or samples of other inputs, that are enough to look at a head.
GLANCE = 16
#: The target of a position that has none.
IGNORED = -100
#: Samples of inputs that are not tokens per forward pass.
SAMPLES = 256
#: The longest window by default (that of GPT-2), where the model allows more or does not say.
CONTEXT = 1024
#: Positions per forward pass, by default.
POSITIONS = 2048
#: Models that number their positions from the padding token on.
SHIFTED_POSITIONS = ("roberta", "camembert", "mpnet", "longformer")


@dataclass(frozen=True, eq=False)
class Reading:
    """One call `model(*args, **kwargs)`.

    `keep` (B, T) marks the positions wanted, None all of them; `targets` (B, T) are the tokens to predict there, −100 where
    there is none.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keep: Tensor | None = None
    targets: Tensor | None = None

    @property
    def samples(self) -> int:
        return _samples((self.args, self.kwargs), 1)

    def glance(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A little of it, enough to look at the head: one sequence, or some rows of other inputs, and few positions."""
        tokens = any(_are_sequences(t) for _, t in named_tensors((self.args, self.kwargs)))
        rows, whole = (1 if tokens else GLANCE), self.samples

        def cut(t: Tensor) -> Tensor:
            t = t[:rows] if t.ndim and len(t) == whole else t
            return t[:, :GLANCE] if _are_sequences(t) else t

        return tuple(map_tensors(cut, self.args)), dict(map_tensors(cut, self.kwargs))


@dataclass(frozen=True, eq=False)
class Source:
    """Readings in order; `total` positions where that is known beforehand, else perhaps the number of `samples`.

    `ends` are the numbers of positions after which a window ends, where one window makes several rows of readings.
    """

    readings: Callable[[], Iterator[Reading]]
    total: int | None = None
    samples: int | None = None
    ends: Tensor | None = None

    def __iter__(self) -> Iterator[Reading]:
        return self.readings()


def _samples(tree: Any, default: int = 0) -> int:
    """How many samples the tensors hold, by the first of them."""
    return next((len(t) for _, t in named_tensors(tree) if t.ndim), default)


def _are_sequences(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and tensor.ndim == 2


def check_ids(ids: Tensor, model: nn.Module) -> None:
    """Refuse tokens that the model has no embedding for, before torch does so without a name."""
    method = getattr(unwrap(model), "get_input_embeddings", None)
    table = method() if callable(method) else None
    if table is None:
        tables = [m for m in unwrap(model).modules() if isinstance(m, nn.Embedding)]
        table = max(tables, key=lambda m: m.num_embeddings, default=None)
    known = getattr(table, "num_embeddings", None)
    if known is not None and len(ids.reshape(-1)) and (int(ids.max()) >= known or int(ids.min()) < 0):
        raise ValueError(
            f"The data hold tokens from {int(ids.min())} to {int(ids.max())}, but {type(model).__name__} embeds 0 .. {known - 1}"
            ": the tokenizer is not that of this model. Encode the text with the model's own tokenizer."
        )


def following(ids: Tensor, present: Tensor | None = None) -> Tensor:
    """The token after each position (B, T), −100 at the end and where it is not `present`."""
    ids = ids if present is None else ids.masked_fill(~present, IGNORED)
    return torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], IGNORED)], dim=1)


# Token ids cut into windows, and shown as causal, masked and encoder-decoder models want to see them.


@dataclass(frozen=True)
class Windows:
    """How token ids are cut and shown: see `anchor_probe`."""

    kind: str
    context: int
    stride: int
    drop_first: int
    batch_size: int
    mask_token: int | None = None
    every: int = 7
    start_token: int | None = None


def from_ids(ids: Tensor, windows: Windows) -> Source:
    """Windows of running text (N,), or rows (B, T) as they are."""
    cut = ((0, block, following(block)) for block in ids.split(windows.batch_size)) if ids.ndim == 2 else _cut(ids, windows)
    blocks = [(max(old, windows.drop_first), block, after) for old, block, after in cut]
    if windows.kind == "masked" and windows.mask_token is None:
        raise ValueError("A masked language model needs the number of its mask token: mask_token=, or a tokenizer that knows it.")
    counts = []  # of the positions of each window
    for old, block, _ in blocks:
        width = block.shape[1] // 2 if windows.kind == "encoder-decoder" else block.shape[1]
        counts += [max(0, width - old)] * len(block)
    if not sum(counts):
        raise ValueError(f"{ids.numel()} tokens leave no position after drop_first={windows.drop_first}: give more text.")
    ends = torch.tensor(counts).cumsum(0) if windows.kind == "masked" else None
    return Source(lambda: chain.from_iterable(_SHOWN[windows.kind](*block, windows) for block in blocks), sum(counts), ends=ends)


def _cut(ids: Tensor, windows: Windows) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Batches of windows: the number of positions at their start that were seen before, the tokens, those that follow each."""
    length, stride = windows.context, windows.stride
    later = following(ids[None])[0]
    whole = (len(ids) - length) // stride + 1 if len(ids) >= length else 0
    if whole:
        rows, after = ids.unfold(0, length, stride), later.unfold(0, length, stride)  # views
        firsts = 1 if stride < length else 0  # nothing before the first window was seen
        parts = [slice(0, firsts)] * bool(firsts)
        parts += [slice(i, min(i + windows.batch_size, whole)) for i in range(firsts, whole, windows.batch_size)]
        for part in parts:
            yield 0 if part.start == 0 else length - stride, rows[part], after[part]
    rest, old = whole * stride, length - stride if whole else 0
    if len(ids) - rest > old:
        yield old, ids[None, rest:], later[None, rest:]


def _new(block: Tensor, old: int) -> Tensor | None:
    """The positions (B, T) from `old` on, None for all."""
    return (torch.arange(block.shape[1]) >= old).repeat(len(block), 1) if old else None


def _causal(old: int, block: Tensor, after: Tensor, windows: Windows) -> Iterator[Reading]:
    yield Reading((block,), {}, _new(block, old), after)


def _masked(old: int, block: Tensor, after: Tensor, windows: Windows) -> Iterator[Reading]:
    """Every position is hidden once, each `every`-th in the same row; all rows of a window come before those of the next."""
    assert windows.mask_token is not None
    places = torch.arange(block.shape[1])
    hidden = places % windows.every == torch.arange(windows.every)[:, None]  # (every, T)
    hidden = hidden[(hidden & (places >= old)).any(1)]
    for rows in torch.arange(len(block) * len(hidden)).split(windows.batch_size):
        window, hide = block[rows // len(hidden)], hidden[rows % len(hidden)]
        yield Reading((window.masked_fill(hide, windows.mask_token),), {}, hide & (places >= old), window)


def _encoder_decoder(old: int, block: Tensor, after: Tensor, windows: Windows) -> Iterator[Reading]:
    """The first part of a window is read, its second half is what the decoder is to say."""
    half = block.shape[1] // 2
    if not half:
        return
    question, answer = block[:, :-half], block[:, -half:]
    start = torch.full_like(answer[:, :1], int(windows.start_token or 0))
    shown = {"input_ids": question, "decoder_input_ids": torch.cat([start, answer[:, :-1]], dim=1)}
    yield Reading((), shown, _new(answer, old), answer)


_SHOWN = {"causal": _causal, "masked": _masked, "encoder-decoder": _encoder_decoder}


# Batches as the user has them, a call of the model each.


def as_tensors(data: Any) -> Any:
    """Numbers in (nested) lists and arrays of NumPy as tensors, alone, in tuples and in mappings.

    Sequences of different lengths become a list of tensors.

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
    if isinstance(data, tuple):
        return tuple(map(as_tensors, data))
    if not all(isinstance(row, list | tuple) and row and all(isinstance(one, numbers.Real) for one in row) for row in data):
        return data
    rows = [torch.tensor(row) for row in data]
    return torch.stack(rows) if len({len(row) for row in rows}) == 1 else rows


def from_batches(batches: Iterable[Any], model: nn.Module, windows: Windows, *, cut: bool) -> Source:
    """Each batch as one reading; a single large one is cut into smaller ones of the same number of samples."""

    def readings() -> Iterator[Reading]:
        for index, given in enumerate(batches):
            raw = as_tensors(given)
            if isinstance(raw, tuple | list) and len(raw) == 1:  # as a DataLoader wraps samples without targets
                raw = raw[0]
            raw = _rows(raw, index) if isinstance(raw, Mapping) else raw
            if isinstance(raw, Tensor) and raw.ndim == 1 and not raw.is_floating_point():  # a text of its own
                check_ids(raw, model)
                yield from from_ids(raw, windows)
                continue
            for part in _parts(raw, windows) if cut else (raw,):
                yield _reading(part, index, model, windows)

    samples = None
    if isinstance(batches, Sequence):
        samples = sum(_samples(as_tensors(batch)) for batch in batches)
        if not samples:
            raise ValueError("data is empty: give at least one batch.")
    return Source(readings, None, samples)


def _parts(raw: Any, windows: Windows) -> Iterator[Any]:
    size = _samples(raw)
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
        follow = windows.kind == "causal" and _are_sequences(raw)
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


# Text, tokens or batches into what a model is called with: which kind of model it is, how long its windows are.


def model_kind(model: nn.Module, mask_token: int | None = None) -> str:
    """Which of "encoder-decoder", "masked", "causal": by the configuration, the name of a Hugging Face class, or a mask token."""
    model = unwrap(model)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return "encoder-decoder"
    return "masked" if mask_token is not None or "MaskedLM" in type(model).__name__ else "causal"


def context_length(model: nn.Module) -> int | None:
    """How many positions the model takes, where it says so."""
    model = unwrap(model)
    config = getattr(model, "config", None)
    for part in (config, getattr(config, "text_config", None)):
        for name in ("max_position_embeddings", "n_positions", "n_ctx"):
            value = getattr(part, name, None)
            if isinstance(value, int) and value > 0:
                shifted = any(word in str(getattr(part, "model_type", "")) for word in SHIFTED_POSITIONS)
                return value - (int(getattr(part, "pad_token_id", None) or 0) + 1) * shifted
    own = (vars(module).get("context") for module in model.modules())
    return next((value for value in own if isinstance(value, int)), None)


def windows_for(
    model: nn.Module,
    tokenizer: Any = None,
    context: int | None = None,
    stride: int | None = None,
    drop_first: int = 0,
    batch_size: int | None = None,
    mask_token: int | None = None,
    every: int = 7,
) -> Windows:
    """The settings with the model's own sizes where none were given."""
    longest = context_length(model)
    if context is None:
        context = min(longest or CONTEXT, CONTEXT)
    elif context < 1 or (longest is not None and context > longest):
        raise ValueError(f"context must be 1 .. {longest or 'the longest the model takes'}. Got {context}.")
    stride = context if stride is None else stride
    if not 1 <= stride <= context:
        raise ValueError(f"stride must be 1 .. context={context}. Got {stride}.")
    if not 0 <= drop_first < context or every < 1 or (batch_size is not None and batch_size < 1):
        raise ValueError(
            f"drop_first must be 0 .. context − 1, every and batch_size 1 or more. Got {drop_first}, {every}, {batch_size}."
        )
    kind = model_kind(model, mask_token)
    if kind == "masked" and mask_token is None:
        mask_token = getattr(tokenizer, "mask_token_id", None)
    config = getattr(unwrap(model), "config", None)
    named = (getattr(config, name, None) for name in ("decoder_start_token_id", "pad_token_id", "bos_token_id"))
    start = next((int(token) for token in named if token is not None), 0)
    size = batch_size if batch_size is not None else max(1, POSITIONS // context)
    return Windows(kind, context, stride, drop_first, size, mask_token, every, start)


def read(model: nn.Module, data: Any, windows: Windows, tokenizer: Any = None) -> Source:
    """`data` as readings: text, ids (N,) or (B, T), one batch, or anything that yields batches."""
    if isinstance(data, list | tuple) and data and all(isinstance(part, str) for part in data):
        data = "\n\n".join(data)
    if isinstance(data, str):
        data = tokenise(data, tokenizer)
    data = as_tensors(data)
    if isinstance(data, Tensor) and data.numel() == 0:
        raise ValueError("data is empty: give at least two tokens of text.")
    if isinstance(data, Tensor) and not data.is_floating_point():
        if data.ndim not in (1, 2):
            raise ValueError(f"Token ids must be (N,), which is cut into windows, or (B, T). Got shape {tuple(data.shape)}.")
        check_ids(data, model)
        return from_ids(data, windows)
    pair = isinstance(data, tuple) and len(data) == 2 and isinstance(data[1], Tensor)  # (inputs, targets)
    if pair or isinstance(data, Tensor | Mapping):
        return from_batches([data], model, windows, cut=True)
    if not isinstance(data, Iterable) or isinstance(data, bytes):
        raise TypeError(
            "data must be text (with tokenizer=), a tensor of token ids, or batches: a list, a DataLoader or another iterable of "
            f"tensors, pairs or mappings. Got {type(data).__name__}."
        )
    return from_batches(data, model, windows, cut=False)


def tokenise(text: str, tokenizer: Any) -> Tensor:
    """The ids (N,) of a text by a Hugging Face tokenizer, an object with `encode`, or a function."""
    if not text.strip():
        raise ValueError("The text is empty.")
    if tokenizer is None:
        raise ValueError("Text needs tokenizer=: a Hugging Face tokenizer, an object with encode(text), or a function to ids.")
    if hasattr(tokenizer, "convert_tokens_to_ids"):  # Hugging Face: no special tokens, no word about the length
        found = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)
    else:
        found = tokenizer.encode(text) if hasattr(tokenizer, "encode") else tokenizer(text)
    if isinstance(found, Mapping):
        found = found["input_ids"]
    ids = torch.as_tensor(getattr(found, "ids", found)).reshape(-1)
    if ids.is_floating_point() or not len(ids):
        raise ValueError(f"The tokenizer must give whole numbers, at least one. Got {ids.dtype} of length {len(ids)}.")
    return ids.long()
