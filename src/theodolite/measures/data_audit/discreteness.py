"""Exact copies among samples, and whether inputs have so few values that samples coincide by chance."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from theodolite.measures.data_audit.views import NUMBERS, parts_of, sample_tensors
from theodolite.problem import Batch, Problem

#: Columns whose values are counted; more would tell the same.
COLUMNS = 200


def sample_keys(problem: Problem) -> Tensor:
    """A whole number for each sample, equal where all its inputs are equal bit by bit, and else different.

    >>> x = torch.tensor([[1.0, 2.0], [0.5, 2.0], [1.0, 2.0]])
    >>> keys = sample_keys(Problem(torch.nn.Linear(2, 1), torch.nn.MSELoss(), (x, torch.zeros(3, 1))))
    >>> bool(keys[0] == keys[2]), bool(keys[0] == keys[1])
    (True, False)
    """
    return torch.cat([_keys(batch) for batch in problem.data])


def _keys(batch: Batch) -> Tensor:
    total = torch.zeros(batch.size, dtype=torch.long)
    for place, t in enumerate(sample_tensors(batch)):
        flat = t.detach().reshape(batch.size, -1).cpu()
        if flat.is_complex():
            flat = torch.view_as_real(flat).flatten(1)
        if not flat.shape[1]:
            continue
        generator = torch.Generator().manual_seed(place)
        # Products of whole numbers that overflow are exact modulo 2^64, in whatever order they are added.
        factors = 2 * torch.randint(2**62, (flat.shape[1],), generator=generator) + 1
        step = max(1, NUMBERS // (4 * flat.shape[1]))
        total += torch.cat([(_bits(part) * factors).sum(1) for part in flat.split(step)])
    return total


def _bits(values: Tensor) -> Tensor:
    """Numbers as whole ones: real ones by their bits, with one zero instead of two."""
    if not values.is_floating_point():
        return values.long()
    if values.dtype != torch.float64:
        return (values.float() + 0.0).contiguous().view(torch.int32).long()
    bits = (values + 0.0).contiguous().view(torch.int64)
    return bits ^ (bits >> 32 & 0xFFFFFFFF)  # simple numbers end in zeros, of which products would keep as many


def coincide(problem: Problem, rows: Tensor) -> bool:
    """Whether the inputs of samples take so few values that equal ones are no surprise: categories, counts, flags.

    The entropies of the columns add up to at most `3 ln n` nats, and no column has a value of its own for most samples.
    """
    parts = [
        torch.cat([_bits(t.reshape(b.size, -1)[:, :COLUMNS].cpu()) for t in sample_tensors(b)], 1)
        for b in parts_of(problem, rows)
    ]
    if not parts or len({part.shape[1] for part in parts}) > 1:
        return False
    values = torch.cat(parts).unique(dim=0)
    n = len(values)
    room = 3 * math.log(max(2, len(rows)))
    for column in values.T:
        counts = column.unique(return_counts=True)[1].double()
        if len(counts) > max(2, n // 2):
            return False
        shares = counts / n
        room += float((shares * shares.log()).sum())
        if room < 0:
            return False
    return True
