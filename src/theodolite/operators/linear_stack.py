"""Layer blocks of piecewise-linear stacks in closed form, without autograd.

For a stack of Linear layers and ReLUs the block of layer p is exactly `E[G_xᵀ A_x G_x ⊗ x xᵀ]`: x the layer's input,
G_x = d output / d z the (c, m) derivative of the outputs, A_x the (c, c) curvature of the loss. With x, G and A stored,
a product is four small matrix products, whatever the depth, and layers of one shape share them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from theodolite.operators.stacks import PIECEWISE_LINEAR, loss_derivatives, plain_stack
from theodolite.problem import Batch, Problem


@dataclass(frozen=True)
class StackFactors:
    """One batch: per shape group the inputs (g, B, n) and output derivatives (g, B, c, m), and A (B, c, c)."""

    inputs: list[Tensor]
    derivatives: list[Tensor]
    curvature: Tensor

    def tensors(self) -> list[Tensor]:
        return [*self.inputs, *self.derivatives, self.curvature]


class LinearStack:
    """The recipe for one problem: its linear layers in order, grouped by shape."""

    def __init__(self, modules: list[nn.Module], weights: dict[str, int]) -> None:
        self.modules = modules
        self.names = list(weights)
        self._linear = [i for i, module in enumerate(modules) if isinstance(module, nn.Linear)]
        shapes: dict[torch.Size, list[int]] = {}
        for place, i in enumerate(self._linear):
            if place < len(self.names):
                shapes.setdefault(modules[i].weight.shape, []).append(place)  # type: ignore[arg-type]
        self.groups = list(shapes.values())

    @classmethod
    def of(cls, problem: Problem) -> LinearStack | None:
        """The stack a problem consists of, or None where the closed form does not hold."""
        modules = plain_stack(problem, PIECEWISE_LINEAR)
        if modules is None:
            return None
        layers = [layer for layer in problem.layers.values() if layer.kind == "Linear"]
        return cls(modules, {layer.name: layer.weights[0] for layer in layers})

    def run(self, problem: Problem, batch: Batch) -> StackFactors | None:
        """Inputs and derivatives of every linear layer for one batch; None if the batch is no matrix of rows."""
        if len(batch.args) != 1 or batch.kwargs:
            return None
        with torch.no_grad():
            inputs, slopes, output = self._forward(batch.args[0])
            if output.ndim != 2 or any(x.ndim != 2 for x in inputs):
                return None
            derivatives = self._derivatives(slopes, output)
        _, curvature = loss_derivatives(problem, output, batch)
        stack = [torch.stack([inputs[p] for p in group]) for group in self.groups]
        pulled = [torch.stack([derivatives[p] for p in group]) for group in self.groups]
        return StackFactors(stack, pulled, curvature)

    def _forward(self, x: Tensor) -> tuple[list[Tensor], list[Tensor | None], Tensor]:
        """Inputs of the linear layers, and the slope of what follows each of them (None for the identity)."""
        inputs: list[Tensor] = []
        slopes: list[Tensor | None] = []
        for module in self.modules:
            if isinstance(module, nn.Linear):
                inputs.append(x)
                slopes.append(None)
            elif slopes and isinstance(module, PIECEWISE_LINEAR):
                # Numbers of x's own type: bare ones would make a float32 slope.
                slope = torch.where(x > 0, x.new_ones(()), x.new_full((), getattr(module, "negative_slope", 0.0)))
                earlier = slopes[-1]
                slopes[-1] = slope if earlier is None else slope * earlier
            x = module(x)
        return inputs, slopes, x

    def _derivatives(self, slopes: list[Tensor | None], output: Tensor) -> list[Tensor]:
        """d output / d z of each linear layer, (B, c, m), from the last layer down."""
        b, c = output.shape
        g = torch.eye(c, dtype=output.dtype, device=output.device).expand(b, c, c)
        found = [g.contiguous()]
        for place in range(len(self._linear) - 1, 0, -1):
            weight: Tensor = self.modules[self._linear[place]].weight.detach()  # type: ignore[operator]
            g = g @ weight
            slope = slopes[place - 1]
            g = g if slope is None else g * slope[:, None, :]
            found.append(g)
        return found[::-1]

    def products(self, factors: StackFactors, blocks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rows (k, m·n) per layer -> rows; whole groups of one shape and width go together."""
        places = {name: self.names.index(name) for name in blocks}
        out: dict[str, Tensor] = {}
        for group, x, g in zip(self.groups, factors.inputs, factors.derivatives, strict=True):
            asked = [name for name in blocks if places[name] in group]
            widths = {len(blocks[name]) for name in asked}
            if len(asked) == len(group) and len(widths) == 1:
                names = sorted(asked, key=lambda name: group.index(places[name]))
                images = _multiply(x, g, factors.curvature, torch.stack([blocks[name] for name in names]))
                out.update(zip(names, images, strict=True))
            else:
                for name in asked:
                    i = group.index(places[name])
                    out[name] = _multiply(x[i : i + 1], g[i : i + 1], factors.curvature, blocks[name][None])[0]
        return out


def _multiply(x: Tensor, g: Tensor, a: Tensor, rows: Tensor) -> Tensor:
    """`Σ_b Gᵀ A G (V x) xᵀ` for a group: x (l, B, n), g (l, B, c, m), a (B, c, c), rows (l, k, m·n) -> the same."""
    layers, b, n = x.shape
    c, m = g.shape[2:]
    k = rows.shape[1]
    v = rows.reshape(layers, k * m, n)
    t = torch.bmm(x, v.transpose(1, 2)).reshape(layers * b, k, m)
    flat = g.reshape(layers * b, c, m)
    # One vector: an elementwise product and sum beats thousands of tiny matrix-vector products.
    u = (flat * t).sum(-1)[:, None] if k == 1 else torch.bmm(t, flat.transpose(1, 2))
    u = (u.reshape(layers, b, k, c) @ a).reshape(layers * b, k, c)
    s = torch.bmm(u, flat).reshape(layers, b, k * m)
    return torch.bmm(s.transpose(1, 2), x).reshape(layers, k, m * n)
