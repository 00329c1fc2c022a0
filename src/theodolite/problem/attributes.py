"""What a forward pass leaves behind in the attributes of modules, put back."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

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
