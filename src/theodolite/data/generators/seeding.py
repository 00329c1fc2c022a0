"""Streams of random numbers for the generators."""

from __future__ import annotations

import hashlib

import torch


def stream(purpose: str, seed: int) -> torch.Generator:
    """A generator of its own for each purpose, so that equal seeds of two of them share no numbers."""
    word = hashlib.blake2b(f"{purpose}:{int(seed)}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(word, "big") >> 1)
