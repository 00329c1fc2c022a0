"""Plain convolutional networks of a few layers, for the scaled-down experiments."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from theodolite.arguments import positive_integers
from theodolite.models.choices import activation as make_activation
from theodolite.models.initialisation import construct


def cnn(
    widths: Sequence[int] = (16, 32),
    classes: int = 10,
    channels: int = 3,
    *,
    kernel: int = 3,
    stride: int = 2,
    activation: str = "relu",
    bias: bool = True,
    init: str = "kaiming_normal",
    seed: int | None = None,
) -> nn.Sequential:
    """Convolutions conv1, conv2, ... of the given widths, each with an activation, global mean, linear layer fc1.

    >>> sum(p.numel() for p in cnn((16, 32), channels=1).parameters())  # 160 + 4640 + 330
    5130
    """
    positive_integers(classes=classes, channels=channels, kernel=kernel, stride=stride, **_each(widths))
    if not widths:
        raise ValueError("widths must name at least one convolution.")

    def make() -> nn.Sequential:
        modules: OrderedDict[str, nn.Module] = OrderedDict()
        for i, (before, after) in enumerate(zip([channels, *widths], widths, strict=False), start=1):
            modules[f"conv{i}"] = nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, bias=bias)
            modules[f"act{i}"] = make_activation(activation)
        modules["pool"] = nn.AdaptiveAvgPool2d(1)
        modules["flatten"] = nn.Flatten()
        modules["fc1"] = nn.Linear(widths[-1], classes, bias=bias)
        return nn.Sequential(modules)

    return construct(make, init, seed)


def _each(widths: Sequence[int]) -> dict[str, int]:
    return {f"widths[{i}]": width for i, width in enumerate(widths)}
