"""Which projections of a block write into the residual stream, found by measurement.

A pre-norm block is `y = x + f(x)`. With all its projections at zero f is zero; then one after the other is given random values,
in the order in which they are called, and those that change y go back to zero. What is left at zero are the last ones: the
projections into the stream. With these at zero the block is the identity, and all parameters still move within two steps: first
these, then the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.interrupts import called_within
from theodolite.problem.activations import Call, Hooks
from theodolite.problem.state_guard import left_as_found
from theodolite.problem.tensors import named_tensors


@dataclass(frozen=True)
class StreamProjections:
    """A block's parameters that write into the residual stream.

    Attributes:
        names: their names, weights with their biases.
        identity: whether the block is the identity with them at zero; with norms behind the sums it is not.
        halved: what the block adds with half of them, over what it adds with all; nearly 1 where a norm stands behind each.
    """

    names: tuple[str, ...]
    identity: bool
    halved: float


@called_within(torch.no_grad)
def stream_projections(block: nn.Module, call: Call, own: Mapping[str, Tensor], seed: int) -> StreamProjections:
    """The projections of a block into the residual stream, measured on a recorded call of it or of a block like it.

    Args:
        block: the block; it is left as found.
        call: what a block of this kind was called with.
        own: the parameters of the block that belong to it alone, by name.
        seed: of the random values.

    """
    x = _stream(call.input if call.args else call.kwargs)
    groups = _groups(block, own, _calls(block, call))
    generator = torch.Generator().manual_seed(seed)
    values = {name: own[name].detach().clone() for group in groups for name in group}
    try:
        for name in values:
            own[name].zero_()
        quiet = _output(block, call, x)
        kept: list[str] = []
        for group in groups:
            for name in group:
                own[name].copy_(torch.randn(own[name].shape, generator=generator) * 0.1)
            if not torch.equal(_output(block, call, x), quiet):  # what is multiplied by zero adds exactly zero
                kept += group
                for name in group:
                    own[name].zero_()
        _put(own, values)
        whole = (_output(block, call, x) - quiet).norm()
        _put(own, {name: 0.5 * values[name] for name in kept})
        half = (_output(block, call, x) - quiet).norm()
        return StreamProjections(tuple(kept), _same(quiet, x), float(half / whole) if whole else 0.0)
    finally:
        _put(own, values)


def _put(own: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        own[name].copy_(value)


def _same(y: Tensor, x: Tensor) -> bool:
    """Equal up to a few roundings of the largest entry; half precision is no excuse."""
    tolerance = min(8 * torch.finfo(x.dtype).eps, 1e-6)
    return bool((y - x).abs().max() <= tolerance * x.abs().max())


def _output(block: nn.Module, call: Call, x: Tensor) -> Tensor:
    """The stream behind the block: the first tensor that it returns of the shape of the one before it."""
    with left_as_found(block, "eval"):
        raw = block(*call.args, **call.kwargs)
    return _stream(raw, x.shape)


def stream_in(tree: Any, shape: torch.Size | None = None) -> Tensor | None:
    """The residual stream among arguments or outputs: the first tensor of real numbers, of this shape where one is given."""
    real = (t for _, t in named_tensors(tree) if t.is_floating_point())
    return next((t for t in real if (t.ndim > 1 if shape is None else t.shape == shape)), None)


def _stream(tree: Any, shape: torch.Size | None = None) -> Tensor:
    if (stream := stream_in(tree, shape)) is None:
        raise ValueError(
            "a block of the body does not map a tensor to one of the same shape, so nothing can be added to it that leaves the "
            "model as it is: take init='copy' or 'random'."
        )
    return stream


def _groups(block: nn.Module, own: Mapping[str, Tensor], calls: Mapping[str, int]) -> list[list[str]]:
    """Projections in the order in which they are used: each weight alone, a bias too, and with them those of experts not called.

    A projection is a parameter of two dimensions or more, or another parameter of the same module. The scales of norms are none.
    """
    flat = {name.rpartition(".")[0] for name, p in own.items() if p.ndim > 1}
    names = [name for name, p in own.items() if p.is_floating_point() and name.rpartition(".")[0] in flat]
    groups = {name: [name] for name in names}
    for name in names:
        called = [other for other in names if other in groups and _is_other_expert(block, name, other, calls)]
        if called:
            groups[called[0]] += groups.pop(name)
    return sorted(groups.values(), key=lambda group: next(calls[around] for around in _around(group[0]) if around in calls))


def _is_other_expert(block: nn.Module, name: str, other: str, calls: Mapping[str, int]) -> bool:
    """Whether `name` is a parameter of an entry of an `nn.ModuleList` that was not called, and `other` that of one that was."""
    for around in list(_around(name))[:-1]:
        parent, _, number = around.rpartition(".")
        if number.isdecimal() and isinstance(block.get_submodule(parent), nn.ModuleList):
            rest = name.removeprefix(around)
            entry = other.removesuffix(rest)
            alike = other.endswith(rest) and entry.rpartition(".")[0] == parent
            return alike and around not in calls and entry in calls
    return False


def _calls(block: nn.Module, call: Call) -> dict[str, int]:
    """Module of the block -> the place of its first call; "" is the block itself."""
    calls: dict[str, int] = {}

    def note(seen: Call) -> None:
        calls.setdefault(seen.name, len(calls))

    with Hooks(dict(block.named_modules()), note, before=True), left_as_found(block, "eval"):
        block(*call.args, **call.kwargs)
    return calls


def _around(name: str) -> Iterator[str]:
    """The modules around a parameter, the nearest first; "" is the block.

    >>> list(_around("mlp.down.weight"))
    ['mlp.down', 'mlp', '']
    """
    while name:
        name = name.rpartition(".")[0]
        yield name
