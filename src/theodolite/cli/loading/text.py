"""Token sequences: from running text, or random ones; masked or not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

IGNORED = -100
RANDOM_SEQUENCES, TEXT_SEQUENCES, LENGTH = 8, 16, 64
MASKED_SHARE = 0.15

Encode = Callable[[str], Sequence[int]]


def byte_encoder(vocabulary: int) -> Encode:
    """Bytes modulo the vocabulary: for a network whose tokenizer is not known."""
    return lambda text: [byte % vocabulary for byte in text.encode()]


def character_encoder(alphabet: Sequence[str]) -> Encode:
    """Positions in an alphabet, which must hold every character."""
    index = {character: i for i, character in enumerate(alphabet)}
    return lambda text: [index[character] for character in text]


def sequences(text: str, encode: Encode, length: int, samples: int, name: str) -> tuple[Tensor, int | None]:
    """`samples` rows of `length` tokens spread evenly over the text, and about how many rows there are in all.

    A text too short for so many gives fewer rows, one too short for a single row gives a shorter one.
    """
    stride = len(text) // samples
    rows, used = [], 0.0
    for i in range(samples):
        begin = i * stride
        begin += 0 if begin == 0 else text[begin : begin + 40].find(" ") + 1  # a row does not begin within a word
        tokens, characters = encoded(text[begin : (i + 1) * stride], encode, length)
        if len(tokens) < length:
            return _cut_up(text, encode, length, samples, name)
        rows.append(tokens[:length])
        used += characters * length / len(tokens)
    total = math.floor(len(text) / (used / samples))
    return torch.tensor(rows, dtype=torch.int64), total if total > samples else None


def encoded(text: str, encode: Encode, count: int) -> tuple[list[int], int]:
    """More than `count` tokens from the start of a text, or all it has, and how many characters they stand for."""
    width = 8 * count
    while True:
        tokens = list(encode(text[:width]))
        if len(tokens) > count or width >= len(text):
            return tokens, min(width, len(text))
        width *= 2


def _cut_up(text: str, encode: Encode, length: int, samples: int, name: str) -> tuple[Tensor, int | None]:
    tokens = list(encode(text))
    if len(tokens) < 2:
        raise ValueError(f"--data {name}: the text gives {len(tokens)} tokens; at least 2 are needed.")
    length = min(length, len(tokens))
    whole = len(tokens) // length
    count = min(samples, whole)
    return torch.tensor(tokens[: count * length], dtype=torch.int64).reshape(count, length), whole if whole > count else None


def random_tokens(vocabulary: int, count: int, length: int, seed: int, avoid: Iterable[int | None] = ()) -> Tensor:
    """Rows of uniformly random tokens, without those that have a special meaning."""
    special = set(avoid)
    allowed = [token for token in range(vocabulary) if token not in special]
    if len(allowed) < 2:
        allowed = list(range(vocabulary))
    generator = torch.Generator().manual_seed(seed)
    return torch.tensor(allowed)[torch.randint(len(allowed), (count, length), generator=generator)]


def masked(ids: Tensor, mask: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rows with 15 % of the tokens (at least one) replaced by `mask`, and labels that are -100 everywhere else."""
    count = max(1, round(MASKED_SHARE * ids.shape[1]))
    draw = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed))
    hidden = torch.zeros_like(ids, dtype=torch.bool).scatter(1, draw.argsort(dim=1)[:, :count], True)
    return ids.masked_fill(hidden, mask), ids.masked_fill(~hidden, IGNORED)


def next_tokens(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and the tokens that follow them."""
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
