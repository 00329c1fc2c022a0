"""A Gaussian over weights, independent along the axes of one basis per layer, and its divergence from an isotropic prior.

A block is one parameter in the coordinates in which its noise is independent. The weight of a layer with Kronecker factors
E[M] = U diag(τ) Uᵀ and E[x xᵀ] = V diag(γ) Vᵀ is `W = U C Vᵀ`; entry (i, j) of C belongs to the approximate eigenvalue τ_i γ_j
of the layer's Hessian. The bias in the same basis of outputs is `b = U c`. All other parameters keep their own coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from theodolite.arguments import checked, entry
from theodolite.arguments import seed as a_seed
from theodolite.measures.bounds.calculator import HIGHEST, grid_penalty, rounded_variance
from theodolite.results import Result, Row


@dataclass(frozen=True, eq=False)
class Block:
    """One parameter: `mean`, `log_std` and `start` (the centre of the prior) in the coordinates of its basis.

    `group` is the layer whose prior variance it shares; `left` (m, m) and `right` (n, n) have the basis vectors as columns, None
    where coordinates are kept. `curvature` is the approximate eigenvalue of each coordinate, where it is known. A `transposed`
    weight is stored as (n, m). Of a weight with a `rank` only the first so many columns leave the prior.
    """

    name: str
    group: str
    shape: tuple[int, ...]
    mean: Tensor
    log_std: Tensor
    start: Tensor
    left: Tensor | None = None
    right: Tensor | None = None
    curvature: Tensor | None = None
    transposed: bool = False
    rank: int | None = None

    @property
    def size(self) -> int:
        return self.mean.numel()

    def parameter(self, coordinates: Tensor) -> Tensor:
        """Coordinates as the parameter of the model."""
        if self.left is not None:
            coordinates = self.left @ coordinates
        if self.right is not None:
            coordinates = coordinates @ self.right.T
        return (coordinates.T if self.transposed else coordinates).reshape(self.shape)

    def coordinates(self, parameter: Tensor) -> Tensor:
        """The inverse of `parameter`."""
        found = parameter.reshape(self.shape[0], -1).T if self.transposed else parameter.reshape(self.mean.shape)
        if self.left is not None:
            found = self.left.T @ found
        return found @ self.right if self.right is not None else found

    def turned(self, left: Tensor | None, right: Tensor | None, curvature: Tensor | None = None) -> Block:
        """The same mean in another basis; the standard deviations stay with the indices of their coordinates."""
        weights = self.parameter(self.mean), self.parameter(self.start)
        other = replace(self, left=left, right=right, curvature=curvature)
        mean, start = (other.coordinates(weight) for weight in weights)
        return replace(other, mean=mean, start=start)

    def nats(self, variance: float) -> float:
        """`½ Σ (s/λ + d²/λ − 1 + log λ − log s)`: its part of the divergence from the prior, summed in float64."""
        log_std = self.own(self.log_std).double()
        spread = float((2 * log_std).exp().sum()) + self.distance
        return 0.5 * (spread / variance + log_std.numel() * (math.log(variance) - 1)) - float(log_std.sum())

    @property
    def distance(self) -> float:
        """The squared distance of the mean from the centre of the prior."""
        return float(self.own(self.mean - self.start).double().square().sum())

    def own(self, values: Tensor) -> Tensor:
        """The coordinates that do not keep the prior."""
        return values if self.rank is None else values[:, : self.rank]

    def beside(self, variance: float) -> Block:
        """The same with those that do keep it where the prior is."""
        if self.rank is None:
            return self
        mean, log_std = self.start.clone(), torch.full_like(self.log_std, 0.5 * math.log(variance))
        mean[:, : self.rank], log_std[:, : self.rank] = self.own(self.mean), self.own(self.log_std)
        return replace(self, mean=mean, log_std=log_std)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class GaussianPosterior(Result):
    """`Q = N(w, R diag(s) Rᵀ)` beside the prior `P = N(w₀, λ I)`, with a λ for each group of parameters (a layer).

    `basis` names the kind of R; `one_variance` says that λ is one for all groups by design, and its choice paid for once. `fixed`
    is what else the network is made of, by name, where the user's model does not have it: what a split has trained beside the
    measured parameters, and its running statistics.
    """

    blocks: tuple[Block, ...]
    variances: dict[str, float]
    basis: str
    one_variance: bool = False
    fixed: dict[str, Tensor] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(block.size for block in self.blocks)

    def kl(self) -> float:
        """`KL(Q‖P)` in nats. It does not depend on the bases, because the prior is isotropic in each group.

        >>> block = Block("w", "w", (1,), torch.zeros(1), torch.zeros(1), torch.ones(1))
        >>> GaussianPosterior(blocks=(block,), variances={"w": 1.0}, basis="standard").kl()      # ½ |w − w₀|²
        0.5
        """
        return max(0.0, math.fsum(block.nats(self.variances[block.group]) for block in self.blocks))

    def rounded(self) -> tuple[GaussianPosterior, dict[str, float]]:
        """The same with each λ on the grid, and what that choice costs, in nats by group."""
        found = {group: rounded_variance(variance) for group, variance in self.variances.items()}
        variances = {group: variance for group, (variance, _) in found.items()}
        blocks = tuple(block.beside(variances[block.group]) for block in self.blocks)
        prices = {group: grid_penalty(j) for group, (_, j) in found.items()}
        paid = {"all layers": next(iter(prices.values()))} if self.one_variance else prices
        return replace(self, blocks=blocks, variances=variances), paid

    def prior(self) -> GaussianPosterior:
        """The prior itself as a posterior: its divergence is zero."""
        blocks = tuple(
            replace(b, mean=b.start, log_std=torch.full_like(b.log_std, 0.5 * math.log(self.variances[b.group])))
            for b in self.blocks
        )
        return replace(self, blocks=blocks)

    def means(self) -> dict[str, Tensor]:
        """The mean as parameters, by name."""
        return {block.name: block.parameter(block.mean) for block in self.blocks}

    @checked(seed=a_seed)
    def sample(self, seed: int = 0) -> dict[str, Tensor]:
        """One network: parameters by name, and what is fixed."""
        generator = torch.Generator().manual_seed(seed)
        return {**self.fixed, **dict(drawn(self.blocks, generator))}

    def module(self, model: nn.Module) -> DrawnModule:
        """`model` with weights that are drawn anew at each call; the model keeps its own. Certified is what eval mode does."""
        return DrawnModule(model, self)

    def variance_by_eigenvalue(self, layer: str) -> list[Row]:
        """The variance of each coordinate of a layer's weight beside its approximate eigenvalue, the largest eigenvalue first."""
        known = {block.group: block for block in self.blocks if block.curvature is not None and block.mean.ndim > 1}
        block = entry("layer", layer, known)
        assert block.curvature is not None
        order = block.curvature.flatten().argsort(descending=True, stable=True)
        pairs = zip(block.curvature.flatten()[order].tolist(), (2 * block.log_std).exp().flatten()[order].tolist(), strict=True)
        return [{"layer": layer, "index": i, "eigenvalue": value, "variance": s} for i, (value, s) in enumerate(pairs)]

    def rows(self) -> list[Row]:
        return [
            {
                "parameter": block.name,
                "layer": block.group,
                "size": block.size,
                "prior_variance": self.variances[block.group],
                "variance": float((2 * block.log_std.double()).exp().mean()),
                "distance": math.sqrt(block.distance),
                "kl": block.nats(self.variances[block.group]),
            }
            for block in self.blocks
        ]

    def sentence(self) -> str:
        return f"A Gaussian over {self.size} weights ({self.basis}), {self.kl():.4g} nats from its prior."


def drawn(blocks: Iterable[Block], generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Parameters by name, drawn once."""
    for block in blocks:
        noise = torch.randn(block.mean.shape, generator=generator, dtype=block.mean.dtype).to(block.mean.device)
        yield block.name, block.parameter(block.mean + noise * block.log_std.exp())


class DrawnModule(nn.Module):
    """A network whose weights are drawn from a posterior at each call: the one that a certificate speaks of."""

    def __init__(self, model: nn.Module, posterior: GaussianPosterior, seed: int = 0) -> None:
        super().__init__()
        self.model, self.posterior = model, posterior
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        weights = {**self.posterior.fixed, **dict(drawn(self.posterior.blocks, self.generator))}
        return functional_call(self.model, weights, args, kwargs)


def best_variances(blocks: Iterable[Block]) -> dict[str, float]:
    """The λ of each group that makes the divergence smallest, `Σ (s + d²) / size`; at most the highest of the grid."""
    totals: dict[str, list[float]] = {}
    for block in blocks:
        total = totals.setdefault(block.group, [0.0, 0.0])
        total[0] += float((2 * block.own(block.log_std).double()).exp().sum()) + block.distance
        total[1] += block.own(block.mean).numel()
    return {group: min(spread / size, HIGHEST) for group, (spread, size) in totals.items()}
