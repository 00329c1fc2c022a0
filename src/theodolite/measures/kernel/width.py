"""Which neurons of a network have few inputs, and whether they threaten linearity."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.measures.kernel.graph import Graph
from theodolite.results import Outcome, Result, Row


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
        return [
            {
                "neuron": self.names[i],
                "layer": int(self.layers[i]),
                "in_degree": int(self.in_degrees[i]),
                "bottleneck": bool(self.bottleneck[i]),
                "share": float(self.share[i]),
                "safe": bool(self.safe[i]),
            }
            for i in range(len(self.names))
        ]

    def sentence(self) -> str:
        if self.width is None:
            return "The network has one layer of weights: it is linear in them."
        count = int(self.bottleneck.sum())
        if not count:
            return f"The width is {self.width} (smallest in-degree behind the first layer); no neuron is a bottleneck."
        verdict = (
            "few enough to leave linearity intact"
            if self.linear
            else f"{int((~self.safe).sum())} neurons are at risk, reading more than a small share through them"
        )
        return f"The width is {self.width}; {count} neurons have in-degrees below {self.threshold:g}: {verdict}."


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
