"""What the curvature means: how the gradient lies in it, how badly it is conditioned."""

from theodolite.measures.hessian.alignment import Alignment, gradient_alignment
from theodolite.measures.hessian.conditioning import Conditioning, conditioning

__all__ = ["Alignment", "Conditioning", "conditioning", "gradient_alignment"]
