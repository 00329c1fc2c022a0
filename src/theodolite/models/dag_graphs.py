"""Graphs for `DagNetwork`: fully connected, dense, convolutional, and what can be done to them.

Vertices are numbered layer by layer, inputs first. `widths` are the hidden layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from theodolite.measures.linearity.graph import Graph
from theodolite.models.choices import check_positive


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
    check_positive(length=length, outputs=outputs, channels=channels, kernel=kernel)
    if kernel % 2 == 0:
        raise ValueError(f"kernel must be odd. Got {kernel}.")
    check_positive(**{f"widths[{i}]": w for i, w in enumerate(widths)})
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
    return Graph.of(
        torch.cat(edges), vertices=len(fan_in), weight_of=torch.cat(weights), fan_in=fan_in, inputs=layers[0], outputs=layers[-1]
    )


def with_drops(graph: Graph, probability: float = 0.5, *, seed: int = 0) -> Graph:
    """Each edge removed once, independently, with this probability; neurons are normalised by what is left.

    A neuron that would be left without an incoming edge keeps one of its own at random, and so does a hidden neuron
    left without an outgoing one.

    >>> with_drops(fcn_graph(4, [6, 6]), 1.0).in_degrees.min().item()  # inputs
    0
    """
    if not 0.0 <= probability <= 1.0:
        raise ValueError(f"probability must lie between 0 and 1. Got {probability!r}.")
    if graph.weight_of is not None:
        raise ValueError("Edges that share weights cannot be dropped one by one.")
    generator = torch.Generator().manual_seed(seed)
    luck = torch.rand(len(graph.edges), generator=generator, dtype=torch.float64)
    keep = luck >= probability
    targets, sources = graph.edges[:, 1], graph.edges[:, 0]
    for ends, needed in ((targets, graph.layers > 0), (sources, graph.layers > 0)):
        left = torch.bincount(ends[keep], minlength=graph.vertices)
        poor = needed & (left == 0)
        # Of the edges of a neuron left with none, the luckiest comes back.
        best = torch.full((graph.vertices,), -1.0, dtype=torch.float64).scatter_reduce(0, ends, luck, "amax")
        keep |= poor[ends] & (luck == best[ends])
    return graph.with_edges(graph.edges[keep])


def with_skips(graph: Graph, skips: Sequence[tuple[int, int]] | None = None) -> Graph:
    """Skips (from, to) added; by default each neuron of a hidden layer from the second on gets the value of its
    namesake, the neuron of the same place in the layer before, where there is one.

    >>> with_skips(fcn_graph(2, [3, 3])).skips.tolist()
    [[2, 5], [3, 6], [4, 7]]
    """
    if skips is not None:
        return graph.with_skips(torch.tensor(list(skips), dtype=torch.int64).reshape(-1, 2))
    pairs = []
    for layer in range(2, graph.depth):
        before, after = graph.layer(layer - 1), graph.layer(layer)
        after = after[~torch.isin(after, graph.outputs)]
        count = min(len(before), len(after))
        pairs.append(torch.stack([before[:count], after[:count]], dim=1))
    return graph.with_skips(torch.cat(pairs) if pairs else graph.skips[:0])


def with_bottlenecks(graph: Graph, layer: int, neurons: int, *, in_degree: int = 1, seed: int = 0) -> Graph:
    """The first `neurons` of a layer keep only `in_degree` of their edges, drawn at random for each.

    >>> graph = with_bottlenecks(fcn_graph(2, [8, 8]), layer=2, neurons=2)
    >>> graph.in_degrees[graph.layer(2)].tolist()
    [1, 1, 8, 8, 8, 8, 8, 8]
    """
    chosen = graph.layer(layer)[:neurons]
    if len(chosen) < neurons:
        raise ValueError(f"Layer {layer} has {len(chosen)} neurons. Got neurons={neurons}.")
    check_positive(neurons=neurons, in_degree=in_degree)
    luck = torch.rand(len(graph.edges), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    narrow = torch.isin(graph.edges[:, 1], chosen)
    order = torch.argsort(graph.edges[narrow, 1].double() + luck[narrow])  # by neuron, shuffled within
    targets = graph.edges[narrow, 1][order]
    first = torch.searchsorted(targets, targets)  # where each neuron's run begins
    kept = narrow.nonzero()[:, 0][order][torch.arange(len(targets)) - first < in_degree]
    keep = ~narrow
    keep[kept] = True
    return graph.with_edges(graph.edges[keep])


def with_connections(graph: Graph, source: int, target: int) -> Graph:
    """All trainable edges from one layer to a later one added, those that are there already left.

    >>> with_connections(fcn_graph(2, [5, 2, 5]), source=1, target=3).in_degrees.tolist()[-6:]
    [7, 7, 7, 7, 7, 5]
    """
    if not 0 <= source < target <= graph.depth:
        raise ValueError(f"source must be a layer before target, both in 0 .. {graph.depth}. Got {source} and {target}.")
    if graph.weight_of is not None:
        raise ValueError("Edges cannot be added to a graph whose weights are shared.")
    edges = torch.cat([graph.edges, _all_pairs(graph.layer(source), graph.layer(target))])
    return graph.with_edges(edges.unique(dim=0))


def _layers(inputs: int, widths: Sequence[int], outputs: int) -> list[Tensor]:
    """The vertices of each layer."""
    check_positive(inputs=inputs, outputs=outputs, **{f"widths[{i}]": w for i, w in enumerate(widths)})
    sizes = [inputs, *widths, outputs]
    return list(torch.arange(sum(sizes)).split(sizes))


def _all_pairs(sources: Tensor, targets: Tensor) -> Tensor:
    """(len(targets) · len(sources), 2), by target."""
    return torch.stack([sources.repeat(len(targets)), targets.repeat_interleave(len(sources))], dim=1)


def _graph(edges: list[Tensor], layers: list[Tensor]) -> Graph:
    return Graph.of(torch.cat(edges), vertices=sum(map(len, layers)), inputs=layers[0], outputs=layers[-1])


def _convolution(before: int, after: int, length: int, kernel: int) -> tuple[Tensor, Tensor]:
    """Edges (E, 2) of one convolution, counted within its two layers, and their weights (E,), order (after, before, tap)."""
    o, i, j, t = (part.reshape(-1) for part in torch.meshgrid(*map(torch.arange, (after, before, length, kernel)), indexing="ij"))
    place = j + t - kernel // 2
    inside = (place >= 0) & (place < length)
    edges = torch.stack([i * length + place, o * length + j], dim=1)
    weights = (o * before + i) * kernel + t
    return edges[inside], weights[inside]
