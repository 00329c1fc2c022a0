"""Replicas of one architecture as stacked tensors: every parameter and buffer with a leading replica axis."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from theodolite.arguments import shown
from theodolite.errors import ArgumentError
from theodolite.interrupts import called_within
from theodolite.problem.calling import copy_model
from theodolite.problem.state_guard import random_states_kept

Factory = Callable[[int], nn.Module]
Stack = dict[str, Tensor]  # name -> (R, *shape)


@dataclass
class FleetState:
    """`parameters` are trained, `buffers` hold all else the model owns (also frozen parameters); both (R, *shape) by name.

    `module` gives the architecture; its own numbers are never used.
    """

    module: nn.Module
    parameters: Stack
    buffers: Stack
    ids: tuple[int, ...]  # the place of each row in the whole fleet

    @property
    def replicas(self) -> int:
        return len(next(iter(self.parameters.values())))

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    def rows(self, rows: Tensor | slice) -> FleetState:
        """A copy of some replicas; of a slice, these in the same memory."""
        parameters = {name: pick(t.detach(), rows).requires_grad_() for name, t in self.parameters.items()}
        ids = self.ids[rows] if isinstance(rows, slice) else tuple(self.ids[row] for row in rows.tolist())
        return FleetState(self.module, parameters, {name: pick(t, rows) for name, t in self.buffers.items()}, ids)

    def replica(self, index: int) -> nn.Module:
        """A module of its own with the numbers of one replica."""
        model = copy_model(self.module)
        self.load(model, index)
        return model

    @called_within(torch.no_grad)
    def load(self, model: nn.Module, index: int) -> None:
        """Copy the numbers of one replica into a module of its own."""
        tensors = {**self.parameters, **self.buffers}
        for name, t in _named(model):
            t.copy_(tensors[name][index])

    @called_within(torch.no_grad)
    def keep_buffers(self, model: nn.Module, index: int) -> None:
        """Take over the buffers of such a module."""
        for name, t in model.named_buffers():
            self.buffers[name][index] = t

    def bound_replica(self, index: int) -> nn.Module:
        """A module whose parameters and buffers are the rows of one replica themselves: it follows the stack."""
        model = copy_model(self.module)
        tensors = {**self.parameters, **self.buffers}
        rows: dict[int, Tensor] = {}
        for name, t in _named(model):
            row = tensors[name].detach()[index]
            rows[id(t)] = nn.Parameter(row, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else row
        for part in model.modules():  # tied tensors have several places
            for owner in (part._parameters, part._buffers):
                owner.update({name: rows[id(t)] for name, t in owner.items() if t is not None})  # type: ignore[misc]
        return model


def pick(stacked: Tensor, rows: Tensor | slice) -> Tensor:
    """A copy of some rows in the same memory layout; a view of a slice."""
    if isinstance(rows, slice):
        return stacked[rows]
    return torch.index_select(stacked, 0, rows, out=torch.empty_like(stacked[: len(rows)]))


def laid_out_like(stacked: Tensor, model: Tensor) -> Tensor:
    """The same numbers in the memory order of `model`, which may hold fewer replicas.

    Elementwise work on tensors of unlike order is slow.
    """
    if torch.empty_like(model).stride() != model.stride():  # gaps or overlaps
        return stacked
    strides = model.stride()
    order = sorted(range(model.ndim), key=lambda axis: (-strides[axis], axis))
    places = [order.index(axis) for axis in range(model.ndim)]
    empty = torch.empty([stacked.shape[axis] for axis in order], dtype=stacked.dtype, device=stacked.device).permute(places)
    if empty.stride() == stacked.stride():
        return stacked
    return empty.copy_(stacked.detach()).requires_grad_(stacked.requires_grad)


def stack_replicas(factory: Factory, seeds: Sequence[int]) -> FleetState:
    """Call the factory once per seed, with torch's generator seeded alike, and stack what it makes.

    The caller's random state is left alone.

    >>> state = stack_replicas(lambda seed: nn.Linear(3, 2), [0, 1, 2, 3])
    >>> state.parameters["weight"].shape
    torch.Size([4, 2, 3])
    """
    make = seeded_factory(factory)
    first: nn.Module | None = None
    columns: dict[str, list[Tensor]] = {}
    with random_states_kept(range(torch.cuda.device_count())):
        for seed in seeds:
            torch.manual_seed(seed)
            model = make(seed)
            if not isinstance(model, nn.Module):
                raise TypeError(f"factory must return an nn.Module for a seed. Got {type(model).__name__} for seed {seed}.")
            if first is None:
                first = copy_model(model)
                columns = {name: [] for name, _ in _named(first)}
            else:
                _check_alike(first, model, seeds[0], seed)
            for name, t in _named(model):
                columns[name].append(t.detach().clone())
    if first is None:
        raise ValueError("seeds is empty: give one seed per replica.")
    trained = {name for name, p in first.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError("The factory's models have no parameter that requires a gradient: there is nothing to train.")
    stacked = {name: torch.stack(column) for name, column in columns.items()}
    parameters = {name: t.requires_grad_() for name, t in stacked.items() if name in trained}
    buffers = {name: t for name, t in stacked.items() if name not in trained}
    return FleetState(first, parameters, buffers, tuple(range(len(seeds))))


def seeded_factory(factory: Callable[..., nn.Module]) -> Factory:
    """A function of the seed from one that takes it, or from one that can be called with nothing.

    For the latter (a module class whose arguments have defaults, say) torch's generator is seed enough.
    """
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):
        return factory
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p.name for p in places if p.default is p.empty]
    if len(needed) > 1:
        raise ArgumentError(
            f"factory is called with the seed alone, as lambda seed: nn.Linear(2, 1). Got {shown(factory)}, which needs "
            f"{' and '.join(needed)}."
        )
    wants = any(p.default is p.empty or p.name == "seed" for p in places) or any(p.kind == p.VAR_POSITIONAL for p in parameters)
    return factory if wants else lambda seed: factory()


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name; tied ones once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _check_alike(first: nn.Module, other: nn.Module, seed: int, other_seed: int) -> None:
    """One program for all replicas needs one architecture."""
    here, there = _architecture(first), _architecture(other)
    for name in [*here, *(name for name in there if name not in here)]:
        if here.get(name) != there.get(name):
            raise ValueError(
                f"All replicas must have the same architecture, but {name!r} is {here.get(name, 'absent')} for seed {seed} and "
                f"{there.get(name, 'absent')} for seed {other_seed}. The factory may change numbers with the seed, not shapes or "
                "settings; train different architectures as different fleets."
            )
    for (name, mine), (_, theirs) in zip(_loose(first), _loose(other), strict=True):
        if mine.shape != theirs.shape or not torch.equal(mine, theirs):
            raise ValueError(
                f"The tensor {name!r} differs between the replicas but is neither a parameter nor a buffer, so it cannot be "
                "stacked. Use self.register_buffer(...) for it."
            )


def _architecture(model: nn.Module) -> dict[str, str]:
    """What must agree: the kinds of modules with the settings torch's own show, shapes, dtypes, what is trained."""
    found = {}
    for name, module in model.named_modules():
        own = type(module).__module__.startswith("torch.nn")
        found[name or "the model"] = f"{type(module).__name__}({module.extra_repr() if own else _plain_settings(module)})"
    for name, t in _named(model):
        shape = "x".join(map(str, t.shape)) or "scalar"
        kind = str(t.dtype).removeprefix("torch.")
        found[f"{name} "] = f"{shape} {kind}{' trained' if t.requires_grad else ''}"
    return {name.strip(): text for name, text in found.items()}


def _plain_settings(module: nn.Module) -> str:
    """Numbers, words and tuples that a module of one's own keeps as attributes: one program runs with those of the first."""
    plain = {key: value for key, value in vars(module).items() if not key.startswith("_") and key != "training"}
    return ", ".join(f"{key}={value!r}" for key, value in plain.items() if isinstance(value, bool | int | float | str | tuple))


def _loose(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Tensors kept as plain attributes."""
    return [
        (f"{prefix}.{name}".lstrip("."), t)
        for prefix, module in model.named_modules()
        for name, t in vars(module).items()
        if isinstance(t, Tensor)
    ]
