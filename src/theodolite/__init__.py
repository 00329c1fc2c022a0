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

__version__ = "0.1.0"
#: Names of version 0.1 that are public under their room only; here for one more release.
_MOVED = {
    "theodolite.operators": "DenseOperator KroneckerFactors KroneckerOperator as_operator jacobian",
    "theodolite.linalg": "Eigenpairs Density TraceEstimate",
    "theodolite.measures.dynamics": (
        "CriticalRate expected_regime MaximumRate CatapultSweep gradient_noise weight_linearity WeightLinearity"
    ),
    "theodolite.measures.hessian": (
        "StructureReport track_eigenpairs EigenTrajectory full_hessian_approximation predicted_overlap "
        "logit_clusters gradient_alignment conditioning"
    ),
    "theodolite.measures.linearity": "LinearityReport hessian_norm linearity_deviation in_degree_report dag_width Graph",
    "theodolite.measures.kernel": "kernel_drift pl_report",
    "theodolite.measures.features": "AGOP agop_penalty",
    "theodolite.monitors": "MonitorReport CriticalRateLR cyclical_rate",
    "theodolite.measures.stability": (
        "StabilityResult make_pair visiting_steps fit_power_law PowerFit slope_windows explains Explanation "
        "fv_bound convex_bounds"
    ),
    "theodolite.measures.mode_connectivity": "LinearPath",
    "theodolite.measures.anchors": (
        "AnchorProbe probe_states anchor_clusters atom_geometry LogLinear anchored_logits fit_readout "
        "compare_readouts prompted_states compare_prompts transfer_certificate TransferCertificate "
        "shift_log_linear shift_anchor shifted_module rare_word_module"
    ),
    "theodolite.measures.dictionary": "hidden_error HiddenError choose_dictionary DictionaryChoice coherence restricted_isometry",
    "theodolite.measures.audit": "audit_batches audit_inputs audit_parameters",
    "theodolite.analyses.compare": "Comparison",
    "theodolite.instruments": "plan_survey Survey Plan",
    "theodolite.training": "Trace FleetTrace",
    "theodolite.results": "Outcome Severity",
}
_OLD_HOMES = {name: module for module, names in _MOVED.items() for name in names.split()}
_HOMES: dict[str, str] = {}


def _homes() -> dict[str, str]:
    """Public name -> module, from the imports of the stub beside this file; read at first use: importing should cost nothing."""
    if not _HOMES:
        import ast
        from pathlib import Path

        tree = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
        imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        _HOMES.update({alias.name: str(node.module) for node in imports for alias in node.names})
    return _HOMES


def __getattr__(name: str) -> object:
    import importlib.util
    import warnings

    if name == "__all__":
        return list(_homes())
    if name in _homes():
        return _attribute(_homes()[name], name)
    if name in _OLD_HOMES:
        home = _OLD_HOMES[name]
        place = f"th.{home.removeprefix('theodolite.')}.{name}"
        warnings.warn(f"th.{name} is now {place}; the short name goes with the next release.", DeprecationWarning, stacklevel=2)
        return _attribute(home, name)
    if not name.startswith("_") and importlib.util.find_spec(f"theodolite.{name}") is not None:
        return importlib.import_module(f"theodolite.{name}")
    raise AttributeError(f"module 'theodolite' has no attribute {name!r}")


def _attribute(module: str, name: str) -> object:
    import importlib

    if module in ("theodolite", "theodolite.measures"):  # the name is a room
        return importlib.import_module(f"{module}.{name}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted([*globals(), "__all__", *_homes()])
