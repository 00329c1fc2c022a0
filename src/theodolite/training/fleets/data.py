"""The data of a fleet: as given by the user, and what each replica sees in each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from theodolite.problem.arguments import as_finite_tensor
from theodolite.problem.batches import Batch, BatchParser, is_bare
from theodolite.training.schedules import epoch_order

Shared = bool | Literal["inputs"]

#: A leaf is "shared" by all replicas, "own" (a replica axis first), "pooled" (samples chosen by an index) or "fixed".
Leaves = tuple[list[Any], list[str], Any, int]


def read_index(index: Tensor | Sequence[Sequence[int]] | None, replicas: int, pool: int) -> Tensor | None:
    """(R, m): which samples of the pool each replica owns."""
    if index is None:
        return None
    chosen = as_finite_tensor("index", index)
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
    if not (isinstance(data, Mapping) or (isinstance(data, tuple | list) and data and is_bare(data[-1]))):
        raise ValueError(
            "data must be tensors (inputs, targets) in a fleet, with shared=False with a leading replica axis or as a list of "
            f"one (inputs, targets) per replica. Got {type(data).__name__}."
        )
    batch = parse(data, 0)
    args, spec = pytree.tree_flatten((batch.args, batch.kwargs, batch.target))
    targets = len(pytree.tree_leaves(batch.target))
    own = [shared is False] * (len(args) - targets) + [shared is False or shared == "inputs"] * targets
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


# What each replica sees in each step: one batch for all, or one per replica from its own order of the data.


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

    def replica(self, row: int, *, copied: bool = False) -> Batch:
        """The batch of one replica, as views or in memory of its own."""
        views = [leaf if dim is None else leaf[row] for leaf, dim in zip(self.leaves, self.dims, strict=True)]
        return self.one([v.clone() if copied and isinstance(v, Tensor) else v for v in views])

    def rows(self, rows: Tensor) -> FleetBatch:
        """The batch of some replicas."""
        pairs = zip(self.leaves, self.dims, strict=True)
        return FleetBatch([leaf if dim is None else leaf[rows] for leaf, dim in pairs], self.dims, self.spec, self.size)


class FleetFeed:
    """Data of a fleet, cut into batches epoch by epoch.

    Orders depend on the order seed and the epoch alone and are those of `train` with that seed. The last batch of an epoch
    is short if the size does not divide, or left out with `drop_last`. With an `index` (R, m) a replica's data are these
    samples of a pool that all share; they are gathered batch by batch.
    """

    def __init__(
        self,
        data: Any,
        replicas: int,
        *,
        order_seeds: Sequence[int],
        parse: BatchParser,
        device: torch.device,
        shared: Shared = True,
        batch_size: int | None = None,
        index: Any = None,
        drop_last: bool = False,
        forward: Callable[..., Any] | None = None,
    ) -> None:
        if index is not None and shared is not True:
            raise ValueError(f"index chooses samples of data that all share: leave shared at True. Got shared={shared!r}.")
        self.leaves, self.kinds, self.spec, self.size = read_data(data, replicas, shared, parse)
        self.leaves = [leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        self.index: Tensor | None = read_index(index, replicas, self.size)
        if self.index is not None:
            self.index = self.index.to(device)
            self.size = self.index.shape[1]
            self.kinds = ["pooled" if kind == "shared" else kind for kind in self.kinds]
        self.width = min(batch_size or self.size, self.size)
        self.full = self.width == self.size
        self.alike = self.full or len(set(order_seeds)) == 1
        self.order_seeds = list(order_seeds)
        self.batches = self.size // self.width if drop_last else -(-self.size // self.width)  # per epoch
        self.device = device
        self._epoch, self._orders = -1, torch.empty(0)
        self._kept: FleetBatch | None = None
        self._is_part = False
        self._space: dict[int, Tensor] = {}  # by leaf: a batch of a large fleet is gathered into the memory of the one before

    def target(self, row: int) -> Any:
        """The targets of all samples of one replica, as its loss takes them."""
        rows = torch.tensor([row], device=self.device)
        inputs = len(pytree.tree_leaves(pytree.tree_unflatten(list(range(len(self.leaves))), self.spec)[:2]))
        leaves: list[Any] = [None] * inputs
        for i in range(inputs, len(self.leaves)):
            leaf = self._of(i, self._in_order(), rows, alike=True)
            leaves.append(leaf[0] if self.dims[i] == 0 else leaf)
        return pytree.tree_unflatten(leaves, self.spec)[2]

    @property
    def dims(self) -> list[int | None]:
        """Of data in the given order."""
        return [0 if kind in ("own", "pooled") else None for kind in self.kinds]

    def parts(self, width: int) -> Iterator[FleetBatch]:
        """All samples in the given order, in pieces of at most `width`."""
        for first in range(0, self.size, width):
            yield self._piece(first, min(width, self.size - first))

    def part_of(self, rows: slice | Tensor) -> FleetFeed:
        """The data of some replicas; nothing is copied for a slice of them."""
        few = copy(self)
        few._epoch, few._kept = -1, None
        few._is_part = True  # the space is shared: chunks take turns
        few.index = None if self.index is None else self.index[rows]
        few.leaves = [leaf[rows] if kind == "own" else leaf for leaf, kind in zip(self.leaves, self.kinds, strict=True)]
        few.order_seeds = torch.tensor(self.order_seeds)[rows].tolist() if len(self.order_seeds) > 1 else self.order_seeds
        return few

    def _in_order(self) -> Tensor:
        return torch.arange(self.size, device=self.device)[None]

    def batch(self, epoch: int, place: int, rows: Tensor | None = None) -> FleetBatch:
        """Batch `place` of an epoch, for all replicas or some; the next one overwrites it."""
        if self.full and not (self._is_part and "pooled" in self.kinds):
            if self._kept is None:  # the same in every step
                self._kept = self._piece(0, self.size)
            return self._kept if rows is None else self._kept.rows(rows)
        places = self._in_order() if self.full else self._places(epoch, place)  # (1 or R, B)
        if rows is not None and not self.alike:
            places = places[rows]
        cut = [self._of(i, places, rows, alike=self.alike, space=self._space) for i in range(len(self.leaves))]
        dims = [0 if kind == "shared" and not self.alike else dim for kind, dim in zip(self.kinds, self.dims, strict=True)]
        return FleetBatch(cut, dims, self.spec, places.shape[1])

    def _places(self, epoch: int, place: int) -> Tensor:
        """The samples of batch `place` by their orders in this epoch."""
        if epoch != self._epoch:
            seeds = self.order_seeds[:1] if self.alike else self.order_seeds
            orders = torch.stack([epoch_order(seed, epoch, self.size) for seed in seeds])
            self._epoch, self._orders = epoch, orders.to(self.device)
        return self._orders[:, place * self.width : (place + 1) * self.width]

    def _piece(self, first: int, width: int) -> FleetBatch:
        places = torch.arange(first, first + width, device=self.device)[None]
        whole = width == self.size
        cut = [
            leaf if kind == "fixed" or (whole and kind != "pooled")
            else leaf.narrow(int(kind == "own"), first, width) if kind != "pooled"
            else self._of(i, places, None, alike=True)
            for i, (leaf, kind) in enumerate(zip(self.leaves, self.kinds, strict=True))
        ]  # fmt: skip
        return FleetBatch(cut, self.dims, self.spec, width)

    def _of(self, i: int, places: Tensor, rows: Tensor | None, *, alike: bool, space: dict[int, Tensor] | None = None) -> Any:
        """The samples of leaf i at `places`, (1, B) if these are alike for all replicas, else (R, B)."""
        leaf, kind = self.leaves[i], self.kinds[i]
        if kind == "fixed":
            return leaf
        if kind == "shared":
            picked = leaf.index_select(0, places.reshape(-1))
            return picked if alike else picked.view(*places.shape, *leaf.shape[1:])
        if kind == "pooled":
            assert self.index is not None
            mine = self.index if rows is None else self.index[rows]
            chosen = mine.index_select(1, places[0]) if alike else mine.gather(1, places)  # (R, B)
            flat = chosen.reshape(-1)
            if space is None:
                return leaf.index_select(0, flat).view(*chosen.shape, *leaf.shape[1:])
            if i not in space or len(space[i]) < len(flat):
                space[i] = leaf.new_empty(len(flat), *leaf.shape[1:])
            return torch.index_select(leaf, 0, flat, out=space[i][: len(flat)]).view(*chosen.shape, *leaf.shape[1:])
        if alike:
            return (leaf if rows is None else leaf[rows]).index_select(1, places[0])
        who = torch.arange(len(leaf), device=leaf.device) if rows is None else rows
        flat = (who[:, None] * self.size + places).reshape(-1)
        return leaf.flatten(0, 1).index_select(0, flat).view(*places.shape, *leaf.shape[2:])
