"""How many inputs the units of a network sum over, and whether the few of some threaten linearity."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from theodolite.measures.linearity.graph import Graph
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


# How many inputs the units of any model's layers sum over, which bounds how linear the model can become.

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_MEASURE = "the theorem does not cover it: measure hessian_norm against its width"


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
        if self.width is None:
            said = "No layer behind the first has a known in-degree."
        else:
            said = f"The smallest in-degree behind the first layer is {self.width}."
        if self.bottlenecks:
            said += f" Bottlenecks: {', '.join(self.bottlenecks)}; a narrow layer keeps the model from becoming linear."
        return said + (f" Unknown: {', '.join(self.unknown)}." if self.unknown else "")


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
    found: list[tuple[str, str, int | None, str]] = []
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


def _of_graph(name: str, graph: Graph) -> list[tuple[str, str, int | None, str]]:
    report = dag_width(graph)
    prefix = f"{name}." if name else ""
    rows: list[tuple[str, str, int | None, str]] = []
    for layer in range(1, graph.depth + 1):
        mine = report.layers == layer
        narrow = int(report.bottleneck[mine].sum())
        note = f"{narrow} of {int(mine.sum())} neurons are bottlenecks" if narrow else ""
        rows.append((f"{prefix}layers.{layer - 1}", "DagLayer", int(report.in_degrees[mine].min()), note))
    return rows


def _of_layer(module: nn.Module) -> tuple[int | None, str]:
    """In-degree of a layer's units, None where it has none, and a remark."""
    weight = getattr(module, "weight", None)
    shape = tuple(getattr(weight, "shape", ()))
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return None, "a lookup: reads one row per token and is linear in its weights"
    if isinstance(module, _NORMS):
        return None, "scale and shift of each channel alone"
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return None, "depends on the place in a transposed convolution"
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return None, _MEASURE
    if getattr(module, "in_features", None) is not None and len(shape) == 2:
        return shape[1], ""
    if "conv" in type(module).__name__.lower() and len(shape) >= 3:
        return int(weight[0].numel()), "channels × filter entries / groups"  # type: ignore[index]
    return None, "unknown kind of layer; " + _MEASURE
