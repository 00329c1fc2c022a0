"""Weights from a file into a model: safetensors, or what `torch.load(weights_only=True)` accepts, and nothing else."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.cli.loading.module_attribute import reason
from theodolite.data.readers import check_zip
from theodolite.models.pretrained import load_weights
from theodolite.problem.calling import unwrap
from theodolite.text import listed
from theodolite.training.interruption import NAME as STATE
from theodolite.training.interruption import load_state

NESTS = ("state_dict", "model_state_dict", "model", "module")
OPTIMIZERS = ("optimizer", "optimizer_state_dict")
PREFIXES = ("module.", "_orig_mod.", "model.")


@dataclass(frozen=True)
class Checkpoint:
    """Weights by state-dict name, and the state of the optimizer if the file holds one."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Any] | None = None


def read_file(path: str | Path) -> Any:
    """The content of a .safetensors file, or of a file of torch's; never unpickled beyond tensors and plain values."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is no sound safetensors file: {reason(error)}.") from error
    if zipfile.is_zipfile(path):
        check_zip(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds more than tensors and plain values, or is no file of torch's; it was not unpickled. "
            "Save torch.save(model.state_dict(), FILE) or a .safetensors file and name that."
        ) from error
    except (RuntimeError, EOFError, ValueError, LookupError) as error:
        raise ValueError(
            f"{path} could not be read as a checkpoint: {reason(error)}. Accepted: .safetensors, torch.save."
        ) from error


def _training_state(path: Path) -> dict[str, Any] | None:
    """The state that `theodolite.train(checkpoint=FOLDER)` saved, from its folder or file; None for anything else."""
    path = path / STATE if path.is_dir() else path
    if path.name != STATE or not path.is_file():
        return None
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            ours = "state" in (file.metadata() or {})
    except (SafetensorError, OSError):
        return None  # reading it as plain weights says what is wrong
    return load_state(path.parent) if ours else None


def read_checkpoint(path: str | Path) -> Checkpoint:
    """The weights in a file, out of the usual nests, and the optimizer's state."""
    content = _training_state(Path(path).expanduser()) or read_file(path)
    weights = content
    if isinstance(content, Mapping):
        weights = next((content[key] for key in NESTS if isinstance(content.get(key), Mapping)), content)
    if not isinstance(weights, Mapping) or not weights or not all(isinstance(v, Tensor) for v in weights.values()):
        came = f"the keys {listed(list(content)[:8])}" if isinstance(content, Mapping) else f"a {type(content).__name__}"
        raise ValueError(
            f"{path} holds no weights: a mapping of names to tensors, bare or under {listed(NESTS)}. It holds {came}."
        )
    return Checkpoint({str(k): v for k, v in weights.items()}, _optimizer_state(content))


def read_optimizer_state(path: str | Path) -> dict[str, Any]:
    """The state of an optimizer in a file: by itself, as the Trainer's optimizer.pt, or in a checkpoint of a training."""
    content = _training_state(Path(path).expanduser()) or read_file(path)
    state = _optimizer_state(content) if isinstance(content, Mapping) else None
    if state is None:
        came = f"the keys {listed(list(content)[:8])}" if isinstance(content, Mapping) else f"a {type(content).__name__}"
        raise ValueError(
            f"{path} holds no state of an optimizer: what optimizer.state_dict() gives, bare or under {listed(OPTIMIZERS)}. It "
            f"holds {came}."
        )
    return state


def _optimizer_state(content: Mapping[str, Any]) -> dict[str, Any] | None:
    found = [content, *(content[key] for key in OPTIMIZERS if key in content)]
    found += content["optimizer_states"] if isinstance(content.get("optimizer_states"), list) else []  # Lightning's
    return next((dict(state) for state in found if isinstance(state, Mapping) and "param_groups" in state), None)


def unprefixed(weights: dict[str, Tensor], known: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights without the prefixes that wrappers put before all names, as long as that helps to fit `known`."""

    def fits(candidate: Mapping[str, Tensor]) -> int:
        return sum(name in known for name in candidate)

    best = weights
    for _ in range(4):  # wrappers may be nested: module._orig_mod.model.
        shared = [prefix for prefix in PREFIXES if all(name.startswith(prefix) for name in best)]
        options = [best, *({name.removeprefix(prefix): value for name, value in best.items()} for prefix in shared)]
        if len(options) == 1 or fits(best) == len(best):
            break
        # Of equal ones the shorter: an inner prefix may hide the fit.
        best = max(options[1:] if fits(best) == 0 else options, key=fits)
    return best if fits(best) else weights


def load_checkpoint(model: nn.Module, path: str | Path) -> Checkpoint:
    """Copy the weights of a file into the model, all or nothing."""
    checkpoint = read_checkpoint(path)
    inner = unwrap(model)
    try:
        load_weights(inner, unprefixed(checkpoint.weights, inner.state_dict()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"--checkpoint {path}: {error}") from error
    return checkpoint
