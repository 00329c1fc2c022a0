"""What the curvature means: its structure layer by layer, how the gradient lies in it, how badly it is conditioned."""

from theodolite.measures.hessian.alignment import Alignment, gradient_alignment
from theodolite.measures.hessian.autocorrelation import Autocorrelation, autocorrelation
from theodolite.measures.hessian.clusters import Clusters, logit_clusters
from theodolite.measures.hessian.comparison import LayerComparison, compare_layers
from theodolite.measures.hessian.conditioning import Conditioning, conditioning
from theodolite.measures.hessian.decoupling import decoupling_error
from theodolite.measures.hessian.full_approximation import FullApproximation, full_hessian_approximation
from theodolite.measures.hessian.matricised import Correspondence, correspondence, kronecker_overlap, rank_ratios
from theodolite.measures.hessian.overlap_law import outlier_count, predicted_overlap, rank_one_count
from theodolite.measures.hessian.structure import LayerStructure, StructureReport, hessian_structure
from theodolite.measures.hessian.tracking import EigenTrajectory, track_eigenpairs
from theodolite.measures.hessian.weight_products import firing_rates, sharp_subspace, weight_product

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
