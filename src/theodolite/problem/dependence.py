"""Whether an objective without a gradient is really constant, or autograd merely does not see how it depends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from theodolite.problem.batches import Batch
    from theodolite.problem.problem import Problem

UNSEEN = (
    "The objective does not depend on the measured parameters through autograd, so its derivatives would all be zero. "
    "Usual causes: .detach(), .item() or torch.no_grad() in the model or the loss, or a loss of decisions (argmax, rounding). "
    "Remedy: keep the way from the parameters to the loss differentiable, or measure other parameters with params=."
)


def refuse_unseen_dependence(problem: Problem, batch: Batch, index: int) -> None:
    """Raise if the loss of a batch without a gradient changes when the measured parameters do.

    One that stays the same is constant in them (a batch may not use them all): its derivatives are truly zero.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        leaves = problem.leaves(grad=False)
        here, there = (problem.raw_loss(problem.tensors(at), batch) for at in (leaves, [_shaken(p, generator) for p in leaves]))
    if not abs(there - here) <= 1e-5 * max(abs(here), 1e-30):
        raise ValueError(
            f"{UNSEEN} (Batch {index}: the loss moves from {here:.4g} to {there:.4g} when the parameters are shaken.)"
        )


def _shaken(p: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(p.shape, generator=generator, dtype=torch.float32).to(p)
    return p + 0.3 * noise * (p.square().mean().sqrt() + 1e-2)
