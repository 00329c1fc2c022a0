"""Growing a plain PyTorch model: new blocks are put into its list, and what counts layers is counted anew."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.interrupts import unbroken
from theodolite.measures.growth.body import Layout
from theodolite.problem.calling import copy_model

#: Names under which models keep their number of layers.
LAYER_COUNT = re.compile(
    r"_?(depth|((n|num)_?)((hidden|encoder|decoder|transformer)_?)?(layers?|blocks?)|(encoder|decoder)_layers)", re.IGNORECASE
)
#: Names under which models keep their settings.
_SETTINGS = ("config", "cfg", "args", "hparams", "params", "settings")


def grow_plain(model: nn.Module, layout: Layout) -> tuple[nn.Module, list[str]]:
    """A copy of the model with new blocks in its list, each a copy of its template, and notes on what was counted anew."""
    grown = copy_model(model)
    blocks = layout.body.blocks(grown)
    container = grown.get_submodule(layout.body.path)
    before = dict(container._modules)
    origins = layout.operator.layer_map()
    inside: dict[str, nn.Module | None] = {}
    for new, old, place in layout.children:
        again = place is not None and origins[place].is_new
        inside[new] = _copy_block(grown, layout, layout.templates[place]) if again and place is not None else before[old]
    container._modules.clear()
    container._modules.update(inside)
    _number_blocks(blocks, [inside[name] for name in layout.names])
    return grown, _count_layers(grown, layout)


def _copy_block(model: nn.Module, layout: Layout, template: int) -> nn.Module:
    """A copy of a block that shares with the rest of the model what the block shares with it."""
    block = layout.body.blocks(model)[template]
    return copy_model(block, {id(thing): thing for thing in outside(model, layout.body.prefix(layout.body.names[template]))})


def outside(model: nn.Module, prefix: str) -> Iterator[Any]:
    """Modules, tensors and settings that are reached without the block of this prefix."""
    for name, module in model.named_modules(remove_duplicate=False):
        if not f"{name}.".startswith(prefix):
            yield module
            yield from (t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None)
            yield from (value for key, value in vars(module).items() if key in _SETTINGS and not isinstance(value, int | str))


def own_tensors(model: nn.Module, names: Collection[str]) -> dict[str, dict[str, Tensor]]:
    """For each of the named blocks its parameters by their names in it, without those that something outside of it shares."""
    owners: dict[int, str] = {}
    shared: set[int] = set()
    starts = {f"{name}.": name for name in names}
    sizes = {len(start) for start in starts}
    for name, module in model.named_modules(remove_duplicate=False):
        owner = next((starts[start] for size in sizes if (start := f"{name}."[:size]) in starts), "")
        for t in (*module._parameters.values(), *module._buffers.values()):
            if t is not None and owners.setdefault(id(t), owner) != owner:
                shared.add(id(t))
    blocks = {name: model.get_submodule(name) for name in names}
    return {name: {key: p for key, p in block.named_parameters() if id(p) not in shared} for name, block in blocks.items()}


def _number_blocks(old: list[nn.Module], new: list[nn.Module | None]) -> None:
    """Give blocks that know their number the one of their new place."""
    if len(old) < 2:
        return
    for path, attribute, first in list(_numbers(old)):
        for place, block in enumerate(new):
            assert block is not None
            setattr(block.get_submodule(path), attribute, place + first)


def _numbers(blocks: list[nn.Module]) -> Iterator[tuple[str, str, int]]:
    """(module in the block, attribute, number of the first) of whole numbers that count the blocks."""
    for path, module in blocks[-1].named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, int) and not isinstance(value, bool):
                there = [_attribute(block, path, attribute) for block in blocks]
                if there == list(range(value - len(blocks) + 1, value + 1)):
                    yield path, attribute, value - len(blocks) + 1


def _attribute(block: nn.Module, path: str, attribute: str) -> Any:
    try:
        return getattr(block.get_submodule(path), attribute, None)
    except AttributeError:
        return None


def _count_layers(model: nn.Module, layout: Layout) -> list[str]:
    """Set attributes that hold the number of layers to the new one, and say so; lists with one entry a layer are said alone."""
    notes, layers, depth = [], layout.body.layers, layout.operator.depth
    for name, holder in _holders(model, layout.body.path):
        values = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
        for attribute, value in list(values.items()):
            called = f"{name}{attribute}"
            if type(value) is int and value == layers and LAYER_COUNT.fullmatch(str(attribute)):
                notes.append(_set(holder, attribute, called, depth, layers))
            elif type(value) in (list, tuple) and len(value) == layers > 1:
                notes.append(f"{called} has {layers} entries, as many as there were layers; it was left as it is.")
    return notes


def _set(holder: Any, attribute: str, called: str, depth: int, layers: int) -> str:
    try:
        if isinstance(holder, dict):
            holder[attribute] = depth
        else:
            setattr(holder, attribute, depth)
    except (AttributeError, TypeError):  # a frozen record
        return f"{called} is {layers} and cannot be changed; if the model reads it, it skips the new layers."
    return f"{called} was {layers} and is {depth} now."


def _holders(model: nn.Module, path: str) -> Iterator[tuple[str, Any]]:
    """The modules from the model down to its list of blocks, and their settings, with what stands before a name in them."""
    parts = path.split(".") if path else []
    seen: set[int] = set()
    for end in range(max(1, len(parts))):
        prefix = ".".join(parts[:end])
        module = model.get_submodule(prefix)
        dot = f"{prefix}." if prefix else ""
        yield dot, module
        for key in _SETTINGS:
            settings = vars(module).get(key)
            if settings is not None and not isinstance(settings, int | float | str | Tensor) and id(settings) not in seen:
                seen.add(id(settings))
                yield f"{dot}{key}.", settings


# Random blocks.


def draw_blocks(model: nn.Module, names: Sequence[str], initialise: Callable[[nn.Module], None]) -> list[str]:
    """Draw the named blocks of a model anew by its own initialiser, and say what that does not touch.

    What it leaves is drawn with the spread it had; vectors become 1 or 0. What a block shares with the rest of the model stays.
    """
    notes: list[str] = []
    for name, own in own_tensors(model, names).items():
        block = model.get_submodule(name)
        free = {id(p) for p in own.values()}
        kept = [(p, p.detach().clone()) for p in block.parameters() if id(p) not in free]
        drawn = {key: p.detach() for key, p in own.items() if p.is_floating_point() and p.numel()}
        with unbroken(torch.no_grad()):
            for p in drawn.values():
                p.view(-1)[0] = torch.nan
            initialise(block)
            for shared, value in kept:
                shared.copy_(value)
            notes += [_draw_alike(key, p) for key, p in drawn.items() if bool(torch.isnan(p.view(-1)[0]))]
    return list(dict.fromkeys(notes))


def initialise_block(model: nn.Module, block: nn.Module) -> None:
    """Draw a block by `reset_parameters` of each layer, then as the model does: `initialise_block(block)` or `_init_weights`."""
    for module in block.modules():
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            reset()
    whole, each = getattr(model, "initialise_block", None), getattr(model, "_init_weights", None)
    if callable(whole):
        whole(block)
    elif callable(each):
        block.apply(each)


def _draw_alike(name: str, parameter: Tensor) -> str:
    """Fill a parameter for which the model has no initialiser; its first entry is lost."""
    if parameter.ndim > 1:
        std = float(parameter.view(-1)[1:].std(correction=0)) if parameter.numel() > 2 else 0.02
        parameter.normal_(0.0, std)
        return f"{name} has no initialiser (reset_parameters or _init_weights): drawn normal with the spread it had, {std:.3g}."
    value = 1.0 if name.rpartition(".")[2] in ("weight", "scale", "gamma", "g") else 0.0
    parameter.fill_(value)
    return f"{name} has no initialiser (reset_parameters or _init_weights): set to {value:g}."
