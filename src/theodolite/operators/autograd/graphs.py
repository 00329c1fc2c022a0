"""Graphs of one evaluation per batch, kept alive between products while they fit in memory.

Differentiating a kept graph again costs about one gradient; rebuilding it costs that and the evaluation. So graphs
are kept, batch by batch, until the budget is spent, and the remaining batches are evaluated anew for each product.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Literal, TypedDict, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from theodolite.arguments import either
from theodolite.problem import Batch, Problem
from theodolite.problem.derivatives.second_order import plain_second_order_errors, refuse_first_order_layers

Keep = Literal["auto", "always", "never"]
Graph = TypeVar("Graph")


class Keeping(TypedDict, total=False):
    """What operators say to their `GraphStore`: whether to keep graphs, and the bytes they may take (None: half of the free)."""

    keep: Keep
    memory_budget: int | None


_CONVOLUTIONAL = (nn.modules.conv._ConvNd,)


class GraphStore(Generic[Graph]):
    """Builds one graph per batch by `build(leaves, tensors, batch, index)` and keeps what fits.

    `roots(graph)` names the tensors whose history is the graph, so that its memory can be counted.
    """

    def __init__(
        self,
        problem: Problem,
        build: Callable[[list[Tensor], dict[str, Tensor], Batch, int], Graph],
        roots: Callable[[Graph], Sequence[Tensor]],
        *,
        keep: Keep = "auto",
        memory_budget: int | None = None,
    ) -> None:
        either("keep", keep, ("auto", "always", "never"))
        refuse_first_order_layers(problem.model)
        self.problem, self._build, self._roots = problem, build, roots
        self.keep = keep
        self.budget = available_bytes(problem.device) // 2 if memory_budget is None else memory_budget
        self.leaves = problem.leaves()
        self._kept: dict[int, tuple[float, Graph]] = {}
        self._full = keep == "never"
        self.bytes = 0

    @property
    def route(self) -> str:
        total = self.problem.num_weighted_batches
        if not self._kept:
            return "recomputed graph" if self._full else "kept graph (not built yet)"
        return "kept graph" if len(self._kept) == total else f"kept graph for {len(self._kept)} of {total} batches"

    @property
    def kept(self) -> list[Graph]:
        return [graph for _, graph in self._kept.values()]

    @property
    def keeping(self) -> bool:
        """Whether what is built next may be kept."""
        return not self._full

    def __iter__(self) -> Iterator[tuple[float, Graph]]:
        """(share, graph) of every batch, kept or built anew."""
        if len(self._kept) == self.problem.num_weighted_batches:
            yield from self._kept.values()
            return
        for i, share, batch in self.problem.iterate():
            if i in self._kept:
                yield self._kept[i]
                continue
            graph = self._evaluate(batch, i)
            if not self._full:
                self._consider(i, share, graph)
            yield share, graph

    def _evaluate(self, batch: Batch, index: int) -> Graph:
        with plain_second_order_errors(), self.problem.session():
            return self._build(self.leaves, self.problem.tensors(self.leaves), batch, index)

    def _consider(self, index: int, share: float, graph: Graph) -> None:
        size = graph_bytes(self._roots(graph), without=self.leaves)
        if self.keep == "always" or self.bytes + size <= self.budget:
            self._kept[index] = (share, graph)
            self.bytes += size
        else:
            self._full = True


def graph_bytes(roots: Sequence[Tensor], *, without: Sequence[Tensor] = ()) -> int:
    """Memory of all tensors that an autograd history holds, each storage once."""
    skip = {t.untyped_storage().data_ptr() for t in without}
    seen: set[Node] = set()
    storages: Storages = {}
    stack = [t.grad_fn for t in roots if t.grad_fn is not None]
    for t in roots:
        _count(t, storages)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for t in _saved_tensors(node):
            _count(t, storages)
        stack.extend(child for child, _ in node.next_functions if child is not None)
    # A batch may be a slice of a whole data set, and an expanded tensor is larger than what it holds.
    return sum(min(whole, sum(parts.values())) for place, (whole, parts) in storages.items() if place not in skip)


#: Of each storage its size, and the bytes of every part of it that was met, by place and form.
Storages = dict[int, tuple[int, dict[object, int]]]


def _count(t: Tensor, storages: Storages) -> None:
    size = t.numel() * t.element_size()
    try:
        storage = t.untyped_storage()
        _, parts = storages.setdefault(storage.data_ptr(), (storage.nbytes(), {}))
        parts[t.storage_offset(), t.shape, t.stride()] = size
    except RuntimeError:  # wrapped by a functional transform: it has no storage of its own
        storages[-id(t)] = (size, {None: size})


_SAVED: dict[type, tuple[str, ...]] = {}


def _saved_tensors(node: Node) -> Iterator[Tensor]:
    kind = type(node)
    if kind not in _SAVED:
        names = tuple(name for name in dir(kind) if name.startswith("_saved_"))
        _SAVED[kind] = (*names, "saved_tensors") if hasattr(kind, "saved_tensors") else names
    for name in _SAVED[kind]:
        value = getattr(node, name, None)
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, Tensor):
                yield item


def available_bytes(device: torch.device) -> int:
    """Memory that can still be allocated on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as file:
            facts = dict(line.split(":", 1) for line in file)
        return int(facts["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def backward(
    outputs: Sequence[Tensor | None], inputs: Sequence[Tensor], vectors: Sequence[Tensor], *, batched: bool
) -> list[Tensor | None]:
    """Vector-Jacobian products on a graph that stays alive; `batched` vectors carry a leading dimension."""
    pairs = [(o, v) for o, v in zip(outputs, vectors, strict=True) if o is not None and o.requires_grad]
    if not pairs:
        return [None] * len(inputs)
    active, cotangents = zip(*pairs, strict=True)
    with plain_second_order_errors():
        return list(
            torch.autograd.grad(active, inputs, cotangents, retain_graph=True, allow_unused=True, is_grads_batched=batched)
        )


def batching_may_pay(problem: Problem) -> bool:
    """Whether several vectors at once are worth trying: not for convolutions on a CPU."""
    convolutional = any(isinstance(m, _CONVOLUTIONAL) for m in problem.model.modules())
    return not (convolutional and problem.device.type == "cpu")
