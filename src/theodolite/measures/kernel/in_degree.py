"""How many inputs the units of any model's layers sum over, which bounds how linear the model can become."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from theodolite.measures.kernel.graph import Graph
from theodolite.measures.kernel.width import dag_width
from theodolite.results import Outcome, Result, Row

_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
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
    if isinstance(module, _RECURRENT):
        return None, _MEASURE
    if getattr(module, "in_features", None) is not None and len(shape) == 2:
        return shape[1], ""
    if "conv" in type(module).__name__.lower() and len(shape) >= 3:
        return int(weight[0].numel()), "channels × filter entries / groups"  # type: ignore[index]
    return None, "unknown kind of layer; " + _MEASURE
