"""Wide residual networks WRN-d-k, pre-activation, with or without normalisation."""

from __future__ import annotations

from torch import Tensor, nn

from theodolite.arguments import positive_integers
from theodolite.models.choices import normalisation
from theodolite.models.initialisation import construct


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
    if not isinstance(depth, int) or depth < 10 or (depth - 4) % 6:
        raise ValueError(f"depth must be 6n + 4 (10, 16, 22, 28, ...). Got {depth!r}.")
    return construct(lambda: WideResNet((depth - 4) // 6, k, classes, channels, norm, bias), init, seed)
