"""Networks whose wiring is any directed acyclic graph, in the NTK parameterisation.

A neuron v computes `f_v = σ( in(v)^(-1/2) Σ_u w_uv f_u ) + Σ skips`; one weight per edge, drawn from N(0, 1); inputs
and outputs have no activation. Neurons are computed layer by layer as one matrix product each, never one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.arguments import about, checked, count, instance, place, positive_integers, sequence, share
from theodolite.arguments import seed as a_seed
from theodolite.measures.linearity.graph import Graph, WidthReport, dag_width
from theodolite.models.initialisation import activation as make_activation
from theodolite.models.initialisation import named, seeded

# Graphs for `DagNetwork`: fully connected, dense, convolutional, and what can be done to them.
#
# Vertices are numbered layer by layer, inputs first. `widths` are the hidden layers.


def fcn_graph(inputs: int, widths: Sequence[int], outputs: int = 1) -> Graph:
    """Every neuron of a layer reads all of the layer before.

    >>> fcn_graph(3, [4, 5]).width, len(fcn_graph(3, [4, 5]).edges)  # in-degrees 3, 4, 5; 3·4 + 4·5 + 5·1
    (4, 37)
    """
    layers = _layers(inputs, widths, outputs)
    return _graph([_all_pairs(u, v) for u, v in itertools.pairwise(layers)], layers)


def densenet_graph(inputs: int, widths: Sequence[int], outputs: int = 1, *, read_inputs: bool = True) -> Graph:
    """Every neuron reads all layers before its own; `read_inputs=False` keeps the inputs for the first layer.

    >>> densenet_graph(3, [4, 5]).in_degrees.tolist()[-1]  # 3 + 4 + 5
    12
    """
    layers = _layers(inputs, widths, outputs)
    first = 0 if read_inputs else 1
    edges = [
        _all_pairs(torch.cat(layers[min(first, i - 1) : i]) if i > 1 else layers[0], layers[i]) for i in range(1, len(layers))
    ]
    return _graph(edges, layers)


def cnn_graph(length: int, widths: Sequence[int], outputs: int = 1, *, channels: int = 1, kernel: int = 3) -> Graph:
    """A one-dimensional convolutional network: stride 1, zero padding to equal length, a linear output on everything.

    A layer has `width · length` neurons, channel-major; neurons of a channel share their weights. Padding counts in the
    normalisation, √(channels · kernel), and the output divides by √(width · length).

    >>> graph = cnn_graph(4, [2])
    >>> len(graph.edges), int(graph.weight_of.max()) + 1  # (3·4 − 2)·2 + 8 edges, 3·2 + 8 weights
    (28, 14)
    """
    positive_integers(length=length, outputs=outputs, channels=channels, kernel=kernel)
    sequence("widths", widths)
    if kernel % 2 == 0:
        raise ValueError(f"kernel must be odd. Got {kernel}.")
    positive_integers(**{f"widths[{i}]": w for i, w in enumerate(widths)})
    layers = _layers(channels * length, [w * length for w in widths], outputs)
    edges, weights, used = [], [], 0
    fan_in = torch.zeros(sum(map(len, layers)), dtype=torch.int64)
    for i, (before, after) in enumerate(itertools.pairwise([channels, *widths]), start=1):
        pairs, index = _convolution(before, after, length, kernel)
        edges.append(pairs + torch.stack([layers[i - 1][0], layers[i][0]]))
        weights.append(index + used)
        used += before * after * kernel
        fan_in[layers[i]] = before * kernel
    edges.append(_all_pairs(layers[-2], layers[-1]))
    weights.append(used + torch.arange(len(edges[-1])))
    fan_in[layers[-1]] = len(layers[-2])
    return _graph(edges, layers, weight_of=torch.cat(weights), fan_in=fan_in)


@checked(graph=instance(Graph), probability=share, seed=a_seed)
def with_drops(graph: Graph, probability: float = 0.5, *, seed: int = 0) -> Graph:
    """Each edge removed once, independently, with this probability; neurons are normalised by what is left.

    A neuron that would be left without an incoming edge keeps one of its own at random, and so does a hidden neuron
    left without an outgoing one.

    >>> with_drops(fcn_graph(4, [6, 6]), 1.0).in_degrees.min().item()  # inputs
    0
    """
    if graph.weight_of is not None:
        raise ValueError("Edges that share weights cannot be dropped one by one.")
    generator = torch.Generator().manual_seed(seed)
    luck = torch.rand(len(graph.edges), generator=generator, dtype=torch.float64)
    keep = luck >= probability
    for ends in (graph.edges[:, 1], graph.edges[:, 0]):
        left = torch.bincount(ends[keep], minlength=graph.vertices)
        poor = (graph.layers > 0) & (left == 0)
        # Of the edges of a neuron left with none, the luckiest comes back.
        best = torch.full((graph.vertices,), -1.0, dtype=torch.float64).scatter_reduce(0, ends, luck, "amax")
        keep |= poor[ends] & (luck == best[ends])
    return graph.with_edges(graph.edges[keep])


@checked(graph=instance(Graph), skips=sequence)
def with_skips(graph: Graph, skips: Sequence[tuple[int, int]] | None = None) -> Graph:
    """The graph with skips (from, to) added.

    By default each neuron of a hidden layer from the second on gets the value of its namesake, the neuron of the same place in
    the layer before, where there is one.

    >>> with_skips(fcn_graph(2, [3, 3])).skips.tolist()
    [[2, 5], [3, 6], [4, 7]]
    """
    if skips is not None:
        return graph.with_skips(Graph.of(graph.edges, vertices=graph.vertices, skips=skips).skips)
    pairs = []
    for layer in range(2, graph.depth):
        before, after = graph.layer(layer - 1), graph.layer(layer)
        after = after[~torch.isin(after, graph.outputs)]
        count = min(len(before), len(after))
        pairs.append(torch.stack([before[:count], after[:count]], dim=1))
    return graph.with_skips(torch.cat(pairs) if pairs else graph.skips[:0])


@checked(graph=instance(Graph), neurons=count, in_degree=count, seed=a_seed)
def with_bottlenecks(graph: Graph, layer: int, neurons: int, *, in_degree: int = 1, seed: int = 0) -> Graph:
    """The first `neurons` of a layer keep only `in_degree` of their edges, drawn at random for each.

    >>> graph = with_bottlenecks(fcn_graph(2, [8, 8]), layer=2, neurons=2)
    >>> graph.in_degrees[graph.layer(2)].tolist()
    [1, 1, 8, 8, 8, 8, 8, 8]
    """
    chosen = graph.layer(place("layer", layer, graph.depth + 1))[:neurons]
    if len(chosen) < neurons:
        raise ValueError(f"neurons must be at most {len(chosen)}, those of layer {layer}. Got {neurons}.")
    luck = torch.rand(len(graph.edges), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    narrow = torch.isin(graph.edges[:, 1], chosen)
    order = torch.argsort(graph.edges[narrow, 1].double() + luck[narrow])  # by neuron, shuffled within
    targets = graph.edges[narrow, 1][order]
    first = torch.searchsorted(targets, targets)  # where each neuron's run begins
    kept = narrow.nonzero()[:, 0][order][torch.arange(len(targets)) - first < in_degree]
    keep = ~narrow
    keep[kept] = True
    return graph.with_edges(graph.edges[keep])


@checked(graph=instance(Graph))
def with_connections(graph: Graph, source: int, target: int) -> Graph:
    """All trainable edges from one layer to a later one added, those that are there already left.

    >>> with_connections(fcn_graph(2, [5, 2, 5]), source=1, target=3).in_degrees.tolist()[-6:]
    [7, 7, 7, 7, 7, 5]
    """
    if place("source", source, graph.depth + 1) >= place("target", target, graph.depth + 1):
        raise ValueError(f"source must be a layer before target, both in 0 .. {graph.depth}. Got {source} and {target}.")
    if graph.weight_of is not None:
        raise ValueError("Edges cannot be added to a graph whose weights are shared.")
    edges = torch.cat([graph.edges, _all_pairs(graph.layer(source), graph.layer(target))])
    return graph.with_edges(edges.unique(dim=0))


def _layers(inputs: int, widths: Sequence[int], outputs: int) -> list[Tensor]:
    """The vertices of each layer."""
    positive_integers(inputs=inputs, outputs=outputs, **{f"widths[{i}]": w for i, w in enumerate(sequence("widths", widths))})
    sizes = [inputs, *widths, outputs]
    return list(torch.arange(sum(sizes)).split(sizes))


def _all_pairs(sources: Tensor, targets: Tensor) -> Tensor:
    """(len(targets) · len(sources), 2), by target."""
    return torch.stack([sources.repeat(len(targets)), targets.repeat_interleave(len(sources))], dim=1)


def _graph(edges: list[Tensor], layers: list[Tensor], **more: Tensor) -> Graph:
    return Graph.of(torch.cat(edges), vertices=sum(map(len, layers)), inputs=layers[0], outputs=layers[-1], **more)


def _convolution(before: int, after: int, length: int, kernel: int) -> tuple[Tensor, Tensor]:
    """Edges (E, 2) of one convolution, counted within its two layers, and their weights (E,), order (after, before, tap)."""
    o, i, j, t = (part.reshape(-1) for part in torch.meshgrid(*map(torch.arange, (after, before, length, kernel)), indexing="ij"))
    place = j + t - kernel // 2
    inside = (place >= 0) & (place < length)
    edges = torch.stack([i * length + place, o * length + j], dim=1)
    weights = (o * before + i) * kernel + t
    return edges[inside], weights[inside]


@dataclass(frozen=True)
class Neurons:
    """Everything a network computed: `values[l]` and `preactivations[l]` are (samples, neurons of layer l).

    Layer 0 are the inputs; it has no pre-activations and holds the values twice.
    """

    values: tuple[Tensor, ...]
    preactivations: tuple[Tensor, ...]


class DagLayer(nn.Module):
    """One layer of a DAG: `weight` holds one number per edge (or per shared weight), ordered by neuron, then source.

    It reads columns `first` to `last` of what was computed so far. Where it reads all of them with weights of its own,
    `weight` is the matrix itself; otherwise it is spread into one, and what lies outside is no parameter.
    """

    index: Tensor
    place: Tensor
    scale: Tensor
    outputs: Tensor
    skip_from: Tensor
    skip_to: Tensor

    def __init__(self, graph: Graph, position: Tensor, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.neurons = graph.layer(layer)
        row = torch.full((graph.vertices,), -1, dtype=torch.int64)
        row[self.neurons] = torch.arange(len(self.neurons))
        mine = (row[graph.edges[:, 1]] >= 0).nonzero()[:, 0]
        rows, sources = row[graph.edges[mine, 1]], position[graph.edges[mine, 0]]
        self.first, self.last = int(sources.min()), int(sources.max()) + 1
        span = self.last - self.first
        place = rows * span + sources - self.first
        order = torch.argsort(place) if bool((place[1:] < place[:-1]).any()) else torch.arange(len(place))
        self.edges = mine[order]  # the graph's edges in the order of the matrix
        place = place[order]
        self.shape = (len(self.neurons), span)
        self.full = graph.weight_of is None and len(place) == len(self.neurons) * span
        names = index = torch.arange(len(place))
        if graph.weight_of is not None:
            names, index = graph.weight_of[self.edges].unique(return_inverse=True)
        self.own = graph.weight_of is None
        self.weight = nn.Parameter(torch.empty(len(names), dtype=dtype))
        self.names = names  # which shared weights these are
        self.register_buffer("index", index, persistent=False)
        self.register_buffer("place", place, persistent=False)
        self.register_buffer("scale", graph.norms[self.neurons].to(dtype).rsqrt(), persistent=False)
        outputs = torch.isin(self.neurons, graph.outputs)
        self.has_outputs, self.only_outputs = bool(outputs.any()), bool(outputs.all())
        self.register_buffer("outputs", outputs, persistent=False)
        skips = graph.skips[row[graph.skips[:, 1]] >= 0]
        self.register_buffer("skip_from", position[skips[:, 0]], persistent=False)
        self.register_buffer("skip_to", row[skips[:, 1]], persistent=False)

    def matrix(self) -> Tensor:
        """The weights as a matrix (neurons, columns read)."""
        if self.full:
            return self.weight.view(self.shape)
        weights = self.weight if self.own else self.weight[self.index]
        zeros = weights.new_zeros(self.shape[0] * self.shape[1])
        return zeros.scatter(0, self.place, weights).view(self.shape)

    def preactivation(self, computed: Tensor) -> Tensor:
        """(samples, all computed so far) -> (samples, neurons)."""
        return (computed[:, self.first : self.last] @ self.matrix().T) * self.scale

    def extra_repr(self) -> str:
        return f"{self.shape[0]} neurons, {len(self.place)} edges, {len(self.names)} weights"


class DagNetwork(nn.Module):
    """A network on a graph: (samples, inputs) -> (samples, outputs).

    Args:
        graph: a `Graph` (see `dag_graphs` for builders), or pairs (from, to).
        activation: of hidden neurons. `output_activation` is the identity unless named, as the theorems want it.
        dtype: float64 by default: slopes of Hessian norms need the digits.
        seed: of the weights; None draws from the global generator.

    >>> network = DagNetwork([(0, 2), (1, 2), (2, 3), (0, 3)], seed=0)
    >>> network(torch.ones(5, 2, dtype=torch.float64)).shape, network.width
    (torch.Size([5, 1]), 2)
    """

    order: Tensor
    readout: Tensor

    @checked(seed=a_seed)
    def __init__(
        self,
        graph: Graph | Iterable[Sequence[Any]],
        *,
        activation: str = "tanh",
        output_activation: str = "identity",
        dtype: torch.dtype = torch.float64,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        with about("graph"):
            self.graph = graph if isinstance(graph, Graph) else Graph.of(graph)
        _check_network(self.graph)
        # Neurons stand in the order in which they are computed: inputs first, then layer by layer.
        order = torch.cat([self.graph.inputs, *(self.graph.layer(i) for i in range(1, self.graph.depth + 1))])
        position = torch.full((self.graph.vertices,), -1, dtype=torch.int64)
        position[order] = torch.arange(len(order))
        self.layers: Any = nn.ModuleList(DagLayer(self.graph, position, i, dtype) for i in range(1, self.graph.depth + 1))
        self.activation, self.output_activation = make_activation(activation), make_activation(output_activation)
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("readout", position[self.graph.outputs], persistent=False)
        names = torch.cat([layer.names for layer in self.layers])  # of shared weights
        if self.graph.weight_of is not None and len(names.unique()) != len(names):
            raise ValueError("Edges that share a weight must end in one layer.")
        with seeded(seed), torch.no_grad():
            self.reset_parameters()
        named(self, "ntk")

    def reset_parameters(self) -> None:
        """Weights from N(0, 1)."""
        for layer in self.layers:
            nn.init.normal_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        values = self.neurons(x).values
        return torch.cat(values, dim=1)[:, self.readout]

    def neurons(self, x: Tensor) -> Neurons:
        """All neurons by layer."""
        x = x.flatten(1)
        if x.shape[1] != len(self.graph.inputs):
            raise ValueError(f"The network has {len(self.graph.inputs)} inputs. Got samples of {x.shape[1]} numbers.")
        values, preactivations = [x], [x]
        for layer in self.layers:
            computed = torch.cat(values, dim=1) if len(values) > 1 else x
            pre = layer.preactivation(computed)
            value = self._activate(layer, pre)
            if len(layer.skip_from):
                value = value.index_add(1, layer.skip_to, computed[:, layer.skip_from])
            values.append(value)
            preactivations.append(pre)
        return Neurons(tuple(values), tuple(preactivations))

    def _activate(self, layer: DagLayer, pre: Tensor) -> Tensor:
        if not layer.has_outputs:
            return self.activation(pre)
        if layer.only_outputs:
            return self.output_activation(pre)
        return torch.where(layer.outputs, self.output_activation(pre), self.activation(pre))

    @property
    def width(self) -> int | None:
        """The smallest in-degree behind the first layer."""
        return self.graph.width

    def in_degrees(self) -> WidthReport:
        """Layers, in-degrees and bottlenecks."""
        return dag_width(self.graph)

    def edge_parameters(self) -> Tensor:
        """For each edge of the graph the place of its weight in the flat parameter vector, (E,)."""
        places = torch.empty(len(self.graph.edges), dtype=torch.int64)
        offset = 0
        for layer in self.layers:
            places[layer.edges] = offset + layer.index
            offset += layer.weight.numel()
        return places


def _check_network(graph: Graph) -> None:
    missing = (graph.layers == 0) & ~torch.isin(torch.arange(graph.vertices), graph.inputs)
    if bool(missing.any()):
        raise ValueError(f"Vertex {graph.name(int(missing.nonzero()[0]))} has no incoming edge and is no input.")
    if bool((graph.layers[graph.inputs] > 0).any()):
        raise ValueError("An input has incoming edges.")
    if bool((graph.layers[graph.outputs] == 0).any()):
        raise ValueError("An output has no incoming edge.")
