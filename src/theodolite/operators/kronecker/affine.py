"""Layers that are affine in their weight, seen as `z = W x` at one or many positions.

Linear layers, convolutions (through the patches of their input) and Hugging Face's transposed `Conv1D` all become pairs of
inputs (B, P, n) and outputs (B, P, m), with P the positions (patches, tokens) at which one sample uses the weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from theodolite.problem import Problem


@dataclass(frozen=True)
class AffineLayer:
    """How one layer's weight is read: `m` outputs, `n` entries of an unfolded input, `groups` of a convolution.

    `transposed` weights are stored as (n, m), so that in row-major order the input comes first. `tied` are other modules
    that share the weight, each with its own geometry.
    """

    name: str
    module: nn.Module
    m: int
    n: int
    groups: int = 1
    transposed: bool = False
    tied: tuple[AffineLayer, ...] = ()

    def input_features(self, x: Tensor) -> Tensor:
        """The layer's input with the n entries that the weight multiplies last: (..., n), of a convolution (B, P, n)."""
        module = self.module
        if not isinstance(module, nn.Conv1d | nn.Conv2d):
            return x
        x = x if x.ndim == module.weight.ndim else x[None]
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        x = F.pad(x, [n for both in reversed(_padding(module)) for n in both], mode=mode)
        one = (1,) * (4 - x.ndim)  # the height of a sequence
        x = x.reshape(*x.shape[:2], *one, *x.shape[2:])
        kernel, dilation, stride = ((*one, *sizes) for sizes in (module.kernel_size, module.dilation, module.stride))
        return F.unfold(x, kernel, dilation, 0, stride).transpose(1, 2)

    def output_features(self, z: Tensor) -> Tensor:
        """The layer's output, or a gradient of its shape, with the m outputs last: (..., m), of a convolution (B, P, m)."""
        if isinstance(self.module, nn.Conv1d | nn.Conv2d):
            z = z if z.ndim == self.module.weight.ndim else z[None]
            return z.flatten(2).transpose(1, 2)
        return z

    def weight_gradient(self, g: Tensor, x: Tensor) -> Tensor:
        """The gradient of the weight, flat, by that of the outputs g (..., m) and the inputs x (..., n)."""
        full = g.reshape(-1, self.m).T @ x.reshape(-1, self.n)  # (m, n)
        if self.transposed:
            full = full.T
        if self.groups > 1:  # every output sees its own group's inputs only
            place = torch.arange(self.groups, device=g.device)
            full = full.reshape(self.groups, self.m // self.groups, self.groups, -1)[place, :, place]
        return full.reshape(-1)


def affine_layer(name: str, module: nn.Module) -> AffineLayer | None:
    """The recipe for a module, or None where its weight has no Kronecker form."""
    if isinstance(module, nn.Linear):
        return AffineLayer(name, module, module.out_features, module.in_features)
    if type(module) in (nn.Conv1d, nn.Conv2d):
        kernel = int(torch.tensor(module.kernel_size).prod())
        inputs = int(module.in_channels) * kernel  # type: ignore[arg-type]
        return AffineLayer(name, module, int(module.out_channels), inputs, int(module.groups))  # type: ignore[arg-type]
    if type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers."):
        n, m = module._parameters["weight"].shape  # type: ignore[union-attr]
        return AffineLayer(name, module, int(m), int(n), transposed=True)
    return None


def affine_layers(problem: Problem, names: list[str]) -> tuple[list[AffineLayer], dict[str, str]]:
    """Recipes of the named layers, and for those that have none the reason."""
    place = {id(p): i for i, p in enumerate(problem.parameters)}
    users: dict[int, list[tuple[str, str, nn.Module]]] = {}  # by weight: (module, name of the weight in it, itself)
    for path, module in problem.model.named_modules():
        for local, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in place:
                users.setdefault(place[id(parameter)], []).append((path or "the model", local, module))
    found: list[AffineLayer] = []
    without: dict[str, str] = {}
    for name in names:
        weights = problem.layers[name].weights
        recipe = _recipe(name, problem.layers[name].kind, [users[i] for i in weights])
        if isinstance(recipe, str):
            without[name] = f"no Kronecker form: {recipe}"
        else:
            found.append(recipe)
    return found, without


def _recipe(name: str, kind: str, weights: list[list[tuple[str, str, nn.Module]]]) -> AffineLayer | str:
    """The recipe of a layer whose weights are used by these modules, or the reason why there is none."""
    if not weights:
        return "its weight is not measured (frozen, or not selected by params)"
    if len(weights) > 1 or weights[0][0][1] != "weight":
        return f"{kind} is not a linear layer or a convolution with one weight"
    (_, _, owner), *others = weights[0]
    recipe = affine_layer(name, owner)
    if recipe is None:
        return f"{kind} is not a linear layer, a Conv1d or a Conv2d"
    tied = []
    for path, local, module in others:
        other = affine_layer(name, module) if local == "weight" else None
        if other is None or replace(other, module=owner) != recipe:
            return f"its weight is also used by {path} ({type(module).__name__})"
        tied.append(other)
    return replace(recipe, tied=tuple(tied))


def _padding(module: nn.Conv1d | nn.Conv2d) -> list[tuple[int, int]]:
    """(before, after) of each spatial dimension."""
    if module.padding == "valid":
        return [(0, 0)] * len(module.kernel_size)
    if module.padding == "same":
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(int(p), int(p)) for p in module.padding]
