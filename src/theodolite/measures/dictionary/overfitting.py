"""A dictionary that fits noisy signals better than the true one although it holds none of the true atoms."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from theodolite.measures.dictionary.arrays import Array, as_rows, unit_rows

#: Inner products held at once.
BLOCK = 1 << 22


def overfitting_dictionary(true: Array, angles: int = 64, radius: float = 0.0) -> Tensor:
    """Directions in the plane of every two true atoms, less those within `radius` of a true atom up to sign: (q, d).

    A mixture of two atoms lets a k-sparse code act like a 2k-sparse one and absorb noise. In each plane `angles` directions
    at equal steps, so q ≤ p(p − 1)/2 · angles. With `radius` = σ, the standard deviation of the noise, no true atom is
    recovered closer than that, and still the reconstruction loss is lower than the true dictionary's. Atoms that are
    parallel have no plane. true (p, d), of any lengths; the result has unit rows.

    >>> overfitting_dictionary(torch.eye(3), angles=2).shape
    torch.Size([6, 3])
    """
    atoms = unit_rows(as_rows("true", true))
    if len(atoms) < 2:
        raise ValueError(f"true must hold at least two atoms to mix. Got {len(atoms)}.")
    if angles < 1:
        raise ValueError(f"angles must be at least 1. Got {angles}.")
    if not 0 <= radius < math.inf:
        raise ValueError(f"radius must be a finite number from 0 on. Got {radius}.")
    first, second = _planes(atoms)
    if not len(first):
        raise ValueError("The true atoms are all parallel (or zero), so no two of them span a plane.")
    theta = (torch.arange(angles, dtype=atoms.dtype, device=atoms.device) + 0.5) * math.pi / angles
    step = max(1, BLOCK // (angles * len(atoms)))
    planes = zip(first.split(step), second.split(step), strict=True)
    kept = [_away_from(atoms, _directions(e1, e2, theta), radius) for e1, e2 in planes]
    net = torch.cat(kept)
    if not len(net):
        raise ValueError(f"Every mixture lies within {radius:g} of a true atom; take a smaller radius or more angles.")
    return net


def _planes(atoms: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal bases (e1, e2), each (m, d), of the planes of all pairs of atoms that are not parallel."""
    i, j = torch.triu_indices(len(atoms), len(atoms), 1, device=atoms.device)
    e1 = atoms[i]
    rest = atoms[j] - (e1 * atoms[j]).sum(1, keepdim=True) * e1
    lengths: Tensor = rest.norm(dim=1)
    plane = (lengths > 1e3 * torch.finfo(atoms.dtype).eps) & (e1.square().sum(1) > 0)
    return e1[plane], unit_rows(rest[plane])


def _directions(e1: Tensor, e2: Tensor, theta: Tensor) -> Tensor:
    """cos θ e1 + sin θ e2 for all angles and planes, (m·angles, d)."""
    return (theta.cos()[None, :, None] * e1[:, None] + theta.sin()[None, :, None] * e2[:, None]).flatten(0, 1)


def _away_from(atoms: Tensor, directions: Tensor, radius: float) -> Tensor:
    """The unit directions at least `radius` away from every atom and its opposite."""
    squares = 2 - 2 * (directions @ atoms.T).abs().amax(1)
    return directions[squares >= radius**2] if radius > 0 else directions
