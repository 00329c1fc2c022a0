"""Residual networks for 32×32 images: ResNet18, ResNet20 and its deeper relatives, wide ones."""

from __future__ import annotations

import itertools

import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.arguments import integer, positive_integers
from theodolite.models.initialisation import activation as make_activation
from theodolite.models.initialisation import construct, normalisation


class ResNet18(nn.Module):
    """A 3×3 stem and eight blocks of two 3×3 convolutions; layers conv1..conv17, sc_conv1..sc_conv3, fc1.

    The 1×1 convolutions sc_conv1..3 (the sources write sc-conv1, which is no Python name) stand on the shortcuts of
    the three blocks with stride 2. All layers are attributes of the network itself, in the order of that list; norms
    are norm1..norm17 and sc_norm1..3, the identity by default.
    """

    def __init__(
        self, widths: tuple[int, int, int, int], classes: int, channels: int, activation: str, norm: str | None, bias: bool
    ) -> None:
        super().__init__()
        planes, strides = [widths[0]], [1]
        for stage, width in enumerate(widths):
            planes += [width] * 4
            strides += [1 if stage == 0 else 2, 1, 1, 1]
        for i, (before, after, stride) in enumerate(zip([channels, *planes], planes, strides, strict=False), start=1):
            self.add_module(f"conv{i}", nn.Conv2d(before, after, 3, stride, padding=1, bias=bias))
        for i, (before, after) in enumerate(itertools.pairwise(widths), start=1):
            self.add_module(f"sc_conv{i}", nn.Conv2d(before, after, 1, stride=2, bias=bias))
        self.fc1 = nn.Linear(widths[-1], classes)
        for i, after in enumerate(planes, start=1):
            self.add_module(f"norm{i}", normalisation(norm, after))
            self.add_module(f"act{i}", make_activation(activation))
        for i, after in enumerate(widths[1:], start=1):
            self.add_module(f"sc_norm{i}", normalisation(norm, after))

    def _layer(self, kind: str, i: int, x: Tensor) -> Tensor:
        return self.get_submodule(f"{kind}norm{i}")(self.get_submodule(f"{kind}conv{i}")(x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.get_submodule("act1")(self._layer("", 1, x))
        for block in range(8):
            first = 2 + 2 * block  # the block's convolutions are `first` and `first + 1`
            z = self.get_submodule(f"act{first}")(self._layer("", first, x))
            z = self._layer("", first + 1, z)
            shrinks = block in (2, 4, 6)
            shortcut = self._layer("sc_", block // 2, x) if shrinks else x
            x = self.get_submodule(f"act{first + 1}")(z + shortcut)
        return self.fc1(x.mean((2, 3)))


def resnet18(
    width: int | None = None,
    classes: int = 10,
    channels: int = 3,
    *,
    activation: str = "relu",
    norm: str | None = None,
    bias: bool = False,
    init: str = "xavier",
    seed: int | None = None,
) -> ResNet18:
    """ResNet18 with `width` channels everywhere, without normalisation; `width=None` is 64, 128, 256, 512.

    `bias` gives the convolutions biases.

    >>> sum(p.numel() for p in resnet18(64).parameters())  # 27·64 + 16·9·64² + 3·64² + 10·64 + 10
    604490
    """
    positive_integers(classes=classes, channels=channels, width=1 if width is None else width)
    widths = (64, 128, 256, 512) if width is None else (width, width, width, width)
    return construct(lambda: ResNet18(widths, classes, channels, activation, norm, bias), init, seed)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut without weights: every second pixel, zero channels on both sides."""

    def __init__(self, before: int, after: int, stride: int, norm: str | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.bn1 = normalisation(norm, after)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = normalisation(norm, after)
        self.relu2 = nn.ReLU()
        self.stride, self.added = stride, after - before

    def forward(self, x: Tensor) -> Tensor:
        z = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if self.added:
            left = self.added // 2
            x = F.pad(x, (0, 0, 0, 0, left, self.added - left))
        return self.relu2(z + x)


class CifarResNet(nn.Module):
    """A stem of `width` channels and three stages of `blocks` basic blocks: ResNet20 has three blocks a stage.

    Layers conv1, bn1, layer1.0.conv1, ..., layer3.2.bn2, linear.
    """

    def __init__(self, blocks: int, width: int, classes: int, channels: int, norm: str | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn1 = normalisation(norm, width)
        self.relu = nn.ReLU()
        self.layer1 = self._stage(width, width, blocks, 1, norm)
        self.layer2 = self._stage(width, 2 * width, blocks, 2, norm)
        self.layer3 = self._stage(2 * width, 4 * width, blocks, 2, norm)
        self.linear = nn.Linear(4 * width, classes)

    @staticmethod
    def _stage(before: int, after: int, blocks: int, stride: int, norm: str | None) -> nn.Sequential:
        first = BasicBlock(before, after, stride, norm)
        return nn.Sequential(first, *(BasicBlock(after, after, 1, norm) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))


def cifar_resnet(
    depth: int = 20,
    classes: int = 10,
    channels: int = 3,
    *,
    width: int = 16,
    norm: str | None = "batch",
    init: str = "kaiming_fan_out",
    seed: int | None = None,
) -> CifarResNet:
    """The residual network of `depth` = 6n + 2 weight layers for small images, width 16, 32, 64.

    >>> sum(p.numel() for p in cifar_resnet(20).parameters())
    269722
    """
    positive_integers(classes=classes, channels=channels, width=width)
    if integer("depth", depth) < 8 or (depth - 2) % 6:
        raise ValueError(f"depth must be 6n + 2 (8, 14, 20, 26, 32, ...). Got {depth!r}.")
    return construct(lambda: CifarResNet((depth - 2) // 6, width, classes, channels, norm), init, seed)


def resnet20(
    classes: int = 10,
    channels: int = 3,
    *,
    width: int = 16,
    norm: str | None = "batch",
    init: str = "kaiming_fan_out",
    seed: int | None = None,
) -> CifarResNet:
    """`cifar_resnet(20)`: convolutions N(0, 2/fan_out), norms at scale 1 and shift 0.

    >>> resnet20(seed=0).layer3[2].conv2.weight.shape
    torch.Size([64, 64, 3, 3])
    """
    return cifar_resnet(20, classes, channels, width=width, norm=norm, init=init, seed=seed)


# Wide residual networks WRN-d-k, pre-activation, with or without normalisation.


class WideBlock(nn.Module):
    """norm-ReLU-conv-norm-ReLU-conv, added to the block's input.

    Where the shape changes, the shortcut is a 1×1 convolution of the input after its first norm and ReLU.
    """

    def __init__(self, before: int, after: int, stride: int, norm: str | None, bias: bool) -> None:
        super().__init__()
        self.norm1 = normalisation(norm, before)
        self.relu1 = nn.ReLU()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=bias)
        self.norm2 = normalisation(norm, after)
        self.relu2 = nn.ReLU()
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=bias)
        changes = before != after or stride != 1
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=bias) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        active = self.relu1(self.norm1(x))
        z = self.conv2(self.relu2(self.norm2(self.conv1(active))))
        return z + (x if self.shortcut is None else self.shortcut(active))


class WideResNet(nn.Module):
    """A stem of 16 channels, three groups of blocks with 16k, 32k, 64k channels, norm, ReLU, global mean, linear.

    Layers conv1, group1.0.conv1, ..., norm, fc1.
    """

    def __init__(self, blocks: int, k: int, classes: int, channels: int, norm: str | None, bias: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1, bias=bias)
        before = 16
        for group, stride in enumerate((1, 2, 2), start=1):
            after = 16 * k * 2 ** (group - 1)
            first = WideBlock(before, after, stride, norm, bias)
            rest = (WideBlock(after, after, 1, norm, bias) for _ in range(blocks - 1))
            self.add_module(f"group{group}", nn.Sequential(first, *rest))
            before = after
        self.norm = normalisation(norm, before)
        self.relu = nn.ReLU()
        self.fc1 = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        for group in (1, 2, 3):
            x = self.get_submodule(f"group{group}")(x)
        return self.fc1(self.relu(self.norm(x)).mean((2, 3)))


def wrn(
    depth: int,
    k: int,
    classes: int = 10,
    channels: int = 3,
    *,
    norm: str | None = "batch",
    bias: bool = True,
    init: str = "kaiming_normal",
    seed: int | None = None,
) -> WideResNet:
    """WRN-d-k: (d − 4)/6 blocks in each group, widening factor k; `norm` is "batch", "batch_stats", "group" or None.

    `bias` gives the convolutions biases.

    >>> sum(p.numel() for p in wrn(10, 2).parameters())  # 304 k
    304394
    """
    positive_integers(k=k, classes=classes, channels=channels)
    if integer("depth", depth) < 10 or (depth - 4) % 6:
        raise ValueError(f"depth must be 6n + 4 (10, 16, 22, 28, ...). Got {depth!r}.")
    return construct(lambda: WideResNet((depth - 4) // 6, k, classes, channels, norm, bias), init, seed)
