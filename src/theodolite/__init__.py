"""Theodolite: survey how a neural network trains.

>>> import theodolite as th
>>> import torch
>>> model = torch.nn.Linear(2, 1, bias=False).double()
>>> data = torch.tensor([[1.0, 0.0], [0.0, 3.0]]).double(), torch.zeros(2, 1).double()
>>> problem = th.Problem(model, torch.nn.MSELoss(), data)
>>> pairs = th.top_eigenpairs(th.hessian(problem), k=1)
>>> round(float(pairs.values[0]), 6)
9.0
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from theodolite import (
        data as data,
        experiments as experiments,
        instruments as instruments,
        models as models,
        plots as plots,
        runners as runners,
        testing as testing,
    )
    from theodolite.linalg import (
        Density as Density,
        Eigenpairs as Eigenpairs,
        TraceEstimate as TraceEstimate,
        overlap_curve as overlap_curve,
        spectral_density as spectral_density,
        subspace_overlap as subspace_overlap,
        top_eigenpairs as top_eigenpairs,
        trace as trace,
    )
    from theodolite.operators import (
        DenseOperator as DenseOperator,
        KroneckerFactors as KroneckerFactors,
        KroneckerOperator as KroneckerOperator,
        LinearOperator as LinearOperator,
        as_operator as as_operator,
        gauss_newton as gauss_newton,
        hessian as hessian,
        jacobian as jacobian,
        kronecker_factors as kronecker_factors,
        layer_hessians as layer_hessians,
        tangent_kernel as tangent_kernel,
        tangent_kernel_operator as tangent_kernel_operator,
    )
    from theodolite.analyses.compare import Comparison as Comparison, compare as compare
    from theodolite.instruments import (
        Plan as Plan,
        Survey as Survey,
        plan_survey as plan_survey,
        survey as survey,
    )
    from theodolite.measures.audit import (
        audit_batches as audit_batches,
        audit_inputs as audit_inputs,
        audit_parameters as audit_parameters,
    )
    from theodolite.measures.dynamics import (
        CatapultSweep as CatapultSweep,
        CriticalRate as CriticalRate,
        MaximumRate as MaximumRate,
        WeightLinearity as WeightLinearity,
        catapult_sweep as catapult_sweep,
        classify_run as classify_run,
        critical_learning_rate as critical_learning_rate,
        expected_regime as expected_regime,
        find_max_learning_rate as find_max_learning_rate,
        gradient_noise as gradient_noise,
        weight_linearity as weight_linearity,
    )
    from theodolite.measures.features import (
        AGOP as AGOP,
        agop as agop,
        agop_alignment as agop_alignment,
        agop_penalty as agop_penalty,
    )
    from theodolite.measures.hessian import (
        EigenTrajectory as EigenTrajectory,
        StructureReport as StructureReport,
        conditioning as conditioning,
        full_hessian_approximation as full_hessian_approximation,
        gradient_alignment as gradient_alignment,
        hessian_structure as hessian_structure,
        logit_clusters as logit_clusters,
        predicted_overlap as predicted_overlap,
        track_eigenpairs as track_eigenpairs,
    )
    from theodolite.measures.linearity import (
        Graph as Graph,
        LinearityReport as LinearityReport,
        dag_width as dag_width,
        hessian_norm as hessian_norm,
        in_degree_report as in_degree_report,
        linearity as linearity,
        linearity_deviation as linearity_deviation,
    )
    from theodolite.measures.kernel import (
        kernel_drift as kernel_drift,
        linearize as linearize,
        quadratize as quadratize,
        pl_report as pl_report,
    )
    from theodolite.monitors import (
        CriticalRateLR as CriticalRateLR,
        Monitor as Monitor,
        MonitorReport as MonitorReport,
        MultiCatapult as MultiCatapult,
        cyclical_rate as cyclical_rate,
    )
    from theodolite.models.dag import DagNetwork as DagNetwork
    from theodolite.problem import Problem as Problem
    from theodolite.results import Finding as Finding, Outcome as Outcome, Result as Result, Severity as Severity, load as load
    from theodolite.measures.anchors import (
        AnchorProbe as AnchorProbe,
        LogLinear as LogLinear,
        TransferCertificate as TransferCertificate,
        anchor_clusters as anchor_clusters,
        anchor_probe as anchor_probe,
        anchored_logits as anchored_logits,
        atom_geometry as atom_geometry,
        compare_prompts as compare_prompts,
        compare_readouts as compare_readouts,
        fit_readout as fit_readout,
        probe_states as probe_states,
        prompted_states as prompted_states,
        rare_word_module as rare_word_module,
        shift_anchor as shift_anchor,
        shift_log_linear as shift_log_linear,
        shifted_module as shifted_module,
        transfer_certificate as transfer_certificate,
    )
    from theodolite.measures.dictionary import (
        DictionaryChoice as DictionaryChoice,
        HiddenError as HiddenError,
        MaskedDictionaryLearning as MaskedDictionaryLearning,
        choose_dictionary as choose_dictionary,
        coherence as coherence,
        hidden_error as hidden_error,
        orthogonal_matching_pursuit as orthogonal_matching_pursuit,
        recovery_error as recovery_error,
        restricted_isometry as restricted_isometry,
    )
    from theodolite.measures.stability import (
        Explanation as Explanation,
        PowerFit as PowerFit,
        StabilityResult as StabilityResult,
        convex_bounds as convex_bounds,
        explains as explains,
        fit_power_law as fit_power_law,
        fv_bound as fv_bound,
        make_pair as make_pair,
        slope_windows as slope_windows,
        stability as stability,
        visiting_steps as visiting_steps,
    )
    from theodolite.measures.mode_connectivity import LinearPath as LinearPath, linear_path as linear_path
    from theodolite.training import Fleet as Fleet, FleetTrace as FleetTrace, Trace as Trace, train as train

__version__ = "0.1.0"

# The table of contents, by room. Names are imported on first use, so `import theodolite` stays light.
_CONTENTS = {
    # the user's model, loss, parameters and data
    "theodolite.problem": ["Problem"],
    # matrices known by their action
    "theodolite.operators": [
        "LinearOperator",
        "DenseOperator",
        "KroneckerFactors",
        "KroneckerOperator",
        "as_operator",
        "hessian",
        "gauss_newton",
        "jacobian",
        "kronecker_factors",
        "layer_hessians",
        "tangent_kernel",
        "tangent_kernel_operator",
    ],
    # what to ask of them
    "theodolite.linalg": [
        "top_eigenpairs",
        "spectral_density",
        "trace",
        "subspace_overlap",
        "overlap_curve",
        "Eigenpairs",
        "Density",
        "TraceEstimate",
    ],
    # how training moves
    "theodolite.measures.dynamics": [
        "critical_learning_rate",
        "CriticalRate",
        "expected_regime",
        "find_max_learning_rate",
        "MaximumRate",
        "catapult_sweep",
        "CatapultSweep",
        "classify_run",
        "gradient_noise",
        "weight_linearity",
        "WeightLinearity",
    ],
    # what the curvature means
    "theodolite.measures.hessian": [
        "hessian_structure",
        "StructureReport",
        "track_eigenpairs",
        "EigenTrajectory",
        "full_hessian_approximation",
        "predicted_overlap",
        "logit_clusters",
        "gradient_alignment",
        "conditioning",
    ],
    # how linear a model is in its weights, and what that promises
    "theodolite.measures.linearity": [
        "linearity",
        "LinearityReport",
        "hessian_norm",
        "linearity_deviation",
        "in_degree_report",
        "dag_width",
        "Graph",
    ],
    "theodolite.measures.kernel": ["kernel_drift", "linearize", "quadratize", "pl_report"],
    # what a model looks at in its inputs
    "theodolite.measures.features": ["agop", "AGOP", "agop_alignment", "agop_penalty"],
    # a training run watched from inside its loop, and rates that follow what is seen
    "theodolite.monitors": ["Monitor", "MonitorReport", "MultiCatapult", "CriticalRateLR", "cyclical_rate"],
    # networks on any directed acyclic graph
    "theodolite.models.dag": ["DagNetwork"],
    # how much hangs on one example, and whether two solutions share a basin
    "theodolite.measures.stability": [
        "stability",
        "StabilityResult",
        "make_pair",
        "visiting_steps",
        "fit_power_law",
        "PowerFit",
        "slope_windows",
        "explains",
        "Explanation",
        "fv_bound",
        "convex_bounds",
    ],
    "theodolite.measures.mode_connectivity": ["linear_path", "LinearPath"],
    # whether a language model's output layer has an anchor vector, and what follows for downstream tasks
    "theodolite.measures.anchors": [
        "anchor_probe",
        "AnchorProbe",
        "probe_states",
        "anchor_clusters",
        "atom_geometry",
        "LogLinear",
        "anchored_logits",
        "fit_readout",
        "compare_readouts",
        "prompted_states",
        "compare_prompts",
        "transfer_certificate",
        "TransferCertificate",
        "shift_log_linear",
        "shift_anchor",
        "shifted_module",
        "rare_word_module",
    ],
    # atoms that predict hidden coordinates, and how well they were recovered
    "theodolite.measures.dictionary": [
        "MaskedDictionaryLearning",
        "orthogonal_matching_pursuit",
        "recovery_error",
        "hidden_error",
        "HiddenError",
        "choose_dictionary",
        "DictionaryChoice",
        "coherence",
        "restricted_isometry",
    ],
    # what is there before anything is measured
    "theodolite.measures.audit": ["audit_batches", "audit_inputs", "audit_parameters"],
    # the main job
    "theodolite.analyses.compare": ["compare", "Comparison"],
    "theodolite.instruments": ["survey", "plan_survey", "Survey", "Plan"],
    # training runs and their traces
    "theodolite.training": ["train", "Trace", "Fleet", "FleetTrace"],
    # what comes back
    "theodolite.results": ["Result", "Outcome", "Finding", "Severity", "load"],
}
# Rooms that are used by their own name: `th.experiments.names()`, `th.data.load("mnist")`.
_ROOMS = ["data", "experiments", "instruments", "models", "plots", "runners", "testing"]
_HOME = {name: module for module, names in _CONTENTS.items() for name in names}

__all__ = [*_HOME, *_ROOMS]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"theodolite.{name}")
    raise AttributeError(f"module 'theodolite' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
