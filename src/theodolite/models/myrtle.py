"""Myrtle-5: four 3×3 convolutions and a linear layer."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from theodolite.arguments import positive_integers
from theodolite.models.choices import activation as make_activation
from theodolite.models.initialisation import construct


def myrtle5(
    width: int = 128,
    classes: int = 10,
    channels: int = 3,
    *,
    activation: str = "relu",
    bias: bool = False,
    init: str = "ntk",
    seed: int | None = None,
) -> nn.Sequential:
    """conv1, conv2, 2×2 mean, conv3, 2×2 mean, conv4, mean over what is left, fc1; a plain `nn.Sequential`.

    NTK parameterisation without biases by default, as in the study of catapults; `init="kaiming_normal", bias=True`
    is the ordinary network.

    >>> sum(p.numel() for p in myrtle5(64).parameters())  # 27·64 + 3·9·64² + 10·64
    112960
    """
    positive_integers(width=width, classes=classes, channels=channels)

    def make() -> nn.Sequential:
        modules: OrderedDict[str, nn.Module] = OrderedDict()
        for i in range(1, 5):
            modules[f"conv{i}"] = nn.Conv2d(channels if i == 1 else width, width, 3, padding=1, bias=bias)
            modules[f"act{i}"] = make_activation(activation)
            if i in (2, 3):
                modules[f"pool{i}"] = nn.AvgPool2d(2)
        modules["pool4"] = nn.AdaptiveAvgPool2d(1)
        modules["flatten"] = nn.Flatten()
        modules["fc1"] = nn.Linear(width, classes, bias=bias)
        return nn.Sequential(modules)

    return construct(make, init, seed)
