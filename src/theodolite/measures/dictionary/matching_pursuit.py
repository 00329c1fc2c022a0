"""Orthogonal matching pursuit for many signals, and for several dictionaries, at once.

Rows are signals, atoms and codes. The atoms a signal has chosen so far are kept through the inverse of the Cholesky factor
of their Gram matrix: one row is added per step, so no system is ever solved anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from theodolite.arguments import checked, either, integer, nonnegative, whole
from theodolite.interrupts import unbroken
from theodolite.measures.dictionary.arrays import as_real, as_visible
from theodolite.problem.arguments import a_tensor

#: What counts of things must be.
FROM_ONE = "a whole number from 1 on"

Selection = Literal["raw", "normalized"]

# Scores (signals × atoms) held at a time: 512 kB to 2 MB stay in the cache between the passes over them.
_CHUNK = 1 << 18


@dataclass(frozen=True, eq=False)
class SparseCodes:
    """Codes by their non-zeros: `support` (..., k) names atoms, −1 where a signal stopped early, `values` (..., k)."""

    support: Tensor
    values: Tensor

    def dense(self, atoms: int) -> Tensor:
        """The codes as (..., atoms)."""
        least = 1 + int(self.support.max()) if self.support.numel() else 0
        if whole("atoms", atoms) < least:
            raise ValueError(f"atoms must be at least {least}, for these codes use atom {least - 1}. Got {atoms}.")
        empty = self.values.new_zeros(*self.support.shape[:-1], atoms)
        return empty.scatter_add_(-1, self.support.clamp(min=0), self.values)

    def reconstruct(self, dictionary: Tensor) -> Tensor:
        """`codes @ dictionary`, (n, d), for codes (n, k), without writing the zeros."""
        return torch.nn.functional.embedding_bag(
            self.support.clamp(min=0), dictionary, per_sample_weights=self.values, mode="sum"
        )


@checked(tolerance=nonnegative)
def orthogonal_matching_pursuit(
    signals: Any,
    dictionary: Any,
    k: int,
    *,
    visible: Any = None,
    selection: Selection = "raw",
    tolerance: float | None = None,
) -> Any:
    """Codes (n, p) with at most k non-zeros for signals (n, d) and atoms (p, d), so that `codes @ dictionary ≈ signals`.

    Each step takes the atom with the largest inner product with what is left of the signal (the lowest number among equals;
    atoms that those taken span up to rounding are passed over), then fits all atoms taken by least squares.
    `selection="normalized"` divides the inner products by the atoms' lengths. `visible`, bool (d,) or (n, d), names the
    coordinates that may be looked at; whatever is in the others, NaN included, is not. A signal stops before k atoms when no
    atom could lower its residual beyond rounding, or, with `tolerance`, once its squared residual is at most that. One signal
    (d,) gives one code (p,); arrays in give arrays out, tensors give tensors.

    Returns:
        The codes (n, p), of the kind and type of the signals.

    >>> orthogonal_matching_pursuit([[0.0, 2.0, 0.0, 1.0]], np.eye(4), 1)
    array([[0., 2., 0., 0.]])
    """
    arrays = not isinstance(signals, Tensor)
    Y, D = as_real("signals", signals), as_real("dictionary", dictionary)
    dtype = torch.promote_types(Y.dtype, D.dtype)
    Y, D = Y.to(dtype), D.to(Y.device, dtype)
    single = Y.ndim == 1
    codes = pursue(Y[None] if single else Y, D, k, visible=visible, selection=selection, tolerance=tolerance).dense(len(D))
    codes = codes[0] if single else codes
    return cast(NDArray[np.float64], codes.numpy()) if arrays else codes


@checked(signals=a_tensor, dictionary=a_tensor, tolerance=nonnegative)
def pursue(
    signals: Tensor,
    dictionary: Tensor,
    k: int,
    *,
    visible: Any = None,
    selection: Selection = "raw",
    tolerance: float | None = None,
) -> SparseCodes:
    """`orthogonal_matching_pursuit` with the codes as their non-zeros, in the order they were taken."""
    Y, D = signals, dictionary
    if Y.ndim != 2 or D.ndim != 2 or Y.shape[1] != D.shape[1]:
        raise ValueError(
            f"signals must be (n, d) and dictionary (p, d) with the same d. Got {tuple(Y.shape)} and {tuple(D.shape)}; "
            "a dictionary with atoms as columns wants transposing."
        )
    integer("k", k, least=1, wanted=FROM_ONE)
    if k > len(D):
        raise ValueError(f"k must be at most the number of atoms, {len(D)}. Got {k}.")
    either("selection", selection, get_args(Selection))
    if tolerance is not None and not tolerance >= 0:
        raise ValueError(f"tolerance must be at least 0. Got {tolerance}.")
    seen = None if visible is None else as_visible(visible, (len(Y), Y.shape[1]), empty=True).to(Y.device)
    if seen is not None and seen.ndim == 1:
        Y, D, seen = Y[:, seen], D[:, seen], None
    if k > Y.shape[1]:
        raise ValueError(f"k must be at most the number of (visible) coordinates, {Y.shape[1]}. Got {k}.")
    if not torch.isfinite(D).all():
        raise ValueError("dictionary has NaN or infinite entries.")
    if not torch.isfinite(Y if seen is None else Y[seen]).all():
        raise ValueError(
            "signals have NaN or infinite entries among the visible coordinates. Missing values: pass visible=~isnan(signals)."
        )
    with unbroken(torch.no_grad()):
        codes = pursue_runs(Y[None], D[None], k, None if seen is None else seen[None], selection, tolerance)
    return SparseCodes(codes.support[0], codes.values[0])


def pursue_runs(
    signals: Tensor,
    dictionaries: Tensor,
    k: int,
    visible: Tensor | None = None,
    selection: Selection = "raw",
    tolerance: float | None = None,
) -> SparseCodes:
    """Codes for signals (R, n, d) by dictionaries (R, p, d), run by run; visible, bool, is (R, 1, d) or (R, n, d). Unchecked."""
    n, per_run = signals.shape[1], visible is not None and visible.shape[1] == 1
    D = torch.where(visible, dictionaries, 0.0) if visible is not None and per_run else dictionaries
    # Everything is brought to numbers about 1 by powers of two, which cost no digit: squares neither vanish nor overflow.
    atom_scale = _power_of_two(D.abs().amax((1, 2), keepdim=True))
    D = D / atom_scale
    one_by_one = visible is not None and not per_run
    # Few atoms for many signals: one Gram matrix of all atoms is cheaper than multiplying the residuals in each step.
    gram = (D @ D.transpose(1, 2)).flatten(0, 1) if not one_by_one and n * (k - 1) > dictionaries.shape[1] else None
    pieces = signals.chunk(max(1, -(-n // max(64, _CHUNK // max(1, signals.shape[0] * dictionaries.shape[1])))), 1)
    masks = visible.chunk(len(pieces), 1) if visible is not None and one_by_one else [visible] * len(pieces)
    parts = []
    for piece, seen in zip(pieces, masks, strict=True):
        Y = piece if seen is None else torch.where(seen, piece, 0.0)
        scale = _power_of_two(Y.abs().amax(2, keepdim=True))  # (R, n, 1)
        limit = None if tolerance is None else (tolerance / scale / scale).flatten()
        codes = _pursue(_Correlations(Y / scale, D, seen if one_by_one else None, gram), k, selection, limit)
        parts.append(SparseCodes(codes.support, codes.values * scale / atom_scale))
    return SparseCodes(torch.cat([p.support for p in parts], 1), torch.cat([p.values for p in parts], 1))


def _power_of_two(size: Tensor) -> Tensor:
    """A power of two within a factor 2 of each entry; 1 for zero."""
    return torch.where(size > 0, torch.ldexp(torch.ones_like(size), torch.frexp(size).exponent), 1.0)


def _pursue(look: _Correlations, k: int, selection: Selection, tolerance: Tensor | None) -> SparseCodes:
    Y, R, n = look.signals, look.runs, look.n
    eps = torch.finfo(Y.dtype).eps
    first = look.first  # (R·n, p): inner products of every atom with the signals, then with the residuals
    energy = Y.square().sum(1)
    weight = look.inverse_lengths() if selection == "normalized" else None
    # An inner product below this is rounding: no atom is left that lowers the residual.
    floor = 8 * eps * energy.sqrt() * (1.0 if weight is not None else look.longest())
    support = torch.full((R * n, k), -1, dtype=torch.int64, device=Y.device)
    inverse = Y.new_zeros(R * n, k, k)  # of the lower Cholesky factor
    inner, values = Y.new_zeros(R * n, k), Y.new_zeros(R * n, k)
    alive = energy > (torch.zeros_like(energy) if tolerance is None else tolerance)
    left = energy
    for t in range(k):
        score = look.left(support[:, :t], values[:, :t]).abs_() if t else first.abs()
        score = score if weight is None else score.mul_(weight)
        if t:
            score.scatter_(1, support[:, :t].clamp(min=0), -1.0)  # no atom twice
        alive, atom, row, beyond = _choose(look, score, support[:, :t], inverse[:, :t, :t], alive, floor)
        scale = torch.where(alive, beyond.clamp(min=torch.finfo(Y.dtype).tiny).rsqrt(), 0.0)
        inverse[:, t, :t] = -scale[:, None] * (row[:, None, :] @ inverse[:, :t, :t])[:, 0]
        inverse[:, t, t] = scale
        inner[:, t] = first.gather(1, atom[:, None])[:, 0]
        support[:, t] = torch.where(alive, atom, -1)
        along = (inverse[:, t, : t + 1] * inner[:, : t + 1]).sum(1)
        values[:, : t + 1] += along[:, None] * inverse[:, t, : t + 1]
        left = left - along.square()
        if tolerance is not None:
            alive = alive & (left > tolerance)
        if not alive.any():
            break
    return SparseCodes(support.view(R, n, k), values.view(R, n, k))


def _choose(
    look: _Correlations, score: Tensor, support: Tensor, inverse: Tensor, alive: Tensor, floor: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Who goes on, the atom each takes, its row of the Cholesky factor, and the square of what the chosen ones leave of it.

    An atom that the chosen ones span up to rounding is passed over, and the next best is looked at.
    """
    eps = torch.finfo(score.dtype).eps
    while True:
        best = score.amax(1)
        # The first among those equal up to rounding (twin atoms).
        atom = (score >= (best * (1 - 16 * eps))[:, None]).view(torch.uint8).argmax(1)
        gram, square = look.gram(support, atom)
        row = (inverse @ gram[:, :, None])[:, :, 0]
        beyond = square - row.square().sum(1)
        alive = alive & (best > floor)
        spanned = alive & ~(beyond > 64 * eps * square)
        if not bool(spanned.any()):
            return alive, atom, row, beyond
        score[spanned, atom[spanned]] = -1.0


class _Correlations:
    """Inner products of atoms (R, p, d) with residuals of signals (R, n, d) and with each other; runs lie one after another.

    `mask`, bool (R, n, d), says what each signal shows where that differs between signals; `gram` (R·p, p) is given where
    the whole matrix pays.
    """

    def __init__(self, Y: Tensor, D: Tensor, mask: Tensor | None, gram: Tensor | None) -> None:
        self.runs, self.n, self.dim = Y.shape
        self.atoms = D.shape[1]
        self.mask = None if mask is None else mask.reshape(-1, self.dim).to(Y.dtype)
        self.signals = Y.reshape(-1, self.dim)
        self.dictionaries, self.flat, self.gram_matrix = D, D.reshape(-1, self.dim), gram
        self.offset = (torch.arange(self.runs, device=Y.device) * self.atoms).repeat_interleave(self.n)  # of each signal's run
        self.first = self._times(self.signals)

    def left(self, support: Tensor, values: Tensor) -> Tensor:
        """Inner products with what the chosen atoms leave of each signal."""
        codes = SparseCodes(support.clamp(min=0) + self.offset[:, None], values)
        if self.gram_matrix is not None:
            spanned = codes.reconstruct(self.gram_matrix)
            return torch.sub(self.first, spanned, out=spanned)
        spanned = codes.reconstruct(self.flat)
        return self._times(self.signals - (spanned if self.mask is None else spanned * self.mask))

    def gram(self, support: Tensor, atom: Tensor) -> tuple[Tensor, Tensor]:
        """Inner products (n, t) of the new atoms with the chosen ones, and the new atoms' squared lengths (n,)."""
        new = atom + self.offset
        if self.gram_matrix is not None:
            return self.gram_matrix[new[:, None], support.clamp(min=0)], self.gram_matrix[new, atom]
        shown = self.flat[new] if self.mask is None else self.flat[new] * self.mask
        chosen = self.flat[support.clamp(min=0) + self.offset[:, None]]
        return (chosen @ shown[:, :, None])[:, :, 0], shown.square().sum(1)

    def inverse_lengths(self) -> Tensor:
        """1/length of the visible part of each atom, (n, p), 0 for atoms that have none."""
        if self.mask is None:
            squares = self.flat.square().sum(1).view(self.runs, 1, -1).expand(-1, self.n, -1).reshape(-1, self.atoms)
        else:
            squares = self._times(self.mask, self.dictionaries.square())
        inverse: Tensor = torch.where(squares > 0, squares.rsqrt(), 0.0)
        return inverse

    def longest(self) -> Tensor:
        """Length of the longest atom, for each signal."""
        lengths: Tensor = self.flat.norm(dim=1).view(self.runs, -1).amax(1)
        return lengths.repeat_interleave(self.n)

    def _times(self, rows: Tensor, atoms: Tensor | None = None) -> Tensor:
        atoms = self.dictionaries if atoms is None else atoms
        return (rows.view(self.runs, self.n, self.dim) @ atoms.transpose(1, 2)).reshape(-1, self.atoms)
