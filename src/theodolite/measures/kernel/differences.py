"""Third differences along a random line: zero where a function of the weights is a quadratic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

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
