"""Many small ReLU networks as one program: outputs, gradients, tangent kernels and input gradients from the same two passes.

R networks of one architecture with a single output each are stacked along the first axis, so that a step of SGD on batches
of five costs a handful of batched products. With h the input of a layer and D = ∂f/∂(its output before the activation), the
gradient of f_i by the weights is `scale · D_i h_iᵀ`, and the tangent kernel is a sum over layers of
`(scale² h hᵀ + bias) ∘ (D Dᵀ)`: no per-sample gradient of a dense layer is ever formed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from theodolite.models.initialisation import NTKConv, NTKLinear

#: Samples, and numbers in the images of a convolution, that pass through the networks together: they should stay in the cache.
SAMPLES, NUMBERS = 250, 2**17


@dataclass
class Weights:
    """What a layer of all networks has: weight (R, out, ...), bias (R, out) or None, and the factor of the weights."""

    weight: Tensor
    bias: Tensor | None
    scale: float

    @property
    def tensors(self) -> list[Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


@dataclass
class Dense(Weights):
    """`scale · W h + b`: weight (R, out, in), bias (R, out) or None."""

    def read(self, h: Tensor) -> Tensor:
        """What the products below take as the layer's input."""
        return h

    def __call__(self, h: Tensor) -> Tensor:
        z = torch.bmm(h, self.weight.mT)
        z = z.mul_(self.scale) if self.scale != 1.0 else z
        return z if self.bias is None else z.add_(self.bias[:, None])

    def back(self, d: Tensor) -> Tensor:
        """D (R, n, out) to the input's side (R, n, in)."""
        return torch.bmm(d, self.weight * self.scale)

    def gradients(self, h: Tensor, d: Tensor, c: Tensor) -> list[Tensor]:
        """Σᵢ cᵢ ∂fᵢ for coefficients c (R, n), by weight and bias."""
        weighted = d * (c * self.scale)[:, :, None]
        found = [torch.bmm(weighted.mT, h)]
        return found if self.bias is None else [*found, torch.einsum("rno,rn->ro", d, c)]

    def add_(self, h: Tensor, d: Tensor, c: Tensor) -> None:
        """Add Σᵢ cᵢ ∂fᵢ to the weights in one product."""
        self.weight.baddbmm_((d * (c * self.scale)[:, :, None]).mT, h)
        if self.bias is not None:
            self.bias.add_(torch.einsum("rno,rn->ro", d, c))

    def kernel(self, h: Tensor, d: Tensor) -> Tensor:
        inner = torch.bmm(h, h.mT).mul_(self.scale**2)
        return (inner if self.bias is None else inner.add_(1.0)).mul_(torch.bmm(d, d.mT))

    def push(self, h: Tensor, d: Tensor, tangent: Sequence[Tensor]) -> Tensor:
        """⟨∂fᵢ, tangent⟩ for each sample: (R, n)."""
        moved = torch.bmm(h, tangent[0].mT).mul_(self.scale)
        moved = moved if self.bias is None else moved.add_(tangent[1][:, None])
        return moved.mul_(d).sum(2)


@dataclass
class Conv(Weights):
    """A convolution with zero padding to equal size: weight (R, out, C, s, s), bias (R, out) or None, on `image` (C, H, W).

    The networks are the groups of one grouped convolution, so between layers the sample comes first: (n, R·C, H, W).
    """

    image: tuple[int, int, int]

    @property
    def padding(self) -> int:
        return self.weight.shape[-1] // 2

    def read(self, h: Tensor) -> Tensor:
        """Images (R, n, C·H·W) as (n, R·C, H, W)."""
        return h.view(*h.shape[:2], -1, *self.image[1:]).transpose(0, 1).flatten(1, 2)

    def _from(self, images: Tensor) -> Tensor:
        """Images (n, R·channels, H, W) as (R, n, channels·H·W)."""
        return images.view(len(images), len(self.weight), -1).transpose(0, 1).contiguous()

    def _convolve(self, images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        flat = None if bias is None else bias.flatten()
        return self._from(F.conv2d(images, weight.flatten(0, 1) * self.scale, flat, padding=self.padding, groups=len(weight)))

    def __call__(self, images: Tensor) -> Tensor:
        return self._convolve(images, self.weight, self.bias)

    def back(self, d: Tensor) -> Tensor:
        weight = self.weight.flatten(0, 1) * self.scale
        return self._from(F.conv_transpose2d(self.read(d), weight, padding=self.padding, groups=len(d)))

    def gradients(self, images: Tensor, d: Tensor, c: Tensor) -> list[Tensor]:
        weighted = self.read(d * c[:, :, None])
        shape = self.weight.flatten(0, 1).shape
        found = conv2d_weight(images, shape, weighted, padding=self.padding, groups=len(d)).mul_(self.scale)
        weights = found.view_as(self.weight)
        return [weights] if self.bias is None else [weights, weighted.sum((0, 2, 3)).view_as(self.bias)]

    def add_(self, images: Tensor, d: Tensor, c: Tensor) -> None:
        for tensor, gradient in zip(self.tensors, self.gradients(images, d, c), strict=True):
            tensor.add_(gradient)

    def kernel(self, images: Tensor, d: Tensor) -> Tensor:
        """By the gradient of each sample, which is small for the batches this is asked for."""
        maps = d.view(*d.shape[:2], self.weight.shape[1], -1)  # (R, n, out, H·W)
        patches = F.unfold(self._from(images).view(-1, *self.image), self.weight.shape[-1], padding=self.padding)
        each = torch.matmul(maps, patches.view(*d.shape[:2], *patches.shape[1:]).mT).mul_(self.scale).flatten(2)
        inner, summed = torch.bmm(each, each.mT), maps.sum(3)
        return inner if self.bias is None else inner.add_(torch.bmm(summed, summed.mT))

    def push(self, images: Tensor, d: Tensor, tangent: Sequence[Tensor]) -> Tensor:
        return self._convolve(images, tangent[0], None if self.bias is None else tangent[1]).mul_(d).sum(2)


class Passes(NamedTuple):
    """Outputs (R, n), and for each layer its input and D."""

    outputs: Tensor
    inputs: list[Tensor]
    signals: list[Tensor]


class StackedNetworks:
    """R networks with ReLU between their layers and one output.

    Args:
        models: `nn.Sequential`s of one architecture out of dense layers and convolutions (torch's or in the NTK form), ReLU
            and Flatten, such as those of `ntk_fcn` and `ntk_cnn`.
        image: (channels, height, width) of the inputs, for networks with convolutions.
    """

    def __init__(self, models: Sequence[nn.Sequential], image: tuple[int, int, int] | None = None) -> None:
        self._example = copy.deepcopy(models[0])
        columns = zip(*(list(_weighted(model)) for model in models), strict=True)
        self.layers: list[Dense | Conv] = []
        for column in columns:
            layer = _stack(column, image)
            self.layers.append(layer)
            if isinstance(layer, Conv):
                image = (layer.weight.shape[1], *layer.image[1:])

    @property
    def tensors(self) -> list[Tensor]:
        """All weights and biases, (R, ...) each; not copies."""
        return [tensor for layer in self.layers for tensor in layer.tensors]

    @property
    def replicas(self) -> int:
        return self.layers[0].weight.shape[0]

    @property
    def chunk(self) -> int:
        """Samples to take at once."""
        sizes = [self.replicas * math.prod(layer.image) for layer in self.layers if isinstance(layer, Conv)]
        return min([SAMPLES, *(max(1, NUMBERS // size) for size in sizes)])

    def copy(self) -> StackedNetworks:
        return copy.deepcopy(self)

    def take(self, rows: Tensor, other: StackedNetworks) -> None:
        """Take over the weights of `other` where `rows` (R,) is true."""
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            mine[rows] = theirs[rows]

    def model(self, replica: int) -> nn.Sequential:
        """One of the networks as a module of its own."""
        model = copy.deepcopy(self._example)
        with torch.no_grad():
            for module, layer in zip(_weighted(model), self.layers, strict=True):
                module.weight.copy_(layer.weight[replica].view_as(module.weight))
                if layer.bias is not None and module.bias is not None:
                    module.bias.copy_(layer.bias[replica])
        return model

    def outputs(self, x: Tensor) -> Tensor:
        """f at inputs (R, n, d): (R, n)."""
        return torch.cat([self._forward(part)[0] for part in x.split(self.chunk, 1)], 1)

    def passes(self, x: Tensor) -> Passes:
        """Forward and backward at inputs (R, n, d); for as many samples as should be held at once."""
        outputs, inputs, masks = self._forward(x)
        signals = [torch.ones_like(outputs)[:, :, None]]
        for layer, mask in zip(reversed(self.layers[1:]), reversed(masks), strict=True):
            signals.append(layer.back(signals[-1]).mul_(mask))
        return Passes(outputs, inputs, signals[::-1])

    def _forward(self, x: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        h = x
        inputs: list[Tensor] = []
        masks: list[Tensor] = []
        for layer in self.layers:
            if inputs:
                masks.append(h > 0)
                h = h.relu_()
            inputs.append(layer.read(h))
            h = layer(inputs[-1])
        return h[:, :, 0], inputs, masks

    def kernel(self, passes: Passes) -> Tensor:
        """The tangent kernel (R, n, n)."""
        found = [layer.kernel(h, d) for layer, h, d in zip(self.layers, passes.inputs, passes.signals, strict=True)]
        return torch.stack(found).sum(0)

    def add_(self, passes: Passes, c: Tensor) -> None:
        """Add Σᵢ cᵢ ∂fᵢ/∂w to the weights, c (R, n); `passes` are spent."""
        for layer, h, d in zip(self.layers, passes.inputs, passes.signals, strict=True):
            layer.add_(h, d, c)

    def gradients(self, passes: Passes, c: Tensor) -> list[Tensor]:
        """Σᵢ cᵢ ∂fᵢ/∂w, one for each of `tensors`."""
        layers = zip(self.layers, passes.inputs, passes.signals, strict=True)
        return [g for layer, h, d in layers for g in layer.gradients(h, d, c)]

    def input_gradients(self, x: Tensor) -> Tensor:
        """∂f/∂x at inputs (R, n, d): (R, n, d)."""
        return torch.cat([self.layers[0].back(self.passes(part).signals[0]) for part in x.split(self.chunk, 1)], 1)

    def kernel_times(self, x: Tensor, v: Tensor) -> Tensor:
        """K v at inputs (R, n, d), v (R, n), without K."""
        parts = [self.passes(part) for part in x.split(self.chunk, 1)]
        pulled = [self.gradients(part, c.contiguous()) for part, c in zip(parts, v.split(self.chunk, 1), strict=True)]
        tangent = [torch.stack(each).sum(0) for each in zip(*pulled, strict=True)]
        return torch.cat([self._push(part, tangent) for part in parts], 1)

    def _push(self, passes: Passes, tangent: list[Tensor]) -> Tensor:
        found, tangents = torch.zeros_like(passes.outputs), iter(tangent)
        for layer, h, d in zip(self.layers, passes.inputs, passes.signals, strict=True):
            found += layer.push(h, d, [next(tangents) for _ in layer.tensors])
        return found

    def top_kernel(self, x: Tensor, start: Tensor | None = None, *, iterations: int = 30) -> tuple[Tensor, Tensor]:
        """Largest eigenvalue (R,) of the kernel and its vector (R, n), by power iteration from `start` (warm) or from ones."""
        v = torch.ones_like(x[:, :, 0]) if start is None else start
        value = v.new_zeros(len(v))
        for _ in range(iterations):
            v = v / v.norm(dim=1, keepdim=True).clamp_min(torch.finfo(v.dtype).tiny)
            moved = self.kernel_times(x, v)
            value, v = (moved * v).sum(1), moved
        return value, v


def _weighted(model: nn.Sequential) -> Iterator[NTKLinear | NTKConv | nn.Linear | nn.Conv2d]:
    """The layers with weights; anything this file does not know is refused."""
    for module in model:
        if isinstance(module, NTKLinear | NTKConv | nn.Linear | nn.Conv2d):
            yield module
        elif not isinstance(module, nn.ReLU | nn.Flatten):
            raise TypeError(f"Stacked networks are made of dense layers, convolutions, ReLU and Flatten. Got {module}.")


def _stack(column: Sequence[NTKLinear | NTKConv | nn.Linear | nn.Conv2d], image: tuple[int, int, int] | None) -> Dense | Conv:
    """One layer of all networks."""
    first = column[0]
    weight = torch.stack([layer.weight.detach() for layer in column])
    bias = None if first.bias is None else torch.stack([layer.bias.detach() for layer in column if layer.bias is not None])
    scale = first.scale if isinstance(first, NTKLinear | NTKConv) else 1.0
    if isinstance(first, NTKLinear | nn.Linear):
        return Dense(weight, bias, scale)
    if image is None:
        raise ValueError("Networks with convolutions need the shape of their images: image=(channels, height, width).")
    return Conv(weight, bias, scale, image)
