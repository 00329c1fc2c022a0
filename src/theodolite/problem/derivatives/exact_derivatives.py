"""Functions whose own double backward is slow or wrong, their derivatives written out by hand; used while a graph is built."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from theodolite.interrupts import unbroken
from theodolite.problem.tensors import inside_transform

Geometry = tuple[list[int], list[int], list[int], bool, list[int], int]

_convolve: Any = torch.ops.aten.convolution
_convolve_backward: Any = torch.ops.aten.convolution_backward


class ExactDerivatives(TorchFunctionMode):
    """Swaps functions whose own double backward is slow (convolutions, ReLU, GELU, SiLU) or wrong (`_weight_norm`)."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _CONVOLUTIONS and not inside_transform():
            call = _convolution_call(_CONVOLUTIONS[func], *args, **kwargs)
            if call is not None:
                return _Convolution.apply(*call)
        elif func in _RELU and not (len(args) > 1 or kwargs.get("inplace")):
            return _relu(*args, **{k: v for k, v in kwargs.items() if k == "input"})
        elif func in _SMOOTH and _traced(args) and not kwargs.get("inplace") and len(args) == 1:
            return twice_differentiable(lambda z: func(z, **kwargs), args[0])
        elif func is torch._weight_norm:
            return weight_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _traced(args: tuple[Any, ...]) -> bool:
    """Whether a call on a plain tensor is recorded for differentiation."""
    plain = bool(args) and type(args[0]) in (Tensor, nn.Parameter)
    return plain and args[0].requires_grad and torch.is_grad_enabled() and not inside_transform()


_SMOOTH = {nn.functional.gelu, nn.functional.silu}
_RELU = {torch.relu, Tensor.relu, nn.functional.relu}
_CONVOLUTIONS = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}


def _convolution_call(
    dim: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None, Geometry] | None:
    """Arguments for `_Convolution`, or None for the rare forms left to torch (string padding, no batch)."""
    if isinstance(padding, str) or input.ndim != dim + 2:
        return None

    def spread(value: Any) -> list[int]:
        items = [value] if isinstance(value, int) else list(value)
        return items * dim if len(items) == 1 else items

    geometry: Geometry = (spread(stride), spread(padding), spread(dilation), False, [0] * dim, groups)
    return input, weight, bias, geometry


class _Convolution(Function):
    """A convolution whose second derivatives are again plain convolutions and their standard backwards.

    torch's own double backward folds the batch into channels, which the CPU kernels do slowly (about half
    the time of a Hessian product of LeNet5).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, geometry: Geometry) -> Tensor:
        ctx.geometry = geometry
        ctx.save_for_backward(x, w)
        out: Tensor = _convolve(x, w, b, *geometry)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (g,) = grads
        x, w = ctx.saved_tensors
        need_x, need_w, need_b, _ = ctx.needs_input_grad
        gx = gw = None
        if need_x or need_w:
            gx, gw = _ConvolutionBackward.apply(g, x, w, ctx.geometry, need_x, need_w)
        gb = g.sum(dim=[0, *range(2, g.ndim)]) if need_b else None
        return gx, gw, gb, None


class _ConvolutionBackward(Function):
    """(g, x, w) -> gradients for x and w; linear in g, bilinear in (g, w) and (g, x)."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, w: Tensor, geometry: Geometry, need_x: bool, need_w: bool) -> Any:
        ctx.geometry = geometry
        ctx.save_for_backward(g, x, w)
        ctx.set_materialize_grads(False)
        gx, gw, _ = _convolve_backward(g, x, w, None, *geometry, [need_x, need_w, False])
        return gx, gw

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        vx, vw = grads
        g, x, w = ctx.saved_tensors
        need_g, need_x, need_w = ctx.needs_input_grad[:3]
        geometry = ctx.geometry
        dg = dx = dw = None
        if need_g and vx is not None:
            dg = _convolve(vx, w, None, *geometry)
        if need_g and vw is not None:
            other = _convolve(x, vw, None, *geometry)
            dg = other if dg is None else dg + other
        if need_x and vw is not None:
            dx = _convolve_backward(g, x, vw, None, *geometry, [True, False, False])[0]
        if need_w and vx is not None:
            dw = _convolve_backward(g, vx, w, None, *geometry, [False, True, False])[1]
        return dg, dx, dw, None, None, None


def _relu(input: Tensor) -> Tensor:
    """A product with a fixed mask: its double backward has no zero tensors to make and add.

    Only -inf times zero goes wrong. One NaN shows in the sum, and filling (2 to 4 times slower) is right then.
    """
    if type(input) in (Tensor, nn.Parameter) and not inside_transform():
        values = input.detach()
        out = input * torch.gt(values, 0, out=torch.empty_like(values))
        if not math.isnan(out.detach().sum().item()):
            return out
    return input.masked_fill(input <= 0, 0)  # keeps NaN


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """`g v / ‖v‖`; the fused kernel's double backward is wrong by tens of percent in torch 2.13."""
    others = [d for d in range(v.ndim) if d != dim % v.ndim] if dim != -1 else list(range(v.ndim))
    return v * (g / v.square().sum(dim=others, keepdim=True).sqrt())


#: The product behind mixtures of experts: rows in groups, each with a matrix of its own. Absent from torch before 2.8.
GROUPED: Any = getattr(torch, "_grouped_mm", None)


def grouped_matmul(rows: Tensor, matrices: Tensor, offs: Tensor | None = None, *args: Any, **options: Any) -> Tensor:
    """`rows[i] @ matrices[g]` for the rows up to `offs[g]`: what the fused kernel gives, also in float64 and forward mode.

    >>> grouped_matmul(torch.ones(3, 1), torch.tensor([[[2.0]], [[5.0]]]), torch.tensor([1, 3])).flatten()
    tensor([2., 5., 5.])
    """
    if offs is None or rows.ndim != 2 or matrices.ndim != 3 or args or any(v is not None for v in options.values()):
        found: Tensor = GROUPED(rows, matrices, offs, *args, **options)
        return found
    ends = offs.tolist()
    groups = [rows[start:end] @ matrices[g] for g, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]
    return torch.cat([*groups, rows.new_zeros(len(rows) - ends[-1], matrices.shape[-1])])


def derivatives(function: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """σ(z), σ'(z), σ''(z) of a function that acts on each entry alone.

    >>> derivatives(torch.square, torch.tensor([3.0]))
    (tensor([9.]), tensor([6.]), tensor([2.]))
    """
    with unbroken(torch.enable_grad()):
        start = z.detach().requires_grad_()
        values = function(start)
        (slope,) = torch.autograd.grad(values.sum(), start, create_graph=True)
        second = torch.autograd.grad(slope.sum(), start)[0] if slope.requires_grad else torch.zeros_like(slope)
    return values.detach(), slope.detach(), second


def twice_differentiable(function: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """`function(z)` whose first and second derivatives in z are known; asking for a third raises.

    torch writes the double backward of GELU and SiLU as a dozen operations on temporaries, an eighth of a product of a small GPT.
    """
    values: Tensor = _Elementwise.apply(z, derivatives(function, z))
    return values


class _Elementwise(Function):
    """z, with (σ(z), σ'(z), σ''(z)) known -> σ(z)."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, known: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        values, slope, second = known
        ctx.save_for_backward(z, slope, second)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        z, slope, second = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return grads[0] * slope, None
        return _ElementwiseBackward.apply(grads[0], z, slope, second), None


class _ElementwiseBackward(Function):
    """(g, z) -> g σ'(z), with derivatives σ'(z) and g σ''(z)."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, z: Tensor, slope: Tensor, second: Tensor) -> Tensor:
        ctx.save_for_backward(slope, g * second)
        return g * slope

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():  # create_graph
            raise RuntimeError("The graph of a Hessian product holds two derivatives of GELU and SiLU, not three.")
        slope, bend = ctx.saved_tensors
        need_g, need_z = ctx.needs_input_grad[:2]
        return grads[0] * slope if need_g else None, grads[0] * bend if need_z else None, None, None
