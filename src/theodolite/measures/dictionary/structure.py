"""The atoms of a dictionary: how far they are from orthogonal, and what each is used for. Rows are atoms."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from theodolite.arguments import at_least, checked, integer, seed
from theodolite.measures.dictionary.arrays import Array, as_rows, as_visible, unit_rows
from theodolite.measures.dictionary.matching_pursuit import SparseCodes
from theodolite.results import Outcome, Result, Row, fields_of

#: So many supports are enumerated, and where there are more so many are drawn.
ENUMERABLE = 200_000
DRAWN = 20_000

#: Supports, and inner products, held at once.
SUPPORTS = 1 << 14
BLOCK = 1 << 24


def coherence(dictionary: Array, visible: Array | None = None) -> float:
    """The largest |cosine| between two atoms of a dictionary (p, d), on the `visible` coordinates (d,) where given.

    The atoms are brought to unit length after the restriction. One atom alone has coherence 0.

    >>> coherence(torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]]).double(), torch.tensor([True, False]))
    1.0
    """
    atoms = as_rows("dictionary", dictionary)
    if visible is not None:
        atoms = atoms[:, as_visible(visible, (len(atoms), atoms.shape[1]), shared=True).to(atoms.device)]
    return min(1.0, max(float(products.max()) for products in _off_diagonal(unit_rows(atoms))))


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class RestrictedIsometry(Result):
    """`value`: the largest ‖A_S A_Sᵀ − I‖ over `supports` sets S of `s` atoms.

    `exact` where these are all the sets of that size; otherwise they were drawn, and the constant is at least `value`.
    `gershgorin` is an upper bound.
    """

    value: float
    s: int
    supports: int
    exact: bool
    gershgorin: float

    def rows(self) -> list[Row]:
        return [fields_of(self, "s value exact supports gershgorin seed")]

    def sentence(self) -> str:
        relation = "is" if self.exact else "is at least"
        how = f"all {self.supports}" if self.exact else f"{self.supports} random"
        return (
            f"The restricted isometry constant of order {self.s} {relation} {self.value:.4g} "
            f"(from {how} supports) and at most {self.gershgorin:.4g} (Gershgorin)."
        )


@checked(s=integer, samples=integer, seed=seed)
def restricted_isometry(dictionary: Array, s: int, *, samples: int | None = None, seed: int = 0) -> RestrictedIsometry:
    """The smallest δ with (1 − δ)‖x‖² ≤ ‖xA‖² ≤ (1 + δ)‖x‖² for every x of at most s non-zeros; A (p, d) as given.

    Exact, over all supports, where there are at most 200,000 (or at most `samples`). Otherwise a lower bound from random
    supports: `samples` of them, 20,000 if not said.

    >>> r = restricted_isometry(torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]).double(), 2)
    >>> round(r.value, 6), r.exact, r.supports
    (0.8, True, 3)
    """
    atoms = as_rows("dictionary", dictionary)
    p, bound = len(atoms), gershgorin_bound(atoms, s)
    count = math.comb(p, s)
    exact = count <= (ENUMERABLE if samples is None else samples)
    drawn = DRAWN if samples is None else samples
    at_least(1, samples=drawn)
    generator, step = torch.Generator().manual_seed(seed), max(1, min(SUPPORTS, BLOCK // p))
    draws = (min(step, drawn - start) for start in range(0, drawn, step))
    batches = all_supports(p, s) if exact else (torch.rand(m, p, generator=generator).topk(s).indices for m in draws)
    value = 0.0
    for supports in batches:
        chosen = atoms[supports.to(atoms.device)]  # (m, s, d)
        eigenvalues: Tensor = torch.linalg.eigvalsh(chosen @ chosen.mT)
        value = max(value, float((eigenvalues - 1).abs().max()))
    return RestrictedIsometry(
        value=value,
        s=s,
        supports=count if exact else drawn,
        exact=exact,
        gershgorin=bound,
        outcome=Outcome.FINISHED if exact else Outcome.ESTIMATED,
        seed=None if exact else seed,
    )


@checked(s=integer)
def gershgorin_bound(dictionary: Array, s: int) -> float:
    """Upper bound of the restricted isometry constant of order s: (s − 1) times the coherence for unit atoms.

    For others the largest |‖aᵢ‖² − 1| plus (s − 1) times the largest |⟨aᵢ, aⱼ⟩|.

    >>> round(gershgorin_bound(torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]).double(), 3), 6)
    1.6
    """
    atoms = as_rows("dictionary", dictionary)
    if not 1 <= s <= len(atoms):
        raise ValueError(f"s must lie between 1 and {len(atoms)}, the number of atoms. Got {s}.")
    diagonal = float((atoms.square().sum(1) - 1).abs().max())
    return diagonal + (s - 1) * max(float(products.max()) for products in _off_diagonal(atoms))


def all_supports(p: int, s: int, size: int = SUPPORTS) -> Iterator[Tensor]:
    """All sets of s of p atoms in lexicographic order, at most `size` at a time, (m, s)."""
    flat = itertools.chain.from_iterable(itertools.combinations(range(p), s))
    for start in range(0, math.comb(p, s), size):
        m = min(size, math.comb(p, s) - start)
        yield torch.from_numpy(np.fromiter(flat, dtype=np.int64, count=m * s).reshape(m, s))


def _off_diagonal(rows: Tensor) -> Iterator[Tensor]:
    """|⟨aᵢ, aⱼ⟩| in blocks of rows, the diagonal set to zero."""
    step = max(1, BLOCK // len(rows))
    for start in range(0, len(rows), step):
        products = (rows[start : start + step] @ rows.T).abs()
        products.diagonal(start).zero_()
        yield products


# What each atom of a dictionary is used for: how many signals, how much of them, and which other atom it resembles.


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class AtomUsage(Result):
    """How often atoms are used, and how alike they are.

    Per atom, tensors (p,): `uses`, the signals whose code has it; `energy`, its share of all squared code entries; `twin`, the
    other atom most like it (−1: there is none), and `cosine` between the two, with its sign.
    """

    uses: Tensor
    energy: Tensor
    twin: Tensor
    cosine: Tensor
    signals: int

    @property
    def dead(self) -> Tensor:
        """Numbers of the atoms that no signal uses."""
        return torch.nonzero(self.uses == 0)[:, 0]

    def twins(self, cosine: float = 0.95) -> list[tuple[int, int, float]]:
        """Atoms with their twins, (i, j, cosine), where |cosine| is at least this; the nearest first, no pair twice."""
        found = {
            (min(i, j), max(i, j)): c
            for i, (j, c) in enumerate(zip(self.twin.tolist(), self.cosine.tolist(), strict=True))
            if j >= 0 and abs(c) >= cosine
        }
        return sorted(((i, j, c) for (i, j), c in found.items()), key=lambda pair: -abs(pair[2]))

    def rows(self) -> list[Row]:
        columns = (self.uses.tolist(), self.energy.tolist(), self.twin.tolist(), self.cosine.tolist())
        return [
            {"atom": i, "uses": uses, "share": uses / self.signals, "energy": energy, "twin": twin, "cosine": cosine}
            for i, (uses, energy, twin, cosine) in enumerate(zip(*columns, strict=True))
        ]

    def sentence(self) -> str:
        middle = float(self.uses.double().median()) / self.signals
        alike = float(self.cosine.abs().max())
        return (
            f"{len(self.dead)} of {len(self.uses)} atoms are used by none of {self.signals} signals, "
            f"half of the atoms by at most {middle:.2%}; the two most alike have a cosine of {alike:.3g}."
        )


def atom_usage(codes: SparseCodes | Array, dictionary: Array) -> AtomUsage:
    """Uses and twins of the atoms (p, d) in codes of n signals, (n, p) or as their non-zeros.

    >>> found = atom_usage(torch.tensor([[2.0, 0.0, 0.0], [1.0, 0.0, 3.0]]), torch.tensor([[1.0, 0], [0, 1.0], [0.6, -0.8]]))
    >>> found.uses.tolist(), found.dead.tolist(), found.twin.tolist()
    ([2, 0, 1], [1], [2, 2, 1])
    """
    atoms = as_rows("dictionary", dictionary)
    p = len(atoms)
    if isinstance(codes, SparseCodes):
        taken, n = (codes.support >= 0) & (codes.values != 0), len(codes.support)
        support, values = codes.support[taken], codes.values[taken].to(atoms)
    else:
        dense = as_rows("codes", codes)
        if dense.shape[1] != p:
            raise ValueError(f"codes must be (n, {p}): one column per atom. Got {tuple(dense.shape)}.")
        support, values, n = dense.nonzero()[:, 1], dense[dense != 0].to(atoms), len(dense)
    energy = atoms.new_zeros(p).index_add_(0, support, values.square())
    twin, cosine = most_alike(unit_rows(atoms))
    return AtomUsage(
        uses=torch.bincount(support, minlength=p),
        energy=energy / energy.sum().clamp(min=torch.finfo(energy.dtype).tiny),
        twin=twin,
        cosine=cosine,
        signals=n,
        outcome=Outcome.FINISHED,
    )


def most_alike(a: Tensor, b: Tensor | None = None, *, signed: bool = False) -> tuple[Tensor, Tensor]:
    """For each unit row of a the row of b with the largest cosine (by magnitude unless `signed`), and that cosine.

    Without b it is the other rows of a; a row alone has the number −1 and the cosine 0.
    """
    others = a if b is None else b
    if b is None and len(a) == 1:
        return torch.full((1,), -1, device=a.device), a.new_zeros(1)
    found, step = [], max(1, BLOCK // len(others))
    for first in range(0, len(a), step):
        products = a[first : first + step] @ others.T
        sizes = products if signed else products.abs()
        if b is None:
            sizes.diagonal(first).fill_(-1)  # also where all others are at right angles, an atom is not its own twin
        index = sizes.argmax(1)
        found.append((index, products.gather(1, index[:, None])[:, 0].clamp(-1, 1)))
    index, cosine = (torch.cat(part) for part in zip(*found, strict=True))
    return index, cosine
