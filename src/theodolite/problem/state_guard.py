"""What a measurement may change and must put back: attributes of modules, their modes, and the random states."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any, cast

import numpy as np
import torch
from torch import nn

_CONTAINERS = {list, dict, set, deque, OrderedDict, defaultdict}

#: The books that every module keeps on its hooks: most of its containers, and no business of a forward pass.
_HOOKS = {
    name
    for name, value in vars(nn.Module()).items()
    if type(value) in _CONTAINERS and name.endswith(("hooks", "kwargs", "called"))
}


@contextmanager
def attributes_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore each module's attributes and the contents of the lists, dictionaries and sets among them.

    A forward pass may keep activations (which hold the graph), count its calls, cache masks, or, as recurrent layers do, list
    its weights. Tensors that are changed in place are not followed.
    """
    attributes = [(module, vars(module).copy()) for module in modules]
    contents: dict[int, tuple[Any, list[Any]]] = {}
    for _, kept in attributes:
        _remember([v for name, v in kept.items() if type(v) in _CONTAINERS and name not in _HOOKS], contents)
    try:
        yield
    finally:
        for module, kept in attributes:
            now = vars(module)
            now.update(kept)
            if len(now) > len(kept):
                for name in now.keys() - kept.keys():
                    del now[name]
        for container, before in contents.values():
            _refill(container, before)


def _remember(values: Iterable[Any], contents: dict[int, tuple[Any, list[Any]]]) -> None:
    """Note the containers among the values, and within them, with what they hold."""
    for value in values:
        if type(value) in _CONTAINERS and id(value) not in contents:
            held = _held(value)
            contents[id(value)] = (value, held)
            if held:
                _remember(held, contents)


def _held(container: Any) -> list[Any]:
    return [*container.keys(), *container.values()] if isinstance(container, dict) else [*container]


def _refill(container: Any, before: list[Any]) -> None:
    if not container and not before:
        return
    now = _held(container)
    if len(now) == len(before) and all(map(is_, now, before)):
        return
    container.clear()
    if isinstance(container, dict):
        half = len(before) // 2
        container.update(zip(before[:half], before[half:], strict=True))
    elif isinstance(container, set):
        container.update(before)
    else:
        container.extend(before)


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Give every module its train or eval mode back."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def random_states_kept(devices: Sequence[int] = (), generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Restore the global states of torch (also on CUDA `devices`), NumPy and Python, and those of the given generators."""
    # Models, losses and data sets of the user may draw from the global state of NumPy, whatever this package does.
    python, numpy, own = random.getstate(), np.random.get_state(), [g.get_state() for g in generators]  # noqa: NPY002
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002
            for generator, state in zip(generators, own, strict=True):
                generator.set_state(state)


class _Measuring(threading.local):
    depth = 0


_MEASURING = _Measuring()


def being_measured() -> bool:
    """Whether the calls of a model that are under way belong to a measurement and not to its training."""
    return _MEASURING.depth > 0


@contextmanager
def left_as_found(model: nn.Module, mode: str | None, loss: object = None) -> Iterator[None]:
    """Enter eval or train mode; on the way out restore the modes and attributes of all modules and the random states.

    Parameters and buffers of the model are never touched: it is always called with stand-ins for both. A loss that is a module
    gets stand-ins for its buffers here. Where a trainer has wrapped `forward` into mixed precision, the plain one is called.
    """
    losses = list(loss.modules()) if isinstance(loss, nn.Module) else []
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with random_states_kept(devices), attributes_kept([*model.modules(), *losses]):
        _MEASURING.depth += 1
        try:
            if mode is not None:
                model.train(mode == "train")
            for module in model.modules():
                if {"forward", "_original_forward"} <= vars(module).keys():
                    module.forward = cast(Any, module._original_forward)
            with torch.inference_mode(False):
                for module in losses:
                    module._buffers.update({name: b.clone() for name, b in module._buffers.items() if b is not None})
            yield
        finally:
            _MEASURING.depth -= 1
