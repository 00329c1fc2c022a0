"""Readers of text: running text in one or three files, and the .csv of AG NEWS."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import torch

from theodolite.data.base import DamagedDataError
from theodolite.data.files import blaming, read_text
from theodolite.data.text import Documents, Text


def read_three(train: Path, valid: Path, test: Path) -> Text:
    """One file for each part."""
    return Text(read_text(train), read_text(valid), read_text(test))


def read_one(path: Path) -> Text:
    """One file: its first 90 % of characters to train on, the next 5 % to validate, the rest to test."""
    text = read_text(path)
    first, second = len(text) * 90 // 100, len(text) * 95 // 100
    return Text(text[:first], text[first:second], text[second:])


def read_ag_news(train: Path, test: Path, *, classes: tuple[str, ...]) -> Documents:
    """Quoted lines `class, title, description`, classes from 1; title and description are joined by a blank."""
    parts = []
    for path in (train, test):
        labels, texts = [], []
        with blaming(path, "it is not a .csv", csv.Error):
            rows = list(csv.reader(io.StringIO(read_text(path), newline="")))
        for number, row in enumerate(rows, 1):
            if len(row) != 3 or row[0] not in map(str, range(1, len(classes) + 1)):
                problem = f"record {number} must be a class of 1..{len(classes)}, a title and a description, it is {row[:3]!r}"
                raise DamagedDataError(path, problem)
            labels.append(int(row[0]) - 1)
            texts.append(f"{row[1]} {row[2]}")
        parts.append((tuple(texts), torch.tensor(labels, dtype=torch.int64)))
    return Documents(*parts[0], *parts[1], classes)
