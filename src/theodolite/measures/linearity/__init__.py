"""How linear a model is in its weights: the Hessian of its outputs, its distance from its linearisation, its in-degrees."""

from theodolite.measures.linearity.graph import Graph, InDegrees, WidthReport, dag_width, in_degree_report, layer_index
from theodolite.measures.linearity.report import (
    Deviation,
    HessianNorm,
    LinearityReport,
    hessian_norm,
    linearity,
    linearity_deviation,
)

__all__ = [
    "Deviation",
    "Graph",
    "HessianNorm",
    "InDegrees",
    "LinearityReport",
    "WidthReport",
    "dag_width",
    "hessian_norm",
    "in_degree_report",
    "layer_index",
    "linearity",
    "linearity_deviation",
]
