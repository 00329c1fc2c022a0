"""Saving and loading results: JSON for what is read by people, safetensors for tensors, never pickle."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from theodolite.files import write_whole
from theodolite.results.base import Result, type_key
from theodolite.results.findings import Finding, Severity
from theodolite.results.provenance import Cost, Outcome, Provenance
from theodolite.text import nearest

_PLAIN = {"Cost": Cost, "Provenance": Provenance, "Finding": Finding}


def save(result: Result, path: str | PathLike[str]) -> None:
    """Write `path`.json, and `path`.safetensors if the result holds tensors.

    Each file is complete or absent.
    """
    tensors: dict[str, Tensor] = {}
    document = _encode(result, "result", tensors)
    json_path, tensor_path = _paths(path)
    if tensors:
        write_whole(tensor_path, save_tensors(tensors))
    text = json.dumps({"format": "theodolite-result", "content": document}, indent=1, allow_nan=True)
    write_whole(json_path, text.encode())


def load(path: str | PathLike[str]) -> Result:
    """Read a result that `save` wrote."""
    json_path, tensor_path = _paths(path)
    if not json_path.exists():
        raise FileNotFoundError(f"There is no result at {json_path}. Give the path that save() was given.")
    try:
        document = json.loads(json_path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{json_path} is damaged: {error}.") from error
    if not isinstance(document, dict) or document.get("format") != "theodolite-result":
        raise ValueError(f"{json_path} was not written by Result.save().")
    tensors = load_tensors(tensor_path.read_bytes()) if tensor_path.exists() else {}
    result = _decode(document["content"], tensors)
    if not isinstance(result, Result):
        raise ValueError(f"{json_path} does not hold a result.")
    return result


def _paths(path: str | PathLike[str]) -> tuple[Path, Path]:
    base = Path(path)
    if base.suffix in (".json", ".safetensors"):
        base = base.with_suffix("")
    return base.with_name(base.name + ".json"), base.with_name(base.name + ".safetensors")


def _encode(value: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[key] = value.detach().cpu().contiguous()
        return {"tensor": key}
    if isinstance(value, Outcome):
        return {"outcome": value.name}
    if isinstance(value, Severity):
        return {"severity": value.name}
    if isinstance(value, Result | Cost | Provenance | Finding):
        fields = {f.name: _encode(getattr(value, f.name), f"{key}.{f.name}", tensors) for f in dataclasses.fields(value)}
        if isinstance(value, Result):
            return {"type": value.type_key, "schema": value.schema, "fields": fields}
        return {"type": type(value).__name__, "fields": fields}
    if isinstance(value, dict):
        return {"map": [[name, _encode(v, f"{key}.{i}", tensors)] for i, (name, v) in enumerate(value.items())]}
    if isinstance(value, tuple | list):
        return {"list": [_encode(v, f"{key}.{i}", tensors) for i, v in enumerate(value)]}
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise TypeError(f"{key} is a {type(value).__name__}, which a result cannot hold: use tensors, numbers, text or results.")


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    decoders: dict[str, Callable[[Any], Any]] = {
        "tensor": lambda key: _tensor(key, tensors),
        "outcome": lambda name: Outcome[name],
        "severity": lambda name: Severity[name],
        "map": lambda pairs: {name: _decode(v, tensors) for name, v in pairs},
        "list": lambda items: tuple(_decode(v, tensors) for v in items),
    }
    for tag, decode in decoders.items():
        if tag in value:
            return decode(value[tag])
    return _rebuild(value, tensors)


def _class_of(name: str, module: str | None) -> type[Result]:
    """The result class that a file names: by its key, or, in files of earlier versions, by its name and module."""
    key = name if module is None else type_key(name, module)
    if key not in Result.registry and key in HOMES:
        importlib.import_module(HOMES[key])  # result types are known once their own module is
    if key not in Result.registry:
        near = ", ".join(nearest(key, {*HOMES, *Result.registry}, 3))
        raise ValueError(f"Unknown result type {name!r}; the nearest known: {near}.")
    return Result.registry[key]


def _tensor(key: str, tensors: dict[str, Tensor]) -> Tensor:
    if key not in tensors:
        raise ValueError(
            f"The tensor {key!r} is missing: the .safetensors file beside the .json is absent or from another result."
        )
    return tensors[key]


def _rebuild(document: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    name = document["type"]
    kind: Any = _PLAIN.get(name) or _class_of(name, document.get("module"))
    if document.get("schema", 1) > getattr(kind, "schema", 1):
        raise ValueError(f"This {name} was saved by a newer version of theodolite; update to read it.")
    known = {f.name for f in dataclasses.fields(kind)}
    return kind(**{k: _decode(v, tensors) for k, v in document["fields"].items() if k in known})


#: Where each saved type lives, so that loading a result imports its module and nothing else. A test keeps the table.
HOMES: dict[str, str] = {
    "alignment": "theodolite.measures.hessian.spectrum",
    "anchor-clusters": "theodolite.measures.anchors.probing.clusters",
    "anchor-probe": "theodolite.measures.anchors.probing.probe",
    "atom-geometry": "theodolite.measures.anchors.probing.atoms",
    "atom-matches": "theodolite.measures.dictionary.recovery",
    "atom-usage": "theodolite.measures.dictionary.structure",
    "batch-audit": "theodolite.measures.audit.data",
    "batch-critical-rates": "theodolite.measures.dynamics.batch_rates",
    "catapult-report": "theodolite.monitors.rates.multi_catapult",
    "catapult-sweep": "theodolite.measures.dynamics.sweep",
    "coding-loss": "theodolite.measures.dictionary.losses",
    "comparison": "theodolite.analyses.compare",
    "conditioning": "theodolite.measures.hessian.spectrum",
    "convex-bounds": "theodolite.measures.stability.bounds",
    "critical-rate": "theodolite.measures.dynamics.critical",
    "density": "theodolite.linalg.density",
    "deviation": "theodolite.measures.linearity.deviation",
    "dictionary-choice": "theodolite.measures.dictionary.estimator",
    "dictionary-study": "theodolite.analyses.dictionary_study",
    "eigen-trajectory": "theodolite.measures.hessian.tracking",
    "eigenpairs": "theodolite.linalg.eigenpairs",
    "explanation": "theodolite.measures.stability.explanation",
    "factor-mapping": "theodolite.operators.kronecker.accumulate",
    "feature-movement": "theodolite.measures.features.movement",
    "feature-report": "theodolite.measures.features.report",
    "features-of-model": "theodolite.instruments.features.features",
    "fleet-trace": "theodolite.training.trace",
    "full-approximation": "theodolite.measures.hessian.approximations",
    "gradient-noise": "theodolite.measures.dynamics.noise",
    "hessian-norm": "theodolite.measures.linearity.hessian_norm",
    "hidden-error": "theodolite.measures.dictionary.hidden",
    "in-degrees": "theodolite.measures.linearity.in_degree",
    "input-audit": "theodolite.measures.audit.data",
    "kernel-drift": "theodolite.measures.kernel.drift",
    "kernel-report": "theodolite.instruments.features.kernel",
    "kronecker-eigenpairs": "theodolite.operators.kronecker.factors",
    "kronecker-factors": "theodolite.operators.kronecker.factors",
    "layer-comparison": "theodolite.measures.hessian.structure",
    "layer-structure": "theodolite.measures.hessian.structure",
    "learned-dictionaries": "theodolite.measures.dictionary.learning",
    "linear-path": "theodolite.measures.mode_connectivity.linear_path",
    "linearity-report": "theodolite.measures.linearity.report",
    "loss-split": "theodolite.measures.dynamics.eigenspace_split",
    "match-table": "theodolite.measures.dynamics.spikes",
    "maximum-rate": "theodolite.measures.dynamics.max_rate",
    "monitor-report": "theodolite.monitors.report",
    "parameter-audit": "theodolite.measures.audit.parameters",
    "pl-report": "theodolite.measures.kernel.polyak_lojasiewicz",
    "plan": "theodolite.instruments.planning",
    "power-fit": "theodolite.measures.stability.power_law",
    "prompt-comparison": "theodolite.measures.anchors.transfer.prompts",
    "readout-comparison": "theodolite.measures.anchors.transfer.readout",
    "regime": "theodolite.measures.dynamics.regimes",
    "regime-diagram": "theodolite.instruments.rates.regimes",
    "restricted-isometry": "theodolite.measures.dictionary.structure",
    "result-mapping": "theodolite.results.base",
    "slope-windows": "theodolite.measures.stability.power_law",
    "stability-result": "theodolite.measures.stability.study",
    "structure-report": "theodolite.measures.hessian.structure",
    "survey": "theodolite.instruments.survey_run",
    "trace": "theodolite.training.trace",
    "trace-estimate": "theodolite.linalg.trace",
    "transfer-certificate": "theodolite.measures.anchors.transfer.certificate",
    "weight-linearity": "theodolite.measures.dynamics.weight_linearity",
    "width-report": "theodolite.measures.linearity.in_degree",
}
