"""Growing a Hugging Face model: it is built again from a configuration of the new depth, and takes its tensors from the old one.

Blocks are never put into a model that is there: what a layer does depends on its number (its place in the cache, its kind of
attention), and a saved model is loaded by its configuration.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.interrupts import unbroken
from theodolite.measures.growth.body import Body, Layout
from theodolite.measures.growth.plain_models import own_tensors
from theodolite.problem.calling import copy_model
from theodolite.text import listed, plural

#: Names under which configurations keep a number of layers.
_DEPTH = re.compile(r".*(layer|depth|block)s?")
#: Names of lists of layer numbers, as opposed to lists with one entry a layer.
_NUMBERS = re.compile(r".*(only_layers|attention_layers|idx|idxs|index|indices|layer_ids)")
#: Lists of configurations that say nothing of layers, whatever their length.
_OTHER_LISTS = re.compile(r".*(token|architectures|label|keys|shape|size|mean|std|dims?)s?(_.*)?")


def pretrained_part(model: nn.Module, path: str) -> str | None:
    """The name of the outermost Hugging Face model around the list at `path`; None where there is none."""
    parts = path.split(".") if path else []
    names = [".".join(parts[:end]) for end in range(len(parts) + 1)]
    return next((name for name in names if _is_pretrained(model.get_submodule(name))), None)


def _is_pretrained(module: nn.Module) -> bool:
    return any(kind.__name__ == "PreTrainedModel" for kind in type(module).__mro__) and hasattr(module, "config")


def grow_hugging_face(model: nn.Module, layout: Layout, part: str) -> tuple[nn.Module, list[str]]:
    """The model with its Hugging Face part built anew at the new depth; copies stand for all new layers.

    `part` is the name of that part, "" for all of the model.
    """
    old: Any = model.get_submodule(part)
    inner = _inside(layout, part)
    skeleton, notes = _skeleton(old, inner)
    new, more = _filled(skeleton, old, inner)
    if part == "":
        return new, [*notes, *more]
    known = dict(old.named_modules(remove_duplicate=False))
    swapped: dict[int, Any] = {}
    for name, module in new.named_modules(remove_duplicate=False):
        before, place = inner.origin(name)
        if place is None:
            swapped |= {id(known[before]): module, **_tensors_by_id(known[before], module)}
    return copy_model(model, swapped), [*notes, *more]


def _tensors_by_id(old: nn.Module, new: nn.Module) -> dict[int, Any]:
    return {id(t): new._parameters[name] for name, t in old._parameters.items() if t is not None}


def _inside(layout: Layout, part: str) -> Layout:
    """The same layout, by names inside a part of the model."""
    body = layout.body
    path = body.path.removeprefix(part).removeprefix(".")
    return Layout(Body(path, body.names, body.fixed, body.children), layout.operator)


# The configuration.


def _skeleton(old: Any, layout: Layout) -> tuple[Any, list[str]]:
    """The model of the new depth without values, on the meta device, by the setting that makes this list of blocks longer."""
    depth, tried = layout.operator.depth, []
    for path, name in _depth_settings(old.config, layout.body.layers):
        config = copy.deepcopy(old.config)
        changed = _deepen(_sub_config(config, path), name, layout)
        try:
            skeleton = _built(type(old), config)
            blocks = len(skeleton.get_submodule(layout.body.path)._modules)
        except Exception as error:
            tried.append(f"{name} ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})")
            continue
        if blocks == depth:
            return skeleton, [*_round_trip(config, changed)]
        tried.append(f"{name} ({plural(blocks, 'block')})")
    raise ValueError(
        f"{type(old).__name__} could not be built from its configuration with {depth} layers in {layout.body.path}. Settings "
        f"tried: {listed(tried, 4)}. Grow the model that was loaded from this configuration, without adapters or replaced layers."
    )


def _depth_settings(config: Any, layers: int, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """(path of the configuration, name) of settings that may be the number of layers, the usual names first."""
    usual = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")
    names = [name for name, value in vars(config).items() if type(value) is int and value == layers and _DEPTH.fullmatch(name)]
    for name in sorted(names, key=lambda name: usual.index(name) if name in usual else len(usual)):
        yield path, name
    for name, value in vars(config).items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from _depth_settings(value, layers, (*path, name))


def _sub_config(config: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        config = getattr(config, name)
    return config


def _deepen(config: Any, name: str, layout: Layout) -> dict[str, Any]:
    """Set the number of layers in a configuration and carry its lists over: what they are now, by name."""
    changed: dict[str, Any] = {name: layout.operator.depth}
    for key, value in vars(config).items():
        if isinstance(value, list | tuple) and value and not _OTHER_LISTS.fullmatch(key):
            if _NUMBERS.fullmatch(key) and all(type(entry) is int and 0 <= entry < layout.body.layers for entry in value):
                changed[key] = type(value)(place for place, old in enumerate(layout.templates) if old in value)
            elif len(value) == layout.body.layers:
                changed[key] = type(value)(value[old] for old in layout.templates)
    kinds = changed.get("attention_layers")
    if isinstance(kinds, list) and hasattr(config, "attention_types"):  # GPT-Neo reads the list from this
        changed["attention_types"] = [[list(kinds), 1]]
    for key, value in changed.items():
        setattr(config, key, value)
    return changed


def _round_trip(config: Any, changed: Mapping[str, Any]) -> Iterator[str]:
    """Notes on what a saved configuration would not say again."""
    again = type(config).from_dict(config.to_dict())
    parts = [again, *(value for value in vars(again).values() if hasattr(value, "to_dict"))]
    for name, value in changed.items():
        there = [getattr(part, name) for part in parts if hasattr(part, name)]
        if not any(_plain(other) == _plain(value) for other in there):
            yield f"The configuration computes {name} anew when it is loaded, and not as it is: a saved model loads another."


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _built(kind: Any, config: Any) -> Any:
    """A model of this class without values."""
    with unbroken(torch.device("meta")):
        return kind(config)


# The tensors.


def _filled(new: Any, old: Any, layout: Layout) -> tuple[Any, list[str]]:
    """The skeleton with copies of the old model's tensors; what is tied there is tied here."""
    known = dict(old.named_modules(remove_duplicate=False))
    names = [layout.body.prefix(name).removesuffix(".") for name in layout.body.names]
    shared = _shared(old, names)
    copies: dict[tuple[int, int | None], Tensor] = {}
    notes: list[str] = []
    for name, module in new.named_modules(remove_duplicate=False):
        before, place = layout.origin(name)
        source = known.get(before)
        moved = place is not None and place != layout.templates[place]
        if source is None or type(source) is not type(module):
            why = f"there it is {_called(source)}, and the configuration makes {_called(module)}"
            raise _misfit(old, before, why, place if moved else None)
        _take(
            module, source, partial(_copied, copies, shared, place), partial(_misfit, old, place=place if moved else None), before
        )
        notes += _differences(module, source, before, place, layout)
        module.training = source.training
        module._is_hf_initialized = True
    if extra := sorted(set(known) - {layout.origin(name)[0] for name, _ in new.named_modules(remove_duplicate=False)}):
        raise _misfit(old, extra[0], "its configuration does not make it", None)
    _carry_over(new, old)
    return new, list(dict.fromkeys(notes))


def _misfit(old: nn.Module, name: str, why: str, place: int | None) -> ValueError:
    """The error for a part that the configuration makes otherwise: `place` where it is in a block that has moved."""
    kind = type(old).__name__
    if place is None:
        return ValueError(
            f"{kind} was changed since it was built from its configuration, at {name}: {why}. Merge adapters into the weights "
            "(merge_and_unload()) and undo replaced layers first."
        )
    return ValueError(
        f"{kind} has layers of several kinds, by their number: {name} cannot become part of layer {place}; {why} there. Take an "
        "operator that moves layers by a multiple of the period in which the kinds come back."
    )


def _called(module: nn.Module | None) -> str:
    return "missing" if module is None else f"a {type(module).__name__}"


def _shared(old: nn.Module, blocks: Sequence[str]) -> set[int]:
    """Tensors in blocks that are shared with other blocks or with the rest."""
    own = {id(t) for block in own_tensors(old, blocks).values() for t in block.values()}
    return {id(t) for block in blocks for t in old.get_submodule(block).parameters()} - own


def _take(
    module: nn.Module,
    source: nn.Module,
    copied: Callable[[Tensor], Tensor],
    misfit: Callable[[str, str], ValueError],
    name: str,
) -> None:
    """Give a module copies of the tensors of the old one: parameters, buffers and others."""
    for book, theirs in ((module._parameters, source._parameters), (module._buffers, source._buffers)):
        differing = book.keys() ^ theirs.keys()
        wrong = [key for key in book.keys() & theirs.keys() if _shape(book[key]) != _shape(theirs[key])]
        if differing or wrong:
            key = sorted([*differing, *wrong])[0]
            why = f"its shape is {_shape(theirs.get(key))}, and the configuration makes {_shape(book.get(key))}"
            raise misfit(f"{name}.{key}", why)
        for key, t in theirs.items():
            book[key] = None if t is None else copied(t)  # type: ignore[assignment]
    for key, value in list(vars(module).items()):
        if isinstance(value, Tensor) and isinstance(vars(source).get(key), Tensor):
            object.__setattr__(module, key, copied(vars(source)[key]))


def _copied(copies: dict[tuple[int, int | None], Tensor], shared: Set[int], place: int | None, t: Tensor) -> Tensor:
    """The one copy of a tensor in the block in this place; where blocks share it, the one in the model."""
    key = (id(t), None if id(t) in shared else place)
    if key not in copies:
        value = t.detach().clone()
        copies[key] = nn.Parameter(value, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else value
    return copies[key]


def _shape(t: Tensor | None) -> tuple[int, ...] | None:
    return None if t is None else tuple(t.shape)


def _differences(module: nn.Module, source: nn.Module, name: str, place: int | None, layout: Layout) -> Iterator[str]:
    """Notes on settings of a block that differ from those of the block it has the weights of, but for its number."""
    if place is None:
        return
    shift = place - layout.templates[place]
    rest = name.removeprefix(layout.body.prefix(layout.body.names[layout.templates[place]]).removesuffix(".")).removeprefix(".")
    for key, value in vars(source).items():
        now = vars(module).get(key)
        plain = isinstance(value, int | float | str | None) and isinstance(now, int | float | str | None)
        counts = type(value) is int and type(now) is int and now - value == shift
        if plain and key not in ("training", "_is_hf_initialized") and now != value and not counts:
            yield (
                f"{'.'.join(part for part in (rest, key) if part)} depends on the number of the layer: {now} in layer {place}, "
                f"{value} in layer {layout.templates[place]}, which it comes from."
            )


def _carry_over(new: Any, old: Any) -> None:
    """What a model keeps beside its modules and its configuration."""
    if getattr(old, "generation_config", None) is not None:
        new.generation_config = copy.deepcopy(old.generation_config)
    if getattr(old, "is_gradient_checkpointing", False):
        new.gradient_checkpointing_enable()


def initialise_block(model: nn.Module, block: nn.Module) -> None:
    """Draw a block anew by the initialiser of the Hugging Face model that it is in."""
    whole: Any = model
    for module in block.modules():
        module._is_hf_initialized = False  # type: ignore[assignment]
    whole.initialize_weights()
