"""What a dictionary is judged by: the reconstruction loss and the masked loss of sparse codes.

Sums over coordinates, means over signals, no factor one half.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from theodolite.measures.dictionary.arrays import Array, as_pair, as_visible
from theodolite.measures.dictionary.exhaustive import exhaustive_search
from theodolite.measures.dictionary.matching_pursuit import Selection, pursue
from theodolite.results import Outcome, Result, Row

Decoder = Literal["omp", "exhaustive"]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class CodingLoss(Result):
    """Mean over the signals of a sum of squared errors, `value`, with its standard error `error`.

    `per_signal` (n,) holds the sums, so that two dictionaries can be compared signal by signal. `coordinates` says over how
    many coordinates the sum runs: all, or the hidden ones of a `masked` loss (their mean number where masks differ).
    """

    value: float
    error: float
    per_signal: Tensor
    k: int
    atoms: int
    coordinates: float
    decoder: str
    masked: bool

    def rows(self) -> list[Row]:
        names = ("value", "error", "masked", "k", "atoms", "coordinates", "decoder")
        return [{name: getattr(self, name) for name in names}]

    def sentence(self) -> str:
        what = "masked loss" if self.masked else "reconstruction loss"
        where = f"{self.coordinates:g} hidden coordinates" if self.masked else f"{self.coordinates:g} coordinates"
        return (
            f"The {what} of {self.atoms} atoms with {self.k} non-zeros ({self.decoder}) is {self.value:.4g} ± {self.error:.2g} "
            f"per signal, summed over {where}."
        )


def reconstruction_loss(
    signals: Array, dictionary: Array, k: int, *, decoder: Decoder = "omp", selection: Selection = "raw"
) -> CodingLoss:
    """Mean ‖y − zB‖² over signals (n, d), with z the k-sparse code of y by the dictionary B (p, d).

    `decoder="exhaustive"` finds the best code of all; `"omp"` is orthogonal matching pursuit with its `selection`.

    >>> reconstruction_loss(torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.eye(2), 1).value
    4.5
    """
    y, b = as_pair("signals", signals, "dictionary", dictionary)
    errors = (y - _rebuilt(y, b, k, decoder=decoder, selection=selection)).square().sum(1)
    return _loss(errors, b, k, decoder, coordinates=y.shape[1], masked=False)


def masked_loss(
    signals: Array,
    dictionary: Array,
    k: int,
    visible: Array,
    *,
    decoder: Decoder = "omp",
    selection: Selection = "raw",
) -> CodingLoss:
    """Mean squared error on the hidden coordinates, of codes found from the visible ones alone.

    signals (n, d), dictionary (p, d); visible, booleans (d,) or one row per signal (n, d). Noise on hidden coordinates is
    unknown to the code, so fitting noise does not lower this loss.

    >>> masked_loss(torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 1.0]]), 1, torch.tensor([True, False])).value
    4.0
    """
    y, b = as_pair("signals", signals, "dictionary", dictionary)
    seen = as_visible(visible, (len(y), y.shape[1])).to(y.device)
    hidden = (~seen).expand_as(y)
    if not bool(hidden.any(1).all()):
        raise ValueError("visible must leave at least one coordinate of each signal hidden; reconstruction_loss needs none.")
    misses = y - _rebuilt(y, b, k, visible=seen, decoder=decoder, selection=selection)
    errors = (misses * hidden).square().sum(1)
    return _loss(errors, b, k, decoder, coordinates=float(hidden.sum(1).double().mean()), masked=True)


def _rebuilt(
    signals: Tensor,
    dictionary: Tensor,
    k: int,
    *,
    visible: Tensor | None = None,
    decoder: Decoder = "omp",
    selection: Selection = "raw",
) -> Tensor:
    """Signals (n, d) as the dictionary (p, d) rebuilds them from k-sparse codes of their visible coordinates."""
    if decoder not in get_args(Decoder):
        raise ValueError(f"decoder must be one of {', '.join(map(repr, get_args(Decoder)))}. Got {decoder!r}.")
    if decoder == "exhaustive":
        return exhaustive_search(signals, dictionary, k, visible=visible).reconstruct(dictionary)
    return pursue(signals, dictionary, k, visible=visible, selection=selection).reconstruct(dictionary)


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """The mean of (n,) numbers and its standard error, NaN for a single number."""
    wide = values.double()
    error = float(torch.std(wide)) / math.sqrt(len(wide)) if len(wide) > 1 else math.nan
    return float(wide.mean()), error


def _loss(errors: Tensor, atoms: Tensor, k: int, decoder: str, *, coordinates: float, masked: bool) -> CodingLoss:
    value, error = mean_and_error(errors)
    return CodingLoss(
        value=value,
        error=error,
        per_signal=errors,
        k=k,
        atoms=len(atoms),
        coordinates=coordinates,
        decoder=decoder,
        masked=masked,
        outcome=Outcome.ESTIMATED,
    )
