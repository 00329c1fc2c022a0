"""Logit gradients in groups: by class of the sample and by output, and what of the Hessian lies between the groups."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from theodolite.arguments import either
from theodolite.operators.kronecker import LayerPass, affine_layers, visit_batches
from theodolite.operators.kronecker.affine import AffineLayer
from theodolite.operators.kronecker.loss_curvature import SoftmaxCurvature
from theodolite.problem import Problem, match_layers

#: The means of all groups may take so many bytes.
MEANS_BYTES = 2**30


@dataclass(frozen=True)
class Clusters:
    """Means of `δ_{x,j}` over the samples of class i, `delta` (c, c, m·n), and of their output part, `gamma` (c, c, m).

    `between` and `within` are the trace of the layer's block due to the means and to the spread around them; they add up.
    `frequency` is what each class weighs in the objective: for a plain mean its share of the samples.
    """

    delta: Tensor
    gamma: Tensor
    frequency: Tensor
    between: float
    within: float

    def score(self, by: str, part: str = "delta") -> float:
        """The share of the variance of the means that groups by `"logit"` (j) or by `"class"` (i) explain."""
        either("by", by, ("logit", "class"))
        either("part", part, ("delta", "gamma"))
        means = self.delta if part == "delta" else self.gamma
        centre = means.mean(0, keepdim=True) if by == "logit" else means.mean(1, keepdim=True)
        spread = (means - means.mean((0, 1))).square().sum()
        return float(1 - (means - centre).square().sum() / spread)


def logit_clusters(problem: Problem, layer: str) -> Clusters:
    """Cluster means of the logit gradients of one layer, for a classifier with softmax cross-entropy and class labels.

    With `Q_x = diag(√p)(I − 1pᵀ)`, `γ_{x,j}` is row j of `Q_x G_x` (G the derivative of the logits in the layer's output) and
    `δ_{x,j} = Σ_t γ_{x,j,t} ⊗ x_t` over the positions t (one for a linear layer), in the order of the flattened weight; the
    layer's block is `Σ_j E[δ δᵀ]`, exactly for piecewise linear networks. E weighs samples as the objective does.
    """
    problem.refuse_batch_coupling("A cluster of logit gradients")
    names = [found.name for found in match_layers(problem.selection, layer)]
    if len(names) != 1:
        raise ValueError(f"logit_clusters takes one layer. {layer!r} fits {', '.join(names)}.")
    recipes, without = affine_layers(problem, names)
    if without:
        raise ValueError(f"{names[0]}: {without[names[0]]}.")
    sums = _Sums(recipes[0], problem.parameters[problem.layers[names[0]].weights[0]].numel())
    refused = visit_batches(problem, recipes, sums.add, who="logit_clusters")
    if refused:
        raise ValueError(f"{names[0]}: {refused[names[0]]}.")
    return sums.result()


class _Sums:
    """Weighted sums over the samples of each class."""

    def __init__(self, recipe: AffineLayer, size: int) -> None:
        self.recipe, self.size = recipe, size
        self.total = 0.0
        self.weight = torch.zeros(0)

    def add(self, one: LayerPass) -> None:
        if one.loss is None or not one.uses:
            return
        softmax = _softmax(one)
        c = softmax.layout.classes
        if not len(self.weight):
            self._begin(c)
        weight = softmax.weight[:, 0] * one.share  # of every sample in the objective
        groups = [(one.batch.target == i).nonzero()[:, 0].to(weight.device) for i in range(c)]
        x = one.inputs(self.recipe.name).double()
        unweighted = replace(softmax, weight=torch.ones_like(softmax.weight))
        for j, parts in enumerate(one.pulled(unweighted.exact())):
            g = parts[self.recipe.name].double()  # (B, P, m)
            self.total += float(weight @ _squared_norms(g, x, self.recipe.groups))
            weighted = g * weight[:, None, None]
            for i, rows in enumerate(groups):
                self.gamma[i, j] += weighted[rows].sum((0, 1)).cpu()
                self.delta[i, j] += self.recipe.weight_gradient(weighted[rows], x[rows]).cpu()
        self.weight += torch.stack([weight[rows].sum() for rows in groups]).cpu()

    def _begin(self, c: int) -> None:
        size = 8 * c * c * self.size
        if size > MEANS_BYTES:
            raise ValueError(
                f"The means of {c} × {c} groups of {self.size} weights would take {size / 2**30:.1f} GiB. Take a smaller layer."
            )
        self.weight = torch.zeros(c, dtype=torch.float64)
        self.gamma = torch.zeros(c, c, self.recipe.m, dtype=torch.float64)
        self.delta = torch.zeros(c, c, self.size, dtype=torch.float64)

    def result(self) -> Clusters:
        safe = torch.where(self.weight > 0, self.weight, 1.0)[:, None, None]
        delta, gamma = self.delta / safe, self.gamma / safe
        between = float((self.weight[:, None] * delta.square().sum(2)).sum())
        return Clusters(delta, gamma, self.weight, between, self.total - between)


def _softmax(one: LayerPass) -> SoftmaxCurvature:
    """The curvature of a classifier's loss, one label to a sample."""
    softmax, target = one.recogniser.softmax(), one.batch.target
    if softmax is None or softmax.layout.per_sample != 1:
        raise ValueError("logit_clusters needs a softmax cross-entropy with one output row per sample. This loss is another.")
    if not isinstance(target, Tensor) or target.is_floating_point() or target.shape != (one.batch.size,):
        came = f"{str(target.dtype).removeprefix('torch.')} {tuple(target.shape)}" if isinstance(target, Tensor) else type(target)
        raise ValueError(
            f"logit_clusters needs class labels, whole numbers of shape ({one.batch.size},). The targets are {came}."
        )
    return softmax


def _squared_norms(g: Tensor, x: Tensor, groups: int) -> Tensor:
    """`‖Σ_t g_t ⊗ x_t‖²` (B,) of g (B, P, m) and x (B, P, n), without the products."""
    g, x = (t.unflatten(2, (groups, -1)).transpose(1, 2) for t in (g, x))  # (B, groups, P, ·)
    return ((g @ g.mT) * (x @ x.mT)).sum((1, 2, 3))
