"""The sharp output directions of a layer from products of the weights above it, with no second derivative at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from theodolite.operators.kronecker import affine_layers
from theodolite.operators.kronecker.affine import AffineLayer, Capture, capturing
from theodolite.problem import Problem, match_layers


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
