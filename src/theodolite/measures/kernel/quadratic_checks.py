"""Whether a function of the weights is quadratic, and whether a loss is a squared one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from theodolite.problem import Problem

# Third differences along a random line: zero where a function of the weights is a quadratic.

#: Seeds of the two trial directions. Small seeds are what people draw their weights with, and a step parallel to the weights
#: would tell a function that is homogeneous in them (a ReLU network, say) for a quadratic.
TRIAL_SEEDS = (0x7E0D, 0x7E0E)


def trial_step(tensors: Mapping[str, Tensor], seed: int = TRIAL_SEEDS[0]) -> dict[str, Tensor]:
    """A random displacement of the size of the weights, for each named tensor: shapes, dtypes and devices are theirs."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(w.shape, generator=generator, dtype=torch.float32).to(w) * (w.detach().abs().mean() + 0.1)
        for name, w in tensors.items()
    }


def third_difference(values: Sequence[Tensor]) -> tuple[float, float]:
    """`‖f₃ − 3f₂ + 3f₁ − f₀‖` for four values at equal steps of a line, and the scale to judge it by: `max ‖fᵢ − f₀‖`.

    The scale is how much f varies, so a large constant part of f hides nothing; rounding of that part is taken off the size.

    >>> third_difference([torch.tensor([100.0 + t**2]) for t in range(4)])
    (0.0, 9.0)
    >>> third_difference([torch.tensor([100.0 + t**3]) for t in range(4)])[0] > 5.9
    True
    """
    first, second, third, fourth = (value.detach().double() for value in values)
    rounding = 8 * torch.finfo(values[0].dtype).eps * max(float(v.norm()) for v in (first, second, third, fourth))
    size = float((fourth - 3 * third + 3 * second - first).norm())
    scale = max(float((value - first).norm()) for value in (second, third, fourth))
    return max(size - rounding, 0.0), scale


# Whether a loss is a squared one, and in which convention: half a sum, a mean, half a mean, over samples or numbers.


def squared_loss_curvature(problem: Problem) -> float | None:
    """The c of a loss (c/2) Σ r² over all outputs of the data; None where the loss is not of this form.

    Found by trial at made-up outputs: the gradient g must be c times the residual and the loss ‖g‖²/(2c).
    """
    loss = problem.loss_function
    if loss is None:
        return None
    found: list[float] = []
    generator = torch.Generator().manual_seed(0)
    with problem.session():
        tensors = problem.tensors(problem.leaves(grad=False))
        for i, share, batch in problem.iterate():
            output = problem.evaluate(tensors, batch, i).output.detach()
            for _ in range(2):
                noise = torch.randn(output.shape, generator=generator, dtype=torch.float32).to(output)
                found.append(_curvature_at(loss, output + noise, batch.target, share))
    tolerance = 1e-8 if problem.dtype == torch.float64 else 1e-4
    middle = sum(found) / len(found)
    agree = all(abs(c - middle) <= tolerance * abs(middle) for c in found)  # false for NaN
    return middle if agree and middle > 0 else None


def _curvature_at(loss: object, output: Tensor, target: object, share: float) -> float:
    """share · c at one place, NaN where the loss is not squared there."""
    output = output.clone().requires_grad_()
    value: Tensor = loss(output, target)  # type: ignore[operator]
    if not value.requires_grad:
        return math.nan
    [gradient] = torch.autograd.grad(value, output, create_graph=True)
    if not gradient.requires_grad:
        return math.nan
    generator = torch.Generator().manual_seed(1)
    v = torch.randn(output.shape, generator=generator, dtype=torch.float32).to(output)
    [image] = torch.autograd.grad(gradient, output, v)
    c = float((v * image).sum() / v.square().sum())
    gradient, value = gradient.detach(), value.detach()
    precision = 1e-8 if output.dtype == torch.float64 else 1e-4
    straight = float((image - c * v).norm()) <= precision * abs(c) * float(v.norm())
    squared = abs(float(gradient.square().sum()) - 2 * c * float(value)) <= precision * abs(2 * c * float(value))
    return share * c if straight and squared and c > 0 else math.nan
