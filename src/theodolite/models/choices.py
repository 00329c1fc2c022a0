"""Named choices with errors that list what is accepted: activations, normalisations, sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import nn

T = TypeVar("T")

#: Activations by name. "swish" and "silu" are the same function, x · sigmoid(x).
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "swish": nn.SiLU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "softplus": nn.Softplus,
    "identity": nn.Identity,
}


def choose(argument: str, value: object, table: Mapping[str, T]) -> T:
    """The entry of `table` called `value`.

    >>> choose("activation", "sine", {"relu": 1, "tanh": 2})
    Traceback (most recent call last):
    ValueError: activation must be one of 'relu', 'tanh'; got 'sine'.
    """
    if isinstance(value, str) and value in table:
        return table[value]
    raise ValueError(f"{argument} must be one of {', '.join(map(repr, table))}; got {value!r}.")


def activation(name: str) -> nn.Module:
    """A fresh activation module, so that hooks can tell one layer's units from another's.

    >>> activation("swish")
    SiLU()
    """
    return choose("activation", name, ACTIVATIONS)()


def normalisation(name: str | None, channels: int) -> nn.Module:
    """The layer after (or before) a convolution; None is the identity.

    "batch" keeps running statistics, "batch_stats" always uses the batch's own, "group" acts on each sample alone, as
    per-sample quantities need: the largest number of groups up to 8 that divides the channels.

    >>> normalisation("group", 12).num_groups
    6
    """
    if name is None:
        return nn.Identity()
    makers: dict[str, Callable[[], nn.Module]] = {
        "batch": lambda: nn.BatchNorm2d(channels),
        "batch_stats": lambda: nn.BatchNorm2d(channels, track_running_stats=False),
        "group": lambda: nn.GroupNorm(max(g for g in range(1, 9) if channels % g == 0), channels),
    }
    if name not in makers:
        raise ValueError(f"norm must be one of {', '.join(map(repr, makers))} or None; got {name!r}.")
    return makers[name]()


def check_positive(**sizes: int) -> None:
    """Raise where a size is no whole number of at least 1.

    >>> check_positive(width=0)
    Traceback (most recent call last):
    ValueError: width must be a whole number of at least 1; got 0.
    """
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be a whole number of at least 1; got {size!r}.")
