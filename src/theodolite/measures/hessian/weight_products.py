"""The sharp output directions of a layer from products of the weights above it, with no second derivative at all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from theodolite.operators.factors import affine_layers, layer_passes
from theodolite.problem import Problem


def weight_product(weights: Sequence[Tensor], rates: Sequence[Tensor] | None = None) -> Tensor:
    """`W_L ⋯ W_{p+1}` (c, m), or with firing rates `W_L Π_{L−1} ⋯ W_{p+1} Π_p`; `weights` from layer p+1 up to the last.

    `rates` are those of the layers p .. L−1, one vector for each weight: how often each unit fires.

    >>> weight_product([torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]])], [torch.tensor([1.0, 0.5]), torch.tensor([1.0])])
    tensor([[3., 3.]])
    """
    if not weights:
        raise ValueError("There is no layer above: the last layer's output directions are those orthogonal to the ones vector.")
    product: Tensor | None = None
    for place, weight in enumerate(weights):
        step = weight if rates is None else weight * rates[place]
        product = step if product is None else step @ product
    assert product is not None
    return product


def sharp_subspace(product: Tensor, *, definition: str = "A") -> Tensor:
    """An orthonormal basis (m, c−1) of the predicted top eigenspace of `E[M]`.

    `"A"` is `span{Sᵀv : v ⊥ 1}`, the range of `Sᵀ A S`; `"B"` the part of the row space of S orthogonal to `Sᵀ1`.
    """
    if definition not in ("A", "B"):
        raise ValueError(f"definition must be 'A' or 'B'. Got {definition!r}.")
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


def firing_rates(problem: Problem) -> tuple[list[str], list[Tensor], list[Tensor]]:
    """Names and weights of a stack of Linear layers, and how often each unit of the hidden ones is positive.

    One forward pass. The model must be a chain of Linear layers, the output of each (rectified) the input of the next.
    """
    recipes, _ = affine_layers(problem, list(problem.layers))
    if not recipes or any(a.m != b.n or a.groups > 1 for a, b in pairwise(recipes)):
        raise ValueError("firing_rates needs a chain of Linear layers, the output of each being the input of the next.")
    rates = [torch.zeros(recipe.m, dtype=torch.float64) for recipe in recipes]
    for one in layer_passes(problem, recipes):
        for place, recipe in enumerate(one.recipes):
            rates[place] += (one.outputs(recipe) > 0).double().mean((0, 1)).cpu() * one.weight
    weights = [problem.parameters[problem.layers[recipe.name].weights[0]].detach().double().cpu() for recipe in recipes]
    return [recipe.name for recipe in recipes], weights, rates[:-1]
