"""Quadratic models whose gradient descent is known exactly: gated networks, scalar recursions, the general form.

Convention of the formulas: loss ½ Σ (g − y)², tangent kernel K = J Jᵀ without a factor. Gradients descend from
`rate · ∇loss`; `half_sum_rate` translates a rate that belongs to another squared loss.
"""

from theodolite.measures.dynamics.quadratic.conventions import CONVENTIONS, critical_rate, half_sum_rate
from theodolite.measures.dynamics.quadratic.gated import Descent, GatedBilinear, descend, gated_kernel, gated_output
from theodolite.measures.dynamics.quadratic.general import GeneralQuadratic, QuadraticStep, quadratic_step
from theodolite.measures.dynamics.quadratic.largest_rate import largest_rate
from theodolite.measures.dynamics.quadratic.one_dimensional import SignClasses, class_eigenvalues, class_orbit, sign_classes
from theodolite.measures.dynamics.quadratic.orbit import Orbit
from theodolite.measures.dynamics.quadratic.recursions import (
    displacement,
    one_example,
    one_example_step,
    pure_quadratic,
    reduced_step,
    unit_sigma,
)
from theodolite.measures.dynamics.quadratic.top_direction import TopDirection, top_direction

__all__ = [
    "CONVENTIONS",
    "Descent",
    "GatedBilinear",
    "GeneralQuadratic",
    "Orbit",
    "QuadraticStep",
    "SignClasses",
    "TopDirection",
    "class_eigenvalues",
    "class_orbit",
    "critical_rate",
    "descend",
    "displacement",
    "gated_kernel",
    "gated_output",
    "half_sum_rate",
    "largest_rate",
    "one_example",
    "one_example_step",
    "pure_quadratic",
    "quadratic_step",
    "reduced_step",
    "sign_classes",
    "top_direction",
    "unit_sigma",
]
