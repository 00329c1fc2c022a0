"""Text: three parts of running text, or labelled documents, and the plainest tokens of both."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from theodolite.arguments import either, integer, optional_integer
from theodolite.data.base import Dataset

Part = Literal["train", "valid", "test"]
END, UNKNOWN = "<eos>", "<unk>"


def words(text: str) -> list[str]:
    r"""The words between blanks, and `<eos>` at each line end.

    >>> words("a rose is\na rose\n")
    ['a', 'rose', 'is', '<eos>', 'a', 'rose', '<eos>']
    """
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    return [word for line in lines for word in (*line.split(), END)]


def encode(tokens: Iterable[str], vocabulary: Sequence[str]) -> Tensor:
    """Positions in the vocabulary; what is not in it becomes `<unk>` where there is one, else an error.

    >>> encode("cab", "abc").tolist()
    [2, 0, 1]
    """
    index = {token: i for i, token in enumerate(vocabulary)}
    unknown = index.get(UNKNOWN)
    found = []
    for token in tokens:
        number = index.get(token, unknown)
        if number is None:
            raise ValueError(f"The vocabulary has neither {token!r} nor {UNKNOWN!r}.")
        found.append(number)
    return torch.tensor(found, dtype=torch.int64)


def most_frequent(tokens: Iterable[str], size: int | None = None) -> tuple[str, ...]:
    """The `size` most frequent tokens, ties in alphabetical order; all of them without a size.

    >>> most_frequent("banana", 2)
    ('a', 'n')
    """
    counts = Counter(tokens)
    return tuple(sorted(counts, key=lambda token: (-counts[token], token))[:size])


@dataclass(frozen=True, repr=False)
class Text:
    """Running text in three parts."""

    train: str
    valid: str
    test: str
    name: str = ""
    origin: str = ""

    def __repr__(self) -> str:
        return f"Text({self.name or 'unnamed'}: {len(self.train)}, {len(self.valid)}, {len(self.test)} characters)"

    def part(self, part: Part) -> str:
        """One of the three parts by its name."""
        either("part", part, ("train", "valid", "test"))
        return str(getattr(self, part))

    def alphabet(self) -> tuple[str, ...]:
        """All characters of the three parts, sorted."""
        return tuple(sorted({*self.train, *self.valid, *self.test}))

    def vocabulary(self, size: int | None = None) -> tuple[str, ...]:
        """`<unk>` and the most frequent words of the training part, `size` in all."""
        known = [w for w in most_frequent(words(self.train)) if w != UNKNOWN]
        return (UNKNOWN, *known)[: optional_integer("size", size, least=1)]

    def characters(self, part: Part = "train") -> Tensor:
        """The part as positions in `alphabet()`."""
        return encode(self.part(part), self.alphabet())

    def words(self, part: Part = "train", vocabulary: Sequence[str] | None = None) -> Tensor:
        """The part as positions in a vocabulary, by default `vocabulary()`."""
        return encode(words(self.part(part)), self.vocabulary() if vocabulary is None else vocabulary)


@dataclass(frozen=True, eq=False, repr=False)
class Documents:
    """Short texts with class labels."""

    x_train: tuple[str, ...]
    y_train: Tensor
    x_test: tuple[str, ...]
    y_test: Tensor
    classes: tuple[str, ...]
    name: str = ""
    origin: str = ""

    def __repr__(self) -> str:
        return f"Documents({self.name or 'unnamed'}: {len(self.x_train)} train, {len(self.x_test)} test)"

    def bag_of_words(self, size: int = 2000) -> Dataset:
        """How often each of the `size` most frequent training words (lower case letters and digits) occurs."""
        size = integer("size", size, least=1)
        split = re.compile(r"[a-z0-9]+")
        train, test = ([split.findall(text.lower()) for text in part] for part in (self.x_train, self.x_test))
        index = {word: i for i, word in enumerate(most_frequent((w for text in train for w in text), size))}

        def count(texts: list[list[str]]) -> Tensor:
            counts = torch.zeros(len(texts), len(index))
            for row, text in zip(counts, texts, strict=True):
                known = [index[word] for word in text if word in index]
                row += torch.bincount(torch.tensor(known, dtype=torch.int64), minlength=len(index))
            return counts

        return Dataset(count(train), self.y_train, count(test), self.y_test, self.classes, self.name, self.origin, peak=1.0)
