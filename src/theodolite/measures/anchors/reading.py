"""Text, tokens or batches into what a model is called with: which kind of model it is, how long its windows are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.measures.anchors.batches import as_tensors, from_batches, is_one_batch
from theodolite.measures.anchors.running_text import Windows, from_ids
from theodolite.measures.anchors.source import Source, check_ids
from theodolite.problem.calling import unwrap

#: The longest window by default (that of GPT-2), where the model allows more or does not say.
CONTEXT = 1024
#: Positions per forward pass, by default.
POSITIONS = 2048
#: Models that number their positions from the padding token on.
SHIFTED_POSITIONS = ("roberta", "camembert", "mpnet", "longformer")


def model_kind(model: nn.Module, mask_token: int | None = None) -> str:
    """ "encoder-decoder", "masked" or "causal": by the configuration, the name of a Hugging Face class, or a mask token given."""
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
    *,
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
    if isinstance(data, Tensor) or is_one_batch(data):
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
