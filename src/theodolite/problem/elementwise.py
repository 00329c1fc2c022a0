"""Elementwise functions with their first two derivatives stored, so that differentiating twice is two multiplications."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def derivatives(function: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """σ(z), σ'(z), σ''(z) of a function that acts on each entry alone.

    >>> derivatives(torch.square, torch.tensor([3.0]))
    (tensor([9.]), tensor([6.]), tensor([2.]))
    """
    with torch.enable_grad():
        start = z.detach().requires_grad_()
        values = function(start)
        (slope,) = torch.autograd.grad(values.sum(), start, create_graph=True)
        second = torch.autograd.grad(slope.sum(), start)[0] if slope.requires_grad else torch.zeros_like(slope)
    return values.detach(), slope.detach(), second


def twice_differentiable(function: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """`function(z)` whose first and second derivatives in z are known; asking for a third raises.

    torch writes the double backward of GELU and SiLU as a dozen operations on temporaries, an eighth of a product of a small GPT.
    """
    values: Tensor = _Elementwise.apply(z, derivatives(function, z))
    return values


class _Elementwise(Function):
    """z, with (σ(z), σ'(z), σ''(z)) known -> σ(z)."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, known: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        values, slope, second = known
        ctx.save_for_backward(z, slope, second)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        z, slope, second = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return grads[0] * slope, None
        return _ElementwiseBackward.apply(grads[0], z, slope, second), None


class _ElementwiseBackward(Function):
    """(g, z) -> g σ'(z), with derivatives σ'(z) and g σ''(z)."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, z: Tensor, slope: Tensor, second: Tensor) -> Tensor:
        ctx.save_for_backward(slope, g * second)
        return g * slope

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():  # create_graph
            raise RuntimeError("The graph of a Hessian product holds two derivatives of GELU and SiLU, not three.")
        slope, bend = ctx.saved_tensors
        need_g, need_z = ctx.needs_input_grad[:2]
        return grads[0] * slope if need_g else None, grads[0] * bend if need_z else None, None, None
