"""Fused layers by plain operations, for transforms that the fused kernels get wrong or refuse.

In torch 2.13 forward mode over forward mode, and forward over reverse by `jacrev`, are off by percents through layer and
instance norm: the fused kernels' derivative formulas treat their saved mean and deviation as constants. SiLU, Mish and GLU
have no such derivative at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from theodolite.problem.derivatives.exact_derivatives import weight_norm


class UnfusedLayers(TorchFunctionMode):
    """Swaps fused normalisations and activations for sums, products, roots and exponentials."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        # A number type of its own may know SiLU better than its parts.
        known = func is F.silu and any(not issubclass(kind, Tensor) for kind in types)
        plain = func if known else _PLAIN.get(func, func)
        return plain(*args, **(kwargs or {}))


def layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """Over the last dimensions."""
    out = _standardised(input, list(range(-len(normalized_shape), 0)), eps)
    return _affine(out, weight, bias)


def rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Divided by the root of the mean square of the last dimensions."""
    square = input.square().mean(list(range(-len(normalized_shape), 0)), keepdim=True)
    floor = torch.finfo(input.dtype).eps if eps is None else eps
    return _affine(input * (square + floor).rsqrt(), weight, None)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Over the channels of a group and all positions."""
    grouped = input.reshape(input.shape[0], num_groups, -1)
    return _by_channel(_standardised(grouped, [-1], eps).reshape(input.shape), weight, bias)


def batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """With running statistics it is affine; otherwise over the batch and all positions. Statistics are not updated."""
    if training or running_mean is None or running_var is None:
        out = _standardised(input, [0, *range(2, input.ndim)], eps)
    else:
        out = _by_channel(input, (running_var + eps).rsqrt(), -running_mean * (running_var + eps).rsqrt())
    return _by_channel(out, weight, bias)


def instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Over the positions of each channel of each sample."""
    if not use_input_stats:
        return batch_norm(input, weight, bias, running_mean, running_var, eps=eps)
    return _by_channel(_standardised(input, list(range(2, input.ndim)), eps), weight, bias)


def _standardised(x: Tensor, dims: list[int], eps: float) -> Tensor:
    centred = x - x.mean(dims, keepdim=True)
    return centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _by_channel(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    shape = (1, -1, *[1] * (x.ndim - 2))
    return _affine(x, None if weight is None else weight.view(shape), None if bias is None else bias.view(shape))


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    """`x σ(x)`, of operations that have every derivative."""
    return input * torch.sigmoid(input)


def mish(input: Tensor, inplace: bool = False) -> Tensor:
    """`x tanh(softplus(x))`, of operations that have every derivative."""
    return input * torch.tanh(F.softplus(input))


def glu(input: Tensor, dim: int = -1) -> Tensor:
    """`a σ(b)` for the two halves of the input."""
    first, second = input.chunk(2, dim)
    return first * torch.sigmoid(second)


def _statistics_first(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same with its arguments as `torch.nn.functional` orders them: running statistics before weight and bias."""

    def called(
        input: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        *rest: Any,
        **named: Any,
    ) -> Tensor:
        return norm(input, weight, bias, running_mean, running_var, *rest, **named)

    return called


# Both levels: a mode is off inside the function it was handed, so the inner call would pass unseen.
_PLAIN: dict[Any, Callable[..., Any]] = {
    torch.layer_norm: layer_norm,
    F.layer_norm: layer_norm,
    torch.rms_norm: rms_norm,
    F.rms_norm: rms_norm,
    torch.group_norm: group_norm,
    F.group_norm: group_norm,
    torch.batch_norm: batch_norm,
    F.batch_norm: _statistics_first(batch_norm),
    torch.instance_norm: instance_norm,
    F.instance_norm: _statistics_first(instance_norm),
    torch._weight_norm: weight_norm,
    F.silu: silu,
    F.mish: mish,
    F.glu: glu,
}
