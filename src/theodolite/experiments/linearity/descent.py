"""Gradient descent on ½ Σ r² for several networks at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.experiments.linearity.ensembles import Ensemble, Weights, norms


@dataclass(frozen=True, eq=False)
class Descent:
    """A run: `losses[t]` (S,), the rates (S,), the kernels at the start (S, n, n), the largest drift, the way gone (S,).

    `lambda_min` is the smallest eigenvalue of the kernels looked at on the way, (S,); `residuals` those at the start. Drift, way
    and `lambda_min` of a network are taken up to the step `ended` (S,) at which its own loss was low enough.
    """

    losses: list[Tensor]
    rates: Tensor
    kernel: Tensor
    drift: Tensor
    moved: Tensor
    lambda_min: Tensor
    residuals: Tensor
    ended: Tensor
    weights: Weights


def descend(
    networks: Ensemble, x: Tensor, y: Tensor, *, steps: int, until: float, every: int, rate: Tensor | None = None
) -> Descent:
    """Descend until every loss is `until` times its start; by default at the rate 1/λ_max(K₀) of each network.

    The kernel is looked at every so many steps and where a network is done. That one keeps descending with the others, but
    nothing more is taken of it than its losses.
    """
    start = [w.clone() for w in networks.weights]
    weights = [w.clone() for w in start]
    kernel = networks.kernel(weights, x)
    values = torch.linalg.eigvalsh(kernel)
    size = values[:, -1]
    rates = 1.0 / size if rate is None else rate
    drift, smallest, moved = torch.zeros_like(size), values[:, 0], torch.zeros_like(size)
    live, ended = torch.ones_like(size, dtype=torch.bool), torch.zeros_like(size, dtype=torch.long)
    losses: list[Tensor] = []
    first = torch.zeros_like(y)
    for step in range(steps + 1):
        leaves = [w.requires_grad_() for w in weights]
        residuals = networks(leaves, x)[..., 0] - y
        loss = 0.5 * residuals.square().sum(1)
        losses.append(loss.detach())
        first = residuals.detach() if step == 0 else first
        low = live & ((losses[-1] <= until * losses[0]) | (step == steps))
        if step and (step % every == 0 or bool(low.any())):
            now = networks.kernel(weights, x)
            further = torch.maximum(drift, torch.linalg.eigvalsh(now - kernel).abs().amax(1) / size)
            drift = torch.where(live, further, drift)
            smallest = torch.where(live, torch.minimum(smallest, torch.linalg.eigvalsh(now)[:, 0]), smallest)
        if bool(low.any()):
            moved = torch.where(low, norms([w.detach() - w0 for w, w0 in zip(weights, start, strict=True)]), moved)
            ended = torch.where(low, step, ended)
            live = live & ~low
        if not bool(live.any()):
            break
        gradients = torch.autograd.grad(loss.sum(), leaves)
        weights = [w.detach() - rates.view(-1, *[1] * (w.ndim - 1)) * g for w, g in zip(leaves, gradients, strict=True)]
    return Descent(losses, rates, kernel, drift, moved, smallest, first, ended, [w.detach() for w in weights])
