"""The sharpest directions of the whole network from the joint output Hessian and the mean inputs of its layers."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from theodolite.operators.kronecker import LayerPass, affine_layers, visit_batches
from theodolite.operators.kronecker.affine import AffineLayer
from theodolite.operators.kronecker.loss_curvature import EXACT_PASSES, FLAT
from theodolite.problem import Problem
from theodolite.results import Cost, Outcome, Result, Row

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


def full_hessian_approximation(
    problem: Problem, k: int, *, variant: Variant = "paper", max_passes: int = EXACT_PASSES, seed: int = 0
) -> FullApproximation:
    """The k sharpest directions of a network of Linear layers, approximately.

    With x̃ the input of a layer (and a 1 where its bias is measured), E[x̃] its mean and E[M] the output Hessian of all layers'
    outputs stacked, the part of the Hessian due to the loss's own curvature is nearly `B E[M] Bᵀ`, `B = blockdiag(I ⊗ E[x̃])`.
    `"paper"` takes the eigenvectors u of E[M], lifts them to Bu and orthonormalises; `"whitened"` solves that matrix exactly,
    through `Λ^½ E[M] Λ^½` with Λ = BᵀB. More outputs than `max_passes` a batch are sampled (`seed`).
    """
    if variant not in ("paper", "whitened"):
        raise ValueError(f"variant must be 'paper' or 'whitened'. Got {variant!r}.")
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
