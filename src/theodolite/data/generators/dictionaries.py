"""Planted dictionaries: signals that are sparse combinations of known atoms, plus noise.

Rows are atoms, signals and codes: `signals = codes @ dictionary + noise`. In double precision, because
near-ties between atoms decide otherwise in single.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from theodolite.arguments import at_least, between, choice
from theodolite.data.generators.seeding import stream

Law = Literal["gaussian", "rademacher", "exponential", "student"]


@dataclass(frozen=True, eq=False)
class PlantedSample:
    """Signals (n, dim) with their parts: codes (n, atoms) and noise (n, dim)."""

    signals: Tensor
    codes: Tensor
    noise: Tensor


def planted_dictionary(atoms: int = 200, dim: int = 100, *, seed: int = 0) -> Tensor:
    """Independent Gaussian atoms of unit length, (atoms, dim).

    >>> planted_dictionary(3, 5).norm(dim=1)
    tensor([1., 1., 1.], dtype=torch.float64)
    """
    at_least(1, atoms=atoms, dim=dim)
    rows = torch.randn(atoms, dim, generator=stream("planted_dictionary", seed), dtype=torch.float64)
    lengths: Tensor = rows.norm(dim=1, keepdim=True)
    return rows / lengths


def planted_samples(
    dictionary: Tensor,
    n: int = 1000,
    sparsity: int = 5,
    *,
    noise: float | None = None,
    law: Law = "gaussian",
    scale: float = 1.0,
    normalize: bool = True,
    seed: int = 0,
) -> PlantedSample:
    """n signals of `sparsity` atoms each, chosen uniformly, with Gaussian noise of the given standard deviation.

    Code entries follow `law`, each of unit mean square: Gaussian, random signs, exponential (positive) or
    Student t with 3 degrees of freedom (heavy tails). Then each code is brought to the length `scale`, or, with
    `normalize=False`, only multiplied by it. Without `noise` it is 1/√dim, as strong as a code of length 1.
    """
    if dictionary.ndim != 2:
        raise ValueError(f"dictionary must be (atoms, dim). Got shape {tuple(dictionary.shape)}.")
    choice("law", law, get_args(Law))
    atoms, dim = dictionary.shape
    at_least(1, n=n, sparsity=sparsity)
    if sparsity > atoms:
        raise ValueError(f"sparsity must be at most {atoms}, the number of atoms. Got {sparsity}.")
    level = 1 / math.sqrt(dim) if noise is None else noise
    between(0, math.inf, noise=level, scale=scale)
    generator = stream("planted_samples", seed)
    support = torch.rand(n, atoms, generator=generator, dtype=torch.float64).topk(sparsity).indices
    values = _entries(law, n, sparsity, generator)
    if normalize:
        values = values / values.norm(dim=1, keepdim=True)
    codes = torch.zeros(n, atoms, dtype=torch.float64).scatter_(1, support, scale * values)
    errors = level * torch.randn(n, dim, generator=generator, dtype=torch.float64)
    return PlantedSample(codes @ dictionary.double() + errors, codes, errors)


def _entries(law: Law, n: int, k: int, generator: torch.Generator) -> Tensor:
    """Independent entries (n, k) of unit mean square."""
    gaussian = torch.randn(n, k, generator=generator, dtype=torch.float64)
    if law == "rademacher":
        return torch.where(gaussian < 0, -1.0, 1.0).double()
    if law == "exponential":
        uniform = torch.rand(n, k, generator=generator, dtype=torch.float64)
        return -torch.log1p(-uniform) / math.sqrt(2)
    if law == "student":
        # normal / √(χ²₃/3) has variance 3
        chi2 = torch.randn(n, k, 3, generator=generator, dtype=torch.float64).square().sum(2)
        return gaussian / chi2.sqrt()
    return gaussian
