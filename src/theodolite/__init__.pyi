# The public names, grouped by question. This file is their only list: `__init__.py` reads it and imports each name on first use,
# and the reference of the documentation has a page for each group. Everything else is public under its room:
# `th.measures.dynamics.gradient_noise`, `th.anchors.anchor_clusters`.

# Survey a model
from theodolite.instruments import survey as survey
from theodolite.analyses.compare import compare as compare
from theodolite.problem import Problem as Problem
from theodolite.results import Finding as Finding
from theodolite.results import Result as Result
from theodolite.results import load as load

# How sharp is it?
from theodolite.operators import hessian as hessian
from theodolite.operators import gauss_newton as gauss_newton
from theodolite.operators import layer_hessians as layer_hessians
from theodolite.operators import kronecker_factors as kronecker_factors
from theodolite.operators import LinearOperator as LinearOperator
from theodolite.linalg import top_eigenpairs as top_eigenpairs
from theodolite.linalg import spectral_density as spectral_density
from theodolite.linalg import trace as trace
from theodolite.linalg import subspace_overlap as subspace_overlap
from theodolite.linalg import overlap_curve as overlap_curve
from theodolite.measures.hessian import hessian_structure as hessian_structure

# How fast may I train?
from theodolite.measures.dynamics import lr_range_test as lr_range_test
from theodolite.measures.dynamics import critical_learning_rate as critical_learning_rate
from theodolite.measures.dynamics import find_max_learning_rate as find_max_learning_rate
from theodolite.measures.dynamics import catapult_sweep as catapult_sweep
from theodolite.monitors import MultiCatapult as MultiCatapult

# Which step size?
from theodolite.measures.stepsize import stable_meta_gradient as stable_meta_gradient
from theodolite.measures.stepsize import meta_gradient_health as meta_gradient_health
from theodolite.measures.stepsize import tune_step_size as tune_step_size
from theodolite.measures.stepsize import meta_gradient as meta_gradient
from theodolite.measures.stepsize import LearnedOptimizer as LearnedOptimizer
from theodolite.measures.stepsize import meta_train as meta_train

# What happened in the run?
from theodolite.monitors import Monitor as Monitor
from theodolite.monitors import compare_runs as compare_runs
from theodolite.measures.dynamics import classify_run as classify_run
from theodolite.training import train as train
from theodolite.training import Fleet as Fleet

# Is it a kernel machine?
from theodolite.operators import tangent_kernel as tangent_kernel
from theodolite.operators import tangent_kernel_operator as tangent_kernel_operator
from theodolite.measures.kernel import linearize as linearize
from theodolite.measures.kernel import quadratize as quadratize
from theodolite.measures.linearity import linearity as linearity
from theodolite.models.dag import DagNetwork as DagNetwork

# What did it learn?
from theodolite.measures.features import agop as agop
from theodolite.measures.features import agop_alignment as agop_alignment
from theodolite.measures.anchors import anchor_probe as anchor_probe
from theodolite.measures import anchors as anchors
from theodolite.measures.dictionary import MaskedDictionaryLearning as MaskedDictionaryLearning
from theodolite.measures.dictionary import orthogonal_matching_pursuit as orthogonal_matching_pursuit
from theodolite.measures.dictionary import recovery_error as recovery_error
from theodolite.measures import dictionary as dictionary

# Which data matter?
from theodolite.measures.stability import stability as stability
from theodolite.measures.mode_connectivity import linear_path as linear_path

# How often will it be wrong?
from theodolite.measures.bounds import pac_bayes_bound as pac_bayes_bound
from theodolite.measures.bounds import risk_certificate as risk_certificate
from theodolite.measures.bounds import held_out_bound as held_out_bound
from theodolite.measures.bounds import kl_inverse as kl_inverse

# How do I make it deeper?
from theodolite.measures.growth import growth_operators as growth_operators
from theodolite.measures.growth import grow as grow
from theodolite.measures.growth import landscape_aware_growth as landscape_aware_growth
from theodolite.measures.growth import growth_study as growth_study
from theodolite.measures.growth import adaptive_stacking as adaptive_stacking

# Reproduce
from theodolite import experiments as experiments
from theodolite import data as data
from theodolite import models as models
from theodolite import runners as runners

# Extend
from theodolite import instruments as instruments
from theodolite import measures as measures
from theodolite import plots as plots
from theodolite import testing as testing

__version__: str
