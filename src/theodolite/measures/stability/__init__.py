"""How far a trained model moves when one training example is exchanged, and whether two solutions share a basin."""

from theodolite.measures.stability.convex import ConvexBounds, convex_bounds, largest_norm, largest_smoothness
from theodolite.measures.stability.generalisation_bound import fv_bound
from theodolite.measures.stability.linear_path import LinearPath, linear_path
from theodolite.measures.stability.metrics import example_losses
from theodolite.measures.stability.pairs import make_pair
from theodolite.measures.stability.power_law import PowerFit, SlopeWindows, fit_power_law, slope_windows
from theodolite.measures.stability.reading import Explanation, explains
from theodolite.measures.stability.study import StabilityResult, stability
from theodolite.measures.stability.visits import visiting_steps

__all__ = [
    "ConvexBounds",
    "Explanation",
    "LinearPath",
    "PowerFit",
    "SlopeWindows",
    "StabilityResult",
    "convex_bounds",
    "example_losses",
    "explains",
    "fit_power_law",
    "fv_bound",
    "largest_norm",
    "largest_smoothness",
    "linear_path",
    "make_pair",
    "slope_windows",
    "stability",
    "visiting_steps",
]
