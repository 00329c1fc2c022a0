"""Roots of the loss's curvature at the output: vectors q with `∇²_z loss = Σ_j q_j q_jᵀ`, row by row of the output.

Pulled back through the network they give the output Hessian of every layer at once. A row is one sample, or one token: the
loss is a sum over rows. Few outputs are treated exactly; for many a softmax is sampled, which is unbiased.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

#: Up to so many backward passes a batch is treated exactly by default.
EXACT_PASSES = 128


def derivative(value: Tensor, of: Tensor) -> Tensor | None:
    """`∂value/∂of` on a graph that stays alive; None where there is no dependence."""
    return torch.autograd.grad(value, of, retain_graph=True, allow_unused=True)[0] if value.requires_grad else None


@dataclass(frozen=True)
class OutputRows:
    """The output of one batch as rows (R, c), `per_sample` of them to a sample, with the loss gradient there."""

    output: Tensor
    gradient: Tensor
    samples: int

    @property
    def rows(self) -> Tensor:
        return self.output.detach().reshape(-1, self.output.shape[-1])

    @property
    def classes(self) -> int:
        return int(self.output.shape[-1])

    @property
    def per_sample(self) -> int:
        return self.rows.shape[0] // self.samples

    @property
    def passes(self) -> int:
        """Backward passes of the exact treatment."""
        return self.per_sample * self.classes

    def curvature(self) -> Tensor:
        """`∂²loss/∂z²` of every row, (R, c, c): one small pass per output, for rows do not mix in the loss."""
        columns = []
        for j in range(self.classes):
            total = self.gradient[..., j].sum()
            found = (
                torch.autograd.grad(total, self.output, retain_graph=True, allow_unused=True)[0] if total.requires_grad else None
            )
            columns.append(torch.zeros_like(self.output) if found is None else found)
        return torch.stack(columns, dim=-2).reshape(-1, self.classes, self.classes).detach()


def exact_roots(rows: OutputRows) -> Iterator[Tensor]:
    """Cotangents of the output's shape, one backward pass each; those of different rows of a sample come one by one."""
    p = rows.rows.double().softmax(-1)
    weight = softmax_weights(rows, p)
    if weight is not None:  # A = w (diag p − p pᵀ) has the roots √(w p_j) (e_j − p): no decomposition is needed
        scale = (weight[:, None] * p).sqrt()
        roots = (torch.eye(rows.classes, dtype=p.dtype, device=p.device) - p[:, None, :]) * scale[:, :, None]  # (R, j, c)
        needed = torch.ones(rows.per_sample, rows.classes, dtype=torch.bool)
    else:
        roots, needed = _decomposed(rows)
    roots = roots.reshape(rows.samples, rows.per_sample, rows.classes, rows.classes).to(rows.output.dtype)
    for r in range(rows.per_sample):
        for j in range(rows.classes):
            if bool(needed[r, j]):
                cotangent = torch.zeros(rows.samples, rows.per_sample, rows.classes, dtype=roots.dtype, device=roots.device)
                cotangent[:, r] = roots[:, r, j]
                yield cotangent.reshape(rows.output.shape)


def _decomposed(rows: OutputRows) -> tuple[Tensor, Tensor]:
    """Roots (R, j, c) of any convex loss by its eigenvectors, and which (row, j) are not zero throughout."""
    values, vectors = torch.linalg.eigh(rows.curvature().double())
    scale = values.abs().amax().clamp_min(1e-300)
    if float(values.min()) < -1e-5 * float(scale):
        raise ValueError("The loss is not convex in the model's output: its Gauss-Newton factors do not exist. Use mode='exact'.")
    roots = (vectors * values.clamp_min(0.0).sqrt()[:, None, :]).transpose(1, 2)
    return roots, values.reshape(rows.samples, rows.per_sample, rows.classes).amax(dim=0) > 1e-14 * scale


def sampled_roots(rows: OutputRows, draws: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Random cotangents of softmax rows with mean 0 and covariance `∇²loss / draws`: `sqrt(w) (e_ŷ − p)`, ŷ drawn from p."""
    p = rows.rows.double().softmax(-1)
    weight = softmax_weights(rows, p)
    if weight is None:
        raise ValueError(
            f"Sampling needs a softmax cross-entropy, which this loss is not. With {rows.passes} backward passes a batch "
            "it can be treated exactly: draws=None, max_passes=... larger."
        )
    for _ in range(draws):
        drawn = torch.multinomial(p.cpu(), 1, generator=generator).to(p.device)
        q = -p.clone()
        q.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=p.dtype))
        q *= (weight / draws).sqrt()[:, None]
        yield q.reshape(rows.output.shape).to(rows.output.dtype)


def softmax_weights(rows: OutputRows, p: Tensor) -> Tensor | None:
    """w of every row with `∇²loss = w (diag p − p pᵀ)`; None where the loss is no softmax cross-entropy."""
    v = torch.randn(p.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(p)
    found = derivative((rows.gradient * v.reshape(rows.gradient.shape).to(rows.gradient.dtype)).sum(), rows.output)
    image = torch.zeros_like(p) if found is None else found.detach().reshape(p.shape).double()
    softmax = p * v - p * (p * v).sum(-1, keepdim=True)
    weight = (image * softmax).sum(-1) / softmax.square().sum(-1).clamp_min(1e-300)
    gap = float((image - weight[:, None] * softmax).norm())
    tolerance = 1e-3 if rows.output.dtype == torch.float32 else 1e-8
    return weight.clamp_min(0.0) if gap <= tolerance * float(image.norm()) and float(image.norm()) > 0 else None
