"""Sparse codes by trying every support: the exact minimum that pursuits approximate, for small dictionaries."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from theodolite.arguments import checked, choice, count, integer
from theodolite.measures.dictionary.arrays import Array, as_pair, as_visible, unit_rows
from theodolite.measures.dictionary.matching_pursuit import Selection, SparseCodes, pursue
from theodolite.measures.dictionary.structure import all_supports
from theodolite.results import Outcome, Result, Row, fields_of

#: What is refused as too much: inner products to form (minutes), and supports of two or more atoms to factor.
MAX_PRODUCTS = 2 * 10**10
MAX_SUPPORTS = 2 * 10**6

#: Inner products held at once; they fit in the cache.
BLOCK = 1 << 19

Decoder = Literal["omp", "exhaustive"]


@checked(k=integer)
def exhaustive_codes(signals: Array, dictionary: Array, k: int, *, visible: Array | None = None) -> Tensor:
    """The best codes (n, p) of at most k non-zeros for signals (n, d) and atoms (p, d): least squares over all supports.

    With `visible`, booleans (d,) or (n, d), only those coordinates are fitted. The first support wins among equals.

    >>> exhaustive_codes(torch.tensor([[1.0, 1.0]]).double(), torch.tensor([[1.0, 0.0], [0.6, 0.8]]).double(), 1)
    tensor([[0.0000, 1.4000]], dtype=torch.float64)
    """
    return exhaustive_search(signals, dictionary, k, visible=visible).dense(len(dictionary))


def exhaustive_search(signals: Array, dictionary: Array, k: int, *, visible: Array | None = None) -> SparseCodes:
    """`exhaustive_codes` as supports and values, without the zeros."""
    y, atoms = as_pair("signals", signals, "dictionary", dictionary)
    p, d = atoms.shape
    if not 1 <= k <= min(p, d):
        raise ValueError(f"k must lie between 1 and {min(p, d)}, the smaller of the numbers of atoms and coordinates. Got {k}.")
    supports = math.comb(p, k)
    if supports * len(y) * k > MAX_PRODUCTS or (k > 1 and supports > MAX_SUPPORTS):
        raise ValueError(
            f"There are {supports:.3g} supports of {k} of {p} atoms, too many to try for {len(y)} signals; "
            "use orthogonal_matching_pursuit, or fewer signals, atoms or non-zeros."
        )
    if visible is None:
        return _search(y, atoms, k)
    seen = as_visible(visible, (len(y), y.shape[1])).to(y.device)
    if int(seen.sum(-1).min()) < k:
        raise ValueError(f"k must be at most the number of visible coordinates, {int(seen.sum(-1).min())}. Got {k}.")
    support = torch.zeros(len(y), k, dtype=torch.int64, device=y.device)
    values = y.new_zeros(len(y), k)
    masks, which = torch.unique(seen.expand_as(y), dim=0, return_inverse=True)
    for i, mask in enumerate(masks):
        mine = which == i
        codes = _search(y[mine][:, mask], atoms[:, mask], k)
        support[mine], values[mine] = codes.support, codes.values
    return SparseCodes(support, values)


def _search(y: Tensor, atoms: Tensor, k: int) -> SparseCodes:
    """The support whose span holds most of each signal's square, and the coefficients on it."""
    best = torch.full((len(y),), -1.0, dtype=y.dtype, device=y.device)
    support = torch.zeros(len(y), k, dtype=torch.int64, device=y.device)
    rows = max(1, min(len(y), 512))
    for supports in all_supports(len(atoms), k, max(1, BLOCK // (rows * k))):
        supports = supports.to(y.device)
        basis = unit_rows(atoms[supports[:, 0]]) if k == 1 else _orthonormal(atoms[supports])
        for start in range(0, len(y), rows):
            part = slice(start, start + rows)
            held, index = _largest_projection(y[part], basis, k)
            better = held > best[part]
            best[part] = torch.where(better, held, best[part])
            support[part] = torch.where(better[:, None], supports[index], support[part])
    return SparseCodes(support, least_squares(y, atoms, support))


def _largest_projection(y: Tensor, basis: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Largest ‖projection‖² of each signal over spans given by k basis rows each, basis (m·k, d), and which span it is."""
    products = y @ basis.T
    if k == 1:
        held, index = products.abs_().max(1)
        return held.square(), index
    return products.square_().view(len(y), -1, k).sum(2).max(1)


def _orthonormal(chosen: Tensor) -> Tensor:
    """Orthonormal rows (m·k, d) spanning each of the supports' atoms (m, k, d); zero rows where atoms depend on each other."""
    _, sizes, rows = torch.linalg.svd(chosen, full_matrices=False)
    kept = sizes > sizes[:, :1] * max(chosen.shape[1:]) * torch.finfo(chosen.dtype).eps
    basis: Tensor = (rows * kept[:, :, None]).flatten(0, 1)
    return basis


def least_squares(y: Tensor, atoms: Tensor, support: Tensor) -> Tensor:
    """Coefficients (n, k) of each signal on the atoms of its support (n, k), of least length where atoms depend on each other."""
    distinct, which = torch.unique(support, dim=0, return_inverse=True)
    inverses: Tensor = torch.linalg.pinv(atoms[distinct])  # (m, d, k)
    values = y.new_zeros(support.shape)
    for i, part in enumerate(y.split(1 << 12)):  # a gather of n × d × k numbers otherwise
        rows = slice(i << 12, (i << 12) + len(part))
        values[rows] = torch.einsum("nd,ndk->nk", part, inverses[which[rows]])
    return values


# What a dictionary is judged by: the reconstruction loss and the masked loss of sparse codes.
#
# Sums over coordinates, means over signals, no factor one half.


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
        return [fields_of(self, "value error masked k atoms coordinates decoder")]

    def sentence(self) -> str:
        what = "masked loss" if self.masked else "reconstruction loss"
        where = f"{self.coordinates:g} hidden coordinates" if self.masked else f"{self.coordinates:g} coordinates"
        return (
            f"The {what} of {self.atoms} atoms with {self.k} non-zeros ({self.decoder}) is {self.value:.4g} ± {self.error:.2g} "
            f"per signal, summed over {where}."
        )


@checked(k=count)
def reconstruction_loss(
    signals: Array, dictionary: Array, k: int, *, decoder: Decoder = "omp", selection: Selection = "raw"
) -> CodingLoss:
    """Mean ‖y − zB‖² over signals (n, d), with z the k-sparse code of y by the dictionary B (p, d).

    `decoder="exhaustive"` finds the best code of all; `"omp"` is orthogonal matching pursuit with its `selection`.

    >>> reconstruction_loss(torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.eye(2), 1).value
    4.5
    """
    return _loss(signals, dictionary, k, None, decoder, selection)


@checked(k=count)
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
    return _loss(signals, dictionary, k, visible, decoder, selection)


def _loss(signals: Array, dictionary: Array, k: int, visible: Array | None, decoder: Decoder, selection: Selection) -> CodingLoss:
    """The loss on what is not visible, of codes from what is; None decodes from, and charges on, all coordinates."""
    y, b = as_pair("signals", signals, "dictionary", dictionary)
    seen = None if visible is None else as_visible(visible, (len(y), y.shape[1])).to(y.device)
    charged = torch.ones_like(y, dtype=torch.bool) if seen is None else (~seen).expand_as(y)
    if not bool(charged.any(1).all()):
        raise ValueError("visible must leave at least one coordinate of each signal hidden; reconstruction_loss needs none.")
    choice("decoder", decoder, get_args(Decoder))
    if decoder == "exhaustive":
        codes = exhaustive_search(y, b, k, visible=seen)
    else:
        codes = pursue(y, b, k, visible=seen, selection=selection)
    errors = ((y - codes.reconstruct(b)) * charged).square().sum(1)
    value, error = mean_and_error(errors)
    return CodingLoss(
        value=value,
        error=error,
        per_signal=errors,
        k=k,
        atoms=len(b),
        coordinates=y.shape[1] if seen is None else float(charged.sum(1).double().mean()),
        decoder=decoder,
        masked=seen is not None,
        outcome=Outcome.ESTIMATED,
    )


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """The mean of (n,) numbers and its standard error, NaN for a single number."""
    wide = values.double()
    error = float(torch.std(wide)) / math.sqrt(len(wide)) if len(wide) > 1 else math.nan
    return float(wide.mean()), error
