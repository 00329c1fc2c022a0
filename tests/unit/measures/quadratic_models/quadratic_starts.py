"""Starts and orbits of quadratic models that their tests share."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

import theodolite as th
from theodolite.measures.quadratic_models import Orbit, gated_kernel, gated_output, gates, one_example

Y = 1.0


def draw(m: int, d: int = 1, replicas: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weights of (3.9): u (replicas, m, d) normal, v (replicas, m) signs."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(replicas, m, d, generator=generator, dtype=torch.float64)
    return u, torch.randint(0, 2, (replicas, m), generator=generator).double() * 2 - 1


@functools.cache
def start(m: int, replicas: int = 20, seed: int = 0) -> tuple[Tensor, Tensor]:
    """First output and kernel of networks at one example with ‖x‖² = d (only u·x/‖x‖ matters, so d = 1)."""
    u, v = draw(m, 1, replicas, seed)
    x = torch.ones(1, 1, dtype=torch.float64)
    gate = gates(u, x)
    return gated_output(u, v, gate, x)[:, 0], gated_kernel(u, v, gate, x)[:, 0, 0]


def orbits(m: int, ratio: float, replicas: int = 20, steps: int = 500, seed: int = 0) -> Orbit:
    g, kernel = start(m, replicas, seed)
    return one_example(g, kernel, Y, 1 / m, ratio / kernel, steps)


def words(orbit: Orbit) -> list[str]:
    runs = zip(orbit.loss.T.tolist(), orbit.kernel_norm.T.tolist(), strict=True)
    return [th.classify_run(loss, kernel=kernel, quadratic=True) for loss, kernel in runs]


def inputs(n: int, d: int, seed: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator, dtype=torch.float64), torch.randn(n, generator=generator, dtype=torch.float64)
