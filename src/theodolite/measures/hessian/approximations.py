"""Where sharp directions come from: products of weights, the joint output Hessian, clusters of logit gradients."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from theodolite.arguments import checked, count, each, either, integer, seed
from theodolite.operators.kronecker import LayerPass, affine_layers, visit_batches
from theodolite.operators.kronecker.affine import AffineLayer
from theodolite.operators.kronecker.loss_curvature import EXACT_PASSES, FLAT, SoftmaxCurvature
from theodolite.problem import Problem, match_layers
from theodolite.problem.activations import Capture, capturing
from theodolite.problem.arguments import a_problem, of_dimensions, tensors_fit
from theodolite.results import Cost, Outcome, Result, Row

# The sharp output directions of a layer from products of the weights above it, with no second derivative at all.


@checked(weights=each(of_dimensions(2)), rates=each(of_dimensions(1)))
@tensors_fit
def weight_product(weights: Sequence[Tensor], rates: Sequence[Tensor] | None = None) -> Tensor:
    """`W_L ⋯ W_{p+1}` (c, m), or with firing rates `W_L Π_{L−1} ⋯ W_{p+1} Π_p`; `weights` from layer p+1 up to the last.

    `rates` are those of the layers p .. L−1, one vector for each weight: how often each unit fires.

    >>> weight_product([torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]])], [torch.tensor([1.0, 0.5]), torch.tensor([1.0])])
    tensor([[3., 3.]])
    """
    if not weights:
        raise ValueError("There is no layer above: the last layer's output directions are those orthogonal to the ones vector.")
    steps = weights if rates is None else [weight * rates[place] for place, weight in enumerate(weights)]
    return reduce(lambda product, step: step @ product, steps)


@checked(product=of_dimensions(2))
def sharp_subspace(product: Tensor, *, definition: str = "A") -> Tensor:
    """An orthonormal basis (m, c−1) of the predicted top eigenspace of `E[M]`.

    `"A"` is `span{Sᵀv : v ⊥ 1}`, the range of `Sᵀ A S`; `"B"` the part of the row space of S orthogonal to `Sᵀ1`.
    """
    either("definition", definition, ("A", "B"))
    c = product.shape[0]
    if definition == "A":
        centre = torch.eye(c, dtype=product.dtype) - 1.0 / c
        product = centre @ product
    else:
        ones = product.sum(0)
        ones = ones / ones.norm()
        product = product - torch.outer(product @ ones, ones)
    frame: Tensor = torch.linalg.svd(product.T, full_matrices=False)[0]
    return frame[:, : c - 1]


@checked(problem=a_problem)
def firing_rates(problem: Problem, layers: str | Iterable[str] | None = None) -> tuple[list[str], list[Tensor], list[Tensor]]:
    """Names and weights of a stack of Linear layers, and how often each unit of the hidden ones is positive.

    One forward pass; every sample counts once. The layers (names or globs; None means all) must be a chain of Linear layers,
    the rectified output of each the input of the next.
    """
    chosen = [layer.name for layer in match_layers(problem.selection, layers)]
    recipes, without = affine_layers(problem, chosen)
    if without or any(not isinstance(recipe.module, nn.Linear) or recipe.tied for recipe in recipes):
        odd = next(iter(without), None) or next(r.name for r in recipes if not isinstance(r.module, nn.Linear) or r.tied)
        raise ValueError(f"firing_rates needs a chain of Linear layers; {odd} is none. Name the chain: layers=[...].")
    rates = [torch.zeros(recipe.m, dtype=torch.float64) for recipe in recipes]
    samples = problem.samples
    with problem.session(second=False), torch.no_grad():
        tensors = problem.tensors(problem.leaves(grad=False))
        for i, raw in enumerate(problem.data):
            with capturing({recipe.name: recipe.module for recipe in recipes}) as seen:
                problem.output(tensors, problem.placed(raw), i)
            _refuse_unchained(seen, recipes)
            for rate, recipe in zip(rates, recipes, strict=True):
                fires = (seen.outputs[recipe.name][0].reshape(-1, recipe.m) > 0).double().mean(0).cpu()
                rate += fires * (raw.size / samples)
    weights = [problem.parameters[problem.layers[recipe.name].weights[0]].detach().double().cpu() for recipe in recipes]
    return [recipe.name for recipe in recipes], weights, rates[:-1]


def _refuse_unchained(seen: Capture, recipes: list[AffineLayer]) -> None:
    for recipe in recipes:
        if len(seen.outputs[recipe.name]) != 1:
            raise ValueError(
                f"firing_rates needs layers called once; {recipe.name} is called {len(seen.outputs[recipe.name])} times."
            )
    for a, b in pairwise(recipes):
        rectified, given = seen.outputs[a.name][0].clamp_min(0.0), seen.inputs[b.name][0]
        if rectified.numel() != given.numel() or not torch.allclose(rectified.reshape(-1), given.reshape(-1), rtol=1e-5):
            raise ValueError(f"firing_rates needs a chain: the input of {b.name} is not the rectified output of {a.name}.")


# The sharpest directions of the whole network from the joint output Hessian and the mean inputs of its layers.

Variant = Literal["paper", "whitened"]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class FullApproximation(Result):
    """Approximate eigenvalues (k,) of the full Hessian, descending, and orthonormal eigenvectors (p, k).

    `draws` is how often the loss's curvature was sampled for each batch (0: exact), `stderr` the relative standard error
    that this leaves in the joint output Hessian.
    """

    values: Tensor
    vectors: Tensor
    variant: str
    draws: int
    stderr: float

    def rows(self) -> list[Row]:
        return [{"index": i, "eigenvalue": value, "variant": self.variant} for i, value in enumerate(self.values.tolist())]

    def sentence(self) -> str:
        shown = ", ".join(f"{v:.4g}" for v in self.values[:5].tolist()) + (", ..." if len(self.values) > 5 else "")
        sampled = f"; output Hessian sampled, relative error {self.stderr:.2g}" if self.draws else ""
        return f"{len(self.values)} approximate eigenvalues of the whole Hessian ({self.variant}): {shown}{sampled}."


@checked(problem=a_problem, k=integer, max_passes=count, seed=seed)
def full_hessian_approximation(
    problem: Problem, k: int, *, variant: Variant = "paper", max_passes: int = EXACT_PASSES, seed: int = 0
) -> FullApproximation:
    """The k sharpest directions of a network of Linear layers, approximately.

    With x̃ the input of a layer (and a 1 where its bias is measured), E[x̃] its mean and E[M] the output Hessian of all layers'
    outputs stacked, the part of the Hessian due to the loss's own curvature is nearly `B E[M] Bᵀ`, `B = blockdiag(I ⊗ E[x̃])`.
    `"paper"` takes the eigenvectors u of E[M], lifts them to Bu and orthonormalises; `"whitened"` solves that matrix exactly,
    through `Λ^½ E[M] Λ^½` with Λ = BᵀB. More outputs than `max_passes` a batch are sampled (`seed`).
    """
    either("variant", variant, ("paper", "whitened"))
    problem.refuse_batch_coupling("The joint output Hessian")
    began = time.perf_counter()
    recipes, without = affine_layers(problem, list(problem.layers))
    without |= {recipe.name: "a grouped convolution" for recipe in recipes if recipe.groups > 1}
    without |= {recipe.name: "its weight is stored transposed" for recipe in recipes if recipe.transposed}
    _refuse(without)
    most = sum(recipe.m for recipe in recipes)
    if not 1 <= k <= most:
        raise ValueError(f"k must lie between 1 and {most}, the number of outputs of all layers. Got {k}.")
    joint = _Joint(problem, recipes, max_passes, seed)
    _refuse(visit_batches(problem, recipes, joint.add, who="full_hessian_approximation"))
    if not joint.curved:
        raise ValueError(FLAT)
    values, vectors = _solve(problem, joint, k, variant)
    return FullApproximation(
        values=values,
        vectors=vectors,
        variant=variant,
        draws=joint.draws,
        stderr=joint.stderr,
        outcome=Outcome.ESTIMATED if joint.draws else Outcome.FINISHED,
        seed=seed,
        cost=Cost(time.perf_counter() - began, "backward passes from the output", 0, problem.notes),
    )


def _refuse(without: dict[str, str]) -> None:
    if without:
        shown = "; ".join(f"{name}: {why}" for name, why in without.items())
        raise ValueError(f"full_hessian_approximation needs linear layers only, each called once. Not so: {shown}.")


class _Joint:
    """E[M] of all outputs stacked (Σm, Σm), and the means of the inputs with a 1 where the bias is measured."""

    def __init__(self, problem: Problem, recipes: list[AffineLayer], max_passes: int, seed: int) -> None:
        total = sum(recipe.m for recipe in recipes)
        self.recipes, self.max_passes = recipes, max_passes
        self.generator = torch.Generator().manual_seed(seed)
        self.output = torch.zeros(total, total, dtype=torch.float64)
        self.biases = [len(problem.layers[recipe.name].biases) for recipe in recipes]
        self.means = [
            torch.zeros(recipe.n + bias, dtype=torch.float64) for recipe, bias in zip(recipes, self.biases, strict=True)
        ]
        self.curved = False
        self.draws = 0
        self._variance = 0.0

    @property
    def stderr(self) -> float:
        size = float(self.output.norm())
        return math.sqrt(self._variance) / size if size > 0 else 0.0

    def add(self, one: LayerPass) -> None:
        if len(one.uses) < len(self.recipes):
            return  # the reason comes at the end
        for mean, bias, recipe in zip(self.means, self.biases, self.recipes, strict=True):
            x = one.inputs(recipe.name)
            if x.shape[1] != 1:
                raise ValueError(f"full_hessian_approximation needs one position a layer; {recipe.name} has {x.shape[1]}.")
            mean += torch.cat([x[:, 0].mean(0).double().cpu(), torch.ones(bias, dtype=torch.float64)]) * one.fraction
        if one.loss is None:
            return
        self.curved |= not one.curvature.flat
        roots, self.draws = one.roots(None, self.max_passes, self.generator)
        total, squares = torch.zeros_like(self.output), 0.0
        for parts in one.pulled(roots):
            rows = torch.cat([parts[recipe.name][:, 0] for recipe in self.recipes], dim=1).double().cpu()
            product = rows.T @ rows * one.share
            total += product
            squares += float(product.square().sum())
        self.output += total
        if self.draws:  # the spread of the draws around their mean, times how many there are
            k = self.draws
            self._variance += (squares - float(total.square().sum()) / k) * k / (k - 1)


def _solve(problem: Problem, joint: _Joint, k: int, variant: str) -> tuple[Tensor, Tensor]:
    recipes, means = joint.recipes, joint.means
    if variant == "whitened":
        scale = torch.cat([mean.norm().expand(recipe.m) for recipe, mean in zip(recipes, means, strict=True)])
        values, u = (t.flip(-1)[..., :k] for t in torch.linalg.eigh(scale[:, None] * joint.output * scale))
        return values, _lift(problem, recipes, means, u / torch.where(scale > 0, scale, 1.0)[:, None])
    sigma, u = (t.flip(-1)[..., :k] for t in torch.linalg.eigh(joint.output))
    lifted = _lift(problem, recipes, means, u)
    orthonormal, triangle = torch.linalg.qr(lifted)
    return sigma * lifted.square().sum(0), orthonormal * torch.where(triangle.diagonal() < 0, -1.0, 1.0)


def _lift(problem: Problem, recipes: list[AffineLayer], means: list[Tensor], u: Tensor) -> Tensor:
    """`B u` (p, k) in the order of the problem's parameters."""
    parts: dict[int, Tensor] = {}
    start = 0
    for recipe, mean in zip(recipes, means, strict=True):
        block, start = u[start : start + recipe.m], start + recipe.m
        layer = problem.layers[recipe.name]
        parts[layer.weights[0]] = (block[:, None, :] * mean[: recipe.n, None]).flatten(0, 1)
        for i in layer.biases:
            parts[i] = block * mean[-1]
    return torch.cat([parts[i] for i in range(len(problem.selection.sizes))])


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


@checked(problem=a_problem)
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
