"""Rows of a matrix that are the same."""

from __future__ import annotations

import torch
from torch import Tensor


def equal_rows(matrix: Tensor, tolerance: float = 1e-6) -> list[list[int]]:
    """Groups of rows that agree to a relative `tolerance`, each with at least two members.

    Rows are sorted by a random projection, so that equal ones become neighbours, and neighbours are compared in full.

    >>> equal_rows(torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]]))
    [[0, 2]]
    """
    rows = matrix.detach().double().flatten(1)
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(rows.shape[1], generator=generator, dtype=torch.float64).to(rows.device)
    order = torch.argsort(rows @ direction, stable=True)
    ordered = rows[order]
    size = torch.maximum(ordered[1:].abs().amax(1), ordered[:-1].abs().amax(1))
    same = ((ordered[1:] - ordered[:-1]).abs().amax(1) <= tolerance * size).tolist()
    groups: list[list[int]] = []
    current = [int(order[0])]
    for place, equal in zip(order[1:].tolist(), same, strict=True):
        if equal:
            current.append(place)
            continue
        groups.append(sorted(current))
        current = [place]
    groups.append(sorted(current))
    return sorted(group for group in groups if len(group) > 1)
