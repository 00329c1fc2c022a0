"""A loss `λ/2 (w - w*)²` of one weight: what learning rates do to it is a product."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

import theodolite as th


class OneWeight(nn.Module):
    """`w x`; it cannot draw new weights, so that nothing starts anew."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[weight]], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def quadratic(sharpness: float, start: float = 0.0, noise: float = 0.0) -> th.Problem:
    """Its minimum is at w* = 1 and its sharpness λ: gradient descent is stable below a rate of 2/λ and diverges above.

    With `noise` of the targets each batch has a minimum of its own, and the same sharpness.
    """
    x = torch.full((16, 1), math.sqrt(sharpness / 2), dtype=torch.float64)
    targets = x + noise * torch.randn(16, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return th.Problem(OneWeight(start), nn.MSELoss(), (x, targets))


def after(sharpness: float, rates: Iterable[float], start: float = 0.0) -> float:
    """The loss after a step at each of the rates."""
    return 0.5 * sharpness * (1.0 - start) ** 2 * math.prod((1.0 - rate * sharpness) ** 2 for rate in rates)
