"""The layers of a model in training: their gradients, updates and weights, units that get no gradient, what never moves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor, nn

from theodolite.monitors.watching.recorder import joint_norm, norms_of
from theodolite.problem.parameters import clean_name
from theodolite.results import Row, fields_of

#: Looks over which a unit without any gradient is not only one that this batch does not need.
LATELY = 5
#: Steps in a row without any gradient after which a layer is dead.
DEAD_AFTER = 20


@dataclass(frozen=True, kw_only=True)
class LayerState:
    """One layer at one look.

    `gradient` is the norm of its gradient per root of its size, `ratio` the length of the last step over that of the weights,
    `weight` their norm and `change` that norm over the one at the first look. `alive` of `units` get a gradient at this step and
    `lately` did so at one of the last looks, which small batches need (both None for layers without units of their own).
    """

    layer: str
    gradient: float
    ratio: float | None
    weight: float
    change: float
    units: int | None = None
    alive: int | None = None
    lately: int | None = None

    def row(self) -> Row:
        return fields_of(self, "layer gradient ratio weight change units alive lately")


@dataclass(frozen=True, kw_only=True)
class LayerSummary:
    """All layers at one look, at `step`; `dead` are those without any gradient for a while, with the step since when.

    `missing` are parameters that get gradients and stand in no optimizer, `unused` layers that never had a gradient; `frozen` is
    the share of the model's weights that do not require one.
    """

    layers: tuple[LayerState, ...] = ()
    step: int = -1
    dead: dict[str, int] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    frozen: float = 0.0

    @property
    def hidden(self) -> list[LayerState]:
        """Layers with units, without the last one, whose units are the outputs."""
        return [layer for layer in self.layers if layer.units][:-1]

    @property
    def alive(self) -> float | None:
        """Share of the hidden units that get a gradient at this step; None without any."""
        units = sum(layer.units or 0 for layer in self.hidden)
        return sum(layer.alive or 0 for layer in self.hidden) / units if units else None

    @property
    def least_alive(self) -> LayerState | None:
        """The hidden layer with the smallest share of living units; of several the last, which stops those before it."""
        return min(reversed(self.hidden), key=lambda layer: (layer.alive or 0) / (layer.units or 1), default=None)

    @property
    def ratio(self) -> float | None:
        """The median over layers of the last step's length over that of the weights."""
        ratios = [layer.ratio for layer in self.layers if layer.ratio is not None and math.isfinite(layer.ratio)]
        return median(ratios) if ratios else None

    @property
    def spread(self) -> tuple[LayerState, LayerState] | None:
        """The layers with units whose gradients are smallest and largest, per entry; None where there are no two."""
        found = [layer for layer in self.layers if layer.units and math.isfinite(layer.gradient)]
        key = lambda layer: layer.gradient  # noqa: E731
        return (min(found, key=key), max(found, key=key)) if len(found) > 1 else None

    @property
    def weight_change(self) -> float | None:
        """The median over layers of the norm of the weights over that at the first look."""
        changes = [layer.change for layer in self.layers if layer.units and math.isfinite(layer.change)]
        return median(changes) if changes else None

    def row(self) -> Row:
        """What the log keeps of a look."""
        low_high, least = self.spread, self.least_alive
        found: Row = {"alive": self.alive, "update_ratio": self.ratio, "weight_change": self.weight_change}
        if least is not None:
            found |= {"least_alive": least.layer, "least_alive_share": (least.alive or 0) / (least.units or 1)}
        if low_high is not None:
            low, high = low_high
            found |= {
                "low_gradient": low.gradient,
                "low_layer": low.layer,
                "high_gradient": high.gradient,
                "high_layer": high.layer,
            }
        return found


@dataclass
class _Group:
    """The parameters of one layer: their places among the watched ones, and which of them has the units, along which axis."""

    name: str
    places: list[int] = field(default_factory=list)
    size: int = 0
    weight: int | None = None
    bias: int | None = None
    axis: int = 0
    units: int = 0
    seen: Tensor | None = None  # the last look at which each unit had a gradient
    first_norm: float | None = None
    zero_since: int | None = None
    had_gradient: bool = False


class LayerTracker:
    """Follows the layers of one watched model; `update` at every step is cheap, `look` makes a pass over the weights."""

    def __init__(self, model: nn.Module, named: Mapping[str, Tensor]) -> None:
        self._model, self._named = model, named
        self._groups = _groups(model, named)
        self._hidden = [group for group in self._groups if group.units][:-1]
        self._looks = 0
        self._zeros = False
        self._steps = 0
        self._outside = _outside(model, named)
        self._outside_norms: list[float] = []
        self._outside_still = 0
        still = sum(p.numel() for p in self._outside.values() if not p.requires_grad)
        self._frozen = still / max(1, sum(p.numel() for p in model.parameters()))

    def update(self, step: int, norms: Sequence[float | None]) -> bool:
        """Take the gradient norms of a step; whether a hidden layer has just died."""
        self._steps += 1
        if not self._zeros and self._steps > 1 and 0.0 not in norms:
            return False
        self._zeros = died = False
        for group in self._hidden:
            mine = [norms[i] for i in group.places]
            if any(norm is None or norm != 0.0 for norm in mine):
                group.had_gradient |= any(mine)
                group.zero_since = None
                continue
            self._zeros = True
            group.zero_since = step if group.zero_since is None else group.zero_since
            died |= step - group.zero_since == DEAD_AFTER
        return died

    def dead(self, step: int) -> dict[str, int]:
        """Hidden layers that have had no gradient for a while: since when.

        One that never had any counts only where most of the others have none either; a head that is not used is no dead layer.
        """
        zero = [g for g in self._hidden if g.zero_since is not None and step - g.zero_since >= DEAD_AFTER]
        most = 2 * len(zero) > len(self._hidden)
        return {g.name: g.zero_since for g in zero if g.zero_since is not None and (g.had_gradient or most)}

    def look(self, step: int, norms: Sequence[float | None], lengths: Sequence[float]) -> LayerSummary:
        """All layers now; `norms` are those of the gradients, `lengths` those of the last step, by parameter."""
        self._looks += 1
        values = list(self._named.values())
        weights = norms_of([p.detach() for p in values])
        counts = iter(self._living(values))
        layers: list[LayerState] = []
        for group in self._groups:
            size, weight = math.sqrt(group.size), joint_norm(weights[i] for i in group.places)
            group.first_norm = weight if group.first_norm is None else group.first_norm
            gradient = joint_norm(norm for i in group.places if (norm := norms[i]) is not None)
            group.had_gradient |= gradient > 0.0
            moved = joint_norm(lengths[i] for i in group.places) if lengths else None
            alive, lately = next(counts) if group.units else (None, None)
            layers.append(
                LayerState(
                    layer=group.name,
                    gradient=gradient / size,
                    ratio=None if moved is None or not weight > 0.0 else moved / weight,
                    weight=weight,
                    change=weight / group.first_norm if group.first_norm else math.nan,
                    units=group.units or None,
                    alive=alive,
                    lately=lately,
                )
            )
        unused = tuple(g.name for g in self._groups if not g.had_gradient) if self._looks >= LATELY else ()
        return LayerSummary(
            layers=tuple(layers), step=step, dead=self.dead(step), missing=self._missing(), unused=unused, frozen=self._frozen
        )

    def _living(self, values: Sequence[Tensor]) -> list[tuple[int, int]]:
        """For each layer with units, how many of them have a gradient now, and how many had one at one of the last looks."""
        counts: list[Tensor] = []
        for group in self._groups:
            if not group.units:
                continue
            assert group.weight is not None
            gradient, bias = values[group.weight].grad, None if group.bias is None else values[group.bias].grad
            if group.seen is None:
                group.seen = torch.full((group.units,), self._looks, device=values[group.weight].device)
            if gradient is None:
                moves = torch.zeros_like(group.seen, dtype=torch.bool)
            elif gradient.is_sparse:  # which rows it has is not asked for
                moves = torch.ones_like(group.seen, dtype=torch.bool)
            else:
                moves = gradient.detach().movedim(group.axis, 0).reshape(group.units, -1).ne(0).any(1)
            moves = moves if bias is None else moves | bias.detach().ne(0)
            group.seen[moves] = self._looks
            counts.append(torch.stack([moves.sum(), (group.seen > self._looks - LATELY).sum()]).cpu())
        return [(int(now), int(lately)) for now, lately in torch.stack(counts).tolist()] if counts else []

    def _missing(self) -> tuple[str, ...]:
        """Parameters outside the optimizer that get gradients and stay as they are, from look to look."""
        waiting = {name: p for name, p in self._outside.items() if p.requires_grad and p.grad is not None}
        norms = norms_of([p.detach() for p in waiting.values()])
        self._outside_still = self._outside_still + 1 if norms and norms == self._outside_norms else 0
        self._outside_norms = norms
        return tuple(waiting) if self._outside_still >= 3 else ()


def _outside(model: nn.Module, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    inside = {id(p) for p in named.values()}
    return {name: p for name, p in model.named_parameters() if id(p) not in inside}


def _groups(model: nn.Module, named: Mapping[str, Tensor]) -> list[_Group]:
    """The watched parameters by the module that owns them."""
    modules = dict(model.named_modules())
    groups: dict[str, _Group] = {}
    for i, (name, parameter) in enumerate(named.items()):
        owner, _, short = name.rpartition(".")
        group = groups.setdefault(owner, _Group(clean_name(f"{owner}.").removesuffix(".") or type(model).__name__))
        group.places.append(i)
        group.size += parameter.numel()
        axis = _unit_axis(modules.get(owner))
        if axis is not None and short == "weight" and parameter.ndim >= 2:
            group.weight, group.axis, group.units = i, axis, parameter.shape[axis]
        elif axis is not None and short == "bias" and parameter.numel() == group.units:
            group.bias = i
    return list(groups.values())


def _unit_axis(module: nn.Module | None) -> int | None:
    """Where the units of a layer stand in its weight; None for layers that have none."""
    if isinstance(module, nn.Linear):
        return 0
    if isinstance(module, nn.modules.conv._ConvNd):
        return 1 if module.transposed and module.groups == 1 else None if module.transposed else 0
    return 1 if type(module).__name__ == "Conv1D" else None  # as Hugging Face's GPT-2 has it
