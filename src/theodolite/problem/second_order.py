"""Everything that must be arranged so that a model can be differentiated twice, exactly and fast.

Entered around the calls of the user's model; nothing of the model is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from theodolite.errors import SecondOrderError

Geometry = tuple[list[int], list[int], list[int], bool, list[int], int]

_convolve: Any = torch.ops.aten.convolution
_convolve_backward: Any = torch.ops.aten.convolution_backward


@contextmanager
def first_order() -> Iterator[None]:
    """Gradients on, eager execution, no checkpointing: what every functional call of a model needs."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_no_checkpointing())
        yield


@contextmanager
def second_order() -> Iterator[None]:
    """Also attention by the kernel that has second derivatives, and fast exact double backward of convolutions."""
    with first_order(), sdpa_kernel(SDPBackend.MATH), _no_fast_attention(), _Replacements():
        yield


@contextmanager
def _no_fast_attention() -> Iterator[None]:
    """The fused inference path of `nn.TransformerEncoder` has no derivative at all."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def _no_checkpointing() -> Iterator[None]:
    """Run checkpointed parts plainly: recomputation happens in backward, after the functional call has ended,

    and would then meet the model's own parameters instead of the ones being differentiated.
    """

    class Direct:
        @staticmethod
        def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
            return function(*args)

    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    with ExitStack() as stack:
        for name, stand_in in (("CheckpointFunction", Direct), ("_checkpoint_without_reentrant_generator", generator)):
            if hasattr(torch.utils.checkpoint, name):
                stack.enter_context(patch.object(torch.utils.checkpoint, name, stand_in))
        yield


def refuse_first_order_layers(model: nn.Module) -> None:
    """Name the layers that torch cannot differentiate twice, before a cryptic error does."""
    for name, module in model.named_modules():
        if isinstance(module, nn.EmbeddingBag):
            raise SecondOrderError(
                f"{name or 'the model'} is an nn.EmbeddingBag, which has no second derivative in torch. Replace it by "
                "nn.Embedding followed by .mean(dim=1) (mode='mean') or .sum(dim=1) (mode='sum'): the same function and weights."
            )


@contextmanager
def plain_second_order_errors() -> Iterator[None]:
    """The friendly form of torch's 'derivative not implemented'."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "not implemented" not in text or "deriv" not in text:
            raise
        raise SecondOrderError(
            f"A layer or the loss has no second derivative in torch ({text.splitlines()[0]}). Replace it by one built of "
            "ordinary torch operations (attn_implementation='eager' for a custom attention kernel)."
        ) from error


class _Replacements(TorchFunctionMode):
    """Swaps functions whose own double backward is slow (convolutions, ReLU) or wrong (`_weight_norm`)."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _CONVOLUTIONS:
            call = _convolution_call(_CONVOLUTIONS[func], *args, **kwargs)
            if call is not None:
                return _Convolution.apply(*call)
        elif func in _RELU and not (len(args) > 1 or kwargs.get("inplace")):
            return _relu(*args, **{k: v for k, v in kwargs.items() if k == "input"})
        elif func is torch._weight_norm:
            return _weight_norm(*args, **kwargs)
        return func(*args, **kwargs)


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
    """A product with a fixed mask: its double backward has no zero tensors to make and add."""
    return input * (input > 0).to(input.dtype)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """`g v / ‖v‖`; the fused kernel's double backward is wrong by tens of percent in torch 2.13."""
    others = [d for d in range(v.ndim) if d != dim % v.ndim] if dim != -1 else list(range(v.ndim))
    return v * (g / v.square().sum(dim=others, keepdim=True).sqrt())
