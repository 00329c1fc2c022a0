"""Walking over the tensors in nested tuples, lists and mappings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """The same structure with `function` applied to every tensor."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return tuple(map_tensors(function, value) for value in tree)
    return tree


def named_tensors(tree: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors of a nested structure with a readable path."""
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from named_tensors(value, f"{name}[{key!r}]" if name else str(key))
    elif isinstance(tree, tuple | list):
        for i, value in enumerate(tree):
            yield from named_tensors(value, f"{name}[{i}]")


def bytes_of(tree: Any) -> int:
    """Memory of all tensors of a nested structure."""
    return sum(t.numel() * t.element_size() for _, t in named_tensors(tree))
