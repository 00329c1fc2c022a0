"""Plain feed-forward networks: fully connected, convolutional of a few layers, LeNet5 and its relatives, Myrtle-5, VGG11."""

from __future__ import annotations

import itertools
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import nn

from theodolite.arguments import a_text, checked, positive_integers, sequence
from theodolite.models.initialisation import activation as make_activation
from theodolite.models.initialisation import construct, image_sizes

Modules = OrderedDict[str, nn.Module]
Linear = Callable[[int, int], nn.Module]

# Fully connected networks, and the names F-n^m the sources give them.

_PART = re.compile(r"(\d+)(?:\^(\d+))?")


@checked(widths=sequence)
def fcn(
    inputs: int,
    widths: Sequence[int],
    outputs: int = 10,
    *,
    activation: str = "relu",
    bias: bool = True,
    batchnorm: bool = False,
    init: str = "xavier",
    seed: int | None = None,
) -> nn.Sequential:
    """Flatten, then hidden layers fc1, fc2, ... and a linear output layer; a plain `nn.Sequential`.

    `batchnorm` adds, after each hidden activation, a BatchNorm without scale and shift. No `widths` is a linear model.

    >>> model = fcn(784, [100, 20])
    >>> sum(p.numel() for p in model.parameters())  # 784·100 + 100 + 100·20 + 20 + 20·10 + 10
    80730
    """
    positive_integers(inputs=inputs, outputs=outputs, **{f"widths[{i}]": w for i, w in enumerate(widths)})

    sizes, linear = [inputs, *widths, outputs], partial(nn.Linear, bias=bias)
    return construct(lambda: fully_connected(OrderedDict(), sizes, activation, linear, batchnorm=batchnorm), init, seed)


def fully_connected(
    modules: Modules, sizes: Sequence[int], activation: str, linear: Linear, last: Linear | None = None, batchnorm: bool = False
) -> nn.Sequential:
    """Behind the modules linear layers fc1, fc2, ... between these sizes, the hidden ones with activation and norm.

    `last` makes the output layer where that differs.
    """
    units = sum(name.startswith("act") for name in modules)  # hidden layers so far: each has its own activation and norm
    modules["flatten"] = nn.Flatten()
    *hidden, outputs = sizes
    for i, (inputs, width) in enumerate(itertools.pairwise(hidden), start=1):
        modules[f"fc{i}"] = linear(inputs, width)
        modules[f"act{units + i}"] = make_activation(activation)
        if batchnorm:
            modules[f"bn{units + i}"] = nn.BatchNorm1d(width, affine=False)
    modules[f"fc{len(hidden)}"] = (last or linear)(hidden[-1], outputs)
    return nn.Sequential(modules)


def f_network(
    name: str,
    inputs: int = 784,
    outputs: int = 10,
    *,
    activation: str = "relu",
    bias: bool = True,
    init: str = "xavier",
    seed: int | None = None,
) -> nn.Sequential:
    """The network called `name`: "F-200^2" has two hidden layers of 200 ReLU units.

    >>> sum(p.numel() for p in f_network("F-200^2").parameters())  # 784·200 + 200 + 200·200 + 200 + 200·10 + 10
    199210
    """
    widths, batchnorm = hidden_widths(name)
    return fcn(inputs, widths, outputs, activation=activation, bias=bias, batchnorm=batchnorm, init=init, seed=seed)


@checked(name=a_text)
def hidden_widths(name: str) -> tuple[list[int], bool]:
    """The hidden widths in a name F-n^m, and whether it ends in -BN.

    >>> hidden_widths("F-200^2-100-BN")
    ([200, 200, 100], True)
    """
    parts = name.split("-")
    batchnorm = parts[-1] == "BN"
    found = [_PART.fullmatch(part) for part in (parts[1:-1] if batchnorm else parts[1:])]
    if parts[0] != "F" or not found or any(match is None or match[2] == "0" for match in found):
        raise ValueError(f"name must look like 'F-200^2', 'F-200^2-100' or 'F-200^2-BN'. Got {name!r}.")
    return [int(match[1]) for match in found if match for _ in range(int(match[2] or 1))], batchnorm


# Convolutions and one linear layer.


@checked(widths=sequence)
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
    positive_integers(classes=classes, channels=channels, kernel=kernel, stride=stride)
    positive_integers(**{f"widths[{i}]": width for i, width in enumerate(widths)})
    if not widths:
        raise ValueError("widths must name at least one convolution.")
    pools = {len(widths): ("pool", nn.AdaptiveAvgPool2d(1))}
    shape = {"kernel": kernel, "stride": stride, "bias": bias}
    return construct(lambda: _stacked(channels, widths, classes, activation, pools, **shape), init, seed)


def _stacked(
    channels: int,
    widths: Sequence[int],
    classes: int,
    activation: str,
    pools: Mapping[int, tuple[str, nn.Module]],
    *,
    kernel: int = 3,
    stride: int = 1,
    bias: bool = True,
) -> nn.Sequential:
    """Convolutions conv1, conv2, ..., each with an activation and the pooling that stands under its number, then fc1."""
    modules: Modules = OrderedDict()
    for i, (before, after) in enumerate(zip((channels, *widths), widths, strict=False), start=1):
        modules[f"conv{i}"] = nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, bias=bias)
        modules[f"act{i}"] = make_activation(activation)
        if i in pools:
            modules.update([pools[i]])
    return fully_connected(modules, [widths[-1], classes], activation, partial(nn.Linear, bias=bias))


# LeNet5 and its relatives, for images of any size the convolutions fit.

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
    modules: Modules = OrderedDict()
    channels, height, width = image_sizes("image", image)
    for i, (after, kernel, pool) in enumerate(convolutions, start=1):
        modules[f"conv{i}"] = nn.Conv2d(channels, after, kernel)
        modules[f"act{i}"] = make_activation(activation)
        if batchnorm:
            modules[f"bn{i}"] = nn.BatchNorm2d(after, affine=False)
        if pool > 1:
            modules[f"pool{i}"] = nn.MaxPool2d(pool)
        channels, height, width = after, (height - kernel + 1) // pool, (width - kernel + 1) // pool
    if min(height, width) < 1:
        raise ValueError(f"image is too small for this network: nothing is left of {image[1]}×{image[2]} pixels.")
    sizes = [channels * height * width, *widths, classes]
    return fully_connected(modules, sizes, activation, nn.Linear, batchnorm=batchnorm)


# Myrtle-5: four 3×3 convolutions and a linear layer.


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
    pools = {2: ("pool2", nn.AvgPool2d(2)), 3: ("pool3", nn.AvgPool2d(2)), 4: ("pool4", nn.AdaptiveAvgPool2d(1))}
    return construct(lambda: _stacked(channels, [width] * 4, classes, activation, pools, bias=bias), init, seed)


# VGG11 for 32×32 images, without dropout and normalisation.

#: Channels of conv1..conv8 at full width.
FULL_WIDTHS = (64, 128, 256, 256, 512, 512, 512, 512)


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
    pools = {i: (f"pool{i}", nn.MaxPool2d(2)) for i in (1, 2, 4, 6, 8)}  # 32×32 pixels become 1×1
    return construct(lambda: _stacked(channels, widths, classes, activation, pools), init, seed)
