# The public names, grouped by question. This file is their only list: `__init__.py` reads it and imports each name on first use.
# Everything else is public under its room: `th.measures.dynamics.gradient_noise`, `th.anchors.anchor_clusters`.

# What is measured: a model, its loss, its data
# Rooms that are used by their own name: `th.experiments.names()`, `th.data.load("mnist")`
from theodolite import (
    data as data,
)
from theodolite import (
    experiments as experiments,
)
from theodolite import (
    instruments as instruments,
)
from theodolite import (
    measures as measures,
)
from theodolite import (
    models as models,
)
from theodolite import (
    plots as plots,
)
from theodolite import (
    runners as runners,
)
from theodolite import (
    testing as testing,
)

# Which data matter, and do two runs agree?
from theodolite.analyses.compare import compare as compare

# The main job, and what comes back
from theodolite.instruments import survey as survey

# How sharp is it, and why?
from theodolite.linalg import (
    overlap_curve as overlap_curve,
)
from theodolite.linalg import (
    spectral_density as spectral_density,
)
from theodolite.linalg import (
    subspace_overlap as subspace_overlap,
)
from theodolite.linalg import (
    top_eigenpairs as top_eigenpairs,
)
from theodolite.linalg import (
    trace as trace,
)
from theodolite.measures import anchors as anchors
from theodolite.measures import dictionary as dictionary

# Dictionaries and language models
from theodolite.measures.anchors import anchor_probe as anchor_probe
from theodolite.measures.dictionary import (
    MaskedDictionaryLearning as MaskedDictionaryLearning,
)
from theodolite.measures.dictionary import (
    orthogonal_matching_pursuit as orthogonal_matching_pursuit,
)
from theodolite.measures.dictionary import (
    recovery_error as recovery_error,
)

# How fast may it be trained, and what happened in the run?
from theodolite.measures.dynamics import (
    catapult_sweep as catapult_sweep,
)
from theodolite.measures.dynamics import (
    classify_run as classify_run,
)
from theodolite.measures.dynamics import (
    critical_learning_rate as critical_learning_rate,
)
from theodolite.measures.dynamics import (
    find_max_learning_rate as find_max_learning_rate,
)

# Is it a kernel machine, and what did it learn?
from theodolite.measures.features import agop as agop
from theodolite.measures.features import agop_alignment as agop_alignment
from theodolite.measures.hessian import hessian_structure as hessian_structure
from theodolite.measures.kernel import linearize as linearize
from theodolite.measures.kernel import quadratize as quadratize
from theodolite.measures.linearity import linearity as linearity
from theodolite.measures.mode_connectivity import linear_path as linear_path
from theodolite.measures.stability import stability as stability
from theodolite.models.dag import DagNetwork as DagNetwork
from theodolite.monitors import Monitor as Monitor
from theodolite.monitors import MultiCatapult as MultiCatapult

# Matrices known by their action
from theodolite.operators import (
    LinearOperator as LinearOperator,
)
from theodolite.operators import (
    gauss_newton as gauss_newton,
)
from theodolite.operators import (
    hessian as hessian,
)
from theodolite.operators import (
    kronecker_factors as kronecker_factors,
)
from theodolite.operators import (
    layer_hessians as layer_hessians,
)
from theodolite.operators import (
    tangent_kernel as tangent_kernel,
)
from theodolite.operators import (
    tangent_kernel_operator as tangent_kernel_operator,
)
from theodolite.problem import Problem as Problem
from theodolite.results import Finding as Finding
from theodolite.results import Result as Result
from theodolite.results import load as load
from theodolite.training import Fleet as Fleet
from theodolite.training import train as train

__version__: str
