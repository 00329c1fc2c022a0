"""Layers in the NTK parameterisation: weights N(0, 1), the factor 1/√fan_in in the forward pass.

Gradients then carry the factor too, so a learning rate of order one suits every width. These are modules of their
own, no kinds of `nn.Linear`: code that multiplies a layer's inputs by its output gradients would forget the factor.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _draw(weight: Tensor, bias: Tensor | None) -> None:
    nn.init.normal_(weight)
    if bias is not None:
        nn.init.zeros_(bias)


class NTKLinear(nn.Module):
    """`y = W x / √in_features + b`, initialised `W ~ N(0, 1)`, `b = 0`.

    >>> layer = NTKLinear(4, 1, bias=False)
    >>> _ = torch.nn.init.ones_(layer.weight)
    >>> layer(torch.ones(1, 4)).item()
    2.0
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.scale = in_features**-0.5
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _draw(self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x * self.scale, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class NTKConv(nn.Module):
    """`y = W * x / √(in_channels · s) + b` with s entries per filter, in one or two dimensions (the length of `kernel`).

    >>> layer = NTKConv(1, 1, (2, 2), bias=False)
    >>> _ = torch.nn.init.ones_(layer.weight)
    >>> layer(torch.ones(1, 1, 2, 2)).item()
    2.0
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: tuple[int, ...],
        stride: tuple[int, ...] | int = 1,
        padding: tuple[int, ...] | int = 0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if len(kernel) not in (1, 2):
            raise ValueError(f"kernel must have one or two sizes. Got {kernel!r}.")
        self.kernel, self.stride, self.padding = kernel, stride, padding
        self.scale = (in_channels * math.prod(kernel)) ** -0.5
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, *kernel))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _draw(self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        convolve = F.conv1d if len(self.kernel) == 1 else F.conv2d
        # The filters are smaller than the image, so they take the factor.
        return convolve(x, self.weight * self.scale, self.bias, self.stride, self.padding)

    def extra_repr(self) -> str:
        out, inputs = self.weight.shape[:2]
        return f"{inputs}, {out}, kernel={self.kernel}, bias={self.bias is not None}"


def ntk_layers(model: nn.Module) -> list[NTKLinear | NTKConv]:
    """The NTK layers of a model, in its order."""
    return [m for m in model.modules() if isinstance(m, NTKLinear | NTKConv)]


def ntk_parameterise(model: nn.Module) -> nn.Module:
    """The model with every Linear and Conv replaced, in place, by its NTK form with fresh weights.

    The model itself is returned, or its replacement where it is a single layer. Norms, embeddings and raw parameters
    stay as they are.

    >>> ntk_parameterise(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
    Sequential(
      (0): NTKLinear(2, 3, bias=True)
      (1): ReLU()
    )
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            replacement = _replacement(child)
            if replacement is not child:
                setattr(parent, name, replacement)
    return _replacement(model)


def _replacement(layer: nn.Module) -> nn.Module:
    if isinstance(layer, nn.Linear):
        return NTKLinear(layer.in_features, layer.out_features, layer.bias is not None)
    if isinstance(layer, nn.Conv1d | nn.Conv2d):
        if layer.groups != 1 or any(d != 1 for d in layer.dilation) or isinstance(layer.padding, str):
            raise ValueError(f"no NTK form for {layer}: groups, dilation and named padding are not supported.")
        bias = layer.bias is not None
        return NTKConv(layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding, bias)
    return layer
