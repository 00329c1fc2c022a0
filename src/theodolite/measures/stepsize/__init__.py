"""Which learning rate for this training? Meta-gradients, how far they can be trusted, and the choice itself."""

from theodolite._names import imported
from theodolite.measures.stepsize.health import MetaGradientHealth as MetaGradientHealth
from theodolite.measures.stepsize.health import descend_unrolled as descend_unrolled
from theodolite.measures.stepsize.health import meta_gradient_health as meta_gradient_health
from theodolite.measures.stepsize.health import unrolled_meta_gradient as unrolled_meta_gradient
from theodolite.measures.stepsize.quadratic import StableMetaGradient as StableMetaGradient
from theodolite.measures.stepsize.quadratic import stable_meta_gradient as stable_meta_gradient
from theodolite.measures.stepsize.quadratic_descent import OptimalRate as OptimalRate
from theodolite.measures.stepsize.quadratic_descent import RateDescent as RateDescent
from theodolite.measures.stepsize.quadratic_descent import descend_rate as descend_rate
from theodolite.measures.stepsize.quadratic_descent import optimal_rate as optimal_rate

__all__ = sorted(imported(__file__))
