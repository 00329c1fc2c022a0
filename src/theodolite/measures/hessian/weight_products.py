"""The sharp output directions of a layer from products of the weights above it, with no second derivative at all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

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

    One forward pass. The model must be a chain of Linear layers with ReLUs between them.
    """
    names = [name for name, module in problem.model.named_modules() if isinstance(module, nn.Linear)]
    modules = dict(problem.model.named_modules())
    layers = [modules[name] for name in names]
    if not layers or any(a.weight.shape[0] != b.weight.shape[1] for a, b in pairwise(layers)):
        raise ValueError("firing_rates needs a chain of Linear layers, the output of each being the input of the next.")
    sums: list[Tensor | None] = [None] * len(layers)
    handles = []

    def hook_of(place: int, share: list[float]):  # type: ignore[no-untyped-def]
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            fired = (output.detach().reshape(-1, output.shape[-1]) > 0).double().mean(0) * share[0]
            before = sums[place]
            sums[place] = fired if before is None else before + fired

        return hook

    weight_of_batch = [1.0]
    total = sum(problem.weighting.shares)
    try:
        for place, layer in enumerate(layers):
            handles.append(layer.register_forward_hook(hook_of(place, weight_of_batch)))
        with problem.session(second=False), torch.no_grad():
            tensors = problem.tensors(problem.leaves(grad=False))
            for i, share, batch in problem.iterate():
                weight_of_batch[0] = share / total
                problem.evaluate(tensors, batch, i)
    finally:
        for handle in handles:
            handle.remove()
    weights = [layer.weight.detach().double() for layer in layers]
    return names, weights, [rate for rate in sums[:-1] if rate is not None]
