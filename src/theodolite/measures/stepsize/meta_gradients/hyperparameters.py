"""Hyperparameters by name, the units in which they move, and the settings of every parameter that follow.

Names are those of the optimizer's rule: `lr`, `momentum`, `weight_decay`, `beta1`, `beta2` (RMSprop: `alpha`). `lr` moves that of
all parameters, `lr:fc1` that of one layer, `lr:0` (or `lr:group0`) that of the first parameter group. `schedule[k]` is the factor
on the learning rate at the k-th of several knots, evenly spaced from the first step to the last; between knots its logarithm is
linear.

In units `"log"`, rates, decays and factors move by factors e^θ, and what lies between 0 and 1 (momentum, betas) by its log-odds;
in units `"natural"` they move as they are. Where a name covers parameters of unlike settings, all move by the same θ.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from theodolite.arguments import choice, nonnegative, number_in, shown
from theodolite.errors import ArgumentError
from theodolite.measures.stepsize.meta_gradients.update_rules import AdaptiveMoments, Descent, RootMeanSquare, Rule, Value
from theodolite.problem.optimizers import NAMES
from theodolite.text import nearest, quoted
from theodolite.training.schedules import Schedule

Units = Literal["log", "natural"]

#: Settings that lie between 0 and 1.
SHARES = ("momentum", "beta1", "beta2", "alpha")
#: Optimizers by name: class, and settings that the name stands for.
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {**NAMES, "rmsprop": (RMSprop, {})}
_FLAGS = ("maximize", "amsgrad", "centered")


def two_betas(name: str, value: Any) -> tuple[float, float]:
    """Two numbers, each of at least 0 and below 1."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"{name} must be two numbers, each of at least 0 and below 1. Got {shown(value)}.")
    first, second = (number_in(least=0, below=1)(f"{name}[{i}]", beta) for i, beta in enumerate(value))
    return first, second


# Optimizers as rules


@dataclass(frozen=True)
class Recipe:
    """An optimizer's rule, its groups' settings by name, and the group of every parameter tensor."""

    rule: Rule
    groups: list[dict[str, float]]
    members: list[int]
    name: str


def read_optimizer(optimizer: Any, settings: Mapping[str, Any], parameters: Sequence[Tensor]) -> Recipe:
    """The rule of an optimizer given by name, by class or by a function of the parameters; `settings` that are not None count.

    >>> recipe = read_optimizer("momentum", {"lr": 0.1}, [torch.zeros(2)])
    >>> recipe.rule.columns, recipe.groups
    (('velocity',), [{'lr': 0.1, 'momentum': 0.9, 'weight_decay': 0.0}])
    """
    given = _checked(settings)
    stand_ins = [p.detach().clone().requires_grad_() for p in parameters]
    made = _make(optimizer, given, stand_ins)
    kind, name = type(made), type(made).__name__
    if kind not in (SGD, Adam, AdamW, RMSprop):
        raise ValueError(
            f"optimizer: the update rules of SGD, Adam, AdamW and RMSprop are known here. Got {name}: take one of them, or train "
            "with yours at several rates (th.train) and compare."
        )
    raised = [flag for flag in _FLAGS if any(group.get(flag) for group in made.param_groups)]
    if raised:
        raise ValueError(f"optimizer: derivatives with {', '.join(raised)} of torch's {name} are not known; leave it off.")
    members = _members(made, stand_ins)
    return Recipe(_rule(made), [_named(group) for group in made.param_groups], members, name)


def _checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in settings.items() if value is not None}
    rules: dict[str, Callable[[str, Any], Any]] = {"lr": nonnegative, "weight_decay": nonnegative, "eps": nonnegative}
    rules["dampening"] = number_in(least=0, most=1)
    rules |= dict.fromkeys(("momentum", "alpha"), number_in(least=0, below=1))
    rules["betas"] = two_betas
    return {name: rules[name](name, value) if name in rules else value for name, value in given.items()}


def _make(optimizer: Any, given: dict[str, Any], parameters: list[Tensor]) -> Optimizer:
    if isinstance(optimizer, str):
        choice("optimizer", optimizer, OPTIMIZERS)
        kind, meant = OPTIMIZERS[optimizer]
    elif isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        kind, meant = optimizer, {}
    elif callable(optimizer) and not isinstance(optimizer, nn.Module | Optimizer | type):
        made = optimizer(parameters)
        if not isinstance(made, Optimizer):
            raise ArgumentError(f"optimizer must make a torch optimizer from the parameters. It made {shown(made)}.")
        for group in made.param_groups:
            _refuse_foreign(given, group, type(made).__name__)
            group.update(given)
        return made
    else:
        raise ArgumentError(
            f"optimizer must be a name ({quoted(OPTIMIZERS)}), or a function of the parameters that makes a torch optimizer. "
            f"Got {shown(optimizer)}."
        )
    if "lr" not in given:
        raise ValueError(f"lr is missing: optimizer={shown(optimizer)} brings no learning rate. Give lr=0.1, say.")
    example: Any = kind
    defaults = example([torch.zeros(1, requires_grad=True)], lr=1.0).defaults
    _refuse_foreign(given, defaults, kind.__name__)
    return example(parameters, **{**meant, **given})  # type: ignore[no-any-return]


def _refuse_foreign(given: Mapping[str, Any], has: Mapping[str, Any], name: str) -> None:
    foreign = [setting for setting in given if setting not in has]
    if foreign:
        known = ("lr", "momentum", "dampening", "nesterov", "weight_decay", "betas", "eps", "alpha")
        raise ValueError(f"{name} has no setting {', '.join(foreign)}; it has {', '.join(s for s in known if s in has)}.")


def _members(made: Optimizer, parameters: list[Tensor]) -> list[int]:
    places = {id(p): i for i, group in enumerate(made.param_groups) for p in group["params"]}
    if left := sum(id(p) not in places for p in parameters):
        raise ValueError(
            f"optimizer must take all parameters that require a gradient: {left} of {len(parameters)} are in no group. Freeze "
            "them in the factory with requires_grad_(False)."
        )
    return [places[id(p)] for p in parameters]


def _rule(made: Optimizer) -> Rule:
    groups = made.param_groups
    shared = {name: {group[name] for group in groups} for name in ("dampening", "nesterov", "eps") if name in groups[0]}
    unlike = [name for name, values in shared.items() if len(values) > 1]
    if unlike:
        raise ValueError(f"optimizer: all parameter groups must have the same {', '.join(unlike)}.")
    first, moving = groups[0], any(group.get("momentum") for group in groups)
    if isinstance(made, SGD):
        return Descent(float(first["dampening"]), bool(first["nesterov"]), moving)
    if isinstance(made, RMSprop):
        return RootMeanSquare(float(first["eps"]), moving)
    decoupled = isinstance(made, AdamW) or bool(first.get("decoupled_weight_decay"))
    return AdaptiveMoments(float(first["eps"]), decoupled)


def _named(group: Mapping[str, Any]) -> dict[str, float]:
    found = {name: float(group[name]) for name in ("lr", "momentum", "alpha", "weight_decay") if name in group}
    if "betas" in group:
        found |= {"beta1": float(group["betas"][0]), "beta2": float(group["betas"][1])}
    return found


def parts_of(recipe: Recipe, layers: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """The parameter tensors of every parameter group and of every layer by name; a group is `0` and `group0`.

    >>> parts_of(read_optimizer("sgd", {"lr": 0.1}, [torch.zeros(1), torch.zeros(1)]), {"fc": [0]})
    {'0': (0, 1), 'group0': (0, 1), 'fc': (0,)}
    """
    groups = {g: tuple(i for i, m in enumerate(recipe.members) if m == g) for g in sorted(set(recipe.members))}
    named = {name: tensors for g, tensors in groups.items() for name in (str(g), f"group{g}")}
    return named | {name: tuple(places) for name, places in layers.items()}


def refuse_two_meanings(names: Sequence[Any], recipe: Recipe, layers: Mapping[str, Sequence[int]]) -> None:
    """Raise where a name is that of a layer and of another parameter group, as `lr:0` with `nn.Sequential`."""
    groups = parts_of(recipe, {}) if len(recipe.groups) > 1 else {}
    for name in names:
        setting, _, part = str(name).partition(":")
        if part in groups and part in layers and groups[part] != tuple(layers[part]):
            raise ArgumentError(
                f"hyper: {name} is layer {part!r} and parameter group {part}. Name the group {setting}:group{part}; to name the "
                "layer, give the layers of the model names that are no numbers."
            )


# Units


def to_units(setting: str, value: float, units: Units) -> float:
    """θ of a value.

    >>> round(to_units("lr", math.e, "log"), 12), to_units("momentum", 0.5, "log")
    (1.0, 0.0)
    """
    if units == "natural":
        return value
    if setting in SHARES:
        return math.log(value / (1.0 - value))
    return math.log(value)


def from_units(setting: str, theta: float, units: Units) -> float:
    """The value at θ."""
    if units == "natural":
        return theta
    if setting in SHARES:
        return 1.0 / (1.0 + math.exp(-theta))
    return math.exp(min(theta, 700.0))


def _moved(setting: str, value: Tensor, shift: Tensor, units: Units) -> Tensor:
    """Values whose θ moves by `shift`."""
    if units == "natural":
        return value + shift
    if setting in SHARES:
        return torch.sigmoid(torch.logit(value) + shift)
    return value * shift.exp()


def _slope(setting: str, value: Tensor, units: Units) -> Tensor:
    """The derivative of the value in θ."""
    if units == "natural":
        return torch.ones_like(value)
    return value * (1 - value) if setting in SHARES else value


# Names


@dataclass(frozen=True)
class Hyperparameter:
    """One name: which setting it moves, of which parameter tensors (None: all), or at which knot of the schedule."""

    name: str
    setting: str
    value: float
    tensors: tuple[int, ...] | None = None
    knot: int | None = None


class Hyperparameters:
    """The named hyperparameters of a recipe: θ -> settings of the rule, step by step, with their slopes."""

    def __init__(
        self,
        names: Sequence[str],
        recipe: Recipe,
        sizes: Sequence[int],
        layers: Mapping[str, Sequence[int]],
        *,
        units: Units,
        steps: int,
        schedule: Schedule | None,
        knots: int,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.recipe, self.units, self.steps, self.schedule, self.knots = recipe, units, steps, schedule, knots
        self._dtype = dtype
        self._sizes = torch.tensor(list(sizes))
        refuse_two_meanings(names, recipe, layers)
        self._parts = parts_of(recipe, layers)
        self.named = [self._read(name) for given in names for name in self._expanded(given)]
        if len({h.name for h in self.named}) < len(self.named):
            raise ValueError(f"hyper names {quoted(h.name for h in self.named)}, some of them twice.")
        self._base = {
            setting: torch.tensor([recipe.groups[m][setting] for m in recipe.members], dtype=torch.float64)
            for setting in recipe.rule.settings
        }
        self._refuse_edges()

    @property
    def rule(self) -> Rule:
        """The optimizer's rule; with a velocity also where there is none but its derivative is wanted."""
        moving = any(h.setting == "momentum" for h in self.named)
        return replace(self.recipe.rule, velocity=True) if moving else self.recipe.rule  # type: ignore[type-var]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(h.name for h in self.named)

    @property
    def values(self) -> dict[str, float]:
        """What the optimizer was given, by name."""
        return {h.name: h.value for h in self.named}

    def shifts(self, values: Mapping[str, float] | None) -> Tensor:
        """How far θ moves to other values by name, (k,)."""
        values = values or {}
        foreign = [name for name in values if name not in self.names]
        if foreign:
            raise ValueError(f"values: {foreign[0]!r} is not among the hyperparameters {quoted(self.names)}.")
        return torch.tensor([self._shift(h, values.get(h.name, h.value)) for h in self.named], dtype=torch.float64)

    def one_percent(self, place: int, share: float) -> tuple[Tensor, Tensor] | None:
        """The shifts that take one hyperparameter down and up by a share of it (of what is left to 1); None where it is 0."""
        h = self.named[place]
        if h.knot is None and h.value == 0.0:
            return None
        start = to_units(h.setting, h.value, "log")
        ends = [from_units(h.setting, start + way, "log") for way in (-share, share)]
        low, high = ({h.name: end} for end in ends)
        return self.shifts(low), self.shifts(high)

    def values_at(self, shifts: Tensor) -> dict[str, float]:
        """The values by name where θ has moved."""
        return {
            h.name: from_units(h.setting, to_units(h.setting, h.value, self.units) + shift, self.units) if shift else h.value
            for h, shift in zip(self.named, shifts.tolist(), strict=True)
        }

    def _shift(self, h: Hyperparameter, value: float) -> float:
        rule = number_in(least=0, below=1) if h.setting in SHARES else nonnegative
        value = rule(h.name, value)
        if value == h.value:
            return 0.0
        if self.units == "log" and value == 0.0:
            raise ValueError(f"{h.name} must be above 0 in units of its logarithm. Got 0.")
        return to_units(h.setting, value, self.units) - to_units(h.setting, h.value, self.units)

    # Settings in a step

    def at(self, shifts: Tensor) -> Callable[[int], dict[str, Value]]:
        """step -> settings of the rule, each a number or a vector (p,), differentiable in the shifts."""
        fixed = {setting: self._spread(self._setting(setting, shifts)) for setting in self._base}
        if self.schedule is None and not self._knotted:
            return lambda step: fixed
        return lambda step: {**fixed, "lr": fixed["lr"] * self.factor(step, shifts)}

    def slopes(self, shifts: Tensor) -> Callable[[int], list[tuple[str, Value]]]:
        """step -> for every hyperparameter the setting that moves, and how fast in θ (zero where it does not reach)."""
        fixed: list[tuple[str, Value]] = []
        for h in self.named:
            setting = "lr" if h.knot is not None else h.setting
            value = self._setting(setting, shifts)
            slope = value if h.knot is not None else _slope(setting, value, self.units)
            fixed.append((setting, self._spread(slope * self._reached(h))))

        def of(step: int) -> list[tuple[str, Value]]:
            factor = self.factor(step, shifts)
            weights = self._weights(step) if self._knotted else []
            found: list[tuple[str, Value]] = []
            for h, shift, (setting, slope) in zip(self.named, shifts.tolist(), fixed, strict=True):
                share = factor if setting == "lr" else 1.0
                if h.knot is not None:
                    share *= weights[h.knot] / (1.0 if self.units == "log" else 1.0 + shift)
                found.append((setting, slope * share))
            return found

        return of

    def by_tensor(self, shifts: Tensor) -> dict[str, Tensor]:
        """The settings of the rule for every parameter tensor, before the schedule."""
        return {setting: self._setting(setting, shifts) for setting in self._base}

    @property
    def _knotted(self) -> bool:
        return any(h.knot is not None for h in self.named)

    def _reached(self, h: Hyperparameter) -> Tensor:
        """One for each parameter tensor that a hyperparameter covers, else zero."""
        if h.tensors is None:
            return torch.ones(len(self._sizes), dtype=torch.float64)
        found = torch.zeros(len(self._sizes), dtype=torch.float64)
        found[list(h.tensors)] = 1.0
        return found

    def _setting(self, setting: str, shifts: Tensor) -> Tensor:
        """By parameter tensor."""
        moves = [shift * self._reached(h) for h, shift in zip(self.named, shifts, strict=True) if h.setting == setting]
        total = sum(moves)
        still = not moves or (not shifts.requires_grad and not bool(total.any()))
        return self._base[setting] if still else _moved(setting, self._base[setting], total, self.units)

    def _spread(self, by_tensor: Tensor) -> Value:
        """A number where all parameter tensors share it, else a vector (p,)."""
        if by_tensor.requires_grad:
            return by_tensor.repeat_interleave(self._sizes).to(self._dtype)
        shared = bool((by_tensor == by_tensor[0]).all())
        return float(by_tensor[0]) if shared else by_tensor.repeat_interleave(self._sizes).to(self._dtype)

    def factor(self, step: int, shifts: Tensor) -> Any:
        """What the learning rate is multiplied with in a step; a number unless the shifts are differentiated."""
        factor: Any = 1.0 if self.schedule is None else nonnegative(f"what schedule gives for step {step}", self.schedule(step))
        if not self._knotted:
            return factor
        weights = self._weights(step)
        for h, shift in zip(self.named, shifts, strict=True):
            if h.knot is not None and weights[h.knot]:
                moved = shift if self.units == "log" else torch.log1p(shift)
                factor = factor * torch.exp(weights[h.knot] * moved)
        return factor if shifts.requires_grad else float(factor)

    def _weights(self, step: int) -> list[float]:
        """The share of every knot in the logarithm of the factor: two neighbours, together one."""
        if self.knots == 1 or self.steps == 1:
            return [1.0] + [0.0] * (self.knots - 1)
        place = step / (self.steps - 1) * (self.knots - 1)
        return [max(0.0, 1.0 - abs(place - k)) for k in range(self.knots)]

    # Reading names

    def _expanded(self, name: Any) -> Iterable[str]:
        if not isinstance(name, str):
            raise TypeError(f"hyper must hold names such as 'lr' or 'momentum'. Got {shown(name)}.")
        return [f"schedule[{k}]" for k in range(self.knots)] if name == "schedule" else [name]

    def _read(self, name: str) -> Hyperparameter:
        knot = re.fullmatch(r"schedule\[(\d+)\]", name)
        if knot and int(knot[1]) < self.knots:
            return Hyperparameter(name, "schedule", 1.0, knot=int(knot[1]))
        setting, _, part = name.partition(":")
        if setting in self.recipe.rule.settings and (not part or part in self._parts):
            tensors = self._parts[part] if part else None
            group = self.recipe.members[tensors[0] if tensors else 0]
            return Hyperparameter(name, setting, self.recipe.groups[group][setting], tensors)
        own = self.recipe.rule.settings
        known = [*own, "schedule", *(f"{s}:{p}" for s in own for p in self._parts)]
        known += [f"schedule[{k}]" for k in range(self.knots)]
        raise ValueError(
            f"hyper: {self.recipe.name} has no hyperparameter {name!r}; the nearest: {', '.join(nearest(name, known, 4))}. A "
            "layer or a parameter group stands after a colon, as in 'lr:0'."
        )

    def _refuse_edges(self) -> None:
        """Raise where a value has no logarithm, or no log-odds."""
        for h in self.named:
            if self.units == "natural" or h.knot is not None:
                continue
            covered = self._base[h.setting] if h.tensors is None else self._base[h.setting][list(h.tensors)]
            if bool((covered <= 0).any()):
                raise ValueError(
                    f"{h.name} is 0, which has no logarithm to move along: give the optimizer a value above 0, or "
                    "units='natural'."
                )
