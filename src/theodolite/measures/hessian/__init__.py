"""What the curvature means: its structure layer by layer, how the gradient lies in it, how badly it is conditioned."""

from theodolite._names import imported
from theodolite.measures.hessian.approximations import Clusters as Clusters
from theodolite.measures.hessian.approximations import FullApproximation as FullApproximation
from theodolite.measures.hessian.approximations import firing_rates as firing_rates
from theodolite.measures.hessian.approximations import full_hessian_approximation as full_hessian_approximation
from theodolite.measures.hessian.approximations import logit_clusters as logit_clusters
from theodolite.measures.hessian.approximations import sharp_subspace as sharp_subspace
from theodolite.measures.hessian.approximations import weight_product as weight_product
from theodolite.measures.hessian.spectrum import Alignment as Alignment
from theodolite.measures.hessian.spectrum import Conditioning as Conditioning
from theodolite.measures.hessian.spectrum import conditioning as conditioning
from theodolite.measures.hessian.spectrum import gradient_alignment as gradient_alignment
from theodolite.measures.hessian.structure import Autocorrelation as Autocorrelation
from theodolite.measures.hessian.structure import Correspondence as Correspondence
from theodolite.measures.hessian.structure import LayerComparison as LayerComparison
from theodolite.measures.hessian.structure import LayerStructure as LayerStructure
from theodolite.measures.hessian.structure import StructureReport as StructureReport
from theodolite.measures.hessian.structure import autocorrelation as autocorrelation
from theodolite.measures.hessian.structure import compare_layers as compare_layers
from theodolite.measures.hessian.structure import correspondence as correspondence
from theodolite.measures.hessian.structure import decoupling_error as decoupling_error
from theodolite.measures.hessian.structure import hessian_structure as hessian_structure
from theodolite.measures.hessian.structure import kronecker_overlap as kronecker_overlap
from theodolite.measures.hessian.structure import outlier_count as outlier_count
from theodolite.measures.hessian.structure import predicted_overlap as predicted_overlap
from theodolite.measures.hessian.structure import rank_one_count as rank_one_count
from theodolite.measures.hessian.structure import rank_ratios as rank_ratios
from theodolite.measures.hessian.tracking import EigenTrajectory as EigenTrajectory
from theodolite.measures.hessian.tracking import track_eigenpairs as track_eigenpairs

__all__ = sorted(imported(__file__))
