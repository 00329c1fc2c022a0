"""Saving and loading results: JSON for what is read by people, safetensors for tensors, never pickle."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any, get_args, get_type_hints

from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from theodolite.files import check_sum, json_check_sum, other_version, write_whole
from theodolite.results.base import Result, type_key
from theodolite.results.findings import Finding, Severity
from theodolite.results.provenance import Cost, Outcome, Provenance
from theodolite.text import nearest, quoted

_PLAIN = {"Cost": Cost, "Provenance": Provenance, "Finding": Finding}
_PACKAGE = Path(__file__).parents[1]
_UPDATE = "Update theodolite if a newer version wrote it, or import the module that defines what it holds."
_REMEDY = "Save the result again, or take the file from a copy."


def save(result: Result, path: str | PathLike[str]) -> None:
    """Write `path`.json, and `path`.safetensors if the result holds tensors.

    Each file is complete or absent; the first holds check sums of both, so that one of them is never read with what is not its
    own.
    """
    tensors: dict[str, Tensor] = {}
    document = _encode(result, "result", tensors)
    json_path, tensor_path = _paths(path)
    packed = save_tensors(tensors) if tensors else None
    if packed is not None:
        write_whole(tensor_path, packed)
    parts = {"content": document, "tensors": None if packed is None else check_sum(packed)}
    text = json.dumps({"format": "theodolite-result", "check": json_check_sum(parts), **parts}, indent=1, allow_nan=True)
    write_whole(json_path, text.encode())


def load(path: str | PathLike[str]) -> Result:
    """Read a result that `save` wrote, in this version or an earlier one.

    Returns:
        The result, of the class that was saved.

    >>> import tempfile
    >>> from theodolite.linalg import TraceEstimate
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = TraceEstimate(value=3.0, stderr=0.1, matvecs=9, samples=9, method="hutchinson").save(f"{folder}/trace")
    ...     load(f"{folder}/trace").value
    3.0
    """
    json_path, tensor_path = _paths(path)
    if not json_path.exists():
        raise FileNotFoundError(f"There is no result at {json_path}. Give the path that save() was given.")
    try:
        document = json.loads(json_path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{json_path} is damaged: {error}. {_REMEDY}") from error
    if not isinstance(document, dict) or document.get("format") != "theodolite-result":
        raise ValueError(f"{json_path} was not written by Result.save().")
    checked = document.keys() != {"format", "content"}  # what earlier versions wrote is not
    parts = {name: document.get(name) for name in ("content", "tensors")}
    if checked and document.get("check") != json_check_sum(parts):
        raise ValueError(f"{json_path} is damaged: its content does not have its check sum. {_REMEDY}")
    wanted = not checked or parts["tensors"] is not None
    tensors = _read_tensors(tensor_path, parts["tensors"]) if wanted and tensor_path.exists() else {}
    try:
        result = _decode(parts["content"], tensors)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{json_path} cannot be read: {error}") from error
    if not isinstance(result, Result):
        raise ValueError(f"{json_path} does not hold a result.")
    return result


def _read_tensors(path: Path, check: str | None) -> dict[str, Tensor]:
    """The tensors of a result; where there is a check sum, those that it was saved with and no others."""
    packed = path.read_bytes()
    if check not in (None, check_sum(packed)):
        raise ValueError(
            f"{path} is damaged, or was not saved together with the .json (a save interrupted between the two). {_REMEDY}"
        )
    try:
        return load_tensors(packed)
    except Exception as error:
        raise ValueError(f"{path} is damaged: {error}. {_REMEDY}") from error


def _paths(path: str | PathLike[str]) -> tuple[Path, Path]:
    base = Path(path)
    if base.suffix in (".json", ".safetensors"):
        base = base.with_suffix("")
    return base.with_name(base.name + ".json"), base.with_name(base.name + ".safetensors")


def _encode(value: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[key] = value.detach().cpu().clone().contiguous()  # several may share their memory
        return {"tensor": key}
    if isinstance(value, Outcome | Severity):
        return {type(value).__name__.lower(): value.name}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _encode(getattr(value, f.name), f"{key}.{f.name}", tensors) for f in dataclasses.fields(value)}
        if isinstance(value, Result):
            return {"type": value.type_key, "schema": value.schema, "fields": fields}
        known = isinstance(value, tuple(_PLAIN.values()))  # else a part of the result, which its class declares
        return {"type" if known else "part": type(value).__name__, "fields": fields}
    if isinstance(value, dict):
        return {"map": [[name, _encode(v, f"{key}.{i}", tensors)] for i, (name, v) in enumerate(value.items())]}
    if isinstance(value, tuple | list):
        return {"list": [_encode(v, f"{key}.{i}", tensors) for i, v in enumerate(value)]}
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise TypeError(f"{key} is a {type(value).__name__}, which a result cannot hold: use tensors, numbers, text or results.")


def _decode(value: Any, tensors: dict[str, Tensor], owner: type | None = None) -> Any:
    if not isinstance(value, dict):
        return value
    decoders: dict[str, Callable[[Any], Any]] = {
        "tensor": lambda key: _tensor(key, tensors),
        "outcome": lambda name: _named(Outcome.__members__, name, "outcome"),
        "severity": lambda name: _named(Severity.__members__, name, "severity"),
        "map": lambda pairs: {name: _decode(v, tensors, owner) for name, v in pairs},
        "list": lambda items: tuple(_decode(v, tensors, owner) for v in items),
        "part": lambda name: _build(_named(_declared(owner), name, "part"), value.get("fields"), tensors),
    }
    for tag, decode in decoders.items():
        if tag in value:
            return decode(value[tag])
    return _rebuild(value, tensors)


def _declared(owner: Any) -> dict[str, type]:
    """The dataclasses that the fields of a class are declared to hold, by name."""
    found: dict[str, type] = {}
    todo = list(get_type_hints(owner).values())
    while todo:
        hint = todo.pop()
        todo += get_args(hint)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            found[hint.__name__] = hint
    return found


def _class_of(name: str, module: str | None) -> type[Result]:
    """The result class that a file names: by its key, or, in files of earlier versions, by its name and module."""
    key = name if module is None else type_key(name, module)
    if key not in Result.registry:
        known = homes()
        if key in known:
            importlib.import_module(known[key])  # result types are known once their own module is
    if key not in Result.registry:
        near = ", ".join(nearest(key, {*known, *Result.registry}, 3))
        raise ValueError(f"Unknown result type {name!r}; the nearest known: {near}. {_UPDATE}")
    return Result.registry[key]


@cache
def homes() -> dict[str, str]:
    """The module of every class of this package by the key it would have, read from the sources without importing them."""
    found: dict[str, str] = {}
    for path in _PACKAGE.rglob("*.py"):
        module = ".".join(("theodolite", *path.relative_to(_PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        text = path.read_text(encoding="utf-8")
        found |= {type_key(name, module): module for name in re.findall(r"^class (\w+)\(.*Result", text, flags=re.MULTILINE)}
        found |= dict.fromkeys(re.findall(r"^    type_key(?:: ClassVar\[str\])? = \"(.+)\"", text, flags=re.MULTILINE), module)
    return found


def _tensor(key: str, tensors: dict[str, Tensor]) -> Tensor:
    if key not in tensors:
        raise ValueError(
            f"The tensor {key!r} is missing: the .safetensors file beside the .json is absent or from another result."
        )
    return tensors[key]


def _rebuild(document: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    name = document.get("type")
    if not isinstance(name, str):
        raise ValueError(f"something in it has no type that is known, but {quoted(document)}. {_UPDATE}")
    kind: Any = _PLAIN.get(name) or _class_of(name, document.get("module"))
    version, newest = document.get("schema", 1), getattr(kind, "schema", 1)
    if version not in range(1, newest + 1):
        raise ValueError(other_version(f"its {name}", version, range(1, newest + 1), "Update theodolite to read it."))
    return _build(kind, document.get("fields"), tensors)


def _named(known: Mapping[str, Any], name: Any, what: str) -> Any:
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"it has the {what} {name!r}, and this version knows {', '.join(known)}. {_UPDATE}")
    return known[name]


def _build(kind: Any, fields: Any, tensors: dict[str, Tensor]) -> Any:
    """An object from its stored fields; those that its class no longer has are left out, later ones take their default."""
    if not isinstance(fields, dict):
        raise ValueError(f"its {kind.__name__} has no fields. {_REMEDY}")
    known = {f.name for f in dataclasses.fields(kind)}
    needed = [f.name for f in dataclasses.fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in needed if name not in fields]:
        version = getattr(kind, "schema", 1)
        raise ValueError(f"its {kind.__name__} lacks {quoted(missing)}, which version {version} of it must have. {_REMEDY}")
    return kind(**{name: _decode(value, tensors, kind) for name, value in fields.items() if name in known})
