"""Taylor arithmetic: a tensor that moves along a curve, carried through a network with its first two derivatives.

A jet stands for `value + ε slope + ε² bend`. Products and linear layers have short rules, so a network evaluated on jets costs
five forward passes where nested forward mode costs eight; everything else goes through nested forward mode, one
operation at a time. Missing coefficients are zero and cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jvp
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from theodolite.interrupts import unbroken, unbroken_context


@dataclass(frozen=True)
class Jet:
    """`value + ε slope + ε² bend`; None is zero. With `aside` the bend is kept out of the autograd graph."""

    value: Tensor
    slope: Tensor | None = None
    bend: Tensor | None = None
    aside: bool = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return _RULES.get(func, _by_forward_mode)(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        """Facts are those of the value; methods are those of a tensor, on the jet."""
        found = getattr(Tensor, name, None)
        if callable(found):
            return lambda *args, **kwargs: Jet.__torch_function__(found, (), (self, *args), kwargs)
        return getattr(self.value, name)

    def __len__(self) -> int:
        return len(self.value)

    def or_zero(self, name: str) -> Tensor:
        """A coefficient, as zeros where it is missing."""
        part: Tensor | None = vars(self)[name]
        return torch.zeros_like(self.value) if part is None else part

    def each(self, function: Callable[[Tensor], Any]) -> tuple[Any, Any, Any]:
        """What a function makes of each coefficient, None of those that are missing."""
        value, slope, bend = (None if part is None else function(part) for part in (self.value, self.slope, self.bend))
        return value, slope, bend


def _operator(name: str) -> Callable[..., Any]:
    found = getattr(Tensor, name)
    return lambda self, *args: Jet.__torch_function__(found, (), (self, *args), {})


_TWO_SIDED = ("add", "sub", "mul", "truediv", "matmul", "pow")
_OTHERS = ("neg", "getitem", "lt", "le", "gt", "ge", "eq", "ne")
for _name in (*_TWO_SIDED, *(f"r{name}" for name in _TWO_SIDED), *_OTHERS):
    setattr(Jet, f"__{_name}__", _operator(f"__{_name}__"))


@unbroken_context
def jets_for(network: nn.Module, tensors: dict[str, Any]) -> Iterator[None]:
    """The network with some of its tensors replaced, by name, wherever they are used; put back afterwards."""
    named = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    stand_in = {id(named[name]): tensor for name, tensor in tensors.items()}
    kept: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module in network.modules():
            for store in (module._parameters, module._buffers):
                for name, tensor in store.items():
                    if id(tensor) in stand_in:
                        kept.append((store, name, tensor))
        for store, name, tensor in kept:
            store[name] = stand_in[id(tensor)]
        yield
    finally:
        for store, name, tensor in kept:
            store[name] = tensor


Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]  # (function, args, kwargs) -> jet


def _by_forward_mode(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any operation: `Dg[bend] + ½ D²g[slope, slope]` by nested forward mode of this operation alone."""
    leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=lambda leaf: isinstance(leaf, Jet))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Jet)]
    jets: list[Jet] = [leaves[i] for i in places]

    def call(*values: Tensor) -> Any:
        filled = list(leaves)
        for i, value in zip(places, values, strict=True):
            filled[i] = value
        a, k = pytree.tree_unflatten(filled, spec)
        return func(*a, **k)

    values = tuple(jet.value for jet in jets)
    plain, form = pytree.tree_flatten(call(*values))
    moving = [i for i, leaf in enumerate(plain) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not moving or all(jet.slope is None and jet.bend is None for jet in jets):
        return pytree.tree_unflatten(plain, form)

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        found = pytree.tree_leaves(call(*values))
        return tuple(found[i] for i in moving)

    slopes = tuple(jet.or_zero("slope") for jet in jets)
    (_, first), (_, second) = jvp(lambda *v: jvp(function, v, slopes), values, slopes)  # type: ignore[misc]
    aside = any(jet.aside for jet in jets)
    with unbroken(torch.no_grad() if aside else nullcontext()):
        _, pushed = jvp(function, values, tuple(jet.or_zero("bend") for jet in jets))  # type: ignore[misc]
        bends = [p + 0.5 * c for p, c in zip(pushed, second, strict=True)]
    for i, slope, bend in zip(moving, first, bends, strict=True):
        plain[i] = Jet(plain[i], slope, bend, aside)
    return pytree.tree_unflatten(plain, form)


def _linear_in_first(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Operations that only move numbers about or add them up."""
    jet, *rest = args
    if not isinstance(jet, Jet) or any(isinstance(leaf, Jet) for leaf in pytree.tree_leaves(rest)):
        return _by_forward_mode(func, args, kwargs)
    value, slope, bend = jet.each(lambda part: func(part, *rest, **kwargs))
    if isinstance(value, Tensor):
        return Jet(value, slope, bend, jet.aside)
    count = len(value)
    return type(value)(
        Jet(*parts, jet.aside) for parts in zip(value, slope or [None] * count, bend or [None] * count, strict=True)
    )


def _add(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2:
        return _by_forward_mode(func, args, kwargs)
    a, b = (_as_jet(arg) for arg in args)
    sign = -1.0 if "sub" in func.__name__ else 1.0
    if func.__name__ == "__rsub__":
        a, b = b, a
    value = a.value + sign * b.value if sign < 0 else a.value + b.value
    return Jet(value, _sum(a.slope, b.slope, sign, value), _sum(a.bend, b.bend, sign, value), a.aside or b.aside)


def _as_jet(x: Any) -> Jet:
    return x if isinstance(x, Jet) else Jet(x)


def _sum(a: Tensor | None, b: Tensor | None, sign: float = 1.0, like: Tensor | None = None) -> Tensor | None:
    found = a if b is None else (b if sign > 0 else -b) if a is None else (a + b if sign > 0 else a - b)
    return found if found is None or like is None or found.shape == like.shape else found.expand(like.shape)


def _product(times: Callable[[Any, Any], Tensor], a: Jet, b: Jet) -> Jet:
    """The product rule up to second order for a bilinear `times`."""
    aside = a.aside or b.aside
    value = times(a.value, b.value)
    slope = _sum(_times(times, a.slope, b.value), _times(times, a.value, b.slope))
    with unbroken(torch.no_grad() if aside else nullcontext()):
        ends = _sum(_times(times, a.bend, b.value), _times(times, a.value, b.bend))
        bend = _sum(ends, _times(times, a.slope, b.slope))
    return Jet(value, slope, bend, aside)


def _times(times: Callable[[Any, Any], Tensor], a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else times(a, b)


def _bilinear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`mul` and `matmul`, by function or operator."""
    if kwargs or len(args) != 2:
        return _by_forward_mode(func, args, kwargs)
    return _product(func, *map(_as_jet, args))


def _affine(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Linear layers and convolutions: (input, weight, bias, ...)."""
    named = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    rest = args[3:]
    extra = {k: v for k, v in kwargs.items() if k not in ("input", "weight", "bias")}
    if func is torch.nn.functional.linear and named["input"].ndim == 1:
        return _by_forward_mode(func, args, kwargs)
    product = _product(lambda x, w: func(x, w, None, *rest, **extra), _as_jet(named["input"]), _as_jet(named["weight"]))
    bias = named.get("bias")
    if bias is None:
        return product
    shape = (-1, *[1] * (named["weight"].ndim - 2))
    return _add(torch.add, (product, Jet(*_as_jet(bias).each(lambda part: part.view(shape)))), {})


def _pad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is padded with is a constant: slope and bend are padded with zero."""
    jet, pad, *more = args
    settings = dict(zip(("mode", "value"), more, strict=False)) | {k: v for k, v in kwargs.items() if k != "pad"}
    pad = kwargs.get("pad", pad)
    if not isinstance(jet, Jet):
        return _by_forward_mode(func, args, kwargs)
    still = {**settings, "value": None}
    slope, bend = (None if part is None else F.pad(part, pad, **still) for part in (jet.slope, jet.bend))
    return Jet(F.pad(jet.value, pad, **settings), slope, bend, jet.aside)


def _relu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    jet: Jet = args[0] if args else kwargs["input"]
    gate = (jet.value > 0).to(jet.value.dtype)
    return Jet(*jet.each(lambda part: part * gate), jet.aside)


#: Value, first derivative and half of the second, which is computed where it is needed.
Derivatives = tuple[Tensor, Tensor, Callable[[], Tensor]]


def _tanh(x: Tensor) -> Derivatives:
    value = torch.tanh(x)
    first = 1.0 - value.square()
    return value, first, lambda: -value * first


def _sigmoid(x: Tensor) -> Derivatives:
    value = torch.sigmoid(x)
    first = value * (1.0 - value)
    return value, first, lambda: first * (0.5 - value)


def _silu(x: Tensor) -> Derivatives:
    s = torch.sigmoid(x)
    value = x * s
    first = torch.addcmul(s, value, 1.0 - s)  # s + x s (1 − s)
    return value, first, lambda: s * (1.0 - s) * torch.addcmul(torch.ones_like(s), x, 0.5 - s)  # s (1 − s) (1 + x (½ − s))


def _elementwise(function: Callable[[Tensor], Derivatives]) -> Rule:
    def rule(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Jet:
        jet: Jet = args[0] if args else kwargs["input"]
        value, first, half_second = function(jet.value)
        slope = None if jet.slope is None else first * jet.slope
        with unbroken(torch.no_grad() if jet.aside else nullcontext()):
            bend = None if jet.bend is None else first * jet.bend
            if jet.slope is not None:
                bend = _sum(bend, half_second() * jet.slope.square())
        return Jet(value, slope, bend, jet.aside)

    return rule


_SHAPES = ["reshape", "flatten", "unflatten", "transpose", "permute", "movedim", "squeeze", "unsqueeze", "t"]
_MOVES = [*_SHAPES, "sum", "mean", "neg", "chunk", "split", "unbind", "clone"]
_MOVES_TORCH = [getattr(torch, name) for name in _MOVES]
_MOVES_TENSOR = [getattr(Tensor, name) for name in [*_MOVES, "view", "view_as", "expand", "contiguous", "__getitem__", "__neg__"]]
_AVERAGES = [F.avg_pool1d, F.avg_pool2d, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d]

_RULES: dict[Any, Rule] = {
    **dict.fromkeys([*_MOVES_TORCH, *_MOVES_TENSOR, *_AVERAGES], _linear_in_first),
    **dict.fromkeys([torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, torch.sub, Tensor.sub, Tensor.__sub__], _add),
    **dict.fromkeys([torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__], _bilinear),
    **dict.fromkeys([torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm], _bilinear),
    **dict.fromkeys([F.linear, torch.conv1d, torch.conv2d, torch.conv3d], _affine),
    **dict.fromkeys([torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, F.relu], _relu),
    **dict.fromkeys([torch.tanh, Tensor.tanh, F.tanh], _elementwise(_tanh)),
    **dict.fromkeys([torch.sigmoid, Tensor.sigmoid, F.sigmoid], _elementwise(_sigmoid)),
    F.silu: _elementwise(_silu),
    F.pad: _pad,
}
