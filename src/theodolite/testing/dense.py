"""Dense truth, written as plainly as possible and sharing no code with the operators.

Double backward is the reference (`torch.func.hessian` is wrong through LayerNorm in torch 2.13); it is itself
checked against finite differences of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from theodolite.arguments import checked, positive, sequence, shown
from theodolite.problem.arguments import a_plain_function, a_tensor, of_dimensions
from theodolite.problem.calling import KeepFloat64


def _flat(tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    return torch.cat([(torch.zeros_like(p) if t is None else t).reshape(-1) for t, p in zip(tensors, like, strict=True)])


def some_parameters(name: str, value: Any) -> list[Tensor]:
    """Tensors that require a gradient."""
    found = [a_tensor(f"{name}[{i}]", t) for i, t in enumerate(sequence(name, value))]
    if not found or not all(t.requires_grad for t in found):
        raise ValueError(f"{name} must be tensors that require a gradient. Got {shown(value)}.")
    return found


@checked(objective=a_plain_function, parameters=some_parameters)
def dense_hessian(objective: Callable[[], Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """The Hessian of `objective()` in the given parameters, one double backward per row."""
    with sdpa_kernel(SDPBackend.MATH), KeepFloat64():
        gradients = torch.autograd.grad(objective(), parameters, create_graph=True, allow_unused=True)
    gradient = _flat(gradients, parameters)
    if not gradient.requires_grad:
        return gradient.new_zeros(gradient.numel(), gradient.numel())
    rows = [torch.autograd.grad(g, parameters, retain_graph=True, allow_unused=True) for g in gradient]
    return torch.stack([_flat(row, parameters) for row in rows]).detach()


def dense_gauss_newton(output: Callable[[], Tensor], loss: Callable[[Tensor], Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """`Jᵀ (∇² loss) J` with J formed row by row and the loss Hessian by double backward in the output."""
    with sdpa_kernel(SDPBackend.MATH), KeepFloat64():
        z = output()
    jacobian = torch.stack(
        [_flat(torch.autograd.grad(v, parameters, retain_graph=True, allow_unused=True), parameters) for v in z.reshape(-1)]
    )
    free = z.detach().requires_grad_()
    return jacobian.T @ dense_hessian(lambda: loss(free), [free]) @ jacobian


@checked(objective=a_plain_function, parameters=some_parameters, vector=of_dimensions(1), step=positive)
def finite_difference_product(
    objective: Callable[[], Tensor], parameters: Sequence[Tensor], vector: Tensor, step: float = 1e-5
) -> Tensor:
    """`H v` by central differences of the gradient, for float64 parameters; they are restored."""
    sizes = [p.numel() for p in parameters]
    if vector.shape != (sum(sizes),):
        raise ValueError(f"vector must have shape ({sum(sizes)},), one number per parameter. Got {tuple(vector.shape)}.")
    pieces = [piece.view_as(p) for piece, p in zip(vector.split(sizes), parameters, strict=True)]
    saved = [p.detach().clone() for p in parameters]

    def gradient_at(shift: float) -> Tensor:
        with torch.no_grad():
            for p, origin, piece in zip(parameters, saved, pieces, strict=True):
                p.copy_(origin + shift * piece)
        with KeepFloat64():
            return _flat(torch.autograd.grad(objective(), parameters, allow_unused=True), parameters)

    try:
        return (gradient_at(step) - gradient_at(-step)) / (2 * step)
    finally:
        with torch.no_grad():
            for p, origin in zip(parameters, saved, strict=True):
                p.copy_(origin)
