"""SGD, Adam and AdamW on stacked parameters, with a learning rate per replica; the numbers of `torch.optim`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.arguments import choice, fields_checked, nonnegative, number_in, shown
from theodolite.text import nearest
from theodolite.training.fleets.state import Stack

State = dict[str, Stack]  # column -> parameter -> (R, *shape)


class FleetOptimizer(Protocol):
    """A rule that moves all replicas at once. `count` (R,) are the steps each replica took before this one."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the tensors kept per parameter; they start at zero."""

    def step(self, parameters: Stack, gradients: Mapping[str, Tensor], state: State, rate: Tensor, count: Tensor) -> None:
        """Change `parameters` and `state` in place; a parameter without gradient stays."""


@dataclass(frozen=True)
class SGD:
    """Gradient descent with momentum, dampening, Nesterov's form and weight decay added to the gradient."""

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        share = number_in(least=0, most=1)
        fields_checked(self, momentum=number_in(least=0, below=1), dampening=share, weight_decay=nonnegative)
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise ValueError(
                f"nesterov needs a momentum and no dampening. Got momentum={self.momentum}, dampening={self.dampening}."
            )

    @property
    def columns(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def step(self, parameters: Stack, gradients: Mapping[str, Tensor], state: State, rate: Tensor, count: Tensor) -> None:
        # Only the first gradient enters the momentum undamped.
        share = 1.0 - self.dampening * (count > 0).to(rate.dtype) if self.dampening else None
        for name, gradient in gradients.items():
            p = parameters[name]
            update = gradient.add(p, alpha=self.weight_decay) if self.weight_decay else gradient
            if self.momentum:
                velocity = state["momentum"][name]
                fresh = update if share is None else update * _along(share, p)
                torch.add(fresh, velocity, alpha=self.momentum, out=velocity)  # one pass over memory
                update = update.add(velocity, alpha=self.momentum) if self.nesterov else velocity
            p.addcmul_(update, _along(rate, p), value=-1)


@dataclass(frozen=True)
class Adam:
    """Adam; `decoupled` weight decay makes it AdamW."""

    columns = ("mean", "square")
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False

    def __post_init__(self) -> None:
        fields_checked(self, betas=_two_betas, eps=nonnegative, weight_decay=nonnegative)

    def step(self, parameters: Stack, gradients: Mapping[str, Tensor], state: State, rate: Tensor, count: Tensor) -> None:
        first, second = self.betas
        steps = count.double() + 1
        stride = (rate / (1 - first**steps)).to(rate.dtype)
        spread = (1 - second**steps).sqrt().to(rate.dtype)
        for name, gradient in gradients.items():
            p, mean, square = parameters[name], state["mean"][name], state["square"][name]
            if self.weight_decay and self.decoupled:
                p.mul_(_along(1 - rate * self.weight_decay, p))
            elif self.weight_decay:
                gradient = gradient.add(p, alpha=self.weight_decay)
            mean.lerp_(gradient, 1 - first)
            square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
            scale = square.sqrt().div_(_along(spread, p)).add_(self.eps)
            torch.div(mean, scale, out=scale)
            p.addcmul_(scale, _along(stride, p), value=-1)


def _along(numbers: Tensor, p: Tensor) -> Tensor:
    """(R,) shaped so that it multiplies (R, *shape)."""
    return numbers.view(-1, *(1,) * (p.ndim - 1))


def zero_state(rule: FleetOptimizer, parameters: Stack) -> State:
    """The state before the first step."""
    return {column: {name: torch.zeros_like(p.detach()) for name, p in parameters.items()} for column in rule.columns}


#: What makes a rule, and which of torch's settings it takes.
_KNOWN: dict[str, tuple[Callable[..., FleetOptimizer], tuple[str, ...]]] = {
    "sgd": (SGD, ("momentum", "dampening", "nesterov", "weight_decay")),
    "adam": (Adam, ("betas", "eps", "weight_decay")),
    "adamw": (partial(Adam, weight_decay=0.01, decoupled=True), ("betas", "eps", "weight_decay")),
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
            f"optimizer: a fleet runs SGD, Adam and AdamW with one parameter group. Got {type(optimizer).__name__}; use th.train "
            "in a loop over the replicas for other optimizers, or pass a rule with `columns` and `step`."
        )
    group = optimizer.param_groups[0]
    foreign = [flag for flag in ("maximize", "amsgrad") if group.get(flag)]
    if foreign:
        raise ValueError(f"A fleet does not know {', '.join(foreign)} of torch's {type(optimizer).__name__}; leave it off.")
    return _by_name(name, {setting: group[setting] for setting in _KNOWN[name][1]}), float(group["lr"])


def _two_betas(name: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"{name} must be two numbers, each of at least 0 and below 1. Got {shown(value)}.")
    first, second = (number_in(least=0, below=1)(f"{name}[{i}]", beta) for i, beta in enumerate(value))
    return first, second
