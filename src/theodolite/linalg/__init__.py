"""L3: algorithms on any operator. Nothing here knows of networks."""

from theodolite.linalg.density import Density, spectral_density
from theodolite.linalg.eigenpairs import Eigenpairs, top_eigenpairs
from theodolite.linalg.overlap import overlap_curve, subspace_overlap
from theodolite.linalg.trace import TraceEstimate, trace

__all__ = [
    "Density",
    "Eigenpairs",
    "TraceEstimate",
    "overlap_curve",
    "spectral_density",
    "subspace_overlap",
    "top_eigenpairs",
    "trace",
]
