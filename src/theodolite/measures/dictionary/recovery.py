"""How well a learned dictionary has found the true atoms. Rows are atoms, and the learned ones may be more or fewer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from theodolite.arguments import choice
from theodolite.measures.dictionary.arrays import Array, as_pair, unit_rows
from theodolite.measures.dictionary.structure import BLOCK, most_alike
from theodolite.results import Outcome, Result, Row

Metric = Literal["cosine", "euclidean"]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class AtomMatches(Result):
    """For each true atom the learned atom most like it: `index` (p,) and the `cosine` (p,) between the two, with its sign.

    Two true atoms may share one learned atom.
    """

    index: Tensor
    cosine: Tensor
    learned: int
    signed: bool

    def rows(self) -> list[Row]:
        pairs = zip(self.index.tolist(), self.cosine.tolist(), strict=True)
        return [{"atom": i, "match": j, "cosine": cosine} for i, (j, cosine) in enumerate(pairs)]

    def sentence(self) -> str:
        likeness = self.cosine if self.signed else self.cosine.abs()
        found = int((likeness >= 0.9).sum())
        return (
            f"{found} of {len(self.index)} true atoms have a learned atom (of {self.learned}) with cosine 0.9 or more; "
            f"mean {float(likeness.mean()):.3g}, lowest {float(likeness.min()):.3g}."
        )


def atom_matches(true: Array, learned: Array, *, signed: bool = False) -> AtomMatches:
    """The learned atom most like each true atom, by cosine.

    true (p, d), learned (p', d). A flipped atom counts as the same atom unless `signed`. A zero atom is like nothing: cosine 0.

    >>> atom_matches(torch.eye(2), torch.tensor([[0.0, -2.0], [1.0, 0.0], [1.0, 1.0]])).rows()
    [{'atom': 0, 'match': 1, 'cosine': 1.0}, {'atom': 1, 'match': 0, 'cosine': -1.0}]
    """
    a, b = (part.double() for part in as_pair("true", true, "learned", learned))
    index, cosine = most_alike(unit_rows(a), unit_rows(b), signed=signed)
    return AtomMatches(index=index, cosine=cosine, learned=len(b), signed=signed, outcome=Outcome.FINISHED)


def recovery_error(true: Array, learned: Array, metric: Metric = "cosine", *, signed: bool = False) -> float:
    """Mean over the true atoms of the distance to the nearest learned atom; 0 where all are found.

    `"cosine"`: 1 − |cosine|, whatever the lengths. `"euclidean"`: squared Euclidean distance of the atoms as given, which for
    unit atoms is twice that. true (p, d), learned (p', d) with p' larger or smaller. The sign of an atom is free unless
    `signed`. Two true atoms may be near the same learned atom; `permutation_error` forbids that.

    Returns:
        The mean distance as a float.

    >>> recovery_error(torch.eye(3), torch.tensor([[0, -1.0, 0], [1.0, 0, 0]]))
    0.3333333333333333
    >>> recovery_error(torch.eye(2), -torch.eye(2), "euclidean", signed=True)    # the nearest is a right angle away
    2.0
    """
    choice("metric", metric, get_args(Metric))
    a, b = (part.double() for part in as_pair("true", true, "learned", learned))
    if metric == "cosine":
        cosine = most_alike(unit_rows(a), unit_rows(b), signed=signed)[1]
        return float((1 - (cosine if signed else cosine.abs())).clamp_min(0).mean())
    return float(_nearest_squares(a, b, signed).mean())


def permutation_error(true: Array, learned: Array) -> float:
    """Squared Frobenius distance to the true dictionary after the best renaming and sign flips of the learned atoms.

    Both (p, d), compared as given. An exact assignment: each learned atom stands for one true atom.

    >>> permutation_error(torch.eye(3), -torch.eye(3)[[2, 0, 1]])
    0.0
    """
    a, b = (part.double() for part in as_pair("true", true, "learned", learned))
    if len(a) != len(b):
        raise ValueError(f"learned must hold as many atoms as true, {len(a)}. Got {len(b)}; recovery_error takes any number.")
    products = a @ b.T
    squares = a.square().sum(1)[:, None] + b.square().sum(1) - 2 * products.abs()
    rows, columns = (torch.as_tensor(i, device=a.device) for i in linear_sum_assignment(squares.cpu().numpy()))
    signs = torch.where(products[rows, columns] < 0, -1, 1)[:, None]
    return float((a[rows] - signs * b[columns]).square().sum())


def _nearest_squares(a: Tensor, b: Tensor, signed: bool) -> Tensor:
    """‖a − c b‖² to the nearest row of b for each row of a, over both signs c unless `signed`."""
    lengths = b.square().sum(1)
    squares = []
    for part in a.split(max(1, BLOCK // len(b))):
        products = part @ b.T
        nearest = (lengths - 2 * (products if signed else products.abs())).argmin(1)
        flipped = (products.gather(1, nearest[:, None]) < 0) & (not signed)
        # from the atoms themselves: the expanded square would lose small distances
        squares.append((part - torch.where(flipped, -b[nearest], b[nearest])).square().sum(1))
    return torch.cat(squares)
