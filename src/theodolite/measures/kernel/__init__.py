"""The tangent kernel and what it rules: how it drifts, how fast it lets a model train, and a model's Taylor expansions."""

from theodolite.measures.kernel.drift import KernelDrift, PLReport, kernel_drift, kernels_on_ball, pl_report, relative_drift
from theodolite.measures.kernel.problem_views import squared_loss_curvature
from theodolite.measures.kernel.twins import TaylorTwin, linearize, quadratize

__all__ = [
    "KernelDrift",
    "PLReport",
    "TaylorTwin",
    "kernel_drift",
    "kernels_on_ball",
    "linearize",
    "pl_report",
    "quadratize",
    "relative_drift",
    "squared_loss_curvature",
]
