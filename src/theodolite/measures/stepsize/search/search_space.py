"""What is tuned: names, units and ranges of hyperparameters, and the settings that a sweep or a random search tries."""

from __future__ import annotations

import glob
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from theodolite.arguments import each, number_in, positive, shown
from theodolite.errors import ArgumentError
from theodolite.measures.stepsize.meta_gradients.hyperparameters import SHARES, from_units, to_units
from theodolite.text import nearest, quoted

Setting = dict[str, float]  # a value of each hyperparameter, by name

#: Where a search looks if no values are given; the learning rate is looked for around the critical one.
RANGES = {
    "momentum": (0.3, 0.98),
    "beta1": (0.3, 0.98),
    "beta2": (0.8, 0.9999),
    "alpha": (0.8, 0.9999),
    "weight_decay": (1e-6, 1e-1),
}
#: Learning rates that a search looks at, as shares of the critical one.
LEAST_RATE, MOST_RATE = 1 / 300, 3.0
#: The same for optimizers that divide by a second moment: their critical rate at the first step says little about later ones.
ADAPTIVE_RATES = (1e-5, 1e-1)


@dataclass(frozen=True)
class Range:
    """Where one hyperparameter is looked for: between two ends, or at the values that are given."""

    name: str
    low: float
    high: float
    values: tuple[float, ...] = ()

    @property
    def is_rate(self) -> bool:
        return self.setting == "lr"

    @property
    def setting(self) -> str:
        """The setting of the optimizer that it moves: of `lr:fc1` the learning rate."""
        return self.name.split(":")[0]

    def to_unit(self, value: float) -> float:
        """The value in units in which equal steps are equal changes: of its logarithm, or of the logarithm of its odds.

        >>> Range("momentum", 0.1, 0.9).to_unit(0.5), Range("lr", 0.1, 0.9).to_unit(1.0)
        (0.0, 0.0)
        """
        return to_units(self.setting, value, "log")

    def from_unit(self, u: float) -> float:
        """The inverse of `to_unit`."""
        return from_units(self.setting, u, "log")

    def spread(self, count: int) -> list[float]:
        """The values of a sweep: those given, or so many from end to end in equal steps."""
        if self.values:
            return list(self.values)
        low, high = self.to_unit(self.low), self.to_unit(self.high)
        return [self.from_unit(low + (high - low) * i / max(1, count - 1)) for i in range(count)]


def swept_axes(names: Sequence[str]) -> int:
    """How many numbers a sweep of hyperparameters with these names varies: all learning rates are one, unless they are both."""
    others = sum(name.split(":")[0] != "lr" for name in names)
    return len(names) if len(names) <= 2 else others + (others < len(names))


class Space:
    """The hyperparameters that are tuned together, with a setting to start from.

    >>> space = Space([Range("lr", 0.01, 1.0)], {"lr": 0.1})
    >>> [round(setting["lr"], 3) for setting in space.sweep(3)]
    [0.01, 0.1, 1.0]
    """

    def __init__(self, hyper: Sequence[Range], start: Setting) -> None:
        self.hyper, self.start = tuple(hyper), dict(start)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.hyper)

    def sweep(self, count: int) -> list[Setting]:
        """About so many settings on a grid: over one hyperparameter, or two; others stay where the start has them.

        Of more than two all learning rates are one, and have the same value.
        """
        axes = self._axes()[:2]
        if len(axes) == 1:
            return [self._with(zip(axes, (value,), strict=True)) for value in axes[0][0].spread(count)]
        side = max(2, round(count**0.5))
        first = axes[0][0].spread(side)
        second = axes[1][0].spread(max(2, round(count / len(first))))
        return [self._with(zip(axes, pair, strict=True)) for pair in itertools.product(first, second)]

    def refined(self, tried: Sequence[Setting], best: int, count: int) -> list[Setting]:
        """So many further settings of the first axis between the neighbours of the best, or beyond an end where it is that."""
        axis = self._axes()[0]
        own = axis[0]
        places = sorted(own.to_unit(setting[own.name]) for setting in tried)
        here = places.index(own.to_unit(tried[best][own.name]))
        step = (places[-1] - places[0]) / max(1, len(places) - 1)
        below = places[here - 1] if here else places[here] - 2 * step
        above = places[here + 1] if here + 1 < len(places) else places[here] + 2 * step
        fewer = count // 2
        found = [places[here] + (below - places[here]) * (i + 1) / (fewer + 1) for i in range(fewer)]
        found += [places[here] + (above - places[here]) * (i + 1) / (count - fewer + 1) for i in range(count - fewer)]
        return [self._with(zip([axis], (own.from_unit(u),), strict=True)) for u in sorted(found)]

    def random(self, count: int, generator: torch.Generator) -> list[Setting]:
        """So many settings, each hyperparameter drawn by itself and evenly in its unit."""
        drawn = torch.rand(count, len(self.hyper), generator=generator, dtype=torch.float64)
        low, high = self._ends()
        return [self.at(row) for row in low + drawn * (high - low)]

    @property
    def axes(self) -> int:
        """How many numbers a sweep of everything would vary."""
        return swept_axes(self.names)

    def inside(self, u: Tensor) -> Tensor:
        """A place in units, moved into the range where it lies outside."""
        return u.clamp(*self._ends())

    def place(self, setting: Setting) -> Tensor:
        """A setting in units, (h,)."""
        return torch.tensor([one.to_unit(setting[one.name]) for one in self.hyper], dtype=torch.float64)

    def at(self, u: Tensor) -> Setting:
        """The setting at a place in units."""
        return {one.name: one.from_unit(value) for one, value in zip(self.hyper, u.tolist(), strict=True)}

    def _ends(self) -> tuple[Tensor, Tensor]:
        ends = [(one.to_unit(one.low), one.to_unit(one.high)) for one in self.hyper]
        low, high = torch.tensor(ends, dtype=torch.float64).unbind(1)
        return low, high

    def _axes(self) -> list[tuple[Range, ...]]:
        """What a sweep moves together: each of two; of more all learning rates, then each of the others."""
        if len(self.hyper) <= 2:
            return [(one,) for one in self.hyper]
        rates = tuple(one for one in self.hyper if one.is_rate)
        return [*([rates] if rates else []), *((one,) for one in self.hyper if not one.is_rate)]

    def _with(self, moved: Any) -> Setting:
        return self.start | {one.name: value for axis, value in moved for one in axis}


def check_names(hyper: Any, settings: Sequence[str], layers: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Names of hyperparameters, each a setting of the optimizer or `lr:LAYER`; an error with the nearest names otherwise.

    `layers` are the parameters of layers, and of parameter groups, by name.
    """
    if isinstance(hyper, str) or not isinstance(hyper, Sequence) or not hyper:
        raise ArgumentError(f"hyper must be a list of names of hyperparameters, such as ['lr', 'momentum']. Got {shown(hyper)}.")
    known = [*settings, *(f"lr:{layer}" for layer in layers)]
    for name in hyper:
        if name not in known:
            raise ArgumentError(f"hyper: {_unknown(name, known)} {quoted(settings)} and lr:LAYER are tuned.")
    if len(set(hyper)) < len(hyper):
        raise ArgumentError(f"hyper names one hyperparameter twice: {quoted(hyper)}.")
    own = [name for name in hyper if name.startswith("lr:")]
    if "lr" in hyper and own:
        raise ArgumentError(
            f"hyper: lr moves the rates of all layers, so it does not go with {quoted(own)}. Name lr: of each layer."
        )
    for one, other in itertools.combinations(own, 2):
        if shared := set(layers[one.removeprefix("lr:")]) & set(layers[other.removeprefix("lr:")]):
            raise ArgumentError(f"hyper: {one} and {other} are both the rate of {min(shared)}. Name one of them.")
    return tuple(hyper)


def _unknown(name: Any, known: Sequence[str]) -> str:
    """What to say of a name that is none of those known."""
    if isinstance(name, str) and name.partition("[")[0] == "schedule":
        return "factors of a schedule are not searched; th.meta_gradient takes their derivatives (hyper='schedule')."
    if isinstance(name, str) and "," in name:
        return f"{shown(name)} is one text. Give a list: {shown([part.strip() for part in name.split(',')])}."
    return f"there is no hyperparameter {shown(name)}; nearest: {quoted(nearest(str(name), known, count=3))}."


def values_of(name: str, values: Any) -> tuple[float, ...]:
    """The values a user wants to be swept, in order."""
    rule = number_in(above=0, below=1) if name in SHARES else positive
    return tuple(sorted(set(each(rule)(f"values[{name!r}]", values))))


def make_space(names: Sequence[str], start: Setting, rates: tuple[float, float], values: Mapping[str, Any]) -> Space:
    """The space of the hyperparameters named: learning rates between two ends, or over the values that are given."""
    unknown = [name for name in values if name not in names]
    if unknown:
        raise ArgumentError(f"values has {quoted(unknown)}, which hyper does not name: {quoted(names)}.")
    ranges = []
    for name in names:
        given = values_of(name, values[name]) if name in values else ()
        low, high = (given[0], given[-1]) if given else RANGES.get(name, rates)
        ranges.append(Range(name, low, high, given))
    return Space(ranges, {one.name: min(max(start[one.name], one.low), one.high) for one in ranges})


def fleet_settings(
    settings: Sequence[Setting], held: Mapping[str, float], parts: Mapping[str, Sequence[str]], own_rates: Mapping[str, float]
) -> dict[str, Any]:
    """The arguments of a `Fleet` with one replica for each setting; `held` are the rate and the betas where they are not tuned.

    `parts` are the parameters of layers and groups, `own_rates` what the optimizer gives to every parameter: a learning rate is
    that of the first parameter it covers, and the others keep their ratio to it.

    >>> own_rates = {"fc.weight": 0.1, "head.weight": 0.05, "head.bias": 0.1}
    >>> fleet_settings([{"lr:fc": 0.2, "momentum": 0.5}], {"lr": 0.4}, {"fc": ["fc.weight"]}, own_rates)
    {'rate': {'head.weight': [0.2], 'head.bias': [0.4], 'fc.weight': [0.2]}, 'momentum': [0.5]}
    >>> fleet_settings([{"lr": 0.2, "beta1": 0.8}], {"beta1": 0.9, "beta2": 0.99}, {}, {"fc.weight": 0.1})
    {'rate': [0.2], 'betas': ([0.8], 0.99)}
    """
    columns = {name: [setting[name] for setting in settings] for name in settings[0]}
    own = {name: columns.pop(name) for name in [*columns] if name.startswith("lr:")}
    shared: Any = columns.pop("lr") if "lr" in columns else [held["lr"]] * len(settings)
    covered = {name: parts[name.removeprefix("lr:")] for name in own}
    left = [name for name in own_rates if not any(name in names for names in covered.values())]
    table: dict[str, Any] = {}
    for names, first, values in [(left, next(iter(own_rates)), shared), *((covered[n], covered[n][0], own[n]) for n in own)]:
        ratios = {name: own_rates[name] / own_rates[first] for name in names}
        table |= {glob.escape(name): [ratio * value for value in values] for name, ratio in ratios.items()}
    rates = table if own or len(set(own_rates.values())) > 1 else shared
    tuned = "beta1" in columns or "beta2" in columns
    betas = {"betas": tuple(columns.pop(name, held[name]) for name in ("beta1", "beta2"))} if tuned else {}
    return {"rate": rates, **betas, **columns}
