"""Several anchors: positions fall into clusters, each with an anchor vector of its own."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from theodolite.arguments import either
from theodolite.measures.anchors.probing.streams import NormalEquations
from theodolite.results import Cost, Outcome, Result, Row

By = Literal["value", "state"]


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
        columns = zip(self.sizes, self.mse, self.mean, self.variance, strict=True)
        return [
            {
                "cluster": i,
                "size": size,
                "mse": mse,
                "mean": mean,
                "variance": variance,
                "first_places": self._at_start(i),
                **shared,
            }
            for i, (size, mse, mean, variance) in enumerate(columns)
        ]

    def _at_start(self, cluster: int) -> float:
        """The share of a cluster's positions that stand first in their window."""
        mine = self.places[self.membership == cluster]
        return float((mine == 0).double().mean()) if len(mine) else 0.0

    def sentence(self) -> str:
        each = " and ".join(f"{mse:.3g} ({size} positions)" for mse, size in zip(self.mse, self.sizes, strict=True))
        return (
            f"With top {self.top} removed, {len(self.sizes)} anchors have the mean square errors {each}, where one anchor has "
            f"{self.joint_mse:.3g}."
        )


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
    members = torch.from_numpy(KMeans(anchors, n_init=5, random_state=seed).fit_predict(seen.numpy())).long()
    members = _in_order(members, y, anchors)
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


def _in_order(members: Tensor, values: Tensor, anchors: int) -> Tensor:
    """Clusters numbered by their mean value."""
    means = torch.stack([values[members == i].mean() for i in range(anchors)])
    return means.argsort().argsort()[members]


def _fit(states: Tensor, values: Tensor, members: Tensor, anchors: int) -> Tensor:
    """The least squares vector (d,) of each cluster, (K, d)."""
    found = []
    for cluster in range(anchors):
        sums = NormalEquations(states.shape[1], 1)
        sums.update(states[members == cluster], values[members == cluster, None])
        found.append(sums.solve()[:, 0] if sums.rows else states.new_zeros(states.shape[1]))
    return torch.stack(found)
