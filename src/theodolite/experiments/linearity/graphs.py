"""A directed acyclic graph and its layers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from theodolite.experiments import Experiment, equal, rows, sizes
from theodolite.experiments.query import Value, select
from theodolite.measures.linearity import Graph, dag_width
from theodolite.results import Row

#: Three inputs, six neurons, two outputs. g has a path of one edge from x3 and one of three: it stands in layer 3.
EXAMPLE = (
    ("x1", "a"), ("x2", "a"), ("x2", "b"), ("x3", "b"), ("x3", "c"), ("a", "d"), ("b", "d"), ("b", "e"), ("c", "e"),
    ("d", "g"), ("e", "g"), ("x3", "g"), ("g", "y1"), ("a", "y1"), ("g", "y2"), ("c", "y2"),
)  # fmt: skip
#: Where the unordered drawing puts them.
SCATTERED = {
    "x1": (0.0, 0.4), "x2": (1.6, 0.0), "x3": (3.4, 0.3), "a": (0.4, 2.0), "b": (2.2, 1.2), "c": (4.2, 1.6), "d": (1.4, 2.9),
    "e": (3.2, 2.4), "g": (2.6, 3.6), "y1": (0.9, 4.4), "y2": (4.0, 4.3),
}  # fmt: skip


def brute_force(vertices: int, edges: list[tuple[int, int]]) -> list[int]:
    """Length of the longest path into each vertex, by following all edges backwards."""
    before: dict[int, list[int]] = {v: [] for v in range(vertices)}
    for u, v in edges:
        before[v].append(u)

    @cache
    def longest(v: int) -> int:
        return max((1 + longest(u) for u in before[v]), default=0)

    return [longest(v) for v in range(vertices)]


def layer_of(vertex: str) -> Value:
    """The layer of a neuron of the example."""
    return rows(kind="vertex", vertex=vertex)["layer"].first()


class Figure21(Experiment):
    """A directed acyclic graph and the same graph in layers.

    The layer of a neuron is the length of the longest path that leads to it from an input, whatever shorter ones there
    are. On random graphs layers and width are compared with the definition, followed by brute force. The rows give for
    each neuron what the notation of the appendix calls ℓ, d_ℓ, m_i and S_i.
    """

    item = ("zhu-2024 Figure 2.1", "zhu-2024 Table A.1")
    where = "Definitions 2.2.1 and 2.2.7; of Table A.1 the notation"
    sizes = sizes(graphs=200, vertices=50, tiny={"graphs": 20}, laptop={}, paper={"vertices": 200})
    claims = {
        "the neuron with a path of one edge and one of three stands in layer 3": equal(
            3, layer_of("g"), says="the longest path decides"
        ),
        "inputs stand in layer 0": equal(0, layer_of("x3"), reported=0, where="Zhu 2024, Definition 2.2.1"),
        "layers and widths of random graphs that differ from the definition": equal(0, rows(kind="random")["wrong"].sum()),
    }

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        yield {"part": "example", "seed": 0}
        yield {"part": "random", "graphs": p.graphs, "vertices": p.vertices, "seed": 0}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        yield from _example_rows() if job["part"] == "example" else _random_rows(job)

    def draw(self, rows: list[Row]) -> Any:
        from theodolite import plots

        vertices = {row["vertex"]: row for row in select(rows, kind="vertex")}
        edges = [(row["source"], row["target"]) for row in select(rows, kind="edge")]
        figure, (left, right) = plots.panels(2, size=(4.2, 3.8))
        _draw(left, SCATTERED, edges, vertices, "the graph")
        _draw(right, _by_layer(vertices), edges, vertices, "in layers, by the longest path")
        for layer in sorted({row["layer"] for row in vertices.values()}):
            right.text(-0.35, layer, f"layer {layer}", ha="right", va="center", fontsize=8)
        right.set_xlim(-1.4, 4.4)
        return figure


def _example_rows() -> Iterator[Row]:
    graph = Graph.of(EXAMPLE)
    report = dag_width(graph)
    layers = report.layers.tolist()
    for v in range(graph.vertices):
        feeding = [str(graph.name(u)) for u, w in graph.edges.tolist() if w == v]
        yield {
            "kind": "vertex",
            "vertex": str(graph.name(v)),
            "layer": layers[v],
            "in_layer": layers.count(layers[v]),
            "in_degree": int(report.in_degrees[v]),
            "feeding": " ".join(feeding),
        }
    for u, v in graph.edges.tolist():
        yield {"kind": "edge", "source": str(graph.name(u)), "target": str(graph.name(v)), "spans": layers[v] - layers[u]}


def _random_rows(job: Mapping[str, Any]) -> Iterator[Row]:
    for seed in range(job["graphs"]):
        drawn = random.Random(seed)
        n = job["vertices"]
        share = drawn.uniform(0.03, 0.3)
        names = drawn.sample(range(n), n)  # so that the numbering says nothing about the order
        edges = [(names[u], names[v]) for u in range(n) for v in range(u + 1, n) if drawn.random() < share]
        graph = Graph.of(edges, vertices=n)
        expected = brute_force(n, edges)
        degrees = [sum(v == w for _, w in edges) for v in range(n)]
        width = min((degrees[v] for v in range(n) if expected[v] >= 2), default=None)
        wrong = sum(a != b for a, b in zip(graph.layers.tolist(), expected, strict=True)) + (graph.width != width)
        yield {"kind": "random", "seed": seed, "edges": len(edges), "depth": graph.depth, "wrong": wrong}


def _by_layer(vertices: Mapping[str, Row]) -> dict[str, tuple[float, float]]:
    """Each layer on one line, spread evenly."""
    places = {}
    for layer in {row["layer"] for row in vertices.values()}:
        members = [name for name, row in vertices.items() if row["layer"] == layer]
        for i, name in enumerate(members):
            places[name] = (4.0 * (i + 1) / (len(members) + 1), float(layer))
    return places


def _draw(ax: Any, places: Mapping[str, Any], edges: list[tuple[str, str]], vertices: Mapping[str, Row], title: str) -> None:
    from theodolite import plots

    for u, v in edges:
        arrow: Any = {"arrowstyle": "-|>", "color": "0.55", "shrinkA": 9, "shrinkB": 9, "linewidth": 0.8}
        ax.annotate("", places[v], places[u], arrowprops=arrow)
    for name, (x, y) in places.items():
        colour = plots.PALETTE[0] if vertices[name]["layer"] == 0 else plots.PALETTE[1] if name == "g" else "white"
        ax.scatter([x], [y], s=260, color=colour, edgecolors="0.2", zorder=3)
        ax.text(x, y, name, ha="center", va="center", fontsize=8, color="0.1" if colour == "white" else "white", zorder=4)
    ax.set_title(title)
    ax.set_axis_off()
    ax.margins(0.12)
