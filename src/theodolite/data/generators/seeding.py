"""Streams of random numbers and checks of arguments for the generators."""

from __future__ import annotations

import hashlib

import torch


def stream(purpose: str, seed: int) -> torch.Generator:
    """A generator of its own for each purpose, so that equal seeds of two of them share no numbers."""
    word = hashlib.blake2b(f"{purpose}:{int(seed)}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(word, "big") >> 1)


def at_least(least: int, **arguments: int) -> None:
    """Refuse counts and sizes below `least`."""
    for name, value in arguments.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}. Got {value}.")


def between(low: float, high: float, **arguments: float) -> None:
    """Refuse numbers outside [low, high]; NaN is outside."""
    for name, value in arguments.items():
        if not low <= value <= high:
            raise ValueError(f"{name} must lie in [{low:g}, {high:g}]. Got {value}.")
