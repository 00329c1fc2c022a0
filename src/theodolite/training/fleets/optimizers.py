"""SGD, Adam, AdamW and RMSprop on stacked parameters, with rates and settings per replica; the numbers of `torch.optim`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.arguments import Rule, choice, fields_checked, nonnegative, number_in, one_or_each, shown
from theodolite.text import nearest
from theodolite.training.fleets.state import Stack

State = dict[str, Stack]  # column -> parameter -> (R, *shape), or (R, *shape, size)
Setting = float | tuple[float, ...]  # one number for all replicas, or one for each


class FleetOptimizer(Protocol):
    """A rule that moves all replicas at once. `count` (R,) are the steps each replica took before this one.

    A rule whose settings differ between replicas also has `rows(rows)`, the rule of some of them: replicas that diverged leave
    the stack, and a large fleet takes its steps chunk by chunk.
    """

    @property
    def columns(self) -> tuple[str, ...] | Mapping[str, int]:
        """Names of the tensors kept per parameter, which start at zero; a mapping gives each the size of a trailing axis."""

    def step(self, parameters: Stack, gradients: Mapping[str, Tensor], state: State, rate: Tensor, count: Tensor) -> None:
        """Change `parameters` and `state` in place; a parameter without gradient stays.

        With a learning rate for each group of parameters it is called once for each group.
        """


class ReplicaSettings:
    """Settings of a rule, each a number for all replicas or a tuple of one for each."""

    def rows(self, rows: Tensor | slice) -> Any:
        """The rule of some replicas."""
        return replace(self, **{name: _part(setting, rows) for name, setting in _settings(self).items()})  # type: ignore[type-var]

    def check(self, replicas: int) -> None:
        """Raise where a setting has one number per replica, of another number of replicas."""
        for name, setting in _settings(self).items():
            wrong = next((own for own in _each_own(setting) if len(own) != replicas), None)
            if wrong is not None:
                raise ValueError(f"{name} must be one number or one per replica: {replicas}. Got {len(wrong)}.")


@dataclass(frozen=True)
class SGD(ReplicaSettings):
    """Gradient descent with momentum, dampening, Nesterov's form and weight decay added to the gradient."""

    momentum: Setting = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: Setting = 0.0

    def __post_init__(self) -> None:
        fields_checked(self, momentum=_own(number_in(least=0, below=1)), weight_decay=_own(nonnegative))
        fields_checked(self, dampening=number_in(least=0, most=1))
        if self.nesterov and (_least(self.momentum) <= 0 or self.dampening != 0):
            raise ValueError(
                f"nesterov needs a momentum and no dampening. Got momentum={shown(self.momentum)}, dampening={self.dampening}."
            )

    @property
    def columns(self) -> tuple[str, ...]:
        return ("momentum",) if _used(self.momentum) else ()

    def step(self, parameters: Stack, gradients: Mapping[str, Tensor], state: State, rate: Tensor, count: Tensor) -> None:
        decays, has_momentum = _used(self.weight_decay), _used(self.momentum)
        decay, momentum = _numbers(self.weight_decay, rate), _numbers(self.momentum, rate)
        share = self._share(rate, count)
        for name, gradient in gradients.items():
            p = parameters[name]
            update = _plus(gradient, p, decay) if decays else gradient
            if has_momentum:
                velocity = state["momentum"][name]
                fresh = update if share is None else update * _along(share, p)
                _plus(fresh, velocity, momentum, out=velocity)  # one pass over memory
                update = _plus(update, velocity, momentum) if self.nesterov else velocity
            p.addcmul_(update, _along(rate, p), value=-1)

    def _share(self, rate: Tensor, count: Tensor) -> Tensor | None:
        """What enters the momentum: the first gradient whole, later ones damped; all of each where there is no momentum."""
        if not self.dampening:
            return None
        late = (count > 0) & (rate.new_tensor(self.momentum) > 0)
        return 1.0 - self.dampening * late.to(rate.dtype)


@dataclass(frozen=True)
class Adam(ReplicaSettings):
    """Adam; `decoupled` weight decay makes it AdamW."""

    columns = ("mean", "square")
    betas: tuple[Setting, Setting] = (0.9, 0.999)  # each one number for all replicas, or one for each
    eps: float = 1e-8
    weight_decay: Setting = 0.0
    decoupled: bool = False

    def __post_init__(self) -> None:
        fields_checked(self, betas=_two_betas, eps=nonnegative, weight_decay=_own(nonnegative))

    def step(self, parameters: Stack, gradients: Mapping[str, Tensor], state: State, rate: Tensor, count: Tensor) -> None:
        steps = count.double() + 1
        first, second = (_numbers(beta, rate, torch.float64) for beta in self.betas)
        decays, decay = _used(self.weight_decay), _numbers(self.weight_decay, rate)
        stride = (rate / (1 - first**steps)).to(rate.dtype)
        spread = (1 - second**steps).sqrt().to(rate.dtype)
        for name, gradient in gradients.items():
            p, mean, square = parameters[name], state["mean"][name], state["square"][name]
            if decays and self.decoupled:
                p.mul_(_along(1 - rate * decay, p))
            elif decays:
                gradient = _plus(gradient, p, decay)
            mean.lerp_(gradient, _shaped(1 - first, p))
            _decay_squares(square, gradient, second)
            scale = square.sqrt().div_(_along(spread, p)).add_(self.eps)
            torch.div(mean, scale, out=scale)
            p.addcmul_(scale, _along(stride, p), value=-1)


@dataclass(frozen=True)
class RMSprop(ReplicaSettings):
    """RMSprop: the gradient over the root of its mean square; `centered` takes the square of its mean off."""

    alpha: Setting = 0.99
    eps: float = 1e-8
    weight_decay: Setting = 0.0
    momentum: Setting = 0.0
    centered: bool = False

    def __post_init__(self) -> None:
        below_one = number_in(least=0, below=1)
        fields_checked(self, alpha=_own(below_one), eps=nonnegative, weight_decay=_own(nonnegative), momentum=_own(below_one))

    @property
    def columns(self) -> tuple[str, ...]:
        return ("square", *(["mean"] if self.centered else []), *(["momentum"] if _used(self.momentum) else []))

    def step(self, parameters: Stack, gradients: Mapping[str, Tensor], state: State, rate: Tensor, count: Tensor) -> None:
        alpha = _numbers(self.alpha, rate, torch.float64)
        decay, momentum = _numbers(self.weight_decay, rate), _numbers(self.momentum, rate)
        for name, gradient in gradients.items():
            p, square = parameters[name], state["square"][name]
            if _used(self.weight_decay):
                gradient = _plus(gradient, p, decay)
            _decay_squares(square, gradient, alpha)
            spread = square
            if self.centered:
                mean = state["mean"][name].lerp_(gradient, _shaped(1 - alpha, p))
                spread = square.addcmul(mean, mean, value=-1)
            update = gradient / spread.sqrt().add_(self.eps)
            if _used(self.momentum):
                update = _plus(update, state["momentum"][name], momentum, out=state["momentum"][name])
            p.addcmul_(update, _along(rate, p), value=-1)


# Settings of one number or one for each replica


class Betas(tuple[Setting, Setting]):
    """Two settings: a pair of numbers is none per replica."""


def _settings(rule: Any) -> dict[str, Any]:
    return {f.name: getattr(rule, f.name) for f in fields(rule)}


def _each_own(setting: Any) -> list[tuple[float, ...]]:
    """The parts of a setting that have a number for each replica."""
    return [part for part in (setting if isinstance(setting, Betas) else (setting,)) if isinstance(part, tuple)]


def _part(setting: Any, rows: Tensor | slice) -> Any:
    """A setting of some replicas."""
    if isinstance(setting, Betas):
        return Betas(_part(beta, rows) for beta in setting)
    if not isinstance(setting, tuple):
        return setting
    return setting[rows] if isinstance(rows, slice) else tuple(setting[row] for row in rows.tolist())


def _own(rule: Rule) -> Rule:
    """A number, or a tuple of one for each replica."""

    def check(name: str, value: Any) -> Setting:
        found = one_or_each(rule)(name, value)
        return tuple(found) if isinstance(found, list) else found

    return check


def _least(setting: Setting) -> float:
    return min(setting) if isinstance(setting, tuple) else setting


def _used(setting: Setting) -> bool:
    return any(setting) if isinstance(setting, tuple) else bool(setting)


def _numbers(setting: Setting, like: Tensor, dtype: torch.dtype | None = None) -> Any:
    """The number, or all of them as a tensor (R,) where another is."""
    return like.new_tensor(setting, dtype=dtype) if isinstance(setting, tuple) else setting


def _along(numbers: Tensor, p: Tensor) -> Tensor:
    """(R,) shaped so that it multiplies (R, *shape)."""
    return numbers.view(-1, *(1,) * (p.ndim - 1))


def _shaped(number: Any, p: Tensor) -> Any:
    """The same for a number, or (R,) in any precision."""
    return _along(number.to(p.dtype), p) if isinstance(number, Tensor) else number


def _plus(a: Tensor, b: Tensor, factor: Any, out: Tensor | None = None) -> Tensor:
    """a + factor b, where the factor is a number or (R,)."""
    if isinstance(factor, Tensor):
        return torch.addcmul(a, b, _along(factor, b), out=out)
    return torch.add(a, b, alpha=factor, out=out)


def _decay_squares(square: Tensor, gradient: Tensor, beta: Any) -> None:
    """square <- beta square + (1 - beta) gradient², in place."""
    if isinstance(beta, Tensor):
        square.mul_(_shaped(beta, square)).addcmul_(gradient * _shaped(1 - beta, square), gradient)
    else:
        square.mul_(beta).addcmul_(gradient, gradient, value=1 - beta)


def zero_state(rule: FleetOptimizer, parameters: Stack) -> State:
    """The state before the first step."""
    columns = rule.columns
    sizes: Mapping[str, int | None] = columns if isinstance(columns, Mapping) else dict.fromkeys(columns)
    return {column: {name: _zeros(p.detach(), size) for name, p in parameters.items()} for column, size in sizes.items()}


def _zeros(p: Tensor, size: int | None) -> Tensor:
    return torch.zeros_like(p) if size is None else p.new_zeros(*p.shape, size)


#: What makes a rule, and which of torch's settings it takes.
_KNOWN: dict[str, tuple[Callable[..., FleetOptimizer], tuple[str, ...]]] = {
    "sgd": (SGD, ("momentum", "dampening", "nesterov", "weight_decay")),
    "adam": (Adam, ("betas", "eps", "weight_decay")),
    "adamw": (partial(Adam, weight_decay=0.01, decoupled=True), ("betas", "eps", "weight_decay")),
    "rmsprop": (RMSprop, ("alpha", "eps", "weight_decay", "momentum", "centered")),
}


def fleet_optimizer(
    optimizer: str | FleetOptimizer | Callable[[Any], Optimizer], settings: Mapping[str, Any], example: Iterable[Tensor]
) -> tuple[FleetOptimizer, float | None]:
    """A rule for the fleet, and the learning rate where the optimizer brings one.

    `optimizer` is a name, a rule, or a function of the parameters that makes a torch optimizer, whose settings are read.
    `settings` that are None keep torch's default.

    >>> fleet_optimizer("sgd", {"momentum": 0.9}, [])
    (SGD(momentum=0.9, dampening=0.0, nesterov=False, weight_decay=0.0), None)
    """
    given = {name: value for name, value in settings.items() if value is not None}
    if isinstance(optimizer, str):
        return _by_name(optimizer, given), None
    if hasattr(optimizer, "columns") and hasattr(optimizer, "step"):
        rule, rate = optimizer, None
    elif callable(optimizer) and not isinstance(optimizer, nn.Module) and _makes_optimizers(optimizer):
        rule, rate = _from_torch(optimizer([p.detach().clone().requires_grad_() for p in example]))
    else:
        raise TypeError(f"optimizer must be a name ({', '.join(map(repr, _KNOWN))}) or a function. Got {shown(optimizer)}.")
    foreign = [setting for setting in given if not hasattr(rule, setting)]
    if foreign:
        has = [setting for setting in settings if hasattr(rule, setting)]
        raise ValueError(
            f"{type(rule).__name__} has no setting {', '.join(foreign)}; it has {', '.join(has) or 'none of those given here'}."
        )
    return (replace(rule, **given) if given else rule), rate  # type: ignore[type-var]


def _by_name(name: str, given: Mapping[str, Any]) -> FleetOptimizer:
    choice("optimizer", name, nearest(name, _KNOWN))
    make, known = _KNOWN[name]
    foreign = [setting for setting in given if setting not in known]
    if foreign:
        raise ValueError(f"{name!r} has no setting {', '.join(foreign)}; it has {', '.join(known)}.")
    return make(**given)


def _makes_optimizers(given: Any) -> bool:
    """Any function may; of the classes those of torch's optimizers do."""
    return not isinstance(given, type) or issubclass(given, Optimizer)


def _from_torch(optimizer: Any) -> tuple[FleetOptimizer, float]:
    name = type(optimizer).__name__.lower()
    if not isinstance(optimizer, Optimizer) or name not in _KNOWN or len(optimizer.param_groups) != 1:
        raise ValueError(
            "optimizer: a fleet runs SGD, Adam, AdamW and RMSprop with one parameter group. Got "
            f"{type(optimizer).__name__}; use th.train in a loop over the replicas for other optimizers, or pass a rule with "
            "`columns` and `step`."
        )
    group = optimizer.param_groups[0]
    foreign = [flag for flag in ("maximize", "amsgrad") if group.get(flag)]
    if foreign:
        raise ValueError(f"A fleet does not know {', '.join(foreign)} of torch's {type(optimizer).__name__}; leave it off.")
    return _by_name(name, {setting: group[setting] for setting in _KNOWN[name][1]}), float(group["lr"])


def _two_betas(name: str, value: Any) -> tuple[Setting, Setting]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"{name} must be two numbers, each of at least 0 and below 1. Got {shown(value)}.")
    first, second = (_own(number_in(least=0, below=1))(f"{name}[{i}]", beta) for i, beta in enumerate(value))
    return Betas((first, second))
