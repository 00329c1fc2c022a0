"""`grow`: a deeper model from a trained one, with its optimizer, and what it changes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.arguments import a_text, about, checked, count, one_of, seed, shown
from theodolite.interrupts import unbroken
from theodolite.measures.growth import hugging_face, plain_models
from theodolite.measures.growth.body import Body, Layout, check_operator, find_body, signature
from theodolite.measures.growth.hugging_face import grow_hugging_face, pretrained_part
from theodolite.measures.growth.operators import GrowthOperator, added_layers, growth_operator
from theodolite.measures.growth.optimizer_state import STATES, Descent, check_optimizer, grow_optimizer
from theodolite.measures.growth.plain_models import grow_plain, own_tensors
from theodolite.measures.growth.preservation import Inputs, Preservation, preservation, sample_inputs
from theodolite.measures.growth.residual_stream import StreamProjections, stream_projections
from theodolite.operators.autograd.graphs import available_bytes
from theodolite.problem.activations import Call, Hooks
from theodolite.problem.arguments import a_loss, a_model, an_optimizer, some_data, some_inputs
from theodolite.problem.calling import unwrap
from theodolite.problem.state_guard import cuda_devices, own_random_state
from theodolite.results import Cost, Result, Row

#: What remains of a projection into the residual stream under init="scaled".
SCALE = 0.5


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Grown(Result):
    """A deeper model made from a trained one.

    Attributes:
        model: the grown model, in the mode the old one was in; None in a result that was loaded.
        optimizer: the grown optimizer; None where none was given, and in a result that was loaded.
        operator: the name of the growth operator.
        body: the name of the list of blocks that grew.
        source: for each layer of the grown model the old layer that it starts from, None for a random one.
        is_new: for each layer whether it is new.
        parameters: parameters of the grown model, tied ones once.
        parameters_before: those of the old one.
        preservation: how outputs and loss change on the given inputs, None without inputs.
        notes: what a user should know: settings that were counted anew, initialisers that are missing, no identity.
    """

    model: nn.Module | None
    optimizer: Optimizer | None
    operator: str
    body: str
    source: tuple[int | None, ...]
    is_new: tuple[bool, ...]
    parameters: int
    parameters_before: int
    preservation: Preservation | None
    notes: tuple[str, ...]

    def rows(self) -> list[Row]:
        return [
            {"layer": layer, "source": source, "is_new": is_new}
            for layer, (source, is_new) in enumerate(zip(self.source, self.is_new, strict=True))
        ]

    def save(self, path: str | PathLike[str]) -> None:
        """Write what the result says; the model and the optimizer are for their own `save_pretrained` or `state_dict`."""
        super(Grown, replace(self, model=None, optimizer=None)).save(path)

    def sentence(self) -> str:
        added = sum(self.is_new)
        more = 100 * (self.parameters - self.parameters_before) / self.parameters_before
        parts = [
            f"{len(self.source) - added} layers have become {len(self.source)} by {self.operator}: {self.parameters:,} "
            f"parameters, {more:.0f} % more."
        ]
        parts += [str(self.preservation)] if self.preservation is not None else []
        return " ".join([*parts, *self.notes])


@checked(
    model=a_model, optimizer=an_optimizer, state=one_of(*STATES), seed=seed, body=a_text, layers=count, inputs=some_inputs,
    data=some_data, loss=a_loss,
)  # fmt: skip
def grow(
    model: nn.Module,
    operator: GrowthOperator | str | Iterable[int | None],
    *,
    optimizer: Optimizer | None = None,
    state: Literal["copy", "zero_new", "reset"] = "copy",
    seed: int = 0,
    body: str | None = None,
    layers: int | None = None,
    inputs: Any = None,
    data: Any = None,
    loss: Any = None,
) -> Grown:
    """A model of L + k layers from one of L: old layers as they are, new ones copied, drawn, or made to add nothing.

    The old model and optimizer are left as found, and nothing is shared with them. Tied weights, dtypes, devices, what is frozen
    and the mode are kept. Hugging Face models are built anew from a configuration of the new depth, and can be saved and loaded.

    Args:
        model: a model whose layers are a list of blocks of one type.
        operator: one of `growth_operators`, a list of old layers (None for a random one), or a name such as "last" or "2/1/copy",
            which needs `layers`.
        optimizer: the model's optimizer; the grown one has its class, groups and settings.
        state: of the optimizer. "copy": copied layers have the moments of what they copy, random ones begin at zero with a step
            of their own; "zero_new": all new layers do; "reset": all layers do.
        seed: of random layers.
        body: the name of the list of blocks, where there are several.
        layers: the depth to grow to, for an operator that is a name.
        inputs: what the model is called with (a tensor, a tuple or a mapping), to measure the change of its outputs. Needed by
            the inits "identity" and "scaled" unless `data` is given or the model is a Hugging Face one.
        data: data as `Problem` takes them, to measure the change of the loss too.
        loss: the loss on the data, None for models that return their own.

    Returns:
        The grown model and optimizer, the layers they come from, and what changed.

    >>> model = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    >>> grown = grow(model, "last", layers=3)
    >>> grown.source, grown.is_new, grown.parameters - grown.parameters_before
    ((0, 1, 1), (False, False, True), 72)
    """
    begun = time.perf_counter()
    whole = unwrap(model)
    refuse_quantised(whole)
    if optimizer is not None:
        check_optimizer(whole, optimizer)
    found = find_body(whole, body)
    chosen = _operator(operator, found, layers)
    check_operator(found, chosen)
    layout = Layout(found, chosen)
    refuse_without_room(whole, layout)
    called = Inputs.of(whole, inputs, data, loss)
    with own_random_state(seed, cuda_devices(whole)):
        grown, notes = _deeper(whole, layout)
        more, fresh = _prepare(whole, grown, layout, called, seed)
    descents = _descents(whole, grown, layout, fresh)
    new_optimizer, about_state = grow_optimizer(optimizer, descents, state) if optimizer is not None else (None, [])
    layer_map = chosen.layer_map()
    return Grown(
        model=grown,
        optimizer=new_optimizer,
        operator=chosen.name,
        body=found.path,
        source=tuple(origin.source for origin in layer_map),
        is_new=tuple(origin.is_new for origin in layer_map),
        parameters=sum(p.numel() for p in grown.parameters()),
        parameters_before=sum(p.numel() for p in whole.parameters()),
        preservation=None if called is None else preservation(whole, grown, called),
        notes=(*notes, *more, *about_state, *([] if whole is model else [_WRAPPED.format(what=type(whole).__name__)])),
        seed=seed,
        cost=Cost(seconds=time.perf_counter() - begun),
    )


def _operator(operator: Any, body: Body, layers: int | None) -> GrowthOperator:
    """The operator that was meant, for a body of this depth."""
    if isinstance(operator, GrowthOperator):
        found = operator
    elif isinstance(operator, str):
        if layers is None:
            raise ValueError(
                f"layers must be given for an operator that is a name: the depth to grow to. Got operator={operator!r}."
            )
        found = growth_operator(operator, body.layers, added_layers(body.layers, layers))
    elif isinstance(operator, Iterable) and not isinstance(operator, Mapping | Tensor | nn.Module):
        with about("operator"):
            found = GrowthOperator.of(operator)
    else:
        raise TypeError(
            "operator must be a GrowthOperator (th.growth_operators makes them), a list of old layers, or a name such as 'last'. "
            f"Got {shown(operator)}."
        )
    if layers is not None and layers != found.depth:
        added_layers(body.layers, layers)
        raise ValueError(f"layers must be {found.depth}, as the operator makes it. Got {layers}; leave it out.")
    return found


def refuse_quantised(model: nn.Module) -> None:
    """Raise for weights of a byte or less each: a copy could be made, and no layer trained."""
    config = getattr(model, "config", None)
    if getattr(model, "is_quantized", False) or getattr(config, "quantization_config", None) is not None:
        raise ValueError(_QUANTISED.format(what=type(model).__name__))
    for name, p in model.named_parameters():
        if (p.element_size() == 1 and p.dtype != torch.bool) or "8bit" in type(p).__name__ or "4bit" in type(p).__name__:
            raise ValueError(_QUANTISED.format(what=name))


_QUANTISED = (
    "model: {what} has quantised weights, which cannot be trained. Load the model in full or half precision, grow it, and "
    "quantise the grown one."
)


def refuse_without_room(model: nn.Module, layout: Layout) -> None:
    """Raise where the memory of a device does not hold the grown model beside the old one."""
    needed: dict[torch.device, int] = {}
    blocks = layout.body.blocks(model)
    again = [blocks[old] for old, origin in zip(layout.templates, layout.operator.layer_map(), strict=True) if origin.is_new]
    for part in (model, *again):
        for p in part.parameters():
            needed[p.device] = needed.get(p.device, 0) + p.numel() * p.element_size()
    for device, size in needed.items():
        if size > (free := available_bytes(device)):
            raise ValueError(
                f"model: the grown model needs {size / 2**30:.1f} GiB on {device} beside the old one, and {free / 2**30:.1f} GiB "
                "are free. Move the model to a device with more memory (model.cpu()), or grow it in half precision."
            )


_WRAPPED = "The grown model is a plain {what}: compile it, or wrap it for several devices, again."


def _deeper(model: nn.Module, layout: Layout) -> tuple[nn.Module, list[str]]:
    """The grown model with copies in the place of all new layers."""
    part = pretrained_part(model, layout.body.path)
    return grow_plain(model, layout) if part is None else grow_hugging_face(model, layout, part)


def _prepare(
    model: nn.Module, grown: nn.Module, layout: Layout, inputs: Inputs | None, seed: int
) -> tuple[list[str], dict[int, set[str] | None]]:
    """Make new layers what they start from: notes, and by place the parameters with fresh values (None: all of them)."""
    origins = layout.operator.layer_map()
    random = [place for place, origin in enumerate(origins) if origin.source is None]
    part = pretrained_part(grown, layout.body.path)
    if part is None:
        initialise = partial(plain_models.initialise_block, grown)
    else:
        initialise = partial(hugging_face.initialise_block, grown.get_submodule(part))
    notes = plain_models.draw_blocks(grown, [_block(layout, place) for place in random], initialise)
    fresh: dict[int, set[str] | None] = dict.fromkeys(random)
    copied = [place for place, origin in enumerate(origins) if origin.is_new and origin.source is not None]
    init = layout.operator.init
    if init not in ("identity", "scaled") or not copied:
        return notes, fresh
    blocks = layout.body.blocks(model)
    kinds = {signature(blocks[layout.templates[place]]): place for place in reversed(copied)}  # the first of each kind
    found = {kind: _projections(model, grown, layout, place, inputs, seed) for kind, place in kinds.items()}
    if init == "identity" and not all(projections.identity for projections in found.values()):
        notes.append(_NO_IDENTITY)
    if init == "scaled" and max(projections.halved for projections in found.values()) > 0.9:
        notes.append(_NOT_SCALED)
    with unbroken(torch.no_grad()):
        tensors = own_tensors(grown, [_block(layout, place) for place in copied])
        for place, own in zip(copied, tensors.values(), strict=True):
            names = found[signature(blocks[layout.templates[place]])].names
            for name in names:
                if init == "identity":
                    own[name].zero_()
                else:
                    own[name].mul_(SCALE)
            fresh[place] = set(names)
    return notes, fresh


_NO_IDENTITY = (
    "This model has no identity block: it normalises behind its sums, so a block that adds nothing still changes the stream. The "
    "projections into the stream of the new layers are zero."
)
_NOT_SCALED = (
    "Halving the projections into the stream changes little here: a norm behind each takes the scale out again, so the new "
    "layers are nearly copies."
)


def _block(layout: Layout, place: int) -> str:
    return layout.body.prefix(layout.names[place]).removesuffix(".")


def _projections(
    model: nn.Module, grown: nn.Module, layout: Layout, place: int, inputs: Inputs | None, seed: int
) -> StreamProjections:
    """What the new block in this place writes into the stream with, measured on the call of its template in the old model."""
    inputs = inputs or sample_inputs(model, seed)
    if inputs is None:
        raise ValueError(
            f"inputs must be given for init={layout.operator.init!r}: which weights write into the residual stream is measured. "
            "Give a batch that the model takes, inputs=x, or data= with loss=."
        )
    template = layout.body.blocks(model)[layout.templates[place]]
    calls: list[Call] = []
    with Hooks({"block": template}, calls.append, before=True):
        inputs.call(model)
    if not calls:
        raise ValueError(
            f"inputs: the model was called with them and did not call its layer {layout.templates[place]} in {layout.body.path}. "
            "Give inputs that this part of the model works on, or the right body=."
        )
    name = _block(layout, place)
    return stream_projections(grown.get_submodule(name), calls[0], own_tensors(grown, [name])[name], seed)


def _descents(model: nn.Module, grown: nn.Module, layout: Layout, fresh: Mapping[int, set[str] | None]) -> list[Descent]:
    """Where each parameter of the grown model comes from, tied ones once."""
    old = dict(model.named_parameters(remove_duplicate=False))
    origins = layout.operator.layer_map()
    found = []
    for name, p in grown.named_parameters():
        before, place = layout.origin(name)
        begins = False
        if place is not None and place in fresh:
            names = fresh[place]
            begins = names is None or name.removeprefix(f"{_block(layout, place)}.") in names
        found.append(Descent(p, old[before], place is not None and origins[place].is_new, begins))
    return found
