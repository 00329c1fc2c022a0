"""Runs that stop between two steps and go on where they were: Ctrl-C deferred, training states on disk."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from theodolite.files import json_check_sum, write_whole
from theodolite.interrupts import HandledBy, unbroken_context

#: The newest state; a kill while it is written leaves the one before.
NAME = "checkpoint.safetensors"


@unbroken_context
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether Ctrl-C was pressed; a second press interrupts at once.

    Only the main thread receives signals; elsewhere nothing is deferred.
    """
    pressed: list[int] = []

    def note(number: int, frame: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    with HandledBy(note):
        yield lambda: bool(pressed)


# Training states on disk: safetensors for tensors, JSON for the rest, never pickle.


def save_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write a nested state of tensors, numbers, strings, lists and dictionaries as one file with its check sum."""
    tensors: dict[str, Tensor] = {}
    document = json.dumps(_encode(state, tensors))
    tensors.setdefault("", torch.zeros(0))  # safetensors wants at least one
    write_whole(folder / NAME, save_tensors(tensors, metadata={"state": document, "check": _check_sum(document, tensors)}))


def load_state(folder: Path) -> dict[str, Any] | None:
    """The newest state of a folder, None if there is none."""
    path = folder / NAME
    if not path.exists():
        return None
    content = path.read_bytes()
    try:
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        tensors = load_tensors(content)
        metadata = header["__metadata__"]
        unchecked = set(metadata) == {"state"}  # by earlier versions
        if not unchecked and metadata["check"] != _check_sum(metadata["state"], tensors):
            raise ValueError("its content does not have its check sum")
        state: dict[str, Any] = _decode(json.loads(metadata["state"]), tensors)
    except Exception as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}). Remove it to train from the start.") from error
    return state


def _check_sum(document: str, tensors: Mapping[str, Tensor]) -> str:
    return json_check_sum([document, *tensor_check_sums(tensors)])


def tensor_check_sums(tensors: Mapping[str, Tensor]) -> list[str]:
    """What tensors hold, one line each in the order of their names; of sparse ones the shape alone."""

    def line(tensor: Tensor) -> str:
        shape = f"{tensor.dtype} {list(tensor.shape)}"
        if tensor.layout is not torch.strided:
            return shape
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return f"{shape} {zlib.crc32(flat.view(torch.uint8).numpy().data):08x}"

    return [f"{name} {line(tensors[name])}" for name in sorted(tensors)]


def _encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().clone().contiguous()
        return {"$tensor": name}
    if isinstance(value, Mapping):
        # Keys keep their type: optimizers number their parameters.
        return {"$items": [[key, _encode(item, tensors)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"$tuple": [_encode(item, tensors) for item in value]}
    if isinstance(value, list):
        return [_encode(item, tensors) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"A training state may hold tensors, numbers, strings, lists and dictionaries. Got {type(value).__name__}.")


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]]
    if "$tuple" in value:
        return tuple(_decode(item, tensors) for item in value["$tuple"])
    return {key: _decode(item, tensors) for key, item in value["$items"]}
