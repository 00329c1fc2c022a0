"""Networks on graphs: layering by brute force, forward passes against matrices and convolutions, what counts as a weight."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import theodolite as th
from theodolite.measures.linearity import Graph, layer_index
from theodolite.models import (
    cnn_graph,
    count_parameters,
    densenet_graph,
    fcn_graph,
    ntk_cnn,
    ntk_fcn,
    with_bottlenecks,
    with_connections,
    with_drops,
    with_skips,
)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def longest_paths(vertices: int, edges: list[tuple[int, int]]) -> list[int]:
    """By the definition: follow every path backwards."""

    def longest(v: int) -> int:
        return max((1 + longest(u) for u, w in edges if w == v), default=0)

    return [longest(v) for v in range(vertices)]


def one_by_one(network: th.DagNetwork, x: torch.Tensor) -> torch.Tensor:
    """The network neuron by neuron, straight from its definition."""
    graph, places = network.graph, network.edge_parameters()
    weights = torch.cat([p.detach() for p in network.parameters()])
    values = dict(zip(graph.inputs.tolist(), x.T, strict=True))
    for v in torch.argsort(graph.layers).tolist():
        if v in values:
            continue
        mine = [(int(u), float(weights[places[e]])) for e, (u, w) in enumerate(graph.edges.tolist()) if w == v]
        total = sum(weight * values[u] for u, weight in mine) / float(graph.norms[v]) ** 0.5
        activation = network.output_activation if v in graph.outputs else network.activation
        values[v] = activation(total) + sum(values[int(u)] for u, w in graph.skips.tolist() if w == v)
    return torch.stack([values[v] for v in graph.outputs.tolist()], dim=1)


# Graphs


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 50), st.floats(0.02, 0.3), st.randoms(use_true_random=False))
def test_check_01_layering(vertices, share, random):
    names = random.sample(range(vertices), vertices)
    pairs = [(names[u], names[v]) for u, v in itertools.combinations(range(vertices), 2) if random.random() < share]
    if not pairs:
        pairs = [(names[0], names[1])]
    graph = Graph.of(pairs, vertices=vertices)
    expected = layered(vertices, pairs)
    degrees = [sum(v == w for _, w in pairs) for v in range(vertices)]
    assert graph.layers.tolist() == expected
    assert graph.in_degrees.tolist() == degrees
    assert graph.width == min((degrees[v] for v in range(vertices) if expected[v] >= 2), default=None)
    assert [expected[v] for v in graph.inputs.tolist()] == [0] * len(graph.inputs)


def layered(vertices: int, edges: list[tuple[int, int]]) -> list[int]:
    """The longest paths, remembering what is known."""
    before: dict[int, list[int]] = {v: [u for u, w in edges if w == v] for v in range(vertices)}
    known: dict[int, int] = {}

    def longest(v: int) -> int:
        if v not in known:
            known[v] = max((1 + longest(u) for u in before[v]), default=0)
        return known[v]

    return [longest(v) for v in range(vertices)]


def test_brute_force_agrees_with_its_remembering_form():
    edges = [(0, 1), (1, 2), (0, 2), (2, 4), (3, 4), (0, 4)]
    assert longest_paths(5, edges) == layered(5, edges) == layer_index(5, torch.tensor(edges)).tolist() == [0, 1, 2, 0, 3]


def test_named_vertices_keep_their_names():
    graph = Graph.of([("x", "h"), ("h", "y"), ("x", "y")])
    assert graph.labels == ("x", "h", "y")
    assert [row["neuron"] for row in th.measures.linearity.dag_width(graph).rows()] == ["x", "h", "y"]


@pytest.mark.parametrize(
    ("edges", "options", "message"),
    [
        ([(0, 1), (1, 0)], {}, "cycle"),
        ([(0, 1), (0, 1)], {}, "twice"),
        ([], {}, "edges must hold at least one"),
        ([(0, 1, 2)], {}, "pair"),
        ([(0, 5)], {"vertices": 3}, "vertices 0 .. 2"),
        ([(0, 1), (1, 2)], {"skips": [(0, 2)]}, "ends in an output"),
        ([(0, 1), (1, 2)], {"weight_of": [0]}, "weight_of must have 2"),
    ],
)
def test_graphs_that_are_none_are_refused(edges, options, message):
    with pytest.raises(ValueError, match=message):
        Graph.of(edges, **options)


def test_width_report_finds_bottlenecks():
    plain = th.measures.linearity.dag_width(fcn_graph(4, [60, 60]))
    assert plain.width == 60
    assert plain.linear
    few = th.measures.linearity.dag_width(with_bottlenecks(fcn_graph(4, [60, 60]), 2, 2))
    assert (few.width, int(few.bottleneck.sum())) == (1, 2)
    assert few.linear
    narrow = th.measures.linearity.dag_width(fcn_graph(4, [60, 2, 60]))
    assert (narrow.width, int(narrow.bottleneck.sum())) == (2, 60)
    assert not narrow.linear
    assert "at risk" in str(narrow)
    assert not th.measures.linearity.dag_width(fcn_graph(4, [60, 2])).linear  # the output itself is one
    assert th.measures.linearity.dag_width(with_connections(fcn_graph(4, [60, 2, 60]), 1, 3)).linear


def test_width_reports_are_saved_and_read(tmp_path):
    report = th.measures.linearity.dag_width(fcn_graph(2, [3]))
    report.save(tmp_path / "width")
    assert th.load(tmp_path / "width").rows() == report.rows()


# Networks


def test_check_02_fcn_as_dag():
    network = th.DagNetwork(fcn_graph(10, [32, 24], 3), seed=0)
    reference = ntk_fcn(10, [32, 24], outputs=3, activation="tanh").double()
    with torch.no_grad():
        for layer, linear in zip(network.layers, (reference.fc1, reference.fc2, reference.fc3), strict=True):
            layer.weight.copy_(linear.weight.reshape(-1))
    x = normal(7, 10)
    assert torch.allclose(network(x), reference(x), rtol=0, atol=1e-12)


def test_shared_weights_are_a_convolution():
    network = th.DagNetwork(cnn_graph(6, [4, 5], 2, channels=3), seed=0)
    reference = ntk_cnn((3, 6), [4, 5], outputs=2, activation="tanh").double()
    assert count_parameters(network) == count_parameters(reference)
    with torch.no_grad():
        for layer, part in zip(network.layers, (reference.conv1, reference.conv2, reference.fc1), strict=True):
            layer.weight.copy_(part.weight.reshape(-1))
    x = normal(7, 3, 6)
    assert torch.allclose(network(x), reference(x), rtol=0, atol=1e-12)


GRAPHS = {
    "fcn": fcn_graph(4, [5, 6], 2),
    "dense": densenet_graph(4, [5, 6], 2),
    "dense without inputs": densenet_graph(4, [5, 6], read_inputs=False),
    "dropped": with_drops(densenet_graph(4, [5, 6], 2), 0.5, seed=1),
    "skips": with_skips(fcn_graph(4, [5, 5, 5])),
    "own skips": with_skips(fcn_graph(4, [5, 6]), [(0, 9), (4, 10)]),
    "bottlenecks": with_bottlenecks(fcn_graph(4, [5, 6]), 2, 3, in_degree=2),
    "restored": with_connections(fcn_graph(4, [5, 2, 5]), 1, 3),
    "convolution": cnn_graph(4, [3, 2]),
    "outputs in two layers": Graph.of([(0, 2), (1, 2), (2, 3), (2, 4), (4, 5), (0, 5)]),
}


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("output", ["identity", "tanh"])
def test_layers_compute_what_the_definition_says(name, output):
    network = th.DagNetwork(GRAPHS[name], output_activation=output, seed=3)
    x = normal(5, len(GRAPHS[name].inputs))
    assert torch.allclose(network(x).detach(), one_by_one(network, x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", GRAPHS)
def test_there_is_one_parameter_per_edge_or_shared_weight(name):
    graph = GRAPHS[name]
    network = th.DagNetwork(graph, seed=0)
    expected = len(graph.edges) if graph.weight_of is None else len(graph.weight_of.unique())
    assert count_parameters(network) == expected
    places = network.edge_parameters()
    assert sorted(set(places.tolist())) == list(range(expected))


def test_a_removed_edge_is_no_parameter_and_the_in_degree_is_what_is_left():
    network = th.DagNetwork([(0, 2), (1, 2), (1, 3), (2, 4), (3, 4)], activation="identity", seed=0)
    assert count_parameters(network) == 5
    with torch.no_grad():
        for p in network.parameters():
            p.fill_(1.0)
    x = torch.tensor([[3.0, 5.0]]).double()
    # (3 + 5)/√2 and 5/√1, then their sum over √2
    assert float(network(x).detach()) == pytest.approx((8 / 2**0.5 + 5) / 2**0.5)


def test_drops_leave_every_neuron_fed_and_read():
    graph = with_drops(fcn_graph(3, [40, 40]), 0.95, seed=0)
    hidden = (graph.layers > 0) & ~torch.isin(torch.arange(graph.vertices), graph.outputs)
    assert int(graph.in_degrees[graph.layers > 0].min()) >= 1
    assert int(torch.bincount(graph.edges[:, 0], minlength=graph.vertices)[hidden].min()) >= 1
    assert len(graph.edges) < 0.2 * len(fcn_graph(3, [40, 40]).edges)
    half = with_drops(densenet_graph(10, [100, 100]), 0.5, seed=0)
    assert len(half.edges) / len(densenet_graph(10, [100, 100]).edges) == pytest.approx(0.5, abs=0.02)
    assert torch.equal(half.edges, with_drops(densenet_graph(10, [100, 100]), 0.5, seed=0).edges)


def test_dtype_seed_and_the_caller_s_random_state():
    before = torch.get_rng_state()
    first, second = (th.DagNetwork(fcn_graph(3, [4]), dtype=torch.float32, seed=5) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert first(torch.ones(1, 3)).dtype == torch.float32
    assert next(th.DagNetwork(fcn_graph(3, [4])).parameters()).dtype == torch.float64


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: th.DagNetwork(fcn_graph(3, [4]), seed=0)(torch.ones(2, 5).double()), "has 3 inputs"),
        (lambda: with_drops(cnn_graph(4, [2])), "share weights"),
        (lambda: with_drops(fcn_graph(2, [2]), 1.5), "probability must be a number from 0 to 1"),
        (lambda: with_bottlenecks(fcn_graph(2, [2, 2]), 2, 5), "neurons must be at most 2"),
        (lambda: with_connections(fcn_graph(2, [2]), 2, 1), "before target"),
        (lambda: cnn_graph(4, [2], kernel=2), "odd"),
        (lambda: fcn_graph(0, [2]), "inputs must be"),
        (lambda: th.DagNetwork(Graph.of([(0, 1), (1, 2)], weight_of=[0, 0])), "end in one layer"),
        (lambda: th.DagNetwork(Graph.of([(0, 1)], vertices=3, inputs=[0], outputs=[1])), "is no input"),
    ],
)
def test_what_cannot_be_built_says_why(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_dag_network_is_measured_like_any_module():
    network = th.DagNetwork(with_drops(densenet_graph(3, [6, 6], 2), seed=0), seed=0)
    problem = th.Problem(network, nn.MSELoss(), (normal(4, 3), normal(4, 2, seed=1)))
    jacobian = th.operators.jacobian(problem).to_dense()
    assert jacobian.shape == (8, len(network.graph.edges))
    assert torch.allclose(th.tangent_kernel(problem), jacobian @ jacobian.T, rtol=1e-10)
