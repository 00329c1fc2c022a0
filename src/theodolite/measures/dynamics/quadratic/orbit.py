"""Many runs of gradient descent side by side."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Orbit:
    """Runs of gradient descent on ½ Σ (g − y)²: time first, then the axes of the runs, then the n examples.

    `rate` (runs), `target` (n) or (runs, n), `output` (steps + 1, runs, n), `kernel` (steps + 1, runs, n, n). A run that
    blows up goes on as infinity or NaN.
    """

    rate: Tensor
    target: Tensor
    output: Tensor
    kernel: Tensor

    @property
    def residual(self) -> Tensor:
        """g − y, shaped as the outputs."""
        return self.output - self.target

    @property
    def loss(self) -> Tensor:
        """½ Σ (g − y)²: (steps + 1, runs)."""
        return 0.5 * self.residual.square().sum(-1)

    @property
    def kernel_norm(self) -> Tensor:
        """Largest eigenvalue of the kernel: (steps + 1, runs); NaN where the run has blown up."""
        if self.kernel.shape[-1] == 1:
            return self.kernel[..., 0, 0]
        finite = self.kernel.isfinite().all(-1).all(-1)
        top = torch.full_like(self.kernel[..., 0, 0], torch.nan)
        top[finite] = torch.linalg.eigvalsh(self.kernel[finite])[..., -1]
        return top


def scalar_orbit(rate: Tensor, target: Tensor, output: list[Tensor], kernel: list[Tensor]) -> Orbit:
    """An orbit of one example from its outputs and kernels, step by step."""
    return Orbit(rate, target[..., None], torch.stack(output)[..., None], torch.stack(kernel)[..., None, None])


def all_over(loss: Tensor, until: float | None) -> bool:
    """Whether every run has blown up or, with `until`, has come down to that loss."""
    gone = ~loss.isfinite()
    return bool((gone if until is None else gone | (loss <= until)).all())
