"""What each replica sees in each step: one batch for all, or one per replica from its own order of the data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from theodolite.problem.batches import Batch, BatchParser
from theodolite.training.feeding import epoch_order

Shared = bool | Literal["inputs"]


@dataclass(frozen=True)
class FleetBatch:
    """Leaves of a `Batch` for all replicas; `dims[i]` is 0 where leaf i has a replica axis, None where all see the same."""

    leaves: list[Any]
    dims: list[int | None]
    spec: Any
    size: int

    def one(self, leaves: Sequence[Any]) -> Batch:
        """The leaves of one replica as a batch."""
        args, kwargs, target = pytree.tree_unflatten(leaves, self.spec)
        return Batch(args, kwargs, target, self.size)

    def replica(self, row: int) -> Batch:
        return self.one([leaf if dim is None else leaf[row] for leaf, dim in zip(self.leaves, self.dims, strict=True)])

    def rows(self, rows: Tensor) -> FleetBatch:
        """The batch of some replicas."""
        pairs = zip(self.leaves, self.dims, strict=True)
        return FleetBatch([leaf if dim is None else leaf[rows] for leaf, dim in pairs], self.dims, self.spec, self.size)

    def parts(self, width: int) -> Iterator[FleetBatch]:
        """The samples in pieces of at most `width`."""
        for first in range(0, self.size, width):
            leaves = [self._slice(leaf, dim, first, width) for leaf, dim in zip(self.leaves, self.dims, strict=True)]
            yield FleetBatch(leaves, self.dims, self.spec, min(width, self.size - first))

    def _slice(self, leaf: Any, dim: int | None, first: int, width: int) -> Any:
        axis = 0 if dim is None else 1
        if width >= self.size or not isinstance(leaf, Tensor) or leaf.ndim <= axis or leaf.shape[axis] != self.size:
            return leaf
        return leaf.narrow(axis, first, min(width, self.size - first))


class FleetFeed:
    """Data of a fleet, cut into batches epoch by epoch.

    Orders depend on the order seed and the epoch alone and are those of `train` with that seed. The last batch of an epoch
    is short if the size does not divide.
    """

    def __init__(
        self,
        data: Any,
        replicas: int,
        *,
        shared: Shared,
        batch_size: int | None,
        order_seeds: Sequence[int],
        own_loss: bool,
        target: str,
        device: torch.device,
    ) -> None:
        if batch_size is not None and (not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1):
            raise ValueError(f"batch_size must be a positive integer or None for all data. Got {batch_size!r}.")
        parse = BatchParser(own_loss=own_loss, target_key=target)
        self.leaves, self.kinds, self.spec, self.size = _read(data, replicas, shared, parse)
        self.leaves = [leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        self.width = min(batch_size or self.size, self.size)
        self.full = self.width == self.size
        self.alike = self.full or len(set(order_seeds)) == 1
        self.order_seeds = list(order_seeds)
        self.batches = -(-self.size // self.width)  # per epoch
        self._epoch, self._orders = -1, torch.empty(0)

    @property
    def whole(self) -> FleetBatch:
        """All data in the given order."""
        dims = [0 if kind == "own" else None for kind in self.kinds]
        return FleetBatch(self.leaves, dims, self.spec, self.size)

    def batch(self, epoch: int, place: int, rows: Tensor | None = None) -> FleetBatch:
        """Batch `place` of an epoch, for all replicas or some."""
        if self.full:
            return self.whole if rows is None else self.whole.rows(rows)
        if epoch != self._epoch:
            seeds = self.order_seeds[:1] if self.alike else self.order_seeds
            orders = torch.stack([epoch_order(seed, epoch, self.size) for seed in seeds])
            self._epoch, self._orders = epoch, orders.to(self.whole_device)
        index = self._orders[:, place * self.width : (place + 1) * self.width]  # (1 or R, B)
        if rows is not None and not self.alike:
            index = index[rows]
        cut = [self._cut(leaf, kind, index, rows) for leaf, kind in zip(self.leaves, self.kinds, strict=True)]
        dims = [0 if kind == "own" or (kind == "shared" and not self.alike) else None for kind in self.kinds]
        return FleetBatch(cut, dims, self.spec, index.shape[1])

    @property
    def whole_device(self) -> torch.device:
        return next(leaf.device for leaf in self.leaves if isinstance(leaf, Tensor))

    def _cut(self, leaf: Any, kind: str, index: Tensor, rows: Tensor | None) -> Any:
        if kind == "fixed":
            return leaf
        if kind == "shared":
            picked = leaf.index_select(0, index.reshape(-1))
            return picked if self.alike else picked.view(*index.shape, *leaf.shape[1:])
        if self.alike:
            return (leaf if rows is None else leaf[rows]).index_select(1, index[0])
        who = torch.arange(len(leaf), device=leaf.device) if rows is None else rows
        flat = (who[:, None] * self.size + index).reshape(-1)
        return leaf.flatten(0, 1).index_select(0, flat).view(*index.shape, *leaf.shape[2:])


def _read(data: Any, replicas: int, shared: Shared, parse: BatchParser) -> tuple[list[Any], list[str], Any, int]:
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


def _read_list(data: list[Any], replicas: int, parse: BatchParser) -> tuple[list[Any], list[str], Any, int]:
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
