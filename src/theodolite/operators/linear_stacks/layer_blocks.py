"""Layer blocks of piecewise-linear stacks in closed form, without autograd.

For a stack of Linear layers and ReLUs the block of layer p is exactly `E[G_xᵀ A_x G_x ⊗ x xᵀ]`: x the layer's input,
G_x = d output / d z the (c, m) derivative of the outputs, A_x the (c, c) curvature of the loss. With x, G and A stored,
a product is four small matrix products, whatever the depth, and layers of one shape share them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.operators.linear_stacks.recognition import StackRun


@dataclass(frozen=True)
class StackFactors:
    """One batch: per group of layers of one shape their names, inputs (g, B, n) and G (g, B, c, m); and A (B, c, c)."""

    names: list[list[str]]
    inputs: list[Tensor]
    derivatives: list[Tensor]
    curvature: Tensor

    @classmethod
    def of(cls, run: StackRun) -> StackFactors:
        groups: dict[torch.Size, list[int]] = {}
        for i, layer in enumerate(run.layers):
            groups.setdefault(layer.linear.weight.shape, []).append(i)
        found = _output_derivatives(run)
        return cls(
            [[run.layers[i].name for i in group] for group in groups.values()],
            [torch.stack([run.inputs[i] for i in group]) for group in groups.values()],
            [torch.stack([found[i] for i in group]) for group in groups.values()],
            run.curvature,
        )

    def tensors(self) -> list[Tensor]:
        return [*self.inputs, *self.derivatives, self.curvature]

    @torch.no_grad()
    def products(self, blocks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rows (k, m·n) per layer -> rows; whole groups of one shape and width go together."""
        out: dict[str, Tensor] = {}
        for names, x, g in zip(self.names, self.inputs, self.derivatives, strict=True):
            asked = [name for name in names if name in blocks]
            if asked == names and len({len(blocks[name]) for name in names}) == 1:
                images = _multiply(x, g, self.curvature, torch.stack([blocks[name] for name in names]))
                out.update(zip(names, images, strict=True))
            else:
                for name in asked:
                    i = names.index(name)
                    out[name] = _multiply(x[i : i + 1], g[i : i + 1], self.curvature, blocks[name][None])[0]
        return {name: out[name] for name in blocks}


@torch.no_grad()
def _output_derivatives(run: StackRun) -> list[Tensor]:
    """d output / d z of each linear layer, (B, c, m), from the last layer down."""
    b, c = run.gradient.shape
    g = torch.eye(c, dtype=run.gradient.dtype, device=run.gradient.device).expand(b, c, c)
    found = [g.contiguous()]
    for i in range(len(run.layers) - 1, 0, -1):
        g = g @ run.layers[i].linear.weight
        slope = run.slopes[i - 1]
        g = g if slope is None else g * slope[:, None, :]
        found.append(g)
    return found[::-1]


def _multiply(x: Tensor, g: Tensor, a: Tensor, rows: Tensor) -> Tensor:
    """`Σ_b Gᵀ A G (V x) xᵀ` for a group: x (l, B, n), g (l, B, c, m), a (B, c, c), rows (l, k, m·n) -> the same."""
    layers, b, n = x.shape
    c, m = g.shape[2:]
    k = rows.shape[1]
    v = rows.reshape(layers, k * m, n)
    t = torch.bmm(x, v.transpose(1, 2)).reshape(layers * b, k, m)
    flat = g.reshape(layers * b, c, m)
    u = torch.bmm(t, flat.transpose(1, 2))
    u = (u.reshape(layers, b, k, c) @ a).reshape(layers * b, k, c)
    s = torch.bmm(u, flat).reshape(layers, b, k * m)
    return torch.bmm(s.transpose(1, 2), x).reshape(layers, k, m * n)
