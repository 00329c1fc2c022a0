"""What each atom of a dictionary is used for: how many signals, how much of them, and which other atom it resembles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.measures.dictionary.arrays import Array, as_rows, unit_rows
from theodolite.measures.dictionary.matching_pursuit import SparseCodes
from theodolite.results import Outcome, Result, Row

#: Inner products held at once.
BLOCK = 1 << 24


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class AtomUsage(Result):
    """Per atom, tensors (p,): `uses`, the signals whose code has it; `energy`, its share of all squared code entries;
    `twin`, the other atom most like it (−1: there is none), and `cosine` between the two, with its sign.
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
        taken = (codes.support >= 0) & (codes.values != 0)
        support, values = codes.support[taken], codes.values[taken].to(atoms)
        n = codes.support.shape[0]
    else:
        dense = as_rows("codes", codes)
        if dense.shape[1] != p:
            raise ValueError(f"codes must be (n, {p}): one column per atom. Got {tuple(dense.shape)}.")
        support, values = dense.nonzero()[:, 1], dense[dense != 0].to(atoms)
        n = len(dense)
    energy = atoms.new_zeros(p).index_add_(0, support, values.square())
    twin, cosine = _nearest_others(unit_rows(atoms))
    return AtomUsage(
        uses=torch.bincount(support, minlength=p),
        energy=energy / energy.sum().clamp(min=torch.finfo(energy.dtype).tiny),
        twin=twin,
        cosine=cosine,
        signals=n,
        outcome=Outcome.FINISHED,
    )


def _nearest_others(unit: Tensor) -> tuple[Tensor, Tensor]:
    """The other row with the largest |cosine| for each unit row, and that cosine; −1 and 0 for a row alone."""
    p = len(unit)
    if p == 1:
        return torch.full((1,), -1, device=unit.device), unit.new_zeros(1)
    found = []
    for first in range(0, p, max(1, BLOCK // p)):
        products = unit[first : first + max(1, BLOCK // p)] @ unit.T
        products.diagonal(first).fill_(0)
        sizes = products.abs()
        sizes.diagonal(first).fill_(-1)  # also where all others are at right angles, an atom is not its own twin
        index = sizes.argmax(1)
        found.append((index, products.gather(1, index[:, None])[:, 0].clamp(-1, 1)))
    twin, cosine = (torch.cat(part) for part in zip(*found, strict=True))
    return twin, cosine
