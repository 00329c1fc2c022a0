"""The sharpest directions of the whole network from the joint output Hessian and the mean inputs of its layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from theodolite.operators.factors import affine_layers, layer_passes
from theodolite.operators.factors.affine import AffineLayer
from theodolite.operators.factors.roots import EXACT_PASSES
from theodolite.problem import Problem

Variant = Literal["paper", "whitened"]


@dataclass(frozen=True)
class FullApproximation:
    """Approximate eigenvalues (k,) of the full Hessian, descending, and orthonormal eigenvectors (p, k)."""

    values: Tensor
    vectors: Tensor
    variant: str


def full_hessian_approximation(problem: Problem, k: int, *, variant: Variant = "paper") -> FullApproximation:
    """The k sharpest directions of a chain of Linear layers, approximately.

    With x̃ = (x; 1) the input of a layer, E[x̃] its mean and E[M] the output Hessian of all layers' outputs stacked, the part of
    the Hessian due to the loss's own curvature is nearly `B E[M] Bᵀ`, `B = blockdiag(I ⊗ E[x̃])`. `"paper"` takes the
    eigenvectors u of E[M], lifts them to Bu and orthonormalises; `"whitened"` solves that matrix exactly, through
    `Λ^½ E[M] Λ^½` with Λ = BᵀB.
    """
    if variant not in ("paper", "whitened"):
        raise ValueError(f"variant must be 'paper' or 'whitened'. Got {variant!r}.")
    recipes, without = affine_layers(problem, list(problem.layers))
    if without or any(recipe.groups > 1 or recipe.transposed for recipe in recipes):
        raise ValueError(f"full_hessian_approximation needs linear layers only. Not one: {', '.join(without)}.")
    joint, means = _joint(problem, recipes)
    scale = torch.cat([mean.norm().expand(recipe.m) for recipe, mean in zip(recipes, means, strict=True)])
    if variant == "whitened":
        values, u = (t.flip(-1)[..., :k] for t in torch.linalg.eigh(scale[:, None] * joint * scale))
        return FullApproximation(values, _lift(problem, recipes, means, u / scale[:, None]), variant)
    sigma, u = (t.flip(-1)[..., :k] for t in torch.linalg.eigh(joint))
    lifted = _lift(problem, recipes, means, u)
    values = sigma * lifted.square().sum(0)
    orthonormal, triangle = torch.linalg.qr(lifted)
    return FullApproximation(values, orthonormal * torch.sign(triangle.diagonal()), variant)


def _joint(problem: Problem, recipes: list[AffineLayer]) -> tuple[Tensor, list[Tensor]]:
    """E[M] of all outputs stacked (Σm, Σm), and the means (n + 1,) of the inputs with a 1 for the bias."""
    total = sum(recipe.m for recipe in recipes)
    joint = torch.zeros(total, total, dtype=torch.float64)
    means = [torch.zeros(recipe.n + 1, dtype=torch.float64) for recipe in recipes]
    generator = torch.Generator().manual_seed(0)
    for one in layer_passes(problem, recipes):
        for mean, recipe in zip(means, one.recipes, strict=True):
            x = one.inputs(recipe)
            if x.shape[1] != 1:
                raise ValueError(f"full_hessian_approximation needs one position a layer; {recipe.name} has {x.shape[1]}.")
            mean += torch.cat([x[:, 0].mean(0).double().cpu(), torch.ones(1).double()]) * one.weight
        roots, _ = one.roots(None, EXACT_PASSES, generator)
        for parts in one.pulled(roots):
            rows = torch.cat([parts[recipe.name][:, 0] for recipe in recipes], dim=1).double().cpu()
            joint += rows.T @ rows * one.share
    return joint, means


def _lift(problem: Problem, recipes: list[AffineLayer], means: list[Tensor], u: Tensor) -> Tensor:
    """`B u` (p, k) in the order of the problem's parameters; parameters of other kinds get 0."""
    parts: dict[int, Tensor] = {}
    start = 0
    for recipe, mean in zip(recipes, means, strict=True):
        block, start = u[start : start + recipe.m], start + recipe.m
        layer = problem.layers[recipe.name]
        parts[layer.weights[0]] = (block[:, None, :] * mean[:-1, None]).flatten(0, 1)
        for i in layer.biases:
            parts[i] = block * mean[-1]
    zero = u.new_zeros(1, u.shape[1])
    return torch.cat([parts.get(i, zero.expand(size, -1)) for i, size in enumerate(problem.selection.sizes)])
