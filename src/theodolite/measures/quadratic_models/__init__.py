"""Quadratic models whose gradient descent is known exactly: gated networks, scalar recursions, the general form.

Convention of the formulas: loss ½ Σ (g − y)², tangent kernel K = J Jᵀ without a factor. Gradients descend from
`rate · ∇loss`; `half_sum_rate` translates a rate that belongs to another squared loss.
"""

from theodolite.measures.quadratic_models.models import (
    Descent,
    GatedBilinear,
    GeneralQuadratic,
    QuadraticStep,
    TopDirection,
    descend,
    gated_kernel,
    gated_output,
    quadratic_step,
    top_direction,
)
from theodolite.measures.quadratic_models.recursions import (
    CONVENTIONS,
    Orbit,
    SignClasses,
    class_eigenvalues,
    class_orbit,
    critical_rate,
    displacement,
    half_sum_rate,
    largest_rate,
    one_example,
    one_example_step,
    pure_quadratic,
    reduced_step,
    sign_classes,
    unit_sigma,
)

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
