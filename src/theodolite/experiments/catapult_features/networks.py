"""The networks of the spike figures, by the names they have there."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch import nn

from theodolite.models import myrtle5, ntk_cnn, ntk_fcn, vision_transformer, wrn
from theodolite.models.fully_connected import fcn
from theodolite.models.initialisation import construct


@dataclass(frozen=True)
class Widths:
    """How large each kind of network is: units, channels, widening factor, and the ViT's dimension and patch."""

    fcn: int
    cnn: int
    shallow: int = 1024
    four: int = 256
    wrn: int = 1
    vit: int = 64
    patch: int = 2
    myrtle: int = 64


TINY = Widths(fcn=512, cnn=24, shallow=512, four=128, vit=32, patch=4, myrtle=64)
LAPTOP = Widths(fcn=512, cnn=64, myrtle=128)
PAPER = Widths(fcn=1024, cnn=512, wrn=10, vit=192, patch=4, myrtle=128)


def network(kind: str, shape: tuple[int, ...], outputs: int, widths: Widths, *, default: bool = False, seed: int) -> nn.Module:
    """A float64 network for inputs of a shape; `default` is PyTorch's own parameterisation, else the NTK's without biases.

    "2-FCN", "4-FCN" and "5-FCN" have one, three and four hidden layers, "5-CNN" four convolutions and a linear layer. "WRN" is
    10-k without normalisation, and "ViT" has its own initialisation: the NTK form is not defined for it.
    """
    return _made(kind, shape, outputs, widths, default=default, seed=seed).double()


def _made(kind: str, shape: tuple[int, ...], outputs: int, widths: Widths, *, default: bool, seed: int) -> nn.Module:
    inputs = 1
    for length in shape:
        inputs *= length
    channels = shape[0]
    hidden = {"2-FCN": [widths.shallow], "4-FCN": [widths.four] * 3, "5-FCN": [widths.fcn] * 4}.get(kind)
    if hidden is not None:
        return (
            fcn(inputs, hidden, outputs, init="torch", seed=seed)
            if default
            else ntk_fcn(inputs, hidden, None, outputs, seed=seed)
        )
    if kind == "5-CNN":
        make = _default_cnn if default else ntk_cnn
        return make(shape, [widths.cnn] * 4, None, outputs, seed=seed)
    if kind == "WRN":
        init = "torch" if default else "ntk"
        residual = wrn(10, widths.wrn, outputs, channels, norm=None, bias=default, init=init, seed=seed)
        return residual if default else _without_output_bias(residual, residual.fc1)
    if kind == "Myrtle-5":
        return myrtle5(widths.myrtle, outputs, channels, seed=seed)
    if kind == "ViT":
        image = (channels, shape[1], shape[2])
        init = "torch" if default else "xavier"
        transformer = vision_transformer(image, widths.patch, widths.vit, 4, 4, outputs, init=init, seed=seed)
        return transformer if default else _without_output_bias(transformer, transformer.head)
    raise ValueError(f"kind must be one of 2-FCN, 4-FCN, 5-FCN, 5-CNN, WRN, ViT, Myrtle-5. Got {kind!r}.")


def _without_output_bias(model: nn.Module, last: nn.Linear) -> nn.Module:
    """The output bias stays at zero: it adds 1 to every entry of the kernel, which no catapult can lower."""
    nn.init.zeros_(last.bias)
    last.bias.requires_grad_(False)
    return model


def _default_cnn(shape: tuple[int, ...], width: list[int], depth: None, outputs: int, *, seed: int) -> nn.Sequential:
    """The same convolutions, flatten and linear layer as torch makes them."""

    def make() -> nn.Sequential:
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise([shape[0], *width]):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width[-1] * shape[1] * shape[2], outputs))

    return construct(make, "torch", seed)
