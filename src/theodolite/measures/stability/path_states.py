"""The two ends of a straight path through the weights, and the points between and beyond them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.measures.hessian.checkpoints import load
from theodolite.problem import Problem

State = nn.Module | Mapping[str, Tensor] | Tensor | str | PathLike[str]

#: Where training scripts keep the weights inside a saved file.
_NESTS = ("state_dict", "model_state_dict", "model", "module")
# A counter BatchNorm needs only where its momentum is None.
_MAY_LACK = "num_batches_tracked"


def interpolate_states(state_a: Mapping[str, Tensor], state_b: Mapping[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """`alpha * state_a + (1 - alpha) * state_b`, tensor by tensor, as new tensors; bitwise the ends at 1 and 0.

    Sums are formed in double precision and rounded once, so equal entries stay as they are. Entries that are no real or
    complex numbers (counters, masks) come from `state_a`, and from `state_b` at alpha = 0.

    >>> a, b = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 2.0])}
    >>> interpolate_states(a, b, 0.25)
    {'w': tensor([2.5000, 2.0000])}
    """
    if alpha in (0.0, 1.0):
        return {name: t.detach().clone() for name, t in (state_a if alpha == 1.0 else state_b).items()}
    return {name: _between(a.detach(), state_b[name].detach(), alpha) for name, a in state_a.items()}


def _between(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    if not (a.is_floating_point() or a.is_complex()):
        return a.clone()
    wide = torch.complex128 if a.is_complex() else torch.float64
    return torch.lerp(b.to(wide), a.to(wide), alpha).to(a.dtype)


def end_tensors(problem: Problem, twin: Problem, state: State, label: str) -> dict[str, Tensor]:
    """All parameters and buffers of an end by name, tied ones once; `twin`, a copy of `problem`, is loaded with them.

    Half-precision weights come as float32, in which they are evaluated.
    """
    if isinstance(state, str | PathLike):
        state = _read(Path(state).expanduser(), label)
    if isinstance(state, Mapping):
        state = _completed(problem.model, state)
    load(state, twin, problem, label)
    return {name: t.clone() for name, t in twin.tensors(twin.leaves(grad=False)).items()}


def _completed(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with the names that files leave out: all but one of tied tensors, and counters."""
    own = model.state_dict(keep_vars=True)
    given = {id(own[name]): value for name, value in state.items() if name in own}
    lacking = {name: t for name, t in own.items() if name not in state}
    tied = {name: given[id(t)] for name, t in lacking.items() if id(t) in given}
    counters = {name: t for name, t in lacking.items() if name.endswith(_MAY_LACK)}
    return {**state, **counters, **tied}


def _read(path: Path, label: str) -> Any:
    """The weights in a .safetensors file, or in one of torch's that holds nothing but tensors and plain values."""
    if not path.is_file():
        raise FileNotFoundError(f"{label}: there is no file {path}.")
    try:
        content = _content(path)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise ValueError(
            f"{label}: {path} could not be read as weights. Accepted: .safetensors, or what torch.load(weights_only=True) reads."
        ) from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{label}: {path} holds a {type(content).__name__}, not weights by name. Save model.state_dict().")
    return next((content[key] for key in _NESTS if isinstance(content.get(key), Mapping)), content)


def _content(path: Path) -> Any:
    if path.suffix != ".safetensors":
        return torch.load(path, map_location="cpu", weights_only=True)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(str(error)) from error
