"""Which form the per-sample gradients of a module's parameters take, judged by what goes in and comes out of it.

A recipe is a guess: `z = W x` for a weight with two dimensions, a convolution for one with more, a scaled normalisation for
one that has the output's last or second dimension. Each guess is compared with the gradient that plain backward gives, up
to a factor (layers in the NTK parameterisation divide by √inputs), and dropped where it does not fit: a weight that
is also used elsewhere, or a module that does something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from theodolite.operators.kronecker.affine import AffineLayer, affine_layer
from theodolite.operators.tangent_kernels.features import Features, Rows, Tokens, affine_features

#: What was pulled back to each call of a module, (c, *output.shape) -> features of these c outputs.
Form = Callable[[list[Tensor]], Features]


@dataclass(frozen=True)
class Use:
    """The calls of one module on a block of n samples: inputs and outputs, call by call."""

    module: nn.Module
    inputs: list[Tensor]
    outputs: list[Tensor]
    samples: int

    @classmethod
    def of(cls, module: nn.Module, inputs: list[Tensor], outputs: list[Tensor], samples: int) -> Use:
        """Only calls that the output can depend on: not those under `no_grad`."""
        followed = [(x, z) for x, z in zip(inputs, outputs, strict=True) if z.requires_grad]
        return cls(module, [x for x, _ in followed], [z for _, z in followed], samples)


def guesses(use: Use, name: str) -> Iterator[Form]:
    """Forms that the gradients of the parameter `name` of a module may have, likeliest first."""
    parameter = use.module._parameters[name]
    assert parameter is not None
    if name == "bias" and parameter.ndim == 1:
        yield from _bias(use, parameter)
    elif name == "weight" and isinstance(use.module, nn.Embedding):
        yield _embedding(use)
    elif name == "weight" and parameter.ndim >= 2:
        yield from _affine(use)
    elif name == "weight":
        yield from _scale(use, parameter)


def _by_position(parts: list[Tensor]) -> Tensor:
    """Several calls side by side: (n, P, ·) or (n, c, P, ·) joined along P."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)


def _affine(use: Use) -> Iterator[Form]:
    layer = affine_layer("", use.module) or _linear_like(use) or _convolution_like(use)
    if layer is None:
        return
    inputs = _by_position([layer.inputs(x, use.samples) for x in use.inputs])

    def form(pulled: list[Tensor]) -> Features:
        found = _by_position([_positions(layer, g, use.samples) for g in pulled])
        return affine_features(inputs, found, groups=layer.groups, transposed=layer.transposed)

    yield form


def _positions(layer: AffineLayer, pulled: Tensor, samples: int) -> Tensor:
    """(c, *output.shape) as (n, c, P, m)."""
    c = pulled.shape[0]
    flat = layer.outputs(pulled.flatten(0, 1), c * samples)
    return flat.reshape(c, samples, *flat.shape[1:]).transpose(0, 1)


def _linear_like(use: Use) -> AffineLayer | None:
    """A module of its own making with a matrix between the last dimensions of its input and output."""
    weight = use.module._parameters["weight"]
    assert weight is not None
    fits = weight.ndim == 2 and use.inputs[0].is_floating_point()
    if not fits or weight.shape != (use.outputs[0].shape[-1], use.inputs[0].shape[-1]):
        return None
    m, n = weight.shape
    return AffineLayer("", use.module, int(m), int(n))


def _convolution_like(use: Use) -> AffineLayer | None:
    """A module of its own making with the stride and padding of a plain convolution."""
    weight, module = use.module._parameters["weight"], use.module
    assert weight is not None
    if weight.ndim not in (3, 4) or not hasattr(module, "stride") or not hasattr(module, "padding"):
        return None
    kind = nn.Conv1d if weight.ndim == 3 else nn.Conv2d
    m, channels, *kernel = weight.shape
    with torch.device("meta"):  # only its geometry is read
        geometry = kind(channels, m, tuple(kernel), module.stride, module.padding, bias=False)  # type: ignore[arg-type]
    return affine_layer("", geometry)


def _bias(use: Use, bias: Tensor) -> Iterator[Form]:
    for dim in (-1, 1):  # of the output: last, or channels
        if all(z.ndim > 1 and z.shape[dim] == len(bias) for z in use.outputs):
            yield lambda pulled, dim=dim: Rows(sum_of([_kept(g, dim, use.samples) for g in pulled]))  # type: ignore[misc]


def _scale(use: Use, weight: Tensor) -> Iterator[Form]:
    """Normalisation layers: the output is the weight times what the layer gives with weight one and no bias."""
    plain = {"weight": torch.ones_like(weight)}
    if use.module._parameters.get("bias") is not None:
        plain["bias"] = torch.zeros_like(weight)
    with torch.no_grad():
        normed = [functional_call(use.module, plain, (x,)) for x in use.inputs]

    def form(pulled: list[Tensor], dim: int) -> Features:
        return Rows(sum_of([_kept(g * x, dim, use.samples) for g, x in zip(pulled, normed, strict=True)]))

    for dim in (-1, 1):
        if weight.ndim == 1 and all(z.ndim > 1 and z.shape[dim] == len(weight) for z in use.outputs):
            yield lambda pulled, dim=dim: form(pulled, dim)  # type: ignore[misc]


def sum_of(parts: list[Tensor]) -> Tensor:
    """The sum over the calls of a module."""
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def _kept(g: Tensor, dim: int, samples: int) -> Tensor:
    """(c, n, ..., m, ...) summed over all dimensions but the first two and `dim` of the output: (n, c, m)."""
    kept = g.movedim(dim if dim < 0 else dim + 1, -1)
    return kept.reshape(g.shape[0], samples, -1, kept.shape[-1]).sum(2).transpose(0, 1)


def _embedding(use: Use) -> Form:
    tokens = torch.cat([x.reshape(use.samples, -1) for x in use.inputs], dim=1)
    weight = use.module._parameters["weight"]
    assert weight is not None

    def form(pulled: list[Tensor]) -> Features:
        parts = [g.reshape(g.shape[0], use.samples, -1, g.shape[-1]).transpose(0, 1) for g in pulled]
        return Tokens(tokens, _by_position(parts), len(weight))

    return form
