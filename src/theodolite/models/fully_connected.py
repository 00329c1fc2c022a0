"""Fully connected networks, and the names F-n^m the sources give them."""

from __future__ import annotations

import itertools
import re
from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from theodolite.arguments import positive_integers
from theodolite.models.initialisation import activation as make_activation
from theodolite.models.initialisation import construct

_PART = re.compile(r"(\d+)(?:\^(\d+))?")


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

    def make() -> nn.Sequential:
        modules: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
        sizes = [inputs, *widths]
        for i, (before, after) in enumerate(itertools.pairwise(sizes), start=1):
            modules[f"fc{i}"] = nn.Linear(before, after, bias)
            modules[f"act{i}"] = make_activation(activation)
            if batchnorm:
                modules[f"bn{i}"] = nn.BatchNorm1d(after, affine=False)
        modules[f"fc{len(sizes)}"] = nn.Linear(sizes[-1], outputs, bias)
        return nn.Sequential(modules)

    return construct(make, init, seed)


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
