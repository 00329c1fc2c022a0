"""Logit gradients in groups: by class of the sample and by output, and what of the Hessian lies between the groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.operators.factors import affine_layers, layer_passes
from theodolite.problem import Problem


@dataclass(frozen=True)
class Clusters:
    """Means of `δ_{x,j}` over the samples of class i, `delta` (c, c, m·n), and of their output part, `gamma` (c, c, m).

    `between` and `within` are the trace of the layer's block due to the means and to the spread around them; they add up.
    `frequency` is the share of each class.
    """

    delta: Tensor
    gamma: Tensor
    frequency: Tensor
    between: float
    within: float

    def score(self, by: str, part: str = "delta") -> float:
        """The share of the variance of the means that groups by `"logit"` (j) or by `"class"` (i) explain."""
        if by not in ("logit", "class"):
            raise ValueError(f"by must be 'logit' or 'class'. Got {by!r}.")
        means = self.delta if part == "delta" else self.gamma
        centre = means.mean(0, keepdim=True) if by == "logit" else means.mean(1, keepdim=True)
        spread = (means - means.mean((0, 1))).square().sum()
        return float(1 - (means - centre).square().sum() / spread)


def logit_clusters(problem: Problem, layer: str) -> Clusters:
    """Cluster means of the logit gradients of one linear layer, for a classifier with softmax cross-entropy.

    With `Q_x = diag(√p)(I − 1pᵀ)`, `γ_{x,j}` is row j of `Q_x G_x` (G the derivative of the logits in the layer's output) and
    `δ_{x,j} = γ_{x,j} ⊗ x`; the layer's block is `Σ_j E[δ δᵀ]`, exactly for piecewise linear networks.
    """
    recipes, without = affine_layers(problem, [layer])
    if without:
        raise ValueError(f"{layer}: {without[layer]}.")
    recipe = recipes[0]
    sums: dict[str, Tensor] = {}
    total = 0.0
    for one in layer_passes(problem, recipes):
        y, z = one.batch.target, one.evaluation.output.detach().double()
        c = z.shape[-1]
        groups = torch.nn.functional.one_hot(y, c).double()  # (B, c)
        p = z.softmax(-1)
        roots = p.sqrt()[:, :, None] * (torch.eye(c, dtype=torch.float64) - p[:, None, :])  # (B, j, c)
        x = one.inputs(recipe)[:, 0].double()
        cotangents = (roots[:, j].to(one.evaluation.output.dtype) for j in range(c))
        per_logit = [part[recipe.name][:, 0].double() for part in one.pulled(cotangents)]
        gamma = torch.stack(per_logit, dim=1)  # (B, j, m)
        _add(sums, "count", groups.sum(0))
        _add(sums, "gamma", torch.einsum("bi,bjm->ijm", groups, gamma))
        _add(sums, "delta", torch.einsum("bi,bjm,bn->ijmn", groups, gamma, x).flatten(2))
        total += float((gamma.square().sum((1, 2)) * x.square().sum(1)).sum())
    count = sums["count"]
    safe = count.clamp_min(1.0)[:, None, None]
    delta, gamma = sums["delta"] / safe, sums["gamma"] / safe
    frequency = count / count.sum()
    between = float((frequency[:, None] * delta.square().sum(2)).sum())
    return Clusters(delta, gamma, frequency, between, total / float(count.sum()) - between)


def _add(sums: dict[str, Tensor], name: str, value: Tensor) -> None:
    sums[name] = sums[name] + value if name in sums else value
