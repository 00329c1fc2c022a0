"""The general quadratic model, and its exact step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn


class GeneralQuadratic(nn.Module):
    """`g(w; x) = wᵀφ(x) + ½γ wᵀΣ(x)w`, with Σ(x) symmetric and known by its products.

    Parameters
    ----------
    w : first weights (p).
    features : φ, inputs (n, ...) -> (n, p).
    product : (inputs, w) -> Σ(x_i) w for every input: (n, p).
    gamma : weight of the quadratic part.

    >>> model = GeneralQuadratic(torch.ones(2), lambda x: x, lambda x, w: w.expand(len(x), -1), gamma=0.5)
    >>> model(torch.tensor([[1.0, 2.0]])).item()                             # 3 + ½·½·2
    3.5
    """

    def __init__(
        self, w: Tensor, features: Callable[[Tensor], Tensor], product: Callable[[Tensor, Tensor], Tensor], gamma: float
    ) -> None:
        super().__init__()
        self.w = nn.Parameter(w.detach().clone())
        self.features, self.product, self.gamma = features, product, gamma

    def forward(self, x: Tensor) -> Tensor:
        return (self.features(x) + 0.5 * self.gamma * self.product(x, self.w)) @ self.w

    def jacobian(self, x: Tensor) -> Tensor:
        """φ(x) + γΣ(x)w: (n, p)."""
        with torch.no_grad():
            return self.features(x) + self.gamma * self.product(x, self.w)

    def step(self, x: Tensor, y: Tensor, rate: float) -> QuadraticStep:
        """What one step of gradient descent on ½ Σ (g − y)² makes of residual and kernel."""
        with torch.no_grad():
            residual, jacobian = self(x) - y, self.jacobian(x)
            return quadratic_step(residual, jacobian, self.gamma * self.product(x, residual @ jacobian), rate)


class QuadraticStep(NamedTuple):
    """Residual (n) and tangent kernel (n, n) after a step."""

    residual: Tensor
    kernel: Tensor


def quadratic_step(residual: Tensor, jacobian: Tensor, curved: Tensor, rate: float) -> QuadraticStep:
    """One exact step of any quadratic model: (3.15), and (3.16) corrected.

    `curved` (n, p) has the rows G_i = rᵀJ H_i with H_i the Hessian of output i. As J(t+1) = J − ηG, the kernel becomes
    K − η(GJᵀ + JGᵀ) + η²GGᵀ; the source prints another form, which does not hold.
    """
    cross = curved @ jacobian.mT
    kernel = jacobian @ jacobian.mT
    after = residual - rate * kernel @ residual + 0.5 * rate**2 * cross @ residual
    return QuadraticStep(after, kernel - rate * (cross + cross.mT) + rate**2 * curved @ curved.mT)
