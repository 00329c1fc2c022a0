"""Fully connected and convolutional networks in the NTK parameterisation.

With f the input of a layer of fan-in m (inputs for a linear layer, channels × filter entries for a convolution),
each layer is `activation(m^(-1/2) W f + b)`; the last layer has no activation. The first layer divides by √inputs
like the others, and no factor makes up for what the activation loses: with ReLU the mean square halves at each hidden
layer, so for ‖x‖² = inputs the outputs have variance 2^-(hidden layers) at every width.

Initialisations (`init`):

| name | weights |
|---|---|
| `ntk` | N(0, 1) |
| `ntk_sign` | N(0, 1), those of the last layer ±1 with equal chances |
| `ntk_small` | N(0, 0.1²): near zero |

Biases (`bias`): "none" (the default), "hidden" (all layers but the last) or "all"; they enter without a factor, are
trained, and start at 0 (`bias_init="zero"`) or at N(0, 1) (`"normal"`).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from theodolite.arguments import checked, count, entry, one_or_each, positive_integers
from theodolite.models.feedforward import fully_connected
from theodolite.models.initialisation import ACTIVATIONS, NTKConv, NTKLinear, image_sizes, named, ntk_layers, seeded
from theodolite.models.initialisation import activation as make_activation

# Name -> standard deviation of the weights.
_STD = {"ntk": 1.0, "ntk_sign": 1.0, "ntk_small": 0.1}
# Name -> whether hidden layers, whether the last layer has a bias.
_BIASES = {"none": (False, False), "hidden": (True, False), "all": (True, True)}


@checked(width=one_or_each(count), depth=count)
def ntk_fcn(
    inputs: int,
    width: int | Sequence[int] = 1024,
    depth: int | None = None,
    outputs: int = 1,
    *,
    activation: str = "relu",
    bias: str = "none",
    bias_init: str = "zero",
    init: str = "ntk",
    seed: int | None = None,
) -> nn.Sequential:
    """Flatten and `depth` weight layers fc1, fc2, ...; "5-layer" means four hidden layers and the output.

    `width` is one number for all hidden layers (`depth` is then 5 unless named) or one for each.

    >>> sum(p.numel() for p in ntk_fcn(10, width=4, depth=3).parameters())  # 10·4 + 4·4 + 4·1
    60
    """
    widths = _hidden(width, depth)
    positive_integers(inputs=inputs, outputs=outputs)
    entry("activation", activation, ACTIVATIONS)
    hidden, last = (partial(NTKLinear, bias=there) for there in entry("bias", bias, _BIASES))
    sizes = [inputs, *widths, outputs]
    return _construct(lambda: fully_connected(OrderedDict(), sizes, activation, hidden, last), init, bias_init, seed)


@checked(image=image_sizes, width=one_or_each(count), depth=count)
def ntk_cnn(
    image: Sequence[int],
    width: int | Sequence[int] = 512,
    depth: int | None = None,
    outputs: int = 1,
    *,
    kernel: int = 3,
    activation: str = "relu",
    bias: str = "none",
    bias_init: str = "zero",
    init: str = "ntk",
    seed: int | None = None,
) -> nn.Sequential:
    """Convolutions conv1, conv2, ... (stride 1, zero padding to equal size), flatten, linear fc1: `depth` layers in all.

    `image` is (channels, height, width), or (channels, length) for the one-dimensional network; `kernel` is odd. The
    linear layer divides by √(channels × pixels).

    >>> sum(p.numel() for p in ntk_cnn((3, 8, 8), width=4, depth=2).parameters())  # 3·9·4 + 4·64
    364
    """
    widths = _hidden(width, depth)
    positive_integers(outputs=outputs, kernel=kernel)
    if kernel % 2 == 0 or not widths:
        raise ValueError(f"kernel must be odd and depth at least 2. Got kernel {kernel}, depth {len(widths) + 1}.")
    hidden_bias, last_bias = entry("bias", bias, _BIASES)
    channels, *pixels = image
    dimensions = len(pixels)

    def make() -> nn.Sequential:
        modules: OrderedDict[str, nn.Module] = OrderedDict()
        for i, (before, after) in enumerate(zip([channels, *widths], widths, strict=False), start=1):
            modules[f"conv{i}"] = NTKConv(before, after, (kernel,) * dimensions, padding=kernel // 2, bias=hidden_bias)
            modules[f"act{i}"] = make_activation(activation)
        last = partial(NTKLinear, bias=last_bias)
        return fully_connected(modules, [widths[-1] * math.prod(pixels), outputs], activation, last)

    return _construct(make, init, bias_init, seed)


def _hidden(width: int | Sequence[int], depth: int | None) -> list[int]:
    if isinstance(width, int):
        return [width] * ((5 if depth is None else depth) - 1)
    if depth is not None and depth != len(width) + 1:
        raise ValueError(f"depth must be {len(width) + 1} for {len(width)} hidden widths. Got {depth}.")
    return list(width)


def _construct(make: Callable[[], nn.Sequential], init: str, bias_init: str, seed: int | None) -> nn.Sequential:
    std = entry("init", init, _STD)
    bias_std = entry("bias_init", bias_init, {"zero": 0.0, "normal": 1.0})
    with seeded(seed), torch.no_grad():
        model = make()
        layers = ntk_layers(model)
        for layer in layers:
            layer.weight.mul_(std)  # drawn from N(0, 1) by the layer
            if layer.bias is not None and bias_std:
                layer.bias.normal_(std=bias_std)
        if init == "ntk_sign":
            layers[-1].weight.sign_()
    return named(model, init)
