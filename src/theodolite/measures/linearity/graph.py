"""Directed acyclic graphs of neurons: layers by the longest path, in-degrees, width.

An edge (u, v) is a trainable weight. Skips (u, v) add the value of u to that of v and are not trained; they count in
the layering, not in the in-degree.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Graph:
    """A DAG on the vertices 0 .. vertices − 1.

    `edges` is (E, 2), `skips` (S, 2). `weight_of` (E,) names the weight of each edge where weights are shared;
    `fan_in` (vertices,) is what a neuron is normalised by where that is not its in-degree (zero padding counts, for
    instance). `labels` are the vertices' own names. Inputs are the vertices nothing points to and outputs those that
    point nowhere, unless they are given.

    >>> graph = Graph.of([("x", "a"), ("x", "b"), ("a", "b"), ("b", "y")])
    >>> dict(zip(graph.labels, graph.layers.tolist()))
    {'x': 0, 'a': 1, 'b': 2, 'y': 3}
    """

    vertices: int
    edges: Tensor
    skips: Tensor
    weight_of: Tensor | None = None
    fan_in: Tensor | None = None
    given_inputs: Tensor | None = None
    given_outputs: Tensor | None = None
    labels: tuple[Hashable, ...] | None = None

    @classmethod
    def of(
        cls,
        edges: Tensor | Iterable[Sequence[Any]],
        *,
        vertices: int | None = None,
        skips: Iterable[Sequence[Any]] | Tensor = (),
        weight_of: Sequence[int] | Tensor | None = None,
        fan_in: Sequence[int] | Tensor | None = None,
        inputs: Sequence[Any] | Tensor | None = None,
        outputs: Sequence[Any] | Tensor | None = None,
    ) -> Graph:
        """A graph from pairs (from, to) of whole numbers or of any names; names are numbered as they first appear.

        Inputs and outputs are given as the edges are: by number or by name.
        """
        labels: tuple[Hashable, ...] | None = None
        if not isinstance(edges, Tensor):
            pairs, more = [_pair(e) for e in edges], [] if isinstance(skips, Tensor) else [_pair(s) for s in skips]
            names = [name for pair in (*pairs, *more) for name in pair]
            if not all(isinstance(name, int) for name in names):
                labels = tuple(dict.fromkeys(names))
                place = {name: i for i, name in enumerate(labels)}
                pairs, more = [[(place[u], place[v]) for u, v in part] for part in (pairs, more)]
                vertices = len(labels)
            edges, skips = _table(pairs), skips if isinstance(skips, Tensor) else _table(more)
        skips = skips if isinstance(skips, Tensor) else _table([_pair(s) for s in skips])
        count = 1 + max((int(part.max()) for part in (edges, skips) if len(part)), default=-1)
        return cls(
            count if vertices is None else vertices,
            edges,
            skips,
            _vector(weight_of),
            _vector(fan_in),
            _vector(_numbers("inputs", inputs, labels)),
            _vector(_numbers("outputs", outputs, labels)),
            labels,
        )

    def __post_init__(self) -> None:
        check_graph(self)

    def with_edges(self, edges: Tensor) -> Graph:
        """The same vertices, inputs, outputs and skips with other trainable edges, none of them sharing a weight."""
        return replace(self, edges=edges, weight_of=None, fan_in=None, given_inputs=self.inputs, given_outputs=self.outputs)

    def with_skips(self, skips: Tensor) -> Graph:
        """The same graph with these skips added."""
        every = torch.cat([self.skips, skips])
        return replace(self, skips=every, given_inputs=self.inputs, given_outputs=self.outputs)

    @cached_property
    def layers(self) -> Tensor:
        """Layer of each vertex: the length of the longest path that ends there, (vertices,)."""
        return layer_index(self.vertices, torch.cat([self.edges, self.skips]))

    @cached_property
    def in_degrees(self) -> Tensor:
        """Trainable edges into each vertex, (vertices,)."""
        return torch.bincount(self.edges[:, 1], minlength=self.vertices)

    @cached_property
    def norms(self) -> Tensor:
        """What each neuron's sum is divided by, squared: `fan_in`, or else the in-degree."""
        return self.in_degrees if self.fan_in is None else self.fan_in

    @cached_property
    def inputs(self) -> Tensor:
        """Vertices that take the input, ascending unless given."""
        return self._without_ends(1) if self.given_inputs is None else self.given_inputs

    @cached_property
    def outputs(self) -> Tensor:
        """Vertices that are read out."""
        return self._without_ends(0) if self.given_outputs is None else self.given_outputs

    def _without_ends(self, side: int) -> Tensor:
        """Vertices that no edge or skip begins (side 0) or ends (side 1) in, ascending."""
        ends = torch.bincount(torch.cat([self.edges[:, side], self.skips[:, side]]), minlength=self.vertices)
        return (ends == 0).nonzero()[:, 0]

    @property
    def depth(self) -> int:
        """Number of weight layers L."""
        return int(self.layers.max())

    @cached_property
    def beyond_first(self) -> Tensor:
        """Whether a vertex counts for the width: layers 2 to L, (vertices,)."""
        return (self.layers >= 2) & (self.in_degrees > 0)

    @property
    def width(self) -> int | None:
        """The smallest in-degree behind the first layer; None where there is no such neuron."""
        return int(self.in_degrees[self.beyond_first].min()) if bool(self.beyond_first.any()) else None

    def layer(self, index: int) -> Tensor:
        """The vertices of a layer, ascending."""
        return (self.layers == index).nonzero()[:, 0]

    def name(self, vertex: int) -> Hashable:
        """The vertex as the user calls it."""
        return vertex if self.labels is None else self.labels[vertex]

    def __deepcopy__(self, memo: dict[int, Any]) -> Graph:
        return self  # nothing in it changes: copies of a network share their graph

    def __repr__(self) -> str:
        return f"<Graph: {self.vertices} vertices, {len(self.edges)} edges, {len(self.skips)} skips, {self.depth} weight layers>"


def layer_index(vertices: int, edges: Tensor) -> Tensor:
    """Length of the longest path that ends in each vertex, (vertices,); raises where the edges close a cycle.

    >>> layer_index(4, torch.tensor([[0, 1], [1, 2], [0, 2], [2, 3]])).tolist()
    [0, 1, 2, 3]
    """
    layers = torch.zeros(vertices, dtype=torch.int64)
    for _ in range(vertices + 1):
        further = layers.scatter_reduce(0, edges[:, 1], layers[edges[:, 0]] + 1, "amax")
        if torch.equal(further, layers):
            return layers
        layers = further
    raise ValueError("The edges close a cycle: a feed-forward network needs a directed acyclic graph.")


def check_graph(graph: Graph) -> None:
    """Raise where a graph is none that a network can have."""
    for name, table in (("edges", graph.edges), ("skips", graph.skips)):
        if table.ndim != 2 or table.shape[1] != 2 or table.dtype != torch.int64:
            raise ValueError(f"{name} must be pairs of whole numbers. Got {table.dtype} of shape {tuple(table.shape)}.")
        if len(table) and not 0 <= int(table.min()) <= int(table.max()) < graph.vertices:
            raise ValueError(
                f"{name} must join vertices 0 .. {graph.vertices - 1}. Got {int(table.min())} .. {int(table.max())}."
            )
    for name, vertices in (("inputs", graph.given_inputs), ("outputs", graph.given_outputs)):
        if vertices is not None and len(vertices) and not 0 <= int(vertices.min()) <= int(vertices.max()) < graph.vertices:
            raise ValueError(f"{name} must lie in 0 .. {graph.vertices - 1}. Got {vertices.tolist()}.")
    if not len(graph.edges):
        raise ValueError("A network needs at least one edge.")
    keys = graph.edges[:, 0] * graph.vertices + graph.edges[:, 1]
    if len(keys.unique()) != len(keys):
        raise ValueError("An edge is listed twice; give each pair (from, to) once.")
    for name, vector, length in (
        ("weight_of", graph.weight_of, len(graph.edges)),
        ("fan_in", graph.fan_in, graph.vertices),
    ):
        if vector is not None and len(vector) != length:
            raise ValueError(f"{name} must have {length} entries. Got {len(vector)}.")
    _ = graph.layers  # raises on a cycle
    if bool(torch.isin(graph.skips[:, 1], graph.outputs).any()):
        raise ValueError("A skip ends in an output; outputs are linear in what they read and take no skips.")
    idle = (graph.layers > 0) & (graph.in_degrees == 0)
    if bool(idle.any()):
        raise ValueError(f"Vertex {graph.name(int(idle.nonzero()[0]))} has a skip but no trainable edge into it.")


def _pair(pair: Sequence[Any]) -> tuple[Any, Any]:
    if len(pair) != 2:
        raise ValueError(f"An edge is a pair (from, to). Got {pair!r}.")
    return pair[0], pair[1]


def _table(pairs: Sequence[tuple[int, int]]) -> Tensor:
    return torch.tensor(list(pairs), dtype=torch.int64).reshape(-1, 2)


def _numbers(
    name: str, vertices: Sequence[Any] | Tensor | None, labels: tuple[Hashable, ...] | None
) -> Sequence[int] | Tensor | None:
    """Vertices by number, from their names where they have names."""
    if vertices is None or isinstance(vertices, Tensor) or labels is None:
        return vertices
    place = {label: i for i, label in enumerate(labels)}
    unknown = [vertex for vertex in vertices if vertex not in place]
    if unknown:
        raise ValueError(f"{name} must be vertices of the graph: {', '.join(map(repr, labels))}. Got {unknown!r}.")
    return [place[vertex] for vertex in vertices]


def _vector(values: Sequence[int] | Tensor | None) -> Tensor | None:
    return None if values is None else torch.as_tensor(values, dtype=torch.int64)
