"""Optimizers by name, where only their kind matters or a learning rate is given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from theodolite.arguments import shown
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
    value: Any, parameters: Iterable[nn.Parameter], *, lr: float | None = None, needs_rate: bool = False
) -> Optimizer | None:
    """An optimizer as it is, None too; a name as a new one of that kind, which needs `lr` where its rate matters.

    >>> as_optimizer("momentum", nn.Linear(1, 1).parameters(), lr=0.5).defaults["momentum"]
    0.9
    """
    if value is None or isinstance(value, Optimizer):
        return value
    if not isinstance(value, str) or value not in NAMES:
        raise ValueError(f"optimizer must be a torch optimizer or one of {quoted(NAMES)}. Got {shown(value)}.")
    if needs_rate and lr is None:
        raise ValueError(
            f"optimizer={value!r} is a name without a learning rate, which is compared here: pass the torch optimizer itself."
        )
    kind, settings = NAMES[value]
    made: Any = kind
    return made(list(parameters), lr=SGD_RATE if lr is None else lr, **settings)  # type: ignore[no-any-return]
