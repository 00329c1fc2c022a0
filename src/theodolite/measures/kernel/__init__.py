"""The tangent kernel and what it rules: how linear a model is in its weights, and how fast it can be trained."""

from theodolite.measures.kernel.deviation import Deviation, linearity_deviation
from theodolite.measures.kernel.drift import KernelDrift, kernel_drift, kernels_on_ball, relative_drift
from theodolite.measures.kernel.graph import Graph, layer_index
from theodolite.measures.kernel.hessian_norm import HessianNorm, hessian_norm
from theodolite.measures.kernel.in_degree import InDegrees, in_degree_report
from theodolite.measures.kernel.linearity import LinearityReport, linearity
from theodolite.measures.kernel.polyak_lojasiewicz import PLReport, pl_report
from theodolite.measures.kernel.squared_loss import squared_loss_curvature
from theodolite.measures.kernel.twins import TaylorTwin, linearize, quadratize
from theodolite.measures.kernel.width import WidthReport, dag_width

__all__ = [
    "Deviation",
    "Graph",
    "HessianNorm",
    "InDegrees",
    "KernelDrift",
    "LinearityReport",
    "PLReport",
    "TaylorTwin",
    "WidthReport",
    "dag_width",
    "hessian_norm",
    "in_degree_report",
    "kernel_drift",
    "kernels_on_ball",
    "layer_index",
    "linearity",
    "linearity_deviation",
    "linearize",
    "pl_report",
    "quadratize",
    "relative_drift",
    "squared_loss_curvature",
]
