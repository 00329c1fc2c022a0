"""Hessian and layer-block products of linear stacks in closed form: tangents forward, then the backward pass differentiated.

With x the input of a layer, z = Wx + b, x⁺ = σ(z), δ = ∂loss/∂z and a dot for the derivative along v = (V, u):

    ż = Vx + Wẋ + u,    ẋ⁺ = σ'(z) ż,    δ̇ = A ż at the outputs, below them  δ̇ = σ'(z) (Wᵀδ̇ + Vᵀδ)⁺ + (Wᵀδ)⁺ σ''(z) ż,

and the product has the parts δ̇ xᵀ + δ ẋᵀ and δ̇ (Pearlmutter 1994). x, σ', δ and (Wᵀδ)⁺ σ'' are stored once; each product
is then nothing but matrix products, written straight into the flat result, for one vector or a block of them alike.
For the diagonal blocks V is zero but in one layer: the tangents of all layers go up and down together in one pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from theodolite.operators.stacks import PIECEWISE_LINEAR, SMOOTH, linear_layers, loss_derivatives, plain_stack
from theodolite.problem import Batch, Problem

#: Numbers that the tangents of a lockstep pass may hold at once, all layers together.
LOCKSTEP_ROOM = 1 << 24


@dataclass(frozen=True)
class StackPass:
    """One batch: per linear layer its input (B, n), δ (B, m), σ' and (Wᵀδ)⁺ σ'' (B, m; None: identity, zero); A (B, c, c)."""

    inputs: list[Tensor]
    deltas: list[Tensor]
    slopes: list[Tensor | None]
    bends: list[Tensor | None]
    curvature: Tensor

    def tensors(self) -> list[Tensor]:
        return [t for t in (*self.inputs, *self.deltas, *self.slopes, *self.bends, self.curvature) if t is not None]


@dataclass(frozen=True)
class _Part:
    """A linear layer's places in the flat vector: weight, and bias (empty where there is none or it is not measured)."""

    name: str
    layer: nn.Linear
    weight: slice
    bias: slice | None


class TangentStack:
    """The recipe for one problem: its linear layers with their places in the flat vector."""

    def __init__(self, modules: list[nn.Module], parts: list[_Part]) -> None:
        self.modules, self.parts = modules, parts

    @classmethod
    def of(cls, problem: Problem) -> TangentStack | None:
        """The stack a problem consists of, or None where the closed form does not hold."""
        modules = plain_stack(problem, PIECEWISE_LINEAR + SMOOTH)
        if modules is None:
            return None
        linear = linear_layers(modules)
        owned = [p for layer in linear for p in (layer.weight, layer.bias) if p is not None]
        if len({id(p) for p in owned}) < len(owned) or {p.dtype for p in owned} != {problem.dtype}:
            return None  # a bias shared by two layers has one place for two parts
        sizes = problem.selection.sizes
        ends = torch.tensor(sizes).cumsum(0).tolist()
        places = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        layers = [layer for layer in problem.layers.values() if layer.kind == "Linear"]
        parts = [
            _Part(layer.name, module, places[layer.weights[0]], places[layer.biases[0]] if layer.biases else None)
            for module, layer in zip(linear, layers, strict=True)
        ]
        measured = sum(part.layer.weight.numel() + (part.layer.out_features if part.bias else 0) for part in parts)
        return cls(modules, parts) if measured == problem.size else None  # else parameters of no layer

    def run(self, problem: Problem, batch: Batch) -> StackPass | None:
        """Forward and backward once for one batch; None if the batch is no matrix of rows."""
        if len(batch.args) != 1 or batch.kwargs:
            return None
        inputs, slopes, second, output = self._forward(batch.args[0])
        if output.ndim != 2 or any(x.ndim != 2 or x.dtype != output.dtype for x in inputs):
            return None
        delta, curvature = loss_derivatives(problem, output, batch)
        deltas = [delta]
        bends: list[Tensor | None] = [None]
        with torch.no_grad():
            for i in range(len(self.parts) - 1, 0, -1):
                pulled = delta @ self.parts[i].layer.weight
                slope, curved = slopes[i - 1], second[i - 1]
                delta = pulled if slope is None else pulled * slope
                deltas.append(delta)
                bends.append(None if curved is None else pulled * curved)
        return StackPass(inputs, deltas[::-1], slopes, bends[::-1], curvature)

    def _forward(self, x: Tensor) -> tuple[list[Tensor], list[Tensor | None], list[Tensor | None], Tensor]:
        """Inputs of the linear layers, σ' and σ'' of what follows each of them, and the output."""
        inputs: list[Tensor] = []
        slopes: list[Tensor | None] = []
        second: list[Tensor | None] = []
        places = [i for i, module in enumerate(self.modules) if isinstance(module, nn.Linear)]
        with torch.no_grad():
            for module in self.modules[: places[0]]:
                x = module(x)
        for here, after in zip(places, [*places[1:], len(self.modules)], strict=True):
            inputs.append(x)
            with torch.no_grad():
                z = self.modules[here](x)
            x, slope, curved = _activate(self.modules[here + 1 : after], z)
            slopes.append(slope)
            second.append(curved)
        return inputs, slopes, second, x

    def product(self, known: StackPass, rows: Tensor) -> Tensor:
        """Rows (k, p) of vectors -> rows of their products; all tangents have shape (k, B, width)."""
        with torch.no_grad():
            tangents, pre = self._tangents_forward(known, rows)
            out = torch.empty_like(rows)
            dot = self._at_outputs(known, pre[-1])
            for i in range(len(self.parts) - 1, -1, -1):
                self._write(out, i, known, dot, tangents[i])
                if i:
                    turned = known.deltas[i].expand(len(rows), -1, -1)
                    pulled = self._pull(i, dot).baddbmm_(turned, _matrices(rows, self.parts[i]))
                    dot = self._bend(i - 1, known, pulled, pre[i - 1])
        return out

    def products(self, known: StackPass, blocks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rows (k, m·n) per layer name -> rows of the products with that layer's diagonal block."""
        rows = {i: blocks[part.name] for i, part in enumerate(self.parts) if part.name in blocks}
        images: dict[int, list[Tensor]] = {i: [] for i in rows}
        with torch.no_grad():
            for some in _portions(rows, self._most(known)):
                for i, image in self._lockstep(known, some).items():
                    images[i].append(image)
        return {self.parts[i].name: torch.cat(found) for i, found in images.items()}

    def _most(self, known: StackPass) -> int:
        """Vectors that may go through the layers together."""
        return max(1, LOCKSTEP_ROOM // sum(delta.numel() for delta in known.deltas))

    def _lockstep(self, known: StackPass, rows: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """One pass for the vectors of all layers: those of a layer join going up, last in line, and leave going down."""
        first, last = min(rows), len(self.parts) - 1
        pre: dict[int, Tensor] = {}
        moved: Tensor | None = None
        for i in range(first, last + 1):
            weight, x = self.parts[i].layer.weight, known.inputs[i]
            here = [] if moved is None else [torch.mm(moved.flatten(0, 1), weight.T).view(len(moved), len(x), -1)]
            if i in rows:
                here.append(torch.bmm(x.expand(len(rows[i]), -1, -1), rows[i].view(-1, *weight.shape).transpose(1, 2)))
            pre[i] = torch.cat(here) if len(here) > 1 else here[0]
            slope = known.slopes[i]
            moved = pre[i] if slope is None else pre[i] * slope
        out: dict[int, Tensor] = {}
        dot = self._at_outputs(known, pre[last])
        for i in range(last, first - 1, -1):
            if i in rows:
                below = len(dot) - len(rows[i])
                x = known.inputs[i].expand(len(rows[i]), -1, -1)
                out[i] = torch.bmm(dot[below:].transpose(1, 2), x).flatten(1)
                dot = dot[:below]
            if i > first:
                dot = self._bend(i - 1, known, self._pull(i, dot), pre[i - 1])
        return out

    @staticmethod
    def _at_outputs(known: StackPass, z: Tensor) -> Tensor:
        """δ̇ = A ż; every sample has its own curvature, so samples lead for a moment."""
        return (z.transpose(0, 1) @ known.curvature).transpose(0, 1).contiguous()

    def _tangents_forward(self, known: StackPass, rows: Tensor) -> tuple[list[Tensor | None], list[Tensor]]:
        """ẋ of every layer's input (None: the data does not move) and ż."""
        tangents: list[Tensor | None] = []
        pre: list[Tensor] = []
        moved: Tensor | None = None
        for part, x, slope in zip(self.parts, known.inputs, known.slopes, strict=True):
            tangents.append(moved)
            direction = _matrices(rows, part).transpose(1, 2)
            shared = x.expand(len(rows), -1, -1)
            if part.bias is None:
                z = torch.bmm(shared, direction)
            else:
                z = torch.baddbmm(rows[:, part.bias][:, None], shared, direction)
            if moved is not None:
                z.flatten(0, 1).addmm_(moved.flatten(0, 1), part.layer.weight.T)
            pre.append(z)
            moved = z if slope is None else z * slope
        return tangents, pre

    def _write(self, out: Tensor, i: int, known: StackPass, dot: Tensor, moved: Tensor | None) -> None:
        """`δ̇ xᵀ + δ ẋᵀ` and `δ̇`, summed over the samples, at their places."""
        part, k = self.parts[i], len(out)
        place = _matrices(out, part)
        torch.bmm(dot.transpose(1, 2), known.inputs[i].expand(k, -1, -1), out=place)
        if moved is not None:
            place.baddbmm_(known.deltas[i].T.expand(k, -1, -1), moved)
        if part.bias is not None:
            torch.sum(dot, 1, out=out[:, part.bias])

    def _pull(self, i: int, dot: Tensor) -> Tensor:
        """Wᵀδ̇ of layer i, for every vector and sample."""
        layer = self.parts[i].layer
        return torch.mm(dot.flatten(0, 1), layer.weight).view(len(dot), -1, layer.in_features)

    @staticmethod
    def _bend(i: int, known: StackPass, pulled: Tensor, z: Tensor) -> Tensor:
        """δ̇ of layer i from what came down to its activations (changed in place) and its ż."""
        slope, bend = known.slopes[i], known.bends[i]
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


def _matrices(rows: Tensor, part: _Part) -> Tensor:
    """A layer's part of every row, (k, m, n), as a view."""
    return rows[:, part.weight].view(len(rows), *part.layer.weight.shape)


def _activate(modules: list[nn.Module], z: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """σ(z), σ'(z), σ''(z) of elementwise modules in a row; None for a slope of one and for a second derivative of zero."""
    active = [m for m in modules if isinstance(m, PIECEWISE_LINEAR + SMOOTH)]
    if not active:
        return z, None, None
    with torch.enable_grad():
        start = z.detach().requires_grad_()
        x = start
        for module in active:
            x = module(x)
        smooth = any(isinstance(m, SMOOTH) for m in active)
        (slope,) = torch.autograd.grad(x.sum(), start, create_graph=smooth)
        second = torch.autograd.grad(slope.sum(), start)[0] if smooth else None
    return x.detach(), slope.detach(), second
