"""Equality, value for value, of what measurements return; and what of a model may not change while it is measured."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn


def same(left: Any, right: Any) -> bool:
    """Equality of rows, value for value; NaN equals NaN, tensors are compared entry by entry, results field by field.

    >>> same([{"a": float("nan")}], [{"a": float("nan")}])
    True
    """
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if is_dataclass(left) and type(left) is type(right):
        return all(same(getattr(left, f.name), getattr(right, f.name)) for f in fields(left) if f.compare)
    if hasattr(left, "shape") or hasattr(right, "shape"):
        return type(left) is type(right) and left.shape == right.shape and bool(((left == right) | (left != left)).all())
    return bool(left == right or (left != left and right != right))


def model_state(model: nn.Module) -> dict[str, Any]:
    """All of a model that a measurement must leave as it was, the random state and torch's switches included.

    >>> layer = nn.Linear(2, 1)
    >>> before = model_state(layer)
    >>> same(before, model_state(layer.eval()))
    False
    """

    def tensor(t: Tensor | None) -> list[Any] | None:
        return None if t is None else [id(t), t.detach().clone(), t.requires_grad, t._version]

    modules = list(model.modules())
    return {
        "modes": [m.training for m in modules],
        "parameters": [tensor(p) for p in model.parameters()],
        "gradients": [tensor(p.grad) for p in model.parameters()],
        "buffers": [tensor(b) for b in model.buffers()],
        "hooks": [[len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)] for m in modules],
        "attributes": [sorted(vars(m)) for m in modules],
        "random state": torch.get_rng_state(),
        "gradient mode": torch.is_grad_enabled(),
        "attention": torch.backends.mha.get_fastpath_enabled(),
    }
