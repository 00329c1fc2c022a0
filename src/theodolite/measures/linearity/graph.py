"""Directed acyclic graphs of neurons, their width, and whether units that sum over few inputs threaten linearity.

An edge (u, v) is a trainable weight. Skips (u, v) add the value of u to that of v and are not trained; they count in
the layering, not in the in-degree.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.arguments import (
    checked,
    count,
    each,
    fraction,
    instance,
    integer,
    number_in,
    optional_integer,
    place,
    sequence,
    shown,
)
from theodolite.problem.arguments import a_model, of_dimensions
from theodolite.results import Outcome, Result, Row, fields_of


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
        vertices = optional_integer("vertices", vertices, least=1)
        pairs, more = (
            [] if isinstance(part, Tensor) else [_pair(name, pair) for pair in sequence(name, part)]
            for name, part in (("edges", edges), ("skips", skips))
        )
        names = [name for pair in (*pairs, *more) for name in pair]
        if not isinstance(edges, Tensor) and not all(isinstance(name, int) for name in names):
            labels = tuple(dict.fromkeys(names))
            index = {name: i for i, name in enumerate(labels)}
            pairs, more = ([(index[u], index[v]) for u, v in part] for part in (pairs, more))
            vertices = len(labels)
        edges = _whole_numbers("edges", edges) if isinstance(edges, Tensor) else _table(pairs)
        skips = _whole_numbers("skips", skips) if isinstance(skips, Tensor) else _table(more)
        count = 1 + max((int(part.max()) for part in (edges, skips) if len(part)), default=-1)
        return cls(
            count if vertices is None else vertices,
            edges,
            skips,
            _vector("weight_of", weight_of),
            _vector("fan_in", fan_in),
            _vector("inputs", _numbers("inputs", inputs, labels)),
            _vector("outputs", _numbers("outputs", outputs, labels)),
            labels,
        )

    def __post_init__(self) -> None:
        """Refuse what no network can have."""
        for name, table in (("edges", self.edges), ("skips", self.skips)):
            if _whole_numbers(name, table).ndim != 2 or table.shape[1] != 2:
                raise ValueError(f"{name} must be pairs of whole numbers. Got {table.dtype} of shape {tuple(table.shape)}.")
            if not self._holds(table):
                span = f"{int(table.min())} .. {int(table.max())}"
                raise ValueError(f"{name} must join vertices 0 .. {self.vertices - 1}. Got {span}.")
        for name, vertices in (("inputs", self.given_inputs), ("outputs", self.given_outputs)):
            if vertices is not None and not self._holds(vertices):
                raise ValueError(f"{name} must lie in 0 .. {self.vertices - 1}. Got {vertices.tolist()}.")
        if not len(self.edges):
            raise ValueError("edges must hold at least one: a network has some.")
        if len(self.edges.unique(dim=0)) != len(self.edges):
            raise ValueError("An edge is listed twice; give each pair (from, to) once.")
        for name, vector, length in (("weight_of", self.weight_of, len(self.edges)), ("fan_in", self.fan_in, self.vertices)):
            if vector is not None and len(vector) != length:
                raise ValueError(f"{name} must have {length} entries. Got {len(vector)}.")
        _ = self.layers  # raises on a cycle
        if bool(torch.isin(self.skips[:, 1], self.outputs).any()):
            raise ValueError("A skip ends in an output; outputs are linear in what they read and take no skips.")
        idle = (self.layers > 0) & (self.in_degrees == 0)
        if bool(idle.any()):
            raise ValueError(f"Vertex {self.name(int(idle.nonzero()[0]))} has a skip but no trainable edge into it.")

    def _holds(self, vertices: Tensor) -> bool:
        return not len(vertices) or 0 <= int(vertices.min()) <= int(vertices.max()) < self.vertices

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
        return (self.layers == place("index", index, self.depth + 1)).nonzero()[:, 0]

    def name(self, vertex: int) -> Hashable:
        """The vertex as the user calls it."""
        vertex = place("vertex", vertex, self.vertices)
        return vertex if self.labels is None else self.labels[vertex]

    def __deepcopy__(self, memo: dict[int, Any]) -> Graph:
        return self  # nothing in it changes: copies of a network share their graph

    def __repr__(self) -> str:
        return f"<Graph: {self.vertices} vertices, {len(self.edges)} edges, {len(self.skips)} skips, {self.depth} weight layers>"


@checked(vertices=count, edges=of_dimensions(2))
def layer_index(vertices: int, edges: Tensor) -> Tensor:
    """Length of the longest path that ends in each vertex, (vertices,); raises where the edges close a cycle.

    >>> layer_index(4, torch.tensor([[0, 1], [1, 2], [0, 2], [2, 3]])).tolist()
    [0, 1, 2, 3]
    """
    if len(edges) and not 0 <= int(edges.min()) <= int(edges.max()) < vertices:
        raise ValueError(f"edges must join vertices 0 .. {vertices - 1}. Got {int(edges.min())} .. {int(edges.max())}.")
    layers = torch.zeros(vertices, dtype=torch.int64)
    for _ in range(vertices + 1):
        further = layers.scatter_reduce(0, edges[:, 1], layers[edges[:, 0]] + 1, "amax")
        if torch.equal(further, layers):
            return layers
        layers = further
    raise ValueError("The edges close a cycle: a feed-forward network needs a directed acyclic graph.")


def _whole_numbers(name: str, table: Tensor) -> Tensor:
    if table.dtype != torch.int64 or table.is_meta:
        raise ValueError(f"{name} must be pairs of whole numbers. Got {table.dtype} numbers, {shown(table)}.")
    return table


def _pair(name: str, pair: Any) -> tuple[Any, Any]:
    """A pair (from, to) of numbers or names; entries of a tensor are numbers."""
    ends = pair.tolist() if isinstance(pair, Tensor) and not pair.is_meta else pair
    known = isinstance(ends, Sequence) and len(ends) == 2 and all(isinstance(end, Hashable) and end == end for end in ends)
    if not known:
        raise ValueError(f"{name}: an edge is a pair (from, to) of numbers or names. Got {shown(pair)}.")
    return ends[0], ends[1]


def _table(pairs: Sequence[tuple[int, int]]) -> Tensor:
    return torch.tensor(list(pairs), dtype=torch.int64).reshape(-1, 2)


def _numbers(
    name: str, vertices: Sequence[Any] | Tensor | None, labels: tuple[Hashable, ...] | None
) -> Sequence[int] | Tensor | None:
    """Vertices by number, from their names where they have names."""
    if vertices is None or isinstance(vertices, Tensor) or labels is None:
        return vertices
    index = {label: i for i, label in enumerate(labels)}
    unknown = [vertex for vertex in sequence(name, vertices) if not isinstance(vertex, Hashable) or vertex not in index]
    if unknown:
        raise ValueError(f"{name} must be vertices of the graph: {', '.join(map(repr, labels))}. Got {shown(unknown)}.")
    return [index[vertex] for vertex in vertices]


def _vector(name: str, values: Sequence[int] | Tensor | None) -> Tensor | None:
    """Whole numbers as a tensor; a fraction is refused and not cut off."""
    if not isinstance(values, Tensor):
        return None if values is None else torch.tensor(each(integer)(name, values), dtype=torch.int64)
    if values.ndim != 1 or values.is_meta or values.is_floating_point() or values.is_complex():
        raise ValueError(f"{name} must be a list or a vector of whole numbers. Got {values.dtype} numbers, {shown(values)}.")
    return values.to(torch.int64)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class WidthReport(Result):
    """The width m of a network and its bottlenecks.

    `width` is the smallest in-degree behind the first layer, `typical` the median over the layers of each layer's
    median in-degree. Tensors run over the vertices: `layers`, `in_degrees`, `bottleneck` (in-degree below β · typical,
    first layer exempt), `share` (bottlenecks among the vertices that feed a neuron) and `safe` (that share is small and
    the neuron itself is no bottleneck output).
    """

    width: int | None
    typical: float
    threshold: float
    layers: Tensor
    in_degrees: Tensor
    bottleneck: Tensor
    share: Tensor
    safe: Tensor
    names: tuple[str, ...]

    @property
    def linear(self) -> bool:
        """Whether nothing speaks against transition to linearity."""
        return self.width is None or bool(self.safe.all())

    def rows(self) -> list[Row]:
        columns = {"layer": self.layers, "in_degree": self.in_degrees, **fields_of(self, "bottleneck share safe")}
        return [{"neuron": name, **{key: t[i].item() for key, t in columns.items()}} for i, name in enumerate(self.names)]

    def sentence(self) -> str:
        if self.width is None:
            return "The network has one layer of weights: it is linear in them."
        count = int(self.bottleneck.sum())
        if not count:
            return f"The width is {self.width} (smallest in-degree behind the first layer); no neuron is a bottleneck."
        risk = f"{int((~self.safe).sum())} neurons are at risk, reading more than a small share through them"
        verdict = "few enough to leave linearity intact" if self.linear else risk
        return f"The width is {self.width}; {count} neurons have in-degrees below {self.threshold:g}: {verdict}."


@checked(graph=instance(Graph), beta=fraction, safe_share=number_in(above=0, most=1))
def dag_width(graph: Graph, *, beta: float = 0.1, safe_share: float = 0.05) -> WidthReport:
    """Layers, in-degrees, width and bottlenecks of a DAG.

    A bottleneck is a neuron whose in-degree is below `beta` times the typical one. The typical in-degree is taken over
    layers, not neurons: behind a narrow layer most neurons are bottlenecks, and a median over neurons would call that
    normal. A few bottlenecks are harmless; a neuron is at risk where `safe_share` or more of what feeds it is one. The
    condition is sufficient and not necessary.

    >>> report = dag_width(Graph.of([(0, 2), (1, 2), (0, 3), (1, 3), (2, 4), (3, 4)]))
    >>> report.width, report.layers.tolist(), report.linear
    (2, [0, 0, 1, 1, 2], True)
    """
    degrees, layers, counted = graph.in_degrees, graph.layers, graph.beyond_first
    middles = [degrees[counted & (layers == i)].double().median() for i in range(2, graph.depth + 1)]
    typical = float(torch.stack(middles).quantile(0.5)) if middles else 0.0
    bottleneck = counted & (degrees < beta * typical)
    feeding = bottleneck[graph.edges[:, 0]].double()
    share = torch.zeros(graph.vertices, dtype=torch.float64).index_add(0, graph.edges[:, 1], feeding) / degrees.clamp(min=1)
    narrow_output = torch.zeros_like(bottleneck)
    narrow_output[graph.outputs] = bottleneck[graph.outputs]
    return WidthReport(
        width=graph.width,
        typical=typical,
        threshold=beta * typical,
        layers=layers,
        in_degrees=degrees,
        bottleneck=bottleneck,
        share=share,
        safe=(share < safe_share) & ~narrow_output,
        names=tuple(str(graph.name(i)) for i in range(graph.vertices)),
        outcome=Outcome.FINISHED,
    )


# How many inputs the units of any model's layers sum over, which bounds how linear the model can become.

_MEASURE = "the theorem does not cover it: measure hessian_norm against its width"
#: Layers without an in-degree, and why.
_WITHOUT: dict[tuple[type, ...], str] = {
    (nn.Embedding, nn.EmbeddingBag): "a lookup: reads one row per token and is linear in its weights",
    (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm): "scale and shift of each channel alone",
    (nn.modules.conv._ConvTransposeNd,): "depends on the place in a transposed convolution",
    (nn.RNNBase, nn.RNNCellBase): _MEASURE,
}
Layer = tuple[str, str, int | None, str]  # name, kind, in-degree, note


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class InDegrees(Result):
    """In-degree of every layer that owns weights, in the order of the model; None where a layer has no such number.

    `width` is the smallest known one behind the first layer (Definition 2.2.7 of the theory, if the modules stand in
    the order in which they are computed); `bottlenecks` names layers far below the median of the others.
    """

    layers: tuple[str, ...]
    kinds: tuple[str, ...]
    degrees: tuple[int | None, ...]
    notes: tuple[str, ...]
    width: int | None
    bottlenecks: tuple[str, ...]

    @property
    def unknown(self) -> tuple[str, ...]:
        """Layers without an in-degree."""
        return tuple(name for name, degree in zip(self.layers, self.degrees, strict=True) if degree is None)

    def rows(self) -> list[Row]:
        return [
            {"layer": name, "kind": kind, "in_degree": degree, "bottleneck": name in self.bottlenecks, "note": note}
            for name, kind, degree, note in zip(self.layers, self.kinds, self.degrees, self.notes, strict=True)
        ]

    def sentence(self) -> str:
        known = f"The smallest in-degree behind the first layer is {self.width}."
        said = "No layer behind the first has a known in-degree." if self.width is None else known
        if self.bottlenecks:
            said += f" Bottlenecks: {', '.join(self.bottlenecks)}; a narrow layer keeps the model from becoming linear."
        return said + (f" Unknown: {', '.join(self.unknown)}." if self.unknown else "")


@checked(model=a_model, beta=fraction)
def in_degree_report(model: nn.Module, *, beta: float = 0.1) -> InDegrees:
    """In-degrees layer by layer: inputs of a linear layer, channels × filter entries / groups of a convolution.

    Networks on a graph are reported layer by layer of the graph, with their smallest in-degree. Attention and recurrent
    layers have no number the theory speaks of; `hessian_norm` measures them. An embedding looks up and sums nothing. A
    bottleneck lies below `beta` times the median of the layers behind the first.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 2), nn.Linear(2, 50))
    >>> report = in_degree_report(model)
    >>> report.degrees, report.width
    ((27, 72, 2), 2)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module. Got {type(model).__name__}.")
    found: list[Layer] = []
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        graph = getattr(module, "graph", None)
        if isinstance(graph, Graph):
            found += _of_graph(name, graph)
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            found.append((name or "(model)", type(module).__name__, None, _MEASURE))
        elif next(module.parameters(recurse=False), None) is not None:
            degree, note = _of_layer(module)
            found.append((name or "(model)", type(module).__name__, degree, note))
            continue
        else:
            continue
        inside = (*inside, f"{name}." if name else "")
    known = [(name, degree) for name, _, degree, _ in found[1:] if degree is not None]
    degrees = sorted(degree for _, degree in known)
    threshold = beta * degrees[len(degrees) // 2] if degrees else 0.0
    return InDegrees(
        layers=tuple(name for name, *_ in found),
        kinds=tuple(kind for _, kind, *_ in found),
        degrees=tuple(degree for *_, degree, _ in found),
        notes=tuple(note for *_, note in found),
        width=degrees[0] if degrees else None,
        bottlenecks=tuple(name for name, degree in known if degree < threshold),
        outcome=Outcome.FINISHED,
    )


def _of_graph(name: str, graph: Graph) -> list[Layer]:
    report = dag_width(graph)
    prefix = f"{name}." if name else ""
    rows: list[Layer] = []
    for layer in range(1, graph.depth + 1):
        mine = report.layers == layer
        narrow = int(report.bottleneck[mine].sum())
        note = f"{narrow} of {int(mine.sum())} neurons are bottlenecks" if narrow else ""
        rows.append((f"{prefix}layers.{layer - 1}", "DagLayer", int(report.in_degrees[mine].min()), note))
    return rows


def _of_layer(module: nn.Module) -> tuple[int | None, str]:
    """In-degree of a layer's units, None where it has none, and a remark."""
    made: Any = getattr(module, "parametrizations", {})  # to ask such a module for its weight computes it, and may change it
    parts = list(made["weight"].parameters(recurse=False)) if "weight" in made else [getattr(module, "weight", None)]
    shape = max((tuple(getattr(part, "shape", ())) for part in parts), key=math.prod)
    for kinds, note in _WITHOUT.items():
        if isinstance(module, kinds):
            return None, note
    if getattr(module, "in_features", None) is not None and len(shape) == 2:
        return shape[1], ""
    if "conv" in type(module).__name__.lower() and len(shape) >= 3:
        return math.prod(shape[1:]), "channels × filter entries / groups"
    return None, "unknown kind of layer; " + _MEASURE
