"""LeNet5 and its relatives, for images of any size the convolutions fit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from theodolite.arguments import positive_integers
from theodolite.models.choices import activation as make_activation
from theodolite.models.initialisation import construct

Image = tuple[int, int, int]  # channels, height, width


def lenet5(
    image: Image = (3, 32, 32),
    classes: int = 10,
    *,
    conv1: int = 6,
    conv2: int = 16,
    fc1: int = 120,
    fc2: int = 84,
    activation: str = "relu",
    batchnorm: bool = False,
    init: str = "xavier",
    seed: int | None = None,
) -> nn.Sequential:
    """conv1, conv2 (5×5, no padding, each with 2×2 max pooling), fc1, fc2, fc3; a plain `nn.Sequential`.

    `image` is (channels, height, width); the widths of the four hidden layers are arguments under their names.
    `batchnorm` is LeNet5-BN: a BatchNorm without scale and shift after each hidden activation, before the pooling.

    >>> sum(p.numel() for p in lenet5().parameters())  # 456 + 2416 + 48120 + 10164 + 850
    62006
    """
    positive_integers(classes=classes, conv1=conv1, conv2=conv2, fc1=fc1, fc2=fc2)
    convolutions = [(conv1, 5, 2), (conv2, 5, 2)]
    return construct(lambda: _network(image, convolutions, [fc1, fc2], classes, activation, batchnorm), init, seed)


def lenet_mini(
    image: Image = (1, 8, 8),
    classes: int = 10,
    *,
    activation: str = "relu",
    batchnorm: bool = False,
    init: str = "xavier",
    seed: int | None = None,
) -> nn.Sequential:
    """A LeNet for 8×8 digits: conv 4 (3×3), max pooling, conv 8 (2×2), fc 24, fc 16, classes.

    `batchnorm` is LeNet-mini-BN, with norms where LeNet5-BN has them.

    >>> sum(p.numel() for p in lenet_mini().parameters())  # 40 + 136 + 792 + 400 + 170
    1538
    """
    positive_integers(classes=classes)
    convolutions = [(4, 3, 2), (8, 2, 1)]
    return construct(lambda: _network(image, convolutions, [24, 16], classes, activation, batchnorm), init, seed)


def _network(
    image: Image,
    convolutions: Sequence[tuple[int, int, int]],
    widths: Sequence[int],
    classes: int,
    activation: str,
    batchnorm: bool,
) -> nn.Sequential:
    """Convolutions given as (channels, kernel, pooling), then hidden linear layers, then the classifier."""
    modules: OrderedDict[str, nn.Module] = OrderedDict()
    channels, height, width = image
    units = 0  # hidden layers so far: each has its own activation and norm
    for units, (after, kernel, pool) in enumerate(convolutions, start=1):
        modules[f"conv{units}"] = nn.Conv2d(channels, after, kernel)
        modules[f"act{units}"] = make_activation(activation)
        if batchnorm:
            modules[f"bn{units}"] = nn.BatchNorm2d(after, affine=False)
        if pool > 1:
            modules[f"pool{units}"] = nn.MaxPool2d(pool)
        channels, height, width = after, (height - kernel + 1) // pool, (width - kernel + 1) // pool
    if min(height, width) < 1:
        raise ValueError(f"image is too small for this network: nothing is left of {image[1]}×{image[2]} pixels.")
    modules["flatten"] = nn.Flatten()
    features = channels * height * width
    for i, after in enumerate(widths, start=1):
        modules[f"fc{i}"] = nn.Linear(features, after)
        modules[f"act{units + i}"] = make_activation(activation)
        if batchnorm:
            modules[f"bn{units + i}"] = nn.BatchNorm1d(after, affine=False)
        features = after
    modules[f"fc{len(widths) + 1}"] = nn.Linear(features, classes)
    return nn.Sequential(modules)
