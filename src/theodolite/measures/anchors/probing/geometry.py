"""Clusters of positions with an anchor vector each, and the geometry of a dictionary of atoms."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from theodolite.arguments import checked, count, either, seed, whole
from theodolite.errors import NonFiniteError
from theodolite.measures.anchors.probing.streams import NormalEquations
from theodolite.problem.arguments import a_tensor, of_dimensions
from theodolite.results import Cost, Outcome, Result, Row

By = Literal["value", "state"]

#: Atoms, and pairs of atoms, taken to float64 at a time.
BLOCK, PAIRS = 8192, 256
BINS = 80
#: Atoms whose mean cosine is above this, and above its own spread, are said to lie in a cone.
CONE = 0.1


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class AnchorClusters(Result):
    """K anchor vectors `vectors` (K, d), each fitted on one cluster of positions; clusters in rising order of their mean value.

    `membership` (N,) is the cluster of each position and `places` (N,) where it stands in its window. `joint_mse` is the error
    of one anchor for all, `mse` and `sizes` are per cluster. Only clusters found `by` "state" can be told without knowing the
    value itself, so only these make a feature at inference; `rounds` counts refinements.
    """

    top: int
    by: str
    sizes: tuple[int, ...]
    mse: tuple[float, ...]
    mean: tuple[float, ...]
    variance: tuple[float, ...]
    joint_mse: float
    vectors: Tensor
    membership: Tensor
    places: Tensor
    rounds: int

    @property
    def overall_mse(self) -> float:
        """Mean over all positions of the error of each one's own anchor."""
        return sum(size * mse for size, mse in zip(self.sizes, self.mse, strict=True)) / sum(self.sizes)

    def rows(self) -> list[Row]:
        shared = {"top": self.top, "joint_mse": self.joint_mse, "by": self.by, "seed": self.seed}
        columns = {"size": self.sizes, "mse": self.mse, "mean": self.mean, "variance": self.variance}
        rows: list[Row] = []
        for i in range(len(self.sizes)):
            starts = (self.places[self.membership == i] == 0).double()  # whether a position stands first in its window
            firsts = float(starts.mean()) if len(starts) else 0.0
            rows.append({"cluster": i, **{name: column[i] for name, column in columns.items()}, "first_places": firsts, **shared})
        return rows

    def sentence(self) -> str:
        each = " and ".join(f"{mse:.3g} ({size} positions)" for mse, size in zip(self.mse, self.sizes, strict=True))
        return (
            f"With top {self.top} removed, {len(self.sizes)} anchors have the mean square errors {each}, where one anchor has "
            f"{self.joint_mse:.3g}."
        )


@checked(states=of_dimensions(2), values=of_dimensions(1), anchors=count, rounds=whole, top=whole, seed=seed)
def anchor_clusters(
    states: Tensor,
    values: Tensor,
    anchors: int = 2,
    *,
    by: By = "value",
    rounds: int = 0,
    places: Tensor | None = None,
    top: int = 0,
    seed: int = 0,
) -> AnchorClusters:
    """K anchors for states (N, d) with log bulk partition functions `values` (N,): k-means, then least squares per cluster.

    Args:
        by: what k-means is run on: the values, or the states.
        rounds: at most so many rounds of clusterwise regression: each position moves to the anchor with the smaller residual, and
            the anchors are fitted again. Clusters are then no longer defined by what `by` names.
        places: positions in their windows (N,), kept with the membership.
    """
    from sklearn.cluster import KMeans

    either("by", by, ("value", "state"))
    if not 1 <= anchors <= len(states) or len(states) != len(values):
        raise ValueError(f"anchors must be 1 .. {len(states)} for {len(states)} states and {len(values)} values. Got {anchors}.")
    began = time.perf_counter()
    h, y = states.double().cpu(), values.double().cpu()
    seen = y[:, None] if by == "value" else h
    members = torch.from_numpy(KMeans(anchors, n_init=5, random_state=seed % 2**32).fit_predict(seen.numpy())).long()
    means = torch.stack([y[members == i].mean() for i in range(anchors)])
    members = means.argsort().argsort()[members]  # numbered by their mean value
    vectors, turn = _fit(h, y, members, anchors), 0
    while turn < rounds:
        nearest = (y[:, None] - h @ vectors.mT).square().argmin(1)
        if torch.equal(nearest, members):
            break
        members, turn = nearest, turn + 1
        vectors = _fit(h, y, members, anchors)
    joint = _fit(h, y, torch.zeros_like(members), 1)[0]
    own = [(y[members == i], h[members == i] @ vectors[i]) for i in range(anchors)]
    return AnchorClusters(
        top=top,
        by=by,
        sizes=tuple(len(part) for part, _ in own),
        mse=tuple(float((part - fit).square().mean()) if len(part) else 0.0 for part, fit in own),
        mean=tuple(float(part.mean()) if len(part) else 0.0 for part, _ in own),
        variance=tuple(float(part.var(correction=0)) if len(part) else 0.0 for part, _ in own),
        joint_mse=float((y - h @ joint).square().mean()),
        vectors=vectors,
        membership=members,
        places=torch.arange(len(y)) if places is None else places.cpu().clone(),
        rounds=turn,
        outcome=Outcome.FINISHED,
        seed=seed,
        cost=Cost(time.perf_counter() - began, "k-means and least squares"),
    )


def _fit(states: Tensor, values: Tensor, members: Tensor, anchors: int) -> Tensor:
    """The least squares vector (d,) of each cluster, (K, d)."""
    found = []
    for cluster in range(anchors):
        sums = NormalEquations(states.shape[1], 1)
        sums.update(states[members == cluster], values[members == cluster, None])
        found.append(sums.solve()[:, 0] if sums.rows else states.new_zeros(states.shape[1]))
    return torch.stack(found)


# The geometry of a dictionary of atoms: singular values, norms and cosines, beside those of atoms uniform on a sphere.


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class AtomGeometry(Result):
    """How the n atoms (rows, dimension d) of a dictionary lie.

    `singular_values` (d,) fall; `norms` (n,) are those of the atoms. `cosines` of random pairs of distinct atoms are kept as
    mean, standard deviation and counts between `cosine_edges`. Atoms uniform on a sphere would have the mean 0, the standard
    deviation `sphere_std` = 1/√d and, at unit norm, singular values between `sphere_singular_values`.
    """

    atoms: int
    dim: int
    singular_values: Tensor
    stable_rank: float
    effective_rank: float
    norms: Tensor
    cosine_mean: float
    cosine_std: float
    cosine_counts: Tensor
    cosine_edges: Tensor
    pairs: int

    @property
    def sphere_std(self) -> float:
        """Standard deviation of the cosine of two atoms uniform on the sphere."""
        return 1 / math.sqrt(self.dim)

    @property
    def sphere_singular_values(self) -> tuple[float, float]:
        """The range of singular values of unit atoms uniform on the sphere, √(n/d) (1 ∓ √(d/n))."""
        middle, spread = math.sqrt(self.atoms / self.dim), math.sqrt(self.dim / self.atoms)
        return middle * max(0.0, 1 - spread), middle * (1 + spread)

    def rows(self) -> list[Row]:
        squares = self.singular_values.square()
        share = squares / squares.sum() if float(squares.sum()) else squares
        return [
            {"rank": i + 1, "singular_value": float(s), "share": float(p)}
            for i, (s, p) in enumerate(zip(self.singular_values, share, strict=True))
        ]

    def sentence(self) -> str:
        low, high = float(self.norms.min()), float(self.norms.max())
        cone = ": they lie in a cone" if self.cosine_mean > max(CONE, self.cosine_std) else ""
        return (
            f"{self.atoms} atoms in {self.dim} dimensions use {self.effective_rank:.0f} of them (stable rank "
            f"{self.stable_rank:.3g}), with norms from {low:.3g} to {high:.3g}; two atoms have the cosine {self.cosine_mean:.3g} "
            f"± {self.cosine_std:.2g} (uniform on a sphere: 0 ± {self.sphere_std:.2g}){cone}."
        )


@checked(weight=a_tensor, pairs=count, seed=seed)
def atom_geometry(weight: Tensor, *, pairs: int = 100_000, seed: int = 0) -> AtomGeometry:
    """Singular values, ranks, norms and cosines of the rows of `weight` (n, d), in float64 through the d × d Gram matrix.

    >>> geometry = atom_geometry(torch.eye(3)[[0, 0, 1]])
    >>> geometry.singular_values.round(decimals=4).tolist(), round(geometry.stable_rank, 4)
    ([1.4142, 1.0, 0.0], 1.5)
    """
    if weight.ndim != 2 or len(weight) < 2 or not weight.is_floating_point():
        raise ValueError(f"weight must hold two or more atoms as floating rows (n, d). Got {weight.dtype} {tuple(weight.shape)}.")
    if pairs < 1:
        raise ValueError(f"pairs must be 1 or more. Got {pairs}.")
    began = time.perf_counter()
    weight = weight.detach()
    gram = torch.zeros(weight.shape[1], weight.shape[1], dtype=torch.float64, device=weight.device)
    norms, stripe = [], max(1, math.ceil(len(gram) / 4))
    for block in weight.split(BLOCK):
        rows = block.double()
        for start in range(0, len(gram), stripe):  # the part on and above the diagonal is enough
            gram[start : start + stripe, start:] += rows[:, start : start + stripe].mT @ rows[:, start:]
        norms.append(rows.norm(dim=1))
    lengths = torch.cat(norms)
    if not bool(torch.isfinite(lengths).all()):
        raise NonFiniteError(
            f"{int((~torch.isfinite(lengths)).sum())} of {len(lengths)} atoms, rows of weight, hold NaN or infinity."
        )
    values = torch.linalg.eigvalsh(gram, UPLO="U").flip(0).clamp_min(0).sqrt()
    cosines = _random_cosines(weight, lengths, pairs, seed)
    edges = torch.linspace(-1, 1, BINS + 1, dtype=torch.float64)
    return AtomGeometry(
        atoms=len(weight),
        dim=weight.shape[1],
        singular_values=values.cpu(),
        stable_rank=stable_rank(values),
        effective_rank=effective_rank(values),
        norms=lengths.cpu(),
        cosine_mean=float(cosines.mean()),
        cosine_std=float(cosines.std(correction=0)),
        cosine_counts=torch.histogram(cosines.clamp(-1, 1), edges).hist.long(),
        cosine_edges=edges,
        pairs=len(cosines),
        outcome=Outcome.FINISHED,
        seed=seed,
        cost=Cost(time.perf_counter() - began, f"{weight.shape[1]} × {weight.shape[1]} Gram matrix"),
    )


def stable_rank(singular_values: Tensor) -> float:
    """‖V‖²_F / s₁², 0 for the zero matrix."""
    squares = singular_values.double().square()
    return float(squares.sum() / squares.max()) if float(squares.max()) else 0.0


def effective_rank(singular_values: Tensor) -> float:
    """exp of the entropy of the shares s² / Σ s².

    >>> round(effective_rank(torch.ones(5)), 9)
    5.0
    """
    squares = singular_values.double().square()
    if not float(squares.sum()):
        return 0.0
    return float(torch.special.entr(squares / squares.sum()).sum().exp())


def _random_cosines(weight: Tensor, lengths: Tensor, pairs: int, seed: int) -> Tensor:
    """Cosines (pairs,) of random pairs of distinct atoms; pairs with a zero atom are left out."""
    generator = torch.Generator().manual_seed(seed)
    n = len(weight)
    first = torch.randint(n, (pairs,), generator=generator)
    second = (first + torch.randint(1, n, (pairs,), generator=generator)) % n
    found = []
    for i, j in zip(first.split(PAIRS), second.split(PAIRS), strict=True):
        i, j = i.to(weight.device), j.to(weight.device)
        dot = (weight[i].double() * weight[j].double()).sum(1)
        size = lengths[i] * lengths[j]
        found.append((dot / size)[size > 0])
    cosines = torch.cat(found).cpu()
    return cosines if len(cosines) else torch.zeros(1, dtype=torch.float64)
