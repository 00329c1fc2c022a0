"""How far a trained model moves when one training example is exchanged, and what that explains."""

from theodolite._names import imported
from theodolite.measures.stability.bounds import ConvexBounds as ConvexBounds
from theodolite.measures.stability.bounds import convex_bounds as convex_bounds
from theodolite.measures.stability.bounds import fv_bound as fv_bound
from theodolite.measures.stability.bounds import largest_norm as largest_norm
from theodolite.measures.stability.bounds import largest_smoothness as largest_smoothness
from theodolite.measures.stability.power_law import Explanation as Explanation
from theodolite.measures.stability.power_law import PowerFit as PowerFit
from theodolite.measures.stability.power_law import SlopeWindows as SlopeWindows
from theodolite.measures.stability.power_law import explains as explains
from theodolite.measures.stability.power_law import fit_power_law as fit_power_law
from theodolite.measures.stability.power_law import slope_windows as slope_windows
from theodolite.measures.stability.study import StabilityResult as StabilityResult
from theodolite.measures.stability.study import stability as stability
from theodolite.measures.stability.training_pairs import example_losses as example_losses
from theodolite.measures.stability.training_pairs import make_pair as make_pair
from theodolite.measures.stability.training_pairs import visiting_steps as visiting_steps

__all__ = sorted(imported(__file__))
