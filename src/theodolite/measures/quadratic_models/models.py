"""Quadratic models of networks: the gated one of a two-layer ReLU network, the general form, and what leaves linear dynamics."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from theodolite.arguments import also_called
from theodolite.measures.quadratic_models.recursions import Orbit, all_over

# The quadratic model of a two-layer ReLU network: the same network with the gates of its start.


class GatedBilinear(nn.Module):
    """`g(u, v; x) = (md)^(-1/2) Σ_i 1{u0_i·x ≥ 0} v_i u_i·x`: second Taylor model of a two-layer ReLU network at (u0, v0).

    Parameters `u` (m, d) and `v` (m) start at the given weights, the gates stay those of `u0` (by default of `u`).
    Inputs are (n, d) or images of d values, outputs (n).

    >>> model = GatedBilinear(torch.tensor([[1.0], [-1.0]]), torch.tensor([1.0, 1.0]))
    >>> round(model(torch.tensor([[2.0]])).item(), 6)                     # 2/√2: the second unit is off, and stays off
    1.414214
    """

    u0: Tensor

    def __init__(self, u: Tensor, v: Tensor, u0: Tensor | None = None) -> None:
        super().__init__()
        if u.ndim != 2 or v.shape != u.shape[:1]:
            raise ValueError(f"u must be (m, d) and v (m). Got {tuple(u.shape)} and {tuple(v.shape)}.")
        self.u = nn.Parameter(u.detach().clone())
        self.v = nn.Parameter(v.detach().clone())
        self.register_buffer("u0", (u if u0 is None else u0).detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return gated_output(self.u, self.v, gates(self.u0, x), x)

    def kernel(self, x: Tensor) -> Tensor:
        """Tangent kernel (n, n) at the inputs."""
        x = x.flatten(1)
        with torch.no_grad():
            return gated_kernel(self.u, self.v, gates(self.u0, x), x)


def gates(u: Tensor, x: Tensor) -> Tensor:
    """1{u_i·x_j ≥ 0}: (..., m, n), as numbers."""
    return (u @ x.mT >= 0).to(u.dtype)


def gated_output(u: Tensor, v: Tensor, gate: Tensor, x: Tensor) -> Tensor:
    """Outputs (..., n) of weights u (..., m, d), v (..., m) with given gates (..., m, n) at inputs (n, d)."""
    return _scale(u) * (v[..., None, :] @ (gate * (u @ x.mT)))[..., 0, :]


def gated_kernel(u: Tensor, v: Tensor, gate: Tensor, x: Tensor) -> Tensor:
    """`K_jk = (md)^(-1) Σ_i gate_ij gate_ik (v_i² x_j·x_k + u_i·x_j u_i·x_k)`: (..., n, n).

    With gates 1{u_i·x_j ≥ 0} it is the kernel of the ReLU network itself.
    """
    active = gate * (u @ x.mT)
    return _scale(u) ** 2 * ((gate * v.square()[..., None]).mT @ gate * (x @ x.mT) + active.mT @ active)


@dataclass(frozen=True, eq=False)
class Descent(Orbit):
    """An orbit with the weights it ended at: u (runs, m, d), v (runs, m)."""

    u: Tensor
    v: Tensor


@also_called(lr="rate")
def descend(
    u: Tensor,
    v: Tensor,
    x: Tensor,
    y: Tensor,
    rate: Tensor | float,
    steps: int,
    *,
    frozen: bool = True,
    until: float | None = None,
) -> Descent:
    """Full-batch gradient descent on ½ Σ (g − y)² for many starts and rates at once.

    Starts u (runs, m, d) and v (runs, m), inputs (n, d), targets (n); `rate` broadcasts against the runs, so one start
    can be run at many rates. `frozen=False` takes the gates anew in every step: the ReLU network instead of its
    quadratic model. Descent ends early once every loss is at most `until` or infinite.
    """
    rates = torch.as_tensor(rate, dtype=u.dtype, device=u.device)
    runs = torch.broadcast_shapes(u.shape[:-2], rates.shape)
    rates = rates.expand(runs)
    u = u.expand(*runs, *u.shape[-2:]).clone()
    v = v.expand(*runs, v.shape[-1]).clone()
    scale, gate = _scale(u), gates(u, x)
    outputs, kernels = [], []
    for taken in range(steps + 1):
        if not frozen and taken:
            gate = gates(u, x)
        active = gate * (u @ x.mT)  # (runs, m, n)
        output = scale * (v[..., None, :] @ active)[..., 0, :]
        outputs.append(output)
        kernels.append(gated_kernel(u, v, gate, x))
        residual = output - y
        if taken == steps or all_over(0.5 * residual.square().sum(-1), until):
            break
        pull = (rates[..., None] * scale * residual)[..., None, :]  # (runs, 1, n)
        change = (active * pull).sum(-1)
        u -= (v[..., None] * gate * pull) @ x
        v -= change
    return Descent(rates, y, torch.stack(outputs), torch.stack(kernels), u, v)


def _scale(u: Tensor) -> float:
    m, d = u.shape[-2:]
    return 1.0 / math.sqrt(m * d)


# The general quadratic model, and its exact step.


class GeneralQuadratic(nn.Module):
    """`g(w; x) = wᵀφ(x) + ½γ wᵀΣ(x)w`, with Σ(x) symmetric and known by its products.

    Args:
        w: first weights (p).
        features: φ, inputs (n, ...) -> (n, p).
        product: (inputs, w) -> Σ(x_i) w for every input: (n, p).
        gamma: weight of the quadratic part.

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

    @also_called(lr="rate")
    def step(self, x: Tensor, y: Tensor, rate: float) -> QuadraticStep:
        """What one step of gradient descent on ½ Σ (g − y)² makes of residual and kernel."""
        with torch.no_grad():
            residual, jacobian = self(x) - y, self.jacobian(x)
            return quadratic_step(residual, jacobian, self.gamma * self.product(x, residual @ jacobian), rate)


class QuadraticStep(NamedTuple):
    """Residual (n) and tangent kernel (n, n) after a step."""

    residual: Tensor
    kernel: Tensor


@also_called(lr="rate")
def quadratic_step(residual: Tensor, jacobian: Tensor, curved: Tensor, rate: float) -> QuadraticStep:
    """One exact step of any quadratic model: (3.15), and (3.16) corrected.

    `curved` (n, p) has the rows G_i = rᵀJ H_i with H_i the Hessian of output i. As J(t+1) = J − ηG, the kernel becomes
    K − η(GJᵀ + JGᵀ) + η²GGᵀ; the source prints another form, which does not hold.
    """
    cross = curved @ jacobian.mT
    kernel = jacobian @ jacobian.mT
    after = residual - rate * kernel @ residual + 0.5 * rate**2 * cross @ residual
    return QuadraticStep(after, kernel - rate * (cross + cross.mT) + rate**2 * curved @ curved.mT)


# What leaves linear dynamics along the top eigenvector of the tangent kernel.

#: Below this share of the residual its part along the eigenvector is too small to divide by.
TOO_SMALL = 1e-8


class TopDirection(NamedTuple):
    """Between two steps, each (...): `rho_f` = p·R_f p and `rho_K` = p·R_K p of the source, and where they act.

    `lambda_1` and `vector` p (..., n) are the top eigenpair of the first kernel, `share` the part of the first loss along p.
    """

    lambda_1: Tensor
    vector: Tensor
    share: Tensor
    rho_f: Tensor
    rho_K: Tensor  # noqa: N815 (as the source writes it)


@also_called(lr="rate")
def top_direction(
    kernel: Tensor, next_kernel: Tensor, residual: Tensor, next_residual: Tensor, rate: Tensor | float
) -> TopDirection:
    """Kernels (..., n, n) and residuals f − y (..., n) of consecutive steps of ½ Σ (f − y)² at `rate` (...).

    `rho_f = ⟨p, r'⟩/⟨p, r⟩ − 1 + ηλ₁` and `rho_K = λ₁ − p·K'p`; both are 0 for a linear model. `rho_f` is NaN where the
    residual has no part along p to speak of.

    >>> K, r = torch.diag(torch.tensor([3.0, 1.0])), torch.tensor([1.0, 1.0])
    >>> found = top_direction(K, K, r, r - 0.5 * K @ r, 0.5)
    >>> float(found.rho_f), float(found.rho_K), float(found.share)
    (0.0, 0.0, 0.5)
    """
    values, vectors = torch.linalg.eigh(kernel)
    lambda_1, p = values[..., -1], vectors[..., -1]
    before, after = (p * residual).sum(-1), (p * next_residual).sum(-1)
    size = residual.square().sum(-1)
    usable = before.abs() >= TOO_SMALL * size.sqrt()
    quotient = torch.where(usable & (size > 0), after / torch.where(before == 0, 1.0, before), torch.nan)
    rho_K = lambda_1 - (p * (next_kernel @ p[..., None])[..., 0]).sum(-1)
    return TopDirection(lambda_1, p, before.square() / size, quotient - 1 + rate * lambda_1, rho_K)
