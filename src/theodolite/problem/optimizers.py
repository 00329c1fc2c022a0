"""Optimizers as users give them: themselves, by a function of the parameters, or by name where a learning rate is given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from theodolite.arguments import shown
from theodolite.errors import ArgumentError
from theodolite.text import quoted

#: Name -> class and settings it stands for.
NAMES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (SGD, {}),
    "momentum": (SGD, {"momentum": 0.9}),
    "heavy-ball": (SGD, {"momentum": 0.9}),
    "nesterov": (SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (Adam, {}),
    "adamw": (AdamW, {}),
}
SGD_RATE = 1e-2  # where no rate was given; torch's own default is smaller than anyone uses


def as_optimizer(
    value: Any, parameters: Iterable[nn.Parameter], *, lr: float | None = None, needs_rate: bool = False, rate: str = "lr=0.1"
) -> Optimizer | None:
    """An optimizer as it is, None too; one made by a function of the parameters; or a new one from its name or its class.

    The last two need `lr` where the rate matters. `rate` names the argument that gives it, where there is one.

    >>> as_optimizer("momentum", nn.Linear(1, 1).parameters(), lr=0.5).defaults["momentum"]
    0.9
    """
    if value is None or isinstance(value, Optimizer):
        return value
    if isinstance(value, str) and value in NAMES:
        kind, settings = NAMES[value]
    elif isinstance(value, type) and issubclass(value, Optimizer):
        kind, settings = value, {}
    elif callable(value) and not isinstance(value, nn.Module | type):
        return _made_by(value, list(parameters))
    else:
        raise ArgumentError(
            f"optimizer must be a torch optimizer, a function of the parameters that makes one, or one of {quoted(NAMES)}. "
            f"Got {shown(value)}."
        )
    if needs_rate and lr is None:
        raise ValueError(
            f"optimizer={value if isinstance(value, type) else repr(value)} has no learning rate: give "
            f"{rate + ', or ' if rate else ''}the optimizer itself, torch.optim.{kind.__name__}(model.parameters(), lr=0.1)."
        )
    made: Any = kind
    return made(list(parameters), lr=SGD_RATE if lr is None else lr, **settings)  # type: ignore[no-any-return]


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether a step calls the loss itself, as LBFGS does.

    >>> from torch.optim import LBFGS
    >>> needs_closure(LBFGS(nn.Linear(1, 1).parameters())), needs_closure(SGD(nn.Linear(1, 1).parameters()))
    (True, False)
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _made_by(function: Callable[[Any], Any], parameters: list[nn.Parameter]) -> Optimizer:
    made = function(parameters)
    if not isinstance(made, Optimizer):
        raise ArgumentError(f"optimizer must make a torch optimizer from the parameters. It made {shown(made)}.")
    return made
