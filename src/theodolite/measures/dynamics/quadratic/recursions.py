"""One example: gradient descent on a quadratic model is a map of two numbers, output and kernel.

All functions broadcast over starts and rates, in float64, and follow the loss ½ (g − y)².
"""

from __future__ import annotations

import torch
from torch import Tensor

from theodolite.measures.dynamics.quadratic.orbit import Orbit, all_over, scalar_orbit

Number = Tensor | float


def one_example_step(g: Tensor, kernel: Tensor, y: Number, c: Number, rate: Number) -> tuple[Tensor, Tensor]:
    """Output and kernel of the gated network after one step, (3.11) and (3.12) without the division; c = ‖x‖²/(md)."""
    r = g - y
    mu = 1 - rate * kernel + c * rate**2 * r * g
    return y + mu * r, kernel - rate * c * r * (4 * g - rate * kernel * r)


def one_example(
    g: Number, kernel: Number, y: Number, c: Number, rate: Number, steps: int, *, until: float | None = None
) -> Orbit:
    """The gated network on one example from its first output and kernel; c = 0 is the linear model.

    >>> float(one_example(1.0, 1.0, 0.0, 0.0, 0.5, 1).output[-1, 0])          # linear: r ← (1 − ηλ) r
    0.5
    """
    g, kernel, y, c, rate = _together(g, kernel, y, c, rate)
    outputs, kernels = [g], [kernel]
    for _ in range(steps):
        if all_over(0.5 * (g - y).square(), until):
            break
        g, kernel = one_example_step(g, kernel, y, c, rate)
        outputs.append(g)
        kernels.append(kernel)
    return scalar_orbit(rate, y, outputs, kernels)


def reduced_step(u: Tensor, v: Tensor, w: Number = 0.0) -> tuple[Tensor, Tensor]:
    """One step in the variables u = cη²(g−y)², v = ηλ, w = cη²(g−y)y: (3.13) and (3.14).

    w changes sign with g − y, so u and v alone make a map only for y = 0, where w is 0.
    """
    return (1 - v + u + w).square() * u, v - u * (4 - v) - 4 * w


def displacement(orbit: Orbit, c: Number) -> Tensor:
    """How far the weights of a gated network have moved since the start, ‖w(t) − w(0)‖: (steps + 1, runs).

    Along x the weights of every active unit undergo the same 2×2 map: a step multiplies u·x/‖x‖ + v by 1 − b and
    u·x/‖x‖ − v by 1 + b with b = η(g−y)√c, so two products and the first output and kernel hold the distance.
    """
    c = torch.as_tensor(c, dtype=torch.float64)
    g, kernel = orbit.output[0, ..., 0], orbit.kernel[0, ..., 0, 0]
    b = orbit.rate * orbit.residual[:-1, ..., 0] * c.sqrt()
    start = torch.ones_like(g)[None]
    plus, minus = (torch.cat([start, torch.cumprod(1 + sign * b, 0)]) for sign in (-1, 1))
    cross = 2 * c.sqrt() * g
    return (0.5 / c * ((plus - 1).square() * (kernel + cross) + (minus - 1).square() * (kernel - cross))).sqrt()


def unit_sigma(
    g: Number, kernel: Number, y: Number, c0: Number, gamma: Number, rate: Number, steps: int, *, until: float | None = None
) -> Orbit:
    """`g = wᵀφ + ½γ wᵀΣw` with Σ² = I on one example; c0 = φᵀΣφ, first kernel ‖φ + γΣw‖²."""
    g, kernel, y, c0, gamma, rate = _together(g, kernel, y, c0, gamma, rate)
    outputs, kernels = [g], [kernel]
    for _ in range(steps):
        if all_over(0.5 * (g - y).square(), until):
            break
        r, bent = g - y, gamma * (c0 + 2 * gamma * g)
        g, kernel = (
            g - rate * r * kernel + 0.5 * rate**2 * r**2 * bent,
            kernel - 2 * rate * r * bent + (rate * gamma * r) ** 2 * kernel,
        )
        outputs.append(g)
        kernels.append(kernel)
    return scalar_orbit(rate, y, outputs, kernels)


def pure_quadratic(
    g: Number, kernel: Number, gamma: Number, norm: Number, rate: Number, steps: int, *, until: float | None = None
) -> Orbit:
    """The case φ = 0, y = 0, Σ² = ‖x‖² I (`norm` is ‖x‖), two-layer linear networks among them.

    It is the map of the gated network with c = γ²‖x‖²: the source prints γ for γ² and leaves out one η.
    """
    gamma, norm = _together(gamma, norm)
    return one_example(g, kernel, 0.0, (gamma * norm).square(), rate, steps, until=until)


def _together(*numbers: Number) -> tuple[Tensor, ...]:
    return tuple(torch.broadcast_tensors(*(torch.as_tensor(value, dtype=torch.float64) for value in numbers)))
