"""What can be known about hidden coordinates at best, and when matching pursuit finds the true support.

Signals y = zA + ε, with k-sparse codes z whose non-zeros are N(0, scale²), noise ε of standard deviation `noise` per
coordinate, and some coordinates visible. Risks are sums over the hidden coordinates of squared errors against zA, so
a masked loss is at least a risk plus `hidden · noise²`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.arguments import at_least, checked, count, nonnegative, positive, share
from theodolite.measures.dictionary.arrays import Array, as_pair, as_rows, as_visible, unit_rows
from theodolite.measures.dictionary.losses import mean_and_error
from theodolite.measures.dictionary.matching_pursuit import SparseCodes
from theodolite.measures.dictionary.structure import ENUMERABLE, all_supports

#: Inner products held at once.
BLOCK = 1 << 22


@dataclass(frozen=True)
class OracleRisks:
    """Risks of two predictors that know the support, and `floor`, what the noise of the hidden coordinates adds to a loss."""

    least_squares: float
    bayes: float
    floor: float


@checked(k=count, noise=nonnegative, scale=positive)
def oracle_risks(
    dictionary: Array, k: int, visible: Array, *, noise: float, scale: float, supports: Tensor | None = None
) -> OracleRisks:
    """Exact risks of least squares and of the Bayes predictor (ridge (noise/scale)²) on the true support.

    With Λ and Q the visible and hidden parts of its k atoms: noise² tr Q(ΛᵀΛ)⁻¹Qᵀ and tr Q(ΛᵀΛ/noise² + I/scale²)⁻¹Qᵀ, in mean
    over `supports` (m, k), or over all of them. dictionary (p, d), visible (d,).

    >>> oracle_risks(torch.ones(1, 2).double(), 1, torch.tensor([True, False]), noise=1.0, scale=1.0)
    OracleRisks(least_squares=1.0, bayes=0.5, floor=1.0)
    """
    atoms = as_rows("dictionary", dictionary)
    for name, value in (("noise", noise), ("scale", scale)):
        positive(name, value, wanted="a positive finite number")
    seen = _both_parts(visible, atoms)
    if int(seen.sum()) < k:
        raise ValueError(f"k must be at most the number of visible coordinates, {int(seen.sum())}. Got {k}.")
    chosen = atoms[_all_or(supports, len(atoms), k).to(atoms.device)]  # (m, k, d)
    shown, hidden = chosen[:, :, seen], chosen[:, :, ~seen]
    gram = shown @ shown.mT
    target = hidden @ hidden.mT
    eye = torch.eye(k, dtype=atoms.dtype, device=atoms.device)
    return OracleRisks(
        least_squares=noise**2 * _mean_trace(gram, target),
        bayes=_mean_trace(gram / noise**2 + eye / scale**2, target),
        floor=int((~seen).sum()) * noise**2,
    )


def oracle_codes(signals: Array, dictionary: Array, supports: Tensor, visible: Array, *, ridge: float = 0.0) -> SparseCodes:
    """Codes on known supports (n, k) from the visible coordinates (d,): least squares, or ridge regression.

    The Bayes predictor has ridge = (noise / scale)². Codes by matching pursuit can be compared with them on the same draws.
    """
    y, atoms = as_pair("signals", signals, "dictionary", dictionary)
    if supports.ndim != 2 or len(supports) != len(y):
        raise ValueError(f"supports must be ({len(y)}, k), one row of atoms per signal. Got shape {tuple(supports.shape)}.")
    if not 0 <= ridge < math.inf:
        raise ValueError(f"ridge must be a finite number from 0 on. Got {ridge}.")
    seen = _both_parts(visible, atoms)
    shown = atoms[:, seen]
    gram = (shown @ shown.T)[supports[:, :, None], supports[:, None, :]]  # (n, k, k)
    gram = gram + ridge * torch.eye(supports.shape[1], dtype=y.dtype, device=y.device)
    products = (y[:, seen] @ shown.T).gather(1, supports)
    values: Tensor = torch.linalg.solve(gram, products)
    return SparseCodes(supports, values)


def noise_cross_term(errors: Array, noise: Array, visible: Array | None = None) -> tuple[float, float]:
    """Mean and standard error of ⟨prediction − truth, noise⟩ over signals, both (n, d); on the hidden coordinates if given.

    Zero for a prediction that has not seen that noise, positive where the noise was fitted.
    """
    wrong, eps = as_pair("errors", errors, "noise", noise)
    if len(wrong) != len(eps):
        raise ValueError(f"errors and noise must have one row per signal. Got {len(wrong)} and {len(eps)} rows.")
    products = wrong * eps
    if visible is not None:
        products = products * ~as_visible(visible, (len(wrong), wrong.shape[1])).to(wrong.device)
    return mean_and_error(products.sum(1))


@checked(noise=nonnegative, k=count, atoms=count, coherence=share, eta=nonnegative)
def omp_threshold(noise: float, k: int, atoms: int, coherence: float, eta: float = 0.0) -> float:
    """Size of coefficients above which orthogonal matching pursuit picks right atoms with high probability (Cai and Wang 2011).

    2σ√k √(2(1 + η) log p) / (1 − (2k − 1)μ), for unit atoms of coherence μ below 1/(2k − 1); infinite above.

    >>> round(omp_threshold(0.1, 2, 50, 0.2), 4)
    1.9779
    """
    _require_theory(k, atoms, eta)
    if not (noise >= 0 and coherence >= 0):
        raise ValueError(f"noise and coherence must not be negative. Got {noise} and {coherence}.")
    room = 1 - (2 * k - 1) * coherence
    return math.inf if room <= 0 else 2 * noise * math.sqrt(2 * k * (1 + eta) * math.log(atoms)) / room


@checked(k=count, atoms=count, eta=nonnegative)
def omp_success_bound(k: int, atoms: int, eta: float = 0.0) -> float:
    """Lower bound of the probability that k steps of pursuit all pick right atoms: 1 − k / (p^η √(2 log p)).

    For coefficients above `omp_threshold`; 0 where the bound says nothing.
    """
    _require_theory(k, atoms, eta)
    share = k / math.sqrt(2 * math.log(atoms)) * math.exp(-eta * math.log(atoms))  # the power itself may be too large to write
    return max(0.0, 1 - share)


@checked(n=count)
def chi_square_max_bound(n: int) -> float:
    """Upper bound of E max of n chi-square variables of one degree of freedom, however dependent: 3 log n + 1.5 log 3.

    >>> round(chi_square_max_bound(10), 2)
    8.56
    """
    at_least(1, n=n)
    return 3 * math.log(n) + 1.5 * math.log(3)


def _mean_trace(matrices: Tensor, target: Tensor) -> float:
    """Mean over supports of tr(M⁻¹ T), both (m, k, k)."""
    solved: Tensor = torch.linalg.solve(matrices, target)
    return float(solved.diagonal(dim1=-2, dim2=-1).sum(-1).mean())


def _all_or(supports: Tensor | None, p: int, k: int) -> Tensor:
    """The supports given, or all of them."""
    if not 1 <= k <= p:
        raise ValueError(f"k must lie between 1 and {p}, the number of atoms. Got {k}.")
    if supports is not None:
        if supports.ndim != 2 or supports.shape[1] != k or not len(supports):
            raise ValueError(f"supports must be (m, {k}) with m at least 1. Got shape {tuple(supports.shape)}.")
        return supports
    count = math.comb(p, k)
    if count > ENUMERABLE:
        raise ValueError(f"There are {count:.3g} supports of {k} of {p} atoms; pass a sample of them as supports=.")
    return torch.cat(list(all_supports(p, k)))


def _both_parts(visible: Array, atoms: Tensor) -> Tensor:
    """Visible coordinates (d,), refused where nothing is hidden."""
    seen = as_visible(visible, (len(atoms), atoms.shape[1]), shared=True).to(atoms.device)
    if bool(seen.all()):
        raise ValueError("visible must leave at least one coordinate hidden.")
    return seen


def _require_theory(k: int, atoms: int, eta: float) -> None:
    if k < 1 or atoms < 2 or not eta >= 0:
        raise ValueError(f"The theory needs k ≥ 1, at least two atoms and eta ≥ 0. Got k={k}, {atoms} atoms, eta={eta}.")


# A dictionary that fits noisy signals better than the true one although it holds none of the true atoms.


@checked(angles=count, radius=nonnegative)
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
    at_least(1, angles=angles)
    if not 0 <= radius < math.inf:
        raise ValueError(f"radius must be a finite number from 0 on. Got {radius}.")
    first, second = _planes(atoms)
    if not len(first):
        raise ValueError("The true atoms are all parallel (or zero), so no two of them span a plane.")
    theta = (torch.arange(angles, dtype=atoms.dtype, device=atoms.device) + 0.5) * math.pi / angles
    step = max(1, BLOCK // (angles * len(atoms)))
    kept = []
    for e1, e2 in zip(first.split(step), second.split(step), strict=True):
        directions = (theta.cos()[:, None] * e1[:, None] + theta.sin()[:, None] * e2[:, None]).flatten(0, 1)  # (m·angles, d)
        squares = 2 - 2 * (directions @ atoms.T).abs().amax(1)  # of the distance to the nearest atom or its opposite
        kept.append(directions[squares >= radius**2] if radius > 0 else directions)
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
