"""Walking over the tensors in nested tuples, lists, mappings and dataclasses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """The same structure, of the same types, with `function` applied to every tensor.

    >>> map_tensors(Tensor.item, {"a": (Tensor([1.0]), [Tensor([2.0])])})
    {'a': (1.0, [2.0])}
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        items = {key: map_tensors(function, value) for key, value in tree.items()}
        return items if type(tree) is dict else _refilled_mapping(tree, items)
    if isinstance(tree, tuple | list):
        values = [map_tensors(function, value) for value in tree]
        kind: Any = type(tree)
        return kind._make(values) if hasattr(kind, "_make") else kind(values)
    fields = _fields(tree)
    if fields:
        tree = copy.copy(tree)
    for name in fields:
        object.__setattr__(tree, name, map_tensors(function, getattr(tree, name)))
    return tree


def named_tensors(tree: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors of a nested structure with a readable path."""
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from named_tensors(value, f"{name}[{key!r}]" if name else str(key))
    elif isinstance(tree, tuple | list) and not hasattr(type(tree), "_fields"):
        for i, value in enumerate(tree):
            yield from named_tensors(value, f"{name}[{i}]")
    else:
        for field in _fields(tree):
            yield from named_tensors(getattr(tree, field), f"{name}.{field}" if name else field)


def bytes_of(tree: Any) -> int:
    """Memory of all tensors of a nested structure."""
    return sum(t.numel() * t.element_size() for _, t in named_tensors(tree))


def _fields(tree: Any) -> list[str]:
    """Names of what a dataclass or a named tuple holds; nothing of anything else."""
    own: Any = getattr(type(tree), "__dataclass_fields__", None) or getattr(type(tree), "_fields", ())
    return [name for name in own if hasattr(tree, name)]


def _refilled_mapping(tree: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the same kind with other values (a `ModelOutput` has attributes too); a dictionary where it is fixed."""
    try:
        found: Any = copy.copy(tree)
        for key, value in items.items():
            found[key] = value
    except (TypeError, AttributeError, NotImplementedError):
        return items
    return found


def inside_transform() -> bool:
    """Whether a torch.func transform (vmap, grad, jvp) is under way: it takes no `autograd.Function` of the usual kind."""
    return torch._C._functorch.peek_interpreter_stack() is not None
