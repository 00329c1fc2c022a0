"""How far a trained model moves when one training example is exchanged, and what that explains."""

from theodolite.measures.stability.bounds import ConvexBounds, convex_bounds, fv_bound, largest_norm, largest_smoothness
from theodolite.measures.stability.power_law import Explanation, PowerFit, SlopeWindows, explains, fit_power_law, slope_windows
from theodolite.measures.stability.study import StabilityResult, stability
from theodolite.measures.stability.training_pairs import example_losses, make_pair, visiting_steps

__all__ = [
    "ConvexBounds",
    "Explanation",
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
    "make_pair",
    "slope_windows",
    "stability",
    "visiting_steps",
]
