"""Configuration and tokenizer of `stories260k`, a small Llama trained on TinyStories."""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from theodolite.data import catalog
from theodolite.data.base import DamagedDataError
from theodolite.data.loading import find, remedy
from theodolite.data.readers import blaming

BEGIN, FIRST_BYTE = 1, 3  # tokens 0, 1, 2 are unknown, begin and end; 3..258 stand for single bytes
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """Byte-pair encoding by scores.

    A blank goes before the text; single characters, or the bytes of those that are no piece, are merged again
    and again: always the neighbours whose joined piece has the highest score, the leftmost among equals.
    """

    def __init__(self, pieces: Sequence[str], scores: Sequence[float]) -> None:
        if len(pieces) != len(scores):
            raise ValueError(f"pieces and scores must be equally long. Got {len(pieces)} and {len(scores)}.")
        self.pieces, self.scores = tuple(pieces), tuple(map(float, scores))
        self._index: dict[str, int] = {}
        for number, piece in enumerate(self.pieces):
            self._index.setdefault(piece, number)

    def __len__(self) -> int:
        return len(self.pieces)

    def encode(self, text: str, *, begin: bool = True) -> Tensor:
        """The tokens of a text, with token 1 before them unless `begin` is False."""
        tokens = self._merge(self._single(f" {text}")) if text else []
        return torch.tensor([BEGIN] * begin + tokens, dtype=torch.int64)

    def decode(self, tokens: Iterable[int] | Tensor) -> str:
        """The text of tokens; the blank that `encode` put before a text is taken away behind token 1."""
        numbers = [int(token) for token in tokens]
        parts = []
        for token in numbers:
            match = _BYTE.fullmatch(self.pieces[token])
            if token >= FIRST_BYTE:
                parts.append(bytes([int(match[1], 16)]) if match else self.pieces[token].encode())
        text = b"".join(parts).decode("utf-8", "replace")
        return text.removeprefix(" ") if numbers[:1] == [BEGIN] else text

    def _single(self, text: str) -> list[int]:
        tokens = []
        for character in text:
            known = self._index.get(character)
            tokens += [known] if known is not None else [byte + FIRST_BYTE for byte in character.encode()]
        return tokens

    def _merge(self, tokens: list[int]) -> list[int]:
        # A heap of candidate pairs over a linked list: n log n, where looking at all pairs each time is n².
        after = [*range(1, len(tokens)), -1]
        before = list(range(-1, len(tokens) - 1))
        alive = [True] * len(tokens)
        heap: list[tuple[float, int, int, int, int]] = []

        def consider(left: int) -> None:
            right = after[left] if left >= 0 else -1
            if right >= 0:
                joined = self._index.get(self.pieces[tokens[left]] + self.pieces[tokens[right]])
                if joined is not None:
                    heapq.heappush(heap, (-self.scores[joined], left, tokens[left], tokens[right], joined))

        for left in range(len(tokens)):
            consider(left)
        while heap:
            _, left, first, second, joined = heapq.heappop(heap)
            right = after[left]
            if not alive[left] or right < 0 or (tokens[left], tokens[right]) != (first, second):
                continue  # one of the two was merged meanwhile
            tokens[left], alive[right], after[left] = joined, False, after[right]
            if after[left] >= 0:
                before[after[left]] = left
            consider(before[left])
            consider(left)
        return [token for token, lives in zip(tokens, alive, strict=True) if lives]


def stories260k_config(*, folder: str | Path | None = None) -> dict[str, Any]:
    """Sizes of the network under the names of a Llama configuration."""
    return dict(_document(folder)["config"])


def stories260k_tokenizer(*, folder: str | Path | None = None) -> Tokenizer:
    """The tokenizer that the network was trained with."""
    tokens = _document(folder)["tokens"]
    return Tokenizer([piece for piece, _ in tokens], [score for _, score in tokens])


def _document(folder: str | Path | None) -> dict[str, Any]:
    entry = catalog.get("stories260k")
    path = find(entry, folder).paths[1]
    try:
        with blaming(path, "it is not JSON with config and tokens", AttributeError):
            document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            size = document["config"]["vocab_size"]
            if len(document["tokens"]) != size or any(len(token) != 2 for token in document["tokens"]):
                raise ValueError(f"tokens must be {size} pairs of piece and score")
    except DamagedDataError as error:
        raise DamagedDataError(error.path, error.problem, remedy(entry)) from error
    return document
