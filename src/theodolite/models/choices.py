"""Named choices with errors that list what is accepted: activations, normalisations, sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from theodolite.arguments import choice, entry
from theodolite.text import quoted

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


def activation(name: str) -> nn.Module:
    """A fresh activation module, so that hooks can tell one layer's units from another's.

    >>> activation("swish")
    SiLU()
    """
    return entry("activation", name, ACTIVATIONS)()


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
    choice("norm", name, makers, wanted=f"one of {quoted(makers)} or None")
    return makers[name]()
