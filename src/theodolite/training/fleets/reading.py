"""The data of a fleet as given by the user, as leaves with or without a replica axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from theodolite.problem.batches import BatchParser

Shared = bool | Literal["inputs"]

#: A leaf is "shared" by all replicas, "own" (a replica axis first), "pooled" (samples chosen by an index) or "fixed".
Leaves = tuple[list[Any], list[str], Any, int]


def read_index(index: Tensor | Sequence[Sequence[int]] | None, replicas: int, pool: int) -> Tensor | None:
    """(R, m): which samples of the pool each replica owns."""
    if index is None:
        return None
    chosen = torch.as_tensor(index)
    if chosen.is_floating_point() or chosen.dtype == torch.bool or chosen.ndim not in (1, 2) or not chosen.numel():
        raise ValueError(
            f"index must hold whole numbers, (R, m) or (m,) for all: one list of samples per replica. Got {chosen.dtype} of "
            f"shape {tuple(chosen.shape)}."
        )
    if chosen.ndim == 2 and len(chosen) != replicas:
        raise ValueError(f"index must hold one list of samples per replica: {replicas}. Got {len(chosen)}.")
    low, high = int(chosen.min()), int(chosen.max())
    if low < 0 or high >= pool:
        raise ValueError(f"index must lie in 0..{pool - 1}, the samples of the data. Got {low} to {high}.")
    return chosen.long().expand(replicas, -1)


def read_data(data: Any, replicas: int, shared: Shared, parse: BatchParser) -> Leaves:
    """Leaves of the data, whether each is "shared", "own" (a replica axis first) or "fixed" (not per sample), and the size."""
    if shared not in (True, False, "inputs"):
        raise ValueError(f"shared must be True, False or 'inputs' (own targets only). Got {shared!r}.")
    if isinstance(data, list) and shared is False:
        return _read_list(data, replicas, parse)
    if not (isinstance(data, Mapping) or (isinstance(data, tuple | list) and data and isinstance(data[-1], Tensor))):
        raise ValueError(
            "A fleet takes its data as tensors (inputs, targets), with shared=False with a leading replica axis or as a list of "
            f"one (inputs, targets) per replica. Got {type(data).__name__}."
        )
    batch = parse(data, 0)
    args, spec = pytree.tree_flatten((batch.args, batch.kwargs, batch.target))
    targets = len(pytree.tree_leaves(batch.target))
    own = [shared is False or (shared == "inputs" and i >= len(args) - targets) for i in range(len(args))]
    for leaf, is_own in zip(args, own, strict=True):
        if is_own and isinstance(leaf, Tensor) and (leaf.ndim < 2 or leaf.shape[0] != replicas):
            raise ValueError(
                f"shared={shared!r} asks for a leading axis of {replicas} replicas. Got a tensor of shape {tuple(leaf.shape)}."
            )
    size = next(leaf.shape[int(is_own)] for leaf, is_own in zip(args, own, strict=True) if isinstance(leaf, Tensor) and leaf.ndim)
    return args, [_kind(leaf, is_own, size) for leaf, is_own in zip(args, own, strict=True)], spec, size


def _read_list(data: list[Any], replicas: int, parse: BatchParser) -> Leaves:
    if len(data) != replicas:
        raise ValueError(f"data must hold one data set per replica: {replicas}. Got {len(data)}.")
    batches = [parse(each, i) for i, each in enumerate(data)]
    flat = [pytree.tree_flatten((b.args, b.kwargs, b.target)) for b in batches]
    size, spec = batches[0].size, flat[0][1]
    shapes = {tuple(getattr(leaf, "shape", ()) for leaf in leaves) for leaves, _ in flat}
    if len(shapes) > 1:
        raise ValueError(f"The data sets of the replicas must have equal shapes. Got {sorted(map(str, shapes))}.")
    columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
    stacked = [torch.stack(column) if isinstance(column[0], Tensor) else column[0] for column in columns]
    return stacked, [_kind(leaf, True, size) for leaf in stacked], spec, size


def _kind(leaf: Any, own: bool, size: int) -> str:
    if not isinstance(leaf, Tensor):
        return "fixed"
    if own and (leaf.ndim < 2 or leaf.shape[1] != size):
        raise ValueError(f"Inputs and targets must have equally many samples: {size}. Got a tensor of shape {tuple(leaf.shape)}.")
    if own:
        return "own"
    return "shared" if leaf.ndim and leaf.shape[0] == size else "fixed"
