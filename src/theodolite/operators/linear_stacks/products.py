"""Hessian and layer-block products of linear stacks in closed form, without autograd: two ways.

**Tangents**, for any activation and the whole Hessian: tangents go forward, then the backward pass is differentiated. With x
the input of a layer, z = Wx + b, x⁺ = σ(z), δ = ∂loss/∂z and a dot for the derivative along v = (V, u):

    ż = Vx + Wẋ + u,    ẋ⁺ = σ'(z) ż,    δ̇ = A ż at the outputs, below them  δ̇ = σ'(z) (Wᵀδ̇ + Vᵀδ)⁺ + (Wᵀδ)⁺ σ''(z) ż,

and the product has the parts δ̇ xᵀ + δ ẋᵀ and δ̇ (Pearlmutter 1994). x, σ', δ and (Wᵀδ)⁺ σ'' are stored once; each product
is then nothing but matrix products, written straight into the flat result, for one vector or a block of them alike.
For the diagonal blocks V is zero but in one layer: the tangents of all layers go up and down together in one pass.

**Factors**, for the layer blocks of a piecewise-linear stack: the block of layer p is exactly `E[G_xᵀ A_x G_x ⊗ x xᵀ]`, x the
layer's input, G_x = d output / d z the (c, m) derivative of the outputs, A_x the (c, c) curvature of the loss. With x, G and A
stored, a product is four small matrix products, whatever the depth, and layers of one shape share them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.interrupts import called_within
from theodolite.operators.linear_stacks.recognition import StackLayer, StackRun

#: Numbers that the tangents of a lockstep pass may hold at once, all layers together.
LOCKSTEP_ROOM = 1 << 24


@dataclass(frozen=True)
class StackPass:
    """One batch: per linear layer its input (B, n), δ (B, m), σ' and (Wᵀδ)⁺ σ'' (B, m; None: one, zero); A (B, c, c)."""

    layers: list[StackLayer]
    inputs: list[Tensor]
    deltas: list[Tensor]
    slopes: list[Tensor | None]
    bends: list[Tensor | None]
    curvature: Tensor

    @classmethod
    @called_within(torch.no_grad)
    def of(cls, run: StackRun) -> StackPass:
        """The backward pass of a batch, from the last layer down."""
        deltas = [run.gradient]
        bends: list[Tensor | None] = [None]
        for i in range(len(run.layers) - 1, 0, -1):
            pulled = deltas[0] @ run.layers[i].linear.weight
            slope, second = run.slopes[i - 1], run.seconds[i - 1]
            deltas.insert(0, pulled if slope is None else pulled * slope)
            bends.insert(0, None if second is None else pulled * second)
        return cls(run.layers, run.inputs, deltas, run.slopes, bends, run.curvature)

    def tensors(self) -> list[Tensor]:
        return [t for t in (*self.inputs, *self.deltas, *self.slopes, *self.bends, self.curvature) if t is not None]

    @called_within(torch.no_grad)
    def product(self, rows: Tensor) -> Tensor:
        """Rows (k, p) of vectors -> rows of their products with the Hessian; all tangents have shape (k, B, width)."""
        tangents, pre = self._tangents(rows)
        out = torch.empty_like(rows)
        dot = self._at_outputs(pre[-1])
        for i in range(len(self.layers) - 1, -1, -1):
            self._write(out, i, dot, tangents[i])
            if i:
                turned = self.deltas[i].expand(len(rows), -1, -1)
                pulled = self._pull(i, dot).baddbmm_(turned, _matrices(rows, self.layers[i]))
                dot = self._bend(i - 1, pulled, pre[i - 1])
        return out

    @called_within(torch.no_grad)
    def gradient(self, out: Tensor) -> Tensor:
        """The gradient, written into the flat `out` (p,)."""
        for layer, x, delta in zip(self.layers, self.inputs, self.deltas, strict=True):
            torch.mm(delta.T, x, out=out[layer.weight].view(layer.linear.weight.shape))
            if layer.bias is not None:
                torch.sum(delta, 0, out=out[layer.bias])
        return out

    @called_within(torch.no_grad)
    def products(self, blocks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rows (k, m·n) per layer name -> rows of the products with that layer's diagonal block."""
        rows = {i: blocks[layer.name] for i, layer in enumerate(self.layers) if layer.name in blocks}
        images: dict[int, list[Tensor]] = {i: [] for i in rows}
        most = max(1, LOCKSTEP_ROOM // max(1, sum(delta.numel() for delta in self.deltas)))
        for some in _portions(rows, most):
            for i, image in self._lockstep(some).items():
                images[i].append(image)
        return {self.layers[i].name: torch.cat(found) for i, found in images.items()}

    def _tangents(self, rows: Tensor) -> tuple[list[Tensor | None], list[Tensor]]:
        """ẋ of every layer's input (None: the data does not move) and ż."""
        tangents: list[Tensor | None] = []
        pre: list[Tensor] = []
        moved: Tensor | None = None
        for layer, x, slope in zip(self.layers, self.inputs, self.slopes, strict=True):
            tangents.append(moved)
            direction = _matrices(rows, layer).transpose(1, 2)
            shared = x.expand(len(rows), -1, -1)
            if layer.bias is None:
                z = torch.bmm(shared, direction)
            else:
                z = torch.baddbmm(rows[:, layer.bias][:, None], shared, direction)
            if moved is not None:
                _sides(z).addmm_(_sides(moved), layer.linear.weight.T)
            pre.append(z)
            moved = z if slope is None else z * slope
        return tangents, pre

    def _lockstep(self, rows: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """One pass for the vectors of all layers: those of a layer join going up, last in line, and leave going down."""
        first, last = min(rows), len(self.layers) - 1
        pre: dict[int, Tensor] = {}
        moved: Tensor | None = None
        for i in range(first, last + 1):
            weight, x = self.layers[i].linear.weight, self.inputs[i]
            here = [] if moved is None else [torch.mm(_sides(moved), weight.T).view(len(moved), len(x), len(weight))]
            if i in rows:
                direction = rows[i].view(len(rows[i]), *weight.shape).transpose(1, 2)
                here.append(torch.bmm(x.expand(len(rows[i]), -1, -1), direction))
            pre[i] = torch.cat(here) if len(here) > 1 else here[0]
            slope = self.slopes[i]
            moved = pre[i] if slope is None else pre[i] * slope
        out: dict[int, Tensor] = {}
        dot = self._at_outputs(pre[last])
        for i in range(last, first - 1, -1):
            if i in rows:
                below = len(dot) - len(rows[i])
                x = self.inputs[i].expand(len(rows[i]), -1, -1)
                out[i] = torch.bmm(dot[below:].transpose(1, 2), x).flatten(1)
                dot = dot[:below]
            if i > first:
                dot = self._bend(i - 1, self._pull(i, dot), pre[i - 1])
        return out

    def _at_outputs(self, z: Tensor) -> Tensor:
        """δ̇ = A ż; every sample has its own curvature, so samples lead for a moment."""
        return (z.transpose(0, 1) @ self.curvature).transpose(0, 1).contiguous()

    def _write(self, out: Tensor, i: int, dot: Tensor, moved: Tensor | None) -> None:
        """`δ̇ xᵀ + δ ẋᵀ` and `δ̇`, summed over the samples, at their places."""
        layer, k = self.layers[i], len(out)
        place = _matrices(out, layer)
        torch.bmm(dot.transpose(1, 2), self.inputs[i].expand(k, -1, -1), out=place)
        if moved is not None:
            place.baddbmm_(self.deltas[i].T.expand(k, -1, -1), moved)
        if layer.bias is not None:
            torch.sum(dot, 1, out=out[:, layer.bias])

    def _pull(self, i: int, dot: Tensor) -> Tensor:
        """Wᵀδ̇ of layer i, for every vector and sample."""
        weight = self.layers[i].linear.weight
        return torch.mm(_sides(dot), weight).view(*dot.shape[:2], weight.shape[1])

    def _bend(self, i: int, pulled: Tensor, z: Tensor) -> Tensor:
        """δ̇ of layer i from what came down to its activations (changed in place) and its ż."""
        slope, bend = self.slopes[i], self.bends[i]
        if slope is not None:
            pulled.mul_(slope)
        return pulled if bend is None else pulled.addcmul_(bend.expand_as(z), z)


def _portions(rows: Mapping[int, Tensor], most: int) -> Iterator[dict[int, Tensor]]:
    """The rows of all layers, in the layers' order, in portions of at most `most` rows."""
    portion: dict[int, Tensor] = {}
    free = most
    for i, vectors in rows.items():
        while len(vectors):
            portion[i], vectors = vectors[:free], vectors[free:]
            free -= len(portion[i])
            if free == 0:
                yield portion
                portion, free = {}, most
    if portion:
        yield portion


def _matrices(rows: Tensor, layer: StackLayer) -> Tensor:
    """A layer's part of every row, (k, m, n), as a view."""
    return rows[:, layer.weight].view(len(rows), *layer.linear.weight.shape)


def _sides(tangents: Tensor) -> Tensor:
    """(k, B, m) side by side as (k·B, m): a view, since results are written through it."""
    return tangents.view(tangents.shape[0] * tangents.shape[1], tangents.shape[2])


@dataclass(frozen=True)
class StackFactors:
    """One batch: per group of layers of one shape their names, inputs (g, B, n) and G (g, B, c, m); and A (B, c, c)."""

    names: list[list[str]]
    inputs: list[Tensor]
    derivatives: list[Tensor]
    curvature: Tensor

    @classmethod
    @called_within(torch.no_grad)
    def of(cls, run: StackRun) -> StackFactors:
        groups: dict[torch.Size, list[int]] = {}
        for i, layer in enumerate(run.layers):
            groups.setdefault(layer.linear.weight.shape, []).append(i)
        b, c = run.gradient.shape
        g = torch.eye(c, dtype=run.gradient.dtype, device=run.gradient.device).expand(b, c, c)
        found = {len(run.layers) - 1: g.contiguous()}  # d output / d z of each linear layer, (B, c, m), from the last down
        for i in range(len(run.layers) - 1, 0, -1):
            slope = run.slopes[i - 1]
            g = g @ run.layers[i].linear.weight
            found[i - 1] = g = g if slope is None else g * slope[:, None, :]
        return cls(
            [[run.layers[i].name for i in group] for group in groups.values()],
            [torch.stack([run.inputs[i] for i in group]) for group in groups.values()],
            [torch.stack([found[i] for i in group]) for group in groups.values()],
            run.curvature,
        )

    def tensors(self) -> list[Tensor]:
        return [*self.inputs, *self.derivatives, self.curvature]

    @called_within(torch.no_grad)
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
