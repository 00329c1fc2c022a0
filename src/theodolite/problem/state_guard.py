"""What a measurement may change and must put back: attributes of modules, their modes, and the random states."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import is_
from typing import Any, cast

import numpy as np
import torch
import torch.utils.checkpoint
from torch import nn

from theodolite.interrupts import acquire, unbroken_context

_CONTAINERS = {list, dict, set, deque, OrderedDict, defaultdict}

#: The books that every module keeps on its hooks: most of its containers, mostly empty.
_HOOKS = [
    name
    for name, value in vars(nn.Module()).items()
    if type(value) in _CONTAINERS and name.endswith(("hooks", "kwargs", "called"))
]


@unbroken_context
def attributes_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore each module's attributes and the contents of the lists, dictionaries and sets among them.

    A forward pass may keep activations (which hold the graph), count its calls, cache masks, list its weights as recurrent
    layers do, or install hooks at its first call as Hugging Face models do. Tensors that are changed in place are not followed.
    """
    attributes = [(module, vars(module).copy()) for module in modules]
    hooks = [(book, dict(book)) for _, kept in attributes for book in map(kept.get, _HOOKS) if book is not None]
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
        for book, before in hooks:
            if book.keys() != before.keys():
                book.clear()
                book.update(before)
        for container, held in contents.values():
            _refill(container, held)


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


@unbroken_context
def loss_kept(loss: object) -> Iterator[None]:
    """Restore the attributes of a loss that is a module; it gets stand-ins for its buffers."""
    modules = list(loss.modules()) if isinstance(loss, nn.Module) else []
    with attributes_kept(modules):
        with torch.inference_mode(False):
            for module in modules:
                module._buffers.update({name: b.clone() for name, b in module._buffers.items() if b is not None})
        yield


@unbroken_context
def gradients_kept(loss: object) -> Iterator[None]:
    """Give the parameters of a loss that is a module their gradients back; they begin with none."""
    gradients = [(p, p.grad) for p in loss.parameters()] if isinstance(loss, nn.Module) else []
    try:
        for p, _ in gradients:
            p.grad = None
        yield
    finally:
        for p, gradient in gradients:
            p.grad = gradient


@unbroken_context
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Give every module its train or eval mode back."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@unbroken_context
def random_states_kept(devices: Sequence[int] = (), generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Restore the global states of torch (also on CUDA `devices`), NumPy and Python, and those of the given generators."""
    # Models, losses and data sets of the user may draw from the global state of NumPy, whatever this package does.
    python, numpy, own = random.getstate(), np.random.get_state(), [g.get_state() for g in generators]  # noqa: NPY002
    cpu, cuda = torch.get_rng_state(), [(torch.cuda.get_rng_state(device), device) for device in devices]
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(cpu)
        for state, device in cuda:
            torch.cuda.set_rng_state(state, device)
        for generator, state in zip(generators, own, strict=True):
            generator.set_state(state)


@unbroken_context
def own_random_state(seed: int, devices: Sequence[int] = ()) -> Iterator[None]:
    """Draw from `seed` inside, on the CPU and on CUDA `devices`; all states are given back, and no other device is touched."""
    with random_states_kept(devices):
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        yield


def cuda_devices(model: nn.Module) -> list[int]:
    """The numbers of the GPUs that hold parameters of a model."""
    return sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})


#: Global switches of torch that contexts or models turn: how each is read and set.
_SWITCHES: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch.is_grad_enabled, torch._C._set_grad_enabled),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)),
    (lambda: _compiler()._stance, lambda stance: setattr(_compiler(), "_stance", stance)),
    (lambda: vars(torch.utils.checkpoint).copy(), lambda names: vars(torch.utils.checkpoint).update(names)),
    (torch._C._len_torch_function_stack, lambda depth: _drop_function_modes(depth)),
]


def _compiler() -> Any:
    """Where torch keeps the stance of its compiler; it takes a second to load, and `set_stance` loads it anyway."""
    from torch._dynamo import eval_frame

    return eval_frame


def _drop_function_modes(depth: int) -> None:
    while torch._C._len_torch_function_stack() > depth:
        torch._C._pop_torch_function_stack()


#: Held while switches are turned: of two threads that measure, one would put back what it found of the other.
_TURNING = threading.RLock()


@unbroken_context
def switches_kept() -> Iterator[None]:
    """Put torch's global switches back, whoever turned them. One thread at a time: the others wait."""
    acquire(_TURNING)
    try:
        before = [read() for read, _ in _SWITCHES]
        try:
            yield
        finally:
            for (read, turn), value in zip(_SWITCHES, before, strict=True):
                if read() != value:
                    turn(value)
    finally:
        _TURNING.release()


class _Measuring(threading.local):
    depth = 0


_MEASURING = _Measuring()


def being_measured() -> bool:
    """Whether the calls of a model that are under way belong to a measurement and not to its training."""
    return _MEASURING.depth > 0


@unbroken_context
def left_as_found(model: nn.Module, mode: str | None, loss: object = None) -> Iterator[None]:
    """Enter eval or train mode; on the way out restore the modes and attributes of all modules and the random states.

    Parameters and buffers of the model are never touched: it is always called with stand-ins for both. Where a trainer has
    wrapped `forward` into mixed precision, the plain one is called.
    """
    with switches_kept(), random_states_kept(cuda_devices(model)), attributes_kept(model.modules()), loss_kept(loss):
        depth = _MEASURING.depth
        try:
            _MEASURING.depth = depth + 1
            if mode is not None:
                model.train(mode == "train")
            for module in model.modules():
                if {"forward", "_original_forward"} <= vars(module).keys():
                    module.forward = cast(Any, module._original_forward)
            yield
        finally:
            _MEASURING.depth = depth
