"""VGG11 for 32×32 images, without dropout and normalisation."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from theodolite.arguments import positive_integers
from theodolite.models.choices import activation as make_activation
from theodolite.models.initialisation import construct

#: Channels of conv1..conv8 at full width.
FULL_WIDTHS = (64, 128, 256, 256, 512, 512, 512, 512)
# A 2×2 max pooling follows these convolutions: 32×32 pixels become 1×1.
_POOL_AFTER = (1, 2, 4, 6, 8)


def vgg11(
    width: int | None = None,
    classes: int = 10,
    channels: int = 3,
    *,
    activation: str = "relu",
    init: str = "xavier",
    seed: int | None = None,
) -> nn.Sequential:
    """conv1..conv8 (3×3, padding 1) with `width` channels each, and one linear layer fc1; a plain `nn.Sequential`.

    `width=None` is the network at its full widths 64, 128, 256, 256, 512, 512, 512, 512.

    >>> sum(p.numel() for p in vgg11(48).parameters())  # 28·48 + 7·(9·48² + 48) + 10·48 + 10
    147322
    """
    positive_integers(classes=classes, channels=channels, width=1 if width is None else width)
    widths = FULL_WIDTHS if width is None else (width,) * 8

    def make() -> nn.Sequential:
        modules: OrderedDict[str, nn.Module] = OrderedDict()
        for i, (before, after) in enumerate(zip((channels, *widths), widths, strict=False), start=1):
            modules[f"conv{i}"] = nn.Conv2d(before, after, 3, padding=1)
            modules[f"act{i}"] = make_activation(activation)
            if i in _POOL_AFTER:
                modules[f"pool{i}"] = nn.MaxPool2d(2)
        modules["flatten"] = nn.Flatten()
        modules["fc1"] = nn.Linear(widths[-1], classes)
        return nn.Sequential(modules)

    return construct(make, init, seed)
