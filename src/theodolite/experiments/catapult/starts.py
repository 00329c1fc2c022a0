"""Random two-layer networks to start from, many at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from theodolite.measures.dynamics import classify_run
from theodolite.measures.quadratic_models import Orbit, gated_kernel, gated_output
from theodolite.measures.quadratic_models.models import gates


class Start(NamedTuple):
    """Weights u (draws, m, d) ~ N(0, 1), v (draws, m) = ±1; outputs and kernels (draws) at one example with ‖x‖² = d."""

    u: Tensor
    v: Tensor
    x: Tensor
    output: Tensor
    kernel: Tensor


def draw(m: int, draws: int, seed: int, d: int = 1) -> Start:
    """Networks of the source's parameterisation (3.9). On one example only u·x/‖x‖ acts, so d = 1 is every d."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(draws, m, d, generator=generator, dtype=torch.float64)
    v = torch.randint(0, 2, (draws, m), generator=generator).double() * 2 - 1
    x = torch.ones(1, d, dtype=torch.float64)
    gate = gates(u, x)
    return Start(u, v, x, gated_output(u, v, gate, x)[:, 0], gated_kernel(u, v, gate, x)[:, 0, 0])


class QuadraticStart(NamedTuple):
    """Outputs, kernels ‖φ + γΣw‖² and φᵀΣφ (draws) of general quadratic models at one example."""

    output: Tensor
    kernel: Tensor
    bend: Tensor


def draw_quadratic(draws: int, gamma: float, seed: int, p: int = 100) -> QuadraticStart:
    """Models with φ a random unit vector of p entries, Σ = diag(±1), w ~ N(0, I)."""
    generator = torch.Generator().manual_seed(seed)
    phi, w = torch.randn(2, draws, p, generator=generator, dtype=torch.float64)
    phi = phi / phi.norm(dim=1, keepdim=True)
    signs = torch.randint(0, 2, (draws, p), generator=generator).double() * 2 - 1
    output = (w * phi).sum(1) + 0.5 * gamma * (signs * w.square()).sum(1)
    return QuadraticStart(output, (phi + gamma * signs * w).square().sum(1), (signs * phi.square()).sum(1))


def words(orbit: Orbit, quadratic: bool = True) -> list[str]:
    """The regime of every run of an orbit, run axes flattened."""
    losses, norms = orbit.loss.flatten(1).T.tolist(), orbit.kernel_norm.flatten(1).T.tolist()
    return [classify_run(loss, kernel=norm, quadratic=quadratic) for loss, norm in zip(losses, norms, strict=True)]
