"""What the curvature means: its structure layer by layer, how the gradient lies in it, how badly it is conditioned."""

from theodolite.measures.hessian.approximations import (
    FullApproximation,
    firing_rates,
    full_hessian_approximation,
    sharp_subspace,
    weight_product,
)
from theodolite.measures.hessian.clusters import Clusters, logit_clusters
from theodolite.measures.hessian.spectrum import Alignment, Conditioning, conditioning, gradient_alignment
from theodolite.measures.hessian.structure import (
    Autocorrelation,
    Correspondence,
    LayerComparison,
    LayerStructure,
    StructureReport,
    autocorrelation,
    compare_layers,
    correspondence,
    decoupling_error,
    hessian_structure,
    kronecker_overlap,
    outlier_count,
    predicted_overlap,
    rank_one_count,
    rank_ratios,
)
from theodolite.measures.hessian.tracking import EigenTrajectory, track_eigenpairs

__all__ = [
    "Alignment",
    "Autocorrelation",
    "Clusters",
    "Conditioning",
    "Correspondence",
    "EigenTrajectory",
    "FullApproximation",
    "LayerComparison",
    "LayerStructure",
    "StructureReport",
    "autocorrelation",
    "compare_layers",
    "conditioning",
    "correspondence",
    "decoupling_error",
    "firing_rates",
    "full_hessian_approximation",
    "gradient_alignment",
    "hessian_structure",
    "kronecker_overlap",
    "logit_clusters",
    "outlier_count",
    "predicted_overlap",
    "rank_one_count",
    "rank_ratios",
    "sharp_subspace",
    "track_eigenpairs",
    "weight_product",
]
