"""Two-layer networks with Gaussian weights, and the expectations that the theorems are about."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from theodolite.problem import Problem

CHUNK = 1000


@dataclass(frozen=True)
class TwoLayers:
    """`M = E[D W₂ᵀ A W₂ D]`, `M*` with gates independent of A, `E[A]`, `W₂` and how often each unit fires."""

    M: Tensor
    star: Tensor
    A: Tensor
    W: Tensor
    rates: Tensor


def weights_of(n: int, d: int, c: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """W₁ (n, d) and W₂ (c, n) with entries N(0, 1/fan-in)."""
    w1 = torch.randn(n, d, generator=generator, dtype=torch.float64) / math.sqrt(d)
    return w1, torch.randn(c, n, generator=generator, dtype=torch.float64) / math.sqrt(n)


def inputs_of(count: int, d: int, rectified: bool, generator: torch.Generator) -> Tensor:
    """Gaussian inputs, or their positive parts; single precision is more than sampling leaves."""
    x = torch.randn(count, d, generator=generator)
    return x.clamp_min(0.0) if rectified else x


def two_layers(n: int, d: int, c: int, samples: int, *, rectified: bool, seed: int) -> TwoLayers:
    """y = relu(W₁x), z = W₂y; expectations over x with the weights held."""
    generator = torch.Generator().manual_seed(seed)
    w1, w2 = weights_of(n, d, c, generator)
    m, gates = torch.zeros(n, n, dtype=torch.float64), torch.zeros(n, n, dtype=torch.float64)
    mean_a = torch.zeros(c, c, dtype=torch.float64)
    for start in range(0, samples, CHUNK):
        u = inputs_of(min(CHUNK, samples - start), d, rectified, generator) @ w1.T.float()
        gate = (u > 0).float()
        p = (u.clamp_min(0.0) @ w2.T.float()).softmax(-1)
        # Rows √p_j (e_j − p)ᵀ W₂ D; their outer products, summed over j, are D W₂ᵀ A W₂ D.
        roots = p.sqrt()[:, :, None] * (torch.eye(c) - p[:, None, :])
        rows = ((roots @ w2.float()) * gate[:, None, :]).flatten(0, 1)
        m += (rows.T @ rows).double() / samples
        gates += (gate.T @ gate).double() / samples
        mean_a += (torch.diag(p.sum(0)) - p.T @ p).double() / samples
    return TwoLayers(m, (w2.T @ mean_a @ w2) * gates, mean_a, w2, gates.diagonal().clone())


def logits(n: int, d: int, c: int, samples: int, *, rectified: bool, seed: int) -> Tensor:
    """z (samples, c) of such a network."""
    generator = torch.Generator().manual_seed(seed)
    w1, w2 = weights_of(n, d, c, generator)
    x = inputs_of(samples, d, rectified, generator)
    return ((x @ w1.T.float()).clamp_min(0.0) @ w2.T.float()).double()


def first_layer_problem(n: int, d: int, c: int, samples: int, *, rectified: bool, seed: int) -> Problem:
    """The same network as a problem; labels do not matter to its curvature."""
    generator = torch.Generator().manual_seed(seed)
    w1, w2 = weights_of(n, d, c, generator)
    first, second = nn.Linear(d, n, bias=False).double(), nn.Linear(n, c, bias=False).double()
    with torch.no_grad():
        first.weight.copy_(w1)
        second.weight.copy_(w2)
    model = nn.Sequential(first, nn.ReLU(), second)
    x = inputs_of(samples, d, rectified, generator).double()
    return Problem(model, nn.CrossEntropyLoss(), (x, torch.arange(samples) % c))


def top_space(matrix: Tensor, k: int) -> Tensor:
    """The k leading eigenvectors of a symmetric matrix."""
    vectors: Tensor = torch.linalg.eigh(matrix)[1]
    return vectors.flip(1)[:, :k]


def rectified_autocorrelation(d: int) -> Tensor:
    """E[xxᵀ]/d of rectified Gaussian inputs: 11ᵀ/(2πd) + (π − 1)/(2πd) I."""
    ones = torch.ones(d, d, dtype=torch.float64)
    return (ones + (math.pi - 1) * torch.eye(d, dtype=torch.float64)) / (2 * math.pi * d)


def rectified_moments() -> dict[str, float]:
    """Mean, variance and fourth central moment of max(g, 0), g Gaussian, by quadrature."""
    from scipy.integrate import quad

    def over_half(f: Callable[[float], float]) -> float:
        found, _ = quad(lambda g: f(g) * math.exp(-g * g / 2) / math.sqrt(2 * math.pi), 0, 12, epsabs=1e-12)
        return float(found)

    mean = over_half(lambda g: g)
    # Half of the probability sits at zero.
    return {
        "mean": mean,
        "variance": over_half(lambda g: (g - mean) ** 2) + 0.5 * mean**2,
        "fourth": over_half(lambda g: (g - mean) ** 4) + 0.5 * mean**4,
    }
