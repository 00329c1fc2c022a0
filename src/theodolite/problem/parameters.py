"""Which parameters are measured, in which order, and how they form layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.arguments import shown
from theodolite.errors import ParameterSelectionError
from theodolite.text import nearest

Selector = str | Tensor | Iterable[str | Tensor] | Callable[[str, nn.Parameter], bool] | None

_WRAPPER_PARTS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


@dataclass(frozen=True)
class Layer:
    """A module that owns selected parameters directly: their positions in the selection."""

    name: str
    kind: str
    weights: tuple[int, ...]
    biases: tuple[int, ...]

    def members(self, *, bias: bool) -> tuple[int, ...]:
        return tuple(sorted(self.weights + self.biases)) if bias else self.weights or self.biases


@dataclass(frozen=True)
class Selection:
    """The selected parameters in the model's order, tied ones once."""

    keys: tuple[str, ...]  # as the module names them, for functional calls
    names: tuple[str, ...]  # as users name them: wrappers' prefixes removed
    shapes: tuple[torch.Size, ...]
    layers: dict[str, Layer]

    @property
    def sizes(self) -> list[int]:
        return [shape.numel() for shape in self.shapes]

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def positions(self, members: Iterable[int]) -> Tensor:
        """Indices into the flat vector of the given parameters."""
        offsets = [0, *torch.tensor(self.sizes).cumsum(0).tolist()]
        return torch.cat([torch.arange(offsets[i], offsets[i + 1]) for i in members])


def padding_rows(model: nn.Module) -> dict[int, int]:
    """Rows that embeddings pad with, by the id of their weight: whatever the loss makes of them, they never train."""
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None]
    return {id(m.weight): int(m.padding_idx) for m in embeddings if m.padding_idx is not None}


def split_like(x: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """A flat vector (n,), or rows of them (k, n), as tensors of the shapes and dtypes of `like`."""
    lead = x.shape[:-1]
    if not lead and x.is_contiguous() and all(t.dtype == x.dtype and t.numel() for t in like):
        return list(torch._utils._unflatten_dense_tensors(x, like))  # the same in C++, which in torch 2.9 flattens empty tensors
    parts = x.split([t.numel() for t in like], dim=-1) if len(like) > 1 else (x,)
    return [part.reshape((*lead, *t.shape)).to(t.dtype) for part, t in zip(parts, like, strict=True)]


def join_like(parts: Sequence[Tensor | None], like: Sequence[Tensor], *lead: int) -> Tensor:
    """The inverse of `split_like`, zeros where a part is missing; `lead` is the number of rows, if any."""
    flat = [
        t.new_zeros(*lead, t.numel()) if part is None else part.reshape(*lead, -1) for part, t in zip(parts, like, strict=True)
    ]
    return torch.cat(flat, dim=-1) if len(flat) > 1 else flat[0]


def clean_name(key: str) -> str:
    """A parameter's name without what wrappers put in front.

    >>> clean_name("module._orig_mod.fc.weight")
    'fc.weight'
    """
    for part in _WRAPPER_PARTS:
        key = key.replace(part, "")
    return key.removeprefix("module.")


def clean_names(keys: Iterable[str]) -> dict[str, str]:
    """Clean names of all parameters; the names as they are where cleaning would make two alike."""
    names = {key: clean_name(key) for key in keys}
    return names if len(set(names.values())) == len(names) else {key: key for key in names}


def select_parameters(model: nn.Module, params: Selector) -> Selection:
    """The parameters of `model` chosen by `params` (None: all that require grad; globs; parameters themselves; a predicate)."""
    available = dict(model.named_parameters())  # names tied parameters once
    names = clean_names(available)
    empty = [names[k] for k, p in available.items() if p.is_meta]
    if empty:
        raise ParameterSelectionError(f"model: {empty[0]} lies on the meta device and has no values: load the weights first.")
    made_there = [names[k] for k, p in available.items() if p.is_inference()]
    if made_there:
        raise ParameterSelectionError(
            f"model: {made_there[0]} was made in inference mode and takes no gradient: build or load the model outside "
            "torch.inference_mode()."
        )
    lazy = [names[k] for k, p in available.items() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        raise ParameterSelectionError(f"model: {lazy[0]} has no shape yet: run the model once on a batch before measuring it.")
    if params is None:
        chosen = [k for k, p in available.items() if p.requires_grad]
    elif callable(params) and not isinstance(params, nn.Module | type):
        chosen = [k for k, p in available.items() if params(names[k], p)]
    else:
        chosen = _match(available, params)
    unreal = next((k for k in chosen if available[k].is_complex()), None)
    if unreal is not None:
        raise ParameterSelectionError(
            f"{names[unreal]} is complex, and derivatives are taken in real numbers. Store it as a real parameter with real and "
            "imaginary parts as its last dimension and use torch.view_as_complex in forward, or leave it out with params=."
        )
    chosen = [k for k in chosen if available[k].is_floating_point()]
    if not chosen:
        raise ParameterSelectionError(_nothing_selected(available, params))
    shown = tuple(names[k] for k in chosen)
    return Selection(tuple(chosen), shown, tuple(available[k].shape for k in chosen), _layers(model, chosen))


def _match(available: dict[str, nn.Parameter], params: Any) -> list[str]:
    names = clean_names(available)
    items = [params] if isinstance(params, str | Tensor) or not isinstance(params, Iterable) else list(params)
    places = {id(p): k for k, p in available.items()}
    chosen: set[str] = set()
    for item in items:
        if isinstance(item, str):
            chosen.update(_fitting(item, names, "params", "parameter"))
        elif id(item) in places:
            chosen.add(places[id(item)])
        elif isinstance(item, Tensor):
            raise ParameterSelectionError(
                f"params holds a tensor of shape {tuple(item.shape)} that is no parameter of the model. "
                f"Pass the model's own parameters, or their names: {_shown(list(names.values()))}."
            )
        else:
            kind = f"{type(item).__name__}: pass its .parameters()" if isinstance(item, nn.Module) else shown(item)
            raise ParameterSelectionError(
                "params must be None, a glob or a list of globs on names, parameters of the model, or a function "
                f"(name, parameter) -> bool. Got {kind}. Names: {_shown(list(names.values()))}."
            )
    return [k for k in names if k in chosen]


def _fitting(pattern: str, names: Mapping[str, str], argument: str, what: str) -> list[str]:
    """Keys of the names that a glob fits; an error with the nearest names where it fits none."""
    found = [key for key, name in names.items() if fnmatchcase(name, pattern)]
    if not found:
        near = nearest(pattern, names.values())
        raise ParameterSelectionError(f"{argument}: {pattern!r} fits no {what}. Nearest names: {', '.join(near)}.")
    return found


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")


def _nothing_selected(available: dict[str, nn.Parameter], params: Selector) -> str:
    if not available:
        return "The model has no parameters."
    shown = _shown(list(clean_names(available).values()))
    if params is None:
        return f"Every parameter is frozen (requires_grad=False). Name the ones to measure with params=; available: {shown}."
    return f"params selects no parameter; available: {shown}."


def _layers(model: nn.Module, chosen: list[str]) -> dict[str, Layer]:
    place = {key: i for i, key in enumerate(chosen)}
    owned: dict[str, tuple[str, list[int], list[int]]] = {}
    for prefix, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            key = f"{prefix}.{name}" if prefix else name
            if key not in place:
                continue  # not selected, or tied to an earlier parameter
            _, weights, biases = owned.setdefault(prefix, (type(module).__name__, [], []))
            (biases if "bias" in name else weights).append(place[key])
    # "module." and the like come with every parameter of a wrapped model; the model itself is no module name.
    prefixes = clean_names(f"{prefix}." if prefix else "" for prefix in owned)
    labels = [name.removesuffix(".") or "(model)" for name in prefixes.values()]
    found = zip(labels, owned.values(), strict=True)
    return {label: Layer(label, kind, tuple(weights), tuple(biases)) for label, (kind, weights, biases) in found}


def match_layers(selection: Selection, layers: str | Iterable[str] | None) -> list[Layer]:
    """Layers by name or glob; None means all."""
    if layers is None:
        return list(selection.layers.values())
    patterns = [layers] if isinstance(layers, str) or not isinstance(layers, Iterable) else list(layers)
    if not patterns:
        raise ParameterSelectionError(f"layers must name at least one layer. Layers: {', '.join(map(repr, selection.layers))}.")
    wrong = [pattern for pattern in patterns if not isinstance(pattern, str)]
    if wrong:
        raise ParameterSelectionError(
            f"layers must be None, a layer's name or glob, or a list of them. Got {shown(wrong[0])}. "
            f"Layers: {', '.join(map(repr, selection.layers))}."
        )
    names = {name: name for name in selection.layers}
    chosen = {name for pattern in patterns for name in _fitting(pattern, names, "layers", "layer")}
    return [layer for name, layer in selection.layers.items() if name in chosen]
