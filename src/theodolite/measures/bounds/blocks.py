"""The coordinates of a posterior: for each parameter a basis, its approximate curvature, and where the fit begins."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from theodolite.measures.bounds.posterior import Block
from theodolite.measures.hessian import firing_rates, weight_product
from theodolite.operators.kronecker import FactorMapping, affine_layers, kronecker_factors
from theodolite.problem import Problem

Basis = Literal["kronecker", "standard", "isotropic", "low-rank"]
#: How the standard deviations begin: by curvature, all at that of the prior, or at the size of the weights (the source).
Start = Literal["curvature", "flat", "weights"]
#: How bases are found again: at the present weights, not at all, or from products of the present weights.
Refresh = Literal["iter", "once", "weights"]
#: Samples from which bases are made.
FACTOR_SAMPLES = 4000
#: Inputs of a layer with so many times fewer outputs keep their coordinates: turning them would cost more than the layer itself.
WIDE = 50
#: Eigenvalues below so many roundings of the largest are no more than that.
ROUNDING = 10.0
#: Weights of exactly zero count as this share of the layer's root mean square.
_LEAST_WEIGHT = 1e-3


def make_blocks(problem: Problem, start: Mapping[str, Tensor], *, rank: int | None = None) -> list[Block]:
    """A block for each measured parameter, in its own coordinates; `start` are the centres of the prior by name."""
    recipes = {problem.layers[r.name].weights[0]: r for r in affine_layers(problem, list(problem.layers))[0]}
    groups = _groups(problem)
    found = []
    for i, (name, p) in enumerate(zip(problem.names, problem.leaves(grad=False), strict=True)):
        recipe = recipes.get(i)
        matrix = recipe is not None and recipe.groups == 1
        transposed = recipe is not None and recipe.transposed
        form = (len(p), -1) if matrix else tuple(p.shape)
        mean, centre = (t.to(p).reshape(form) for t in (p, start[name]))
        if transposed:
            mean, centre = mean.T.contiguous(), centre.T.contiguous()
        block = Block(name, groups[name], tuple(p.shape), mean, torch.zeros_like(mean), centre, transposed=transposed)
        kept = rank if matrix and rank is not None and rank < mean.shape[1] else None
        found.append(replace(block, rank=kept))
    return found


def _groups(problem: Problem) -> dict[str, str]:
    """The layer that each parameter belongs to: the module that owns it."""
    owners = {f"{path}.{local}" if path else local: path for path, m in problem.model.named_modules() for local in m._parameters}
    return {name: owners.get(name, name) or "(model)" for name in problem.names}


def layer_factors(problem: Problem, samples: int, seed: int = 0) -> FactorMapping:
    """Kronecker factors of all layers, from some samples."""
    order = torch.randperm(problem.samples, generator=torch.Generator().manual_seed(seed))[:samples].sort().values
    parts, before = [], 0
    for batch in problem.data:
        mine = order[(order >= before) & (order < before + batch.size)] - before
        parts += [batch.part(mine)] if len(mine) else []
        before += batch.size
    return kronecker_factors(problem.with_batches(parts), sharing="expand")


def blocks_in_basis(
    problem: Problem,
    blocks: Sequence[Block],
    basis: Basis,
    refresh: Refresh,
    first: dict[str, tuple[Tensor, Tensor]],
    seed: int = 0,
    samples: int = FACTOR_SAMPLES,
) -> list[Block]:
    """The blocks in their basis at the weights of a problem; see `turned_blocks`."""
    factors = layer_factors(problem, samples, seed)
    output = None
    if refresh == "weights" and basis in ("kronecker", "low-rank"):
        before = {b.group: b.left for b in blocks if b.left is not None and b.mean.ndim == 2}
        output = weight_product_bases(problem, factors, before)
    return turned_blocks(problem, blocks, factors, basis, first, output)


def turned_blocks(
    problem: Problem,
    blocks: Sequence[Block],
    factors: FactorMapping,
    basis: Basis,
    first: dict[str, tuple[Tensor, Tensor]],
    output: Mapping[str, tuple[Tensor, Tensor]] | None = None,
) -> list[Block]:
    """The blocks in the basis of the factors, or with their curvature in their own coordinates.

    `first` keeps eigenvalues and eigenvectors of the inputs of the first layer, which do not change; it is added to. `output` has
    those of the outputs, by layer, where they are not those of `E[M]`.
    """
    place = {name: i for i, name in enumerate(problem.names)}
    by_weight = {problem.layers[name].weights[0]: name for name in factors}
    by_group = {problem.names[i]: name for i, name in by_weight.items()}
    layer_of_group = {b.group: by_group[b.name] for b in blocks if b.name in by_group}
    turned: dict[str, tuple[Tensor, Tensor]] = dict(output or {})
    found = []
    for block in blocks:
        layer = layer_of_group.get(block.group)
        if layer is None or factors[layer].groups > 1:
            found.append(block)
            continue
        curved, input_ = factors[layer].output.to(block.mean), factors[layer].input.to(block.mean)
        weight = by_weight.get(place[block.name]) == layer
        if not weight and block.mean.shape != curved.shape[:1]:
            found.append(block)  # neither the weight nor the bias
        elif basis in ("standard", "isotropic"):
            diagonal = curved.diagonal().clamp(min=0.0)
            found.append(replace(block, curvature=torch.outer(diagonal, input_.diagonal()) if weight else diagonal))
        else:
            if layer not in turned:
                turned[layer] = _descending(curved)
            tau, left = (part.to(block.mean) for part in turned[layer])
            if not weight:
                found.append(block.turned(left, None, tau))
                continue
            gamma, vectors = first[block.name] if block.name in first else _descending(input_)
            if block is blocks[0]:
                first[block.name] = gamma, vectors
            if len(gamma) > WIDE * len(tau) and block.rank is None:
                found.append(block.turned(left, None, torch.outer(tau, input_.diagonal())))
            else:
                found.append(block.turned(left, vectors, torch.outer(tau, gamma)))
    return found


def weight_product_bases(
    problem: Problem, factors: FactorMapping, before: Mapping[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Eigenvalues and eigenvectors of `4^−(L−p) Sᵀ E[A] S`, S the product of the weights above layer p, by layer.

    E[A] is the curvature of the loss in the network's output, the output Hessian of the last layer. Only as many directions as
    the loss has are determined; the others are completed from those `before`, so that they do not jump.
    """
    names, weights, _ = firing_rates(problem, list(factors))
    curvature = _without_rounding(factors[names[-1]].output, problem.parameters[0].dtype).cpu()
    found = {names[-1]: _descending(factors[names[-1]].output)}
    for place, name in enumerate(names[:-1]):
        product = weight_product(weights[place + 1 :])
        tau, left = _descending(product.T @ curvature @ product / 4.0 ** (len(names) - 1 - place))
        determined = int((tau > 1e-12 * tau[0]).sum())
        old = before.get(name, torch.eye(len(tau))).double().cpu()
        sharp = left[:, :determined]
        rest = old[:, determined:] - sharp @ (sharp.T @ old[:, determined:])
        tau[determined:] = 0.0
        found[name] = tau, torch.cat([sharp, torch.linalg.qr(rest)[0]], 1)
    like = factors[names[0]].output
    return {name: (tau.to(like), left.to(like)) for name, (tau, left) in found.items()}


def _without_rounding(matrix: Tensor, precision: torch.dtype) -> Tensor:
    """The matrix without the eigenvalues that are rounding errors of the outputs that it was made from."""
    values, vectors = torch.linalg.eigh(matrix.double())
    real = values > ROUNDING * torch.finfo(precision).eps * values[-1]
    found: Tensor = (vectors[:, real] * values[real]) @ vectors[:, real].T
    return found


def _descending(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, the largest first and none below 0, and eigenvectors as columns."""
    values, vectors = torch.linalg.eigh(matrix.double())
    return values.flip(0).clamp(min=0.0).to(matrix), vectors.flip(1).to(matrix).contiguous()


def spread_out(blocks: Sequence[Block], how: Start, variances: Mapping[str, float], strength: float) -> list[Block]:
    """The blocks with standard deviations to begin with.

    By curvature `s = 1/(1/λ + strength · h)`, where the loss of a quadratic and the divergence balance; what has no known
    curvature h counts with the mean of the others.
    """
    known = [b.curvature.mean() for b in blocks if b.curvature is not None]
    usual = float(torch.stack(known).mean()) if known else 0.0
    found = []
    for block in blocks:
        variance = variances[block.group]
        if how == "weights":
            size = block.parameter(block.mean)
            least = _LEAST_WEIGHT * float(size.square().mean().sqrt()) or math.sqrt(variance) * _LEAST_WEIGHT
            log_std = size.abs().clamp(min=least).log().reshape(block.shape)
            log_std = (log_std.T if block.transposed else log_std).reshape(block.mean.shape)
        elif how == "flat":
            log_std = torch.full_like(block.mean, 0.5 * math.log(variance))
        else:
            h = torch.full_like(block.mean, usual) if block.curvature is None else block.curvature
            log_std = -0.5 * (1 / variance + strength * h).log()
        found.append(replace(block, log_std=log_std))
    return found
