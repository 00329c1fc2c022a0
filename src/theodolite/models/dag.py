"""Networks whose wiring is any directed acyclic graph, in the NTK parameterisation.

A neuron v computes `f_v = σ( in(v)^(-1/2) Σ_u w_uv f_u ) + Σ skips`; one weight per edge, drawn from N(0, 1); inputs
and outputs have no activation. Neurons are computed layer by layer as one matrix product each, never one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.measures.linearity.graph import Graph
from theodolite.measures.linearity.in_degree import WidthReport, dag_width
from theodolite.models.choices import activation as make_activation
from theodolite.models.initialisation import named, seeded


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

    Parameters
    ----------
    graph : a `Graph` (see `dag_graphs` for builders), or pairs (from, to).
    activation : of hidden neurons. `output_activation` is the identity unless named, as the theorems want it.
    dtype : float64 by default: slopes of Hessian norms need the digits.
    seed : of the weights; None draws from the global generator.

    >>> network = DagNetwork([(0, 2), (1, 2), (2, 3), (0, 3)], seed=0)
    >>> network(torch.ones(5, 2, dtype=torch.float64)).shape, network.width
    (torch.Size([5, 1]), 2)
    """

    order: Tensor
    readout: Tensor

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
        self._check_sharing()
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

    def _check_sharing(self) -> None:
        names = torch.cat([layer.names for layer in self.layers]) if self.graph.weight_of is not None else None
        if names is not None and len(names.unique()) != len(names):
            raise ValueError("Edges that share a weight must end in one layer.")


def _check_network(graph: Graph) -> None:
    missing = (graph.layers == 0) & ~torch.isin(torch.arange(graph.vertices), graph.inputs)
    if bool(missing.any()):
        raise ValueError(f"Vertex {graph.name(int(missing.nonzero()[0]))} has no incoming edge and is no input.")
    if bool((graph.layers[graph.inputs] > 0).any()):
        raise ValueError("An input has incoming edges.")
    if bool((graph.layers[graph.outputs] == 0).any()):
        raise ValueError("An output has no incoming edge.")
