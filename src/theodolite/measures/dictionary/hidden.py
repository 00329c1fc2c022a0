"""Hidden coordinates: which ones are hidden in a step of learning, and how well a dictionary predicts them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from theodolite.arguments import checked, choice, count, fraction, integer, nonnegative, one_of, whole
from theodolite.measures.dictionary.arrays import Array, as_pair
from theodolite.measures.dictionary.decoding import Decoder, check_decoder, decode, reconstruct
from theodolite.measures.dictionary.matching_pursuit import Selection
from theodolite.results import Outcome, Result, Row, fields_of

#: Which coordinates are hidden in a step of learning: a random set, a set of its own for each sample, or blocks in turn.
Masks = Literal["batch", "sample", "cycle"]


def hidden_count(dim: int, hidden_fraction: float) -> int:
    """How many of `dim` coordinates are hidden: ⌊fraction · dim⌋, at least one, and at least one stays visible.

    >>> hidden_count(100, 0.1), hidden_count(5, 0.1)
    (10, 1)
    """
    fraction("hidden_fraction", hidden_fraction)
    if dim < 2:
        raise ValueError(
            f"Hiding coordinates needs at least 2 features; got {dim} feature(s) while a minimum of 2 is required. "
            'Use objective="reconstruction".'
        )
    return min(dim - 1, max(1, math.floor(hidden_fraction * dim + 1e-9)))


def visible_masks(dim: int, hidden: int, *, masks: Masks, batch: int, step: int, seeds: Sequence[int]) -> Tensor:
    """What is visible in one step, bool (runs, 1, dim), or (runs, batch, dim) for `masks="sample"`.

    "batch" hides one random set in the whole batch, "cycle" goes round a fixed random order, block after block.
    Each step has its own random stream, so that a run may be taken up at any step.
    """
    choice("masks", masks, get_args(Masks))
    rows = [_hidden(dim, hidden, masks, batch, step, seed) for seed in seeds]
    seen = torch.ones(len(rows), rows[0].shape[0], dim, dtype=torch.bool)
    return seen.scatter_(2, torch.from_numpy(np.stack(rows)), False)


def _hidden(dim: int, hidden: int, masks: Masks, batch: int, step: int, seed: int) -> NDArray[np.int64]:
    """Hidden coordinates (1 or batch, hidden)."""
    random = np.random.default_rng((seed, 0 if masks == "cycle" else step + 1))
    if masks == "sample":
        return random.random((batch, dim)).argpartition(hidden - 1, axis=1)[:, :hidden]
    first = step * hidden if masks == "cycle" else 0
    return random.permutation(dim)[None, (first + np.arange(hidden)) % dim]


# How well a dictionary predicts what it did not see: a score that needs no ground truth.


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class HiddenError(Result):
    """Mean squared error per hidden coordinate, `value` ± `stderr` (over signals), beside the error of reconstruction.

    `reconstruction` is per coordinate too, decoded from all of them; `baseline` is what predicting zero costs. A falling
    reconstruction error with a rising value is the mark of overfitting.
    """

    value: float
    stderr: float
    reconstruction: float
    baseline: float
    masks: int
    hidden: int

    @property
    def explained(self) -> float:
        """Share of the hidden energy that is predicted."""
        return 1 - self.value / self.baseline if self.baseline > 0 else math.nan

    def rows(self) -> list[Row]:
        return [fields_of(self, "value stderr reconstruction baseline masks hidden seed explained")]

    def sentence(self) -> str:
        return (
            f"Hidden coordinates are predicted with a mean squared error of {self.value:.4g} ± {self.stderr:.2g}, "
            f"which explains {self.explained:.0%} of their energy; reconstruction from all leaves {self.reconstruction:.4g}."
        )


def check_hidden(dim: int, atoms: int, sparsity: int, hidden_fraction: float, masks: int, decoder: str) -> int:
    """How many coordinates a score hides; refuses what cannot be scored."""
    hidden = hidden_count(dim, hidden_fraction)
    count("masks", masks)
    most = min(atoms, dim - hidden)
    if decoder == "omp" and not 1 <= sparsity <= most:
        raise ValueError(
            f"sparsity must be from 1 to {most} to predict {hidden} hidden coordinates from the {dim - hidden} others by "
            f"{atoms} atoms. Got {sparsity}."
        )
    return hidden


@checked(
    sparsity=count,
    selection=one_of(*get_args(Selection)),
    hidden_fraction=fraction,
    masks=integer,
    penalty=nonnegative,
    seed=whole,
)
def hidden_error(
    signals: Array,
    dictionary: Array,
    sparsity: int,
    *,
    hidden_fraction: float = 0.1,
    masks: int = 10,
    decoder: Decoder = "omp",
    selection: Selection = "raw",
    penalty: float = 0.1,
    observed: Tensor | None = None,
    seed: int = 0,
) -> HiddenError:
    """The error per hidden coordinate over `masks` random choices of what is hidden, for signals (n, d) and atoms (p, d).

    Of entries not `observed`, bool (n, d), none is used. Lower is better; compare dictionaries, their sizes and sparsities on
    signals that were not trained on.
    """
    if observed is not None:
        signals = torch.where(observed, torch.as_tensor(signals), 0.0)
    Y, D = as_pair("signals", signals, "dictionary", dictionary)
    check_decoder(decoder, penalty)
    n, dim = Y.shape
    hidden = check_hidden(dim, len(D), sparsity, hidden_fraction, masks, decoder)
    known = torch.ones_like(Y, dtype=torch.bool) if observed is None else observed

    def left(seen: Tensor | None) -> Tensor:
        codes = decode(Y[None], D[None], sparsity, seen, decoder, selection, penalty)
        return (Y - reconstruct(codes, D[None])[0]).square()

    squares, energy, counts = Y.new_zeros(n), Y.new_zeros(n), Y.new_zeros(n)
    for mask in range(masks):
        visible = visible_masks(dim, hidden, masks="batch", batch=n, step=mask, seeds=(seed,)).to(Y.device)
        charged = ~visible[0] & known
        error = left(visible if observed is None else visible & known)
        squares += torch.where(charged, error, 0.0).sum(1)
        energy += torch.where(charged, Y.square(), 0.0).sum(1)
        counts += charged.sum(1)
    whole = left(None if observed is None else known[None])
    total = float(counts.sum())
    value = float(squares.sum()) / total if total else math.nan
    spread = (squares - value * counts).square().sum().sqrt()  # of a ratio of sums over signals
    return HiddenError(
        value=value,
        stderr=float(spread) / total if n > 1 and total else math.nan,
        reconstruction=float(whole[known].mean()),
        baseline=float(energy.sum()) / total if total else math.nan,
        masks=masks,
        hidden=hidden,
        outcome=Outcome.ESTIMATED,
        seed=seed,
    )
