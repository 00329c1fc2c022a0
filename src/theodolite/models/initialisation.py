"""Named initialisations: every model of this room says in `model.initialisation` which one it had.

| name | weights | biases |
|---|---|---|
| `torch` | what torch does: U(±1/√fan_in); embeddings N(0, 1) | the same law |
| `xavier` | U(±√(6/(fan_in + fan_out))) | 0 |
| `xavier_normal` | N(0, 2/(fan_in + fan_out)) | 0 |
| `kaiming_normal` | N(0, 2/fan_in) | 0 |
| `kaiming_fan_out` | convolutions N(0, 2/fan_out), linear layers as torch | 0, linear layers as torch |
| `lecun_normal` | N(0, 1/fan_in) | 0 |
| `normal_1.2` | N(0, 1.2²/fan_in) | N(0, 1.2²/size) |
| `normal_0.02` | N(0, 0.02²), embeddings too | 0 |
| `gpt2` | the same, projections into the residual stream divided by √(number of them) | 0 |
| `ntk` | N(0, 1), and the layer divides by √fan_in in its forward pass | 0 |

Normalisation layers always start at scale 1 and shift 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.arguments import checked, choice, count, each, entry, random_seed, shown
from theodolite.interrupts import unbroken_context
from theodolite.problem.arguments import a_module
from theodolite.problem.state_guard import own_random_state
from theodolite.text import quoted

# Named choices with errors that list what is accepted: activations, normalisations, sizes.

#: Activations by name. "swish" and "silu" are the same function, x · sigmoid(x).
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "swish": nn.SiLU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "softplus": nn.Softplus,
    "identity": nn.Identity,
}


def activation(name: str) -> nn.Module:
    """A fresh activation module, so that hooks can tell one layer's units from another's.

    >>> activation("swish")
    SiLU()
    """
    return entry("activation", name, ACTIVATIONS)()


def normalisation(name: str | None, channels: int) -> nn.Module:
    """The layer after (or before) a convolution; None is the identity.

    "batch" keeps running statistics, "batch_stats" always uses the batch's own, "group" acts on each sample alone, as
    per-sample quantities need: the largest number of groups up to 8 that divides the channels.

    >>> normalisation("group", 12).num_groups
    6
    """
    if name is None:
        return nn.Identity()
    makers: dict[str, Callable[[], nn.Module]] = {
        "batch": lambda: nn.BatchNorm2d(channels),
        "batch_stats": lambda: nn.BatchNorm2d(channels, track_running_stats=False),
        "group": lambda: nn.GroupNorm(max(g for g in range(1, 9) if channels % g == 0), channels),
    }
    choice("norm", name, makers, wanted=f"one of {quoted(makers)} or None")
    return makers[name]()


def image_sizes(name: str, value: Any) -> tuple[int, ...]:
    """An image as (channels, height, width) or, in one dimension, (channels, length)."""
    if not isinstance(value, tuple | list) or len(value) not in (2, 3):
        raise ValueError(f"{name} must be (channels, height, width). Got {shown(value)}.")
    return tuple(each(count)(name, value))


# Layers in the NTK parameterisation: weights N(0, 1), the factor 1/√fan_in in the forward pass.
#
# Gradients then carry the factor too, so a learning rate of order one suits every width. These are modules of their
# own, no kinds of `nn.Linear`: code that multiplies a layer's inputs by its output gradients would forget the factor.


class _NTKLayer(nn.Module):
    """A weight of a shape (outputs, inputs, ...), a bias, and the factor 1/√fan_in for the forward pass."""

    def __init__(self, shape: tuple[int, ...], bias: bool) -> None:
        super().__init__()
        self.scale = math.prod(shape[1:]) ** -0.5
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape[0])) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class NTKLinear(_NTKLayer):
    """`y = W x / √in_features + b`, initialised `W ~ N(0, 1)`, `b = 0`.

    >>> layer = NTKLinear(4, 1, bias=False)
    >>> _ = torch.nn.init.ones_(layer.weight)
    >>> layer(torch.ones(1, 4)).item()
    2.0
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__((out_features, in_features), bias)
        self.in_features, self.out_features = in_features, out_features

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x * self.scale, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class NTKConv(_NTKLayer):
    """`y = W * x / √(in_channels · s) + b` with s entries per filter, in one or two dimensions (the length of `kernel`).

    >>> layer = NTKConv(1, 1, (2, 2), bias=False)
    >>> _ = torch.nn.init.ones_(layer.weight)
    >>> layer(torch.ones(1, 1, 2, 2)).item()
    2.0
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: tuple[int, ...],
        stride: tuple[int, ...] | int = 1,
        padding: tuple[int, ...] | int = 0,
        bias: bool = True,
    ) -> None:
        if len(kernel) not in (1, 2):
            raise ValueError(f"kernel must have one or two sizes. Got {kernel!r}.")
        super().__init__((out_channels, in_channels, *kernel), bias)
        self.kernel, self.stride, self.padding = kernel, stride, padding

    def forward(self, x: Tensor) -> Tensor:
        convolve = F.conv1d if len(self.kernel) == 1 else F.conv2d
        # The filters are smaller than the image, so they take the factor.
        return convolve(x, self.weight * self.scale, self.bias, self.stride, self.padding)

    def extra_repr(self) -> str:
        out, inputs = self.weight.shape[:2]
        return f"{inputs}, {out}, kernel={self.kernel}, bias={self.bias is not None}"


def ntk_layers(model: nn.Module) -> list[_NTKLayer]:
    """The NTK layers of a model, in its order."""
    return [m for m in model.modules() if isinstance(m, _NTKLayer)]


@checked(model=a_module)
def ntk_parameterise(model: nn.Module) -> nn.Module:
    """The model with every Linear and Conv replaced, in place, by its NTK form with fresh weights.

    The model itself is returned, or its replacement where it is a single layer. Norms, embeddings and raw parameters
    stay as they are.

    >>> ntk_parameterise(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
    Sequential(
      (0): NTKLinear(2, 3, bias=True)
      (1): ReLU()
    )
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            replacement = _replacement(child)
            if replacement is not child:
                setattr(parent, name, replacement)
    return _replacement(model)


def _replacement(layer: nn.Module) -> nn.Module:
    if isinstance(layer, nn.Linear):
        return NTKLinear(layer.in_features, layer.out_features, layer.bias is not None)
    if isinstance(layer, nn.Conv1d | nn.Conv2d):
        if layer.groups != 1 or any(d != 1 for d in layer.dilation) or isinstance(layer.padding, str):
            raise ValueError(f"no NTK form for {layer}: groups, dilation and named padding are not supported.")
        bias = layer.bias is not None
        return NTKConv(layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding, bias)
    return layer


M = TypeVar("M", bound=nn.Module)
Layer = nn.Linear | nn.Conv1d | nn.Conv2d

#: What networks on images and vectors accept.
LAYER_INITS = ("torch", "xavier", "xavier_normal", "kaiming_normal", "kaiming_fan_out", "lecun_normal", "normal_1.2", "ntk")
#: What networks on tokens accept.
TOKEN_INITS = ("torch", "normal_0.02", "gpt2")

# Linear layers of these names write into the residual stream.
_INTO_THE_STREAM = ("out", "down", "o_proj", "down_proj")


@unbroken_context
def seeded(seed: int | None) -> Iterator[None]:
    """Draw from `seed` inside and leave the global generator as it was; None draws from the global one.

    >>> before = torch.get_rng_state()
    >>> with seeded(0):
    ...     x = torch.randn(1)
    >>> torch.equal(before, torch.get_rng_state())
    True
    """
    if seed is None:
        yield
        return
    with own_random_state(random_seed(seed)):  # models are built on the CPU
        yield


def construct(make: Callable[[], M], init: str, seed: int | None, accepted: Sequence[str] = LAYER_INITS) -> M:
    """Build a model under a seed and initialise it; a wrong name is found before anything is built."""
    entry("init", init, {name: name for name in accepted})
    with seeded(seed):
        model = make()
        return named(model, init) if init == "torch" else initialise(model, init)


@checked(model=a_module, residuals=count)
def initialise(model: M, init: str, *, residuals: int | None = None) -> M:
    """Draw all Linear, Conv and Embedding weights anew by the named law, from the global generator.

    `residuals` is the number of projections into the residual stream that "gpt2" counts: 2 · depth. None counts those
    of `model`; name it where `model` is one block of a deeper network.

    >>> initialise(nn.Linear(3, 3), "kaiming_normal").bias.tolist()
    [0.0, 0.0, 0.0]
    """
    rule = entry("init", init, _RULES)
    scaled = ntk_layers(model)
    if scaled and init != "ntk":
        raise ValueError(f"init must be 'ntk' for a network with NTK layers, whose scale is in the forward pass. Got {init!r}.")
    for layer in scaled:
        layer.reset_parameters()
    if init == "ntk":
        model = ntk_parameterise(model)  # type: ignore[assignment]
    elif init in ("gpt2", "normal_0.02"):
        _small_normal(model, init == "gpt2", residuals)
    elif rule is not None:
        for module in model.modules():
            if isinstance(module, Layer):
                rule(module)
            elif isinstance(module, nn.Embedding):
                module.reset_parameters()
    return named(model, init)


class DrawsBlocks:
    """For models with a list of blocks: what draws one more of them, as `theodolite.grow` asks for.

    The number of layers that "gpt2" scales by is that of the model as it is; a model with loaded weights draws as "normal_0.02".
    """

    initialisation: str

    def initialise_block(self, block: nn.Module) -> None:
        """Draw a block of this model by the law that the model had."""
        law = "normal_0.02" if self.initialisation == "loaded" else self.initialisation
        body: Any = self if hasattr(self, "layers") else self.model  # type: ignore[attr-defined]
        initialise(block, law, residuals=2 * len(body.layers))
        del block.initialisation


def named(model: M, init: str) -> M:
    """The model, knowing its initialisation by name."""
    model.initialisation = init  # type: ignore[assignment]
    return model


@checked(model=a_module)
def count_parameters(model: nn.Module) -> int:
    """Numbers in the model's parameters, tied ones once.

    >>> count_parameters(nn.Linear(3, 2))
    8
    """
    return sum(p.numel() for p in model.parameters())


def _law(weights: Callable[[Tensor], Any], biases: Callable[[Tensor], Any] = nn.init.zeros_) -> Callable[[Layer], None]:
    """Weights and biases drawn by laws; biases are 0 by default."""

    def rule(layer: Layer) -> None:
        weights(layer.weight)
        if layer.bias is not None:
            biases(layer.bias)

    return rule


def _small_normal(model: nn.Module, scale_residuals: bool, residuals: int | None, std: float = 0.02) -> None:
    into_stream = {
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in _INTO_THE_STREAM
    }
    count = residuals if residuals is not None else max(1, len(into_stream))
    shrink = 1 / math.sqrt(count) if scale_residuals else 1.0
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, Layer):
            _law(partial(nn.init.normal_, std=std * (shrink if module in into_stream else 1.0)))(module)


_FAN_OUT = _law(partial(nn.init.kaiming_normal_, mode="fan_out", nonlinearity="relu"))

# None: the rule needs to see the whole model.
_RULES: dict[str, Callable[[Layer], None] | None] = {
    "torch": lambda layer: layer.reset_parameters(),
    "xavier": _law(nn.init.xavier_uniform_),
    "xavier_normal": _law(nn.init.xavier_normal_),
    "kaiming_normal": _law(partial(nn.init.kaiming_normal_, nonlinearity="relu")),
    # Ten classes would give a linear layer a standard deviation of 0.45: the usual recipe leaves the classifier alone.
    "kaiming_fan_out": lambda layer: None if isinstance(layer, nn.Linear) else _FAN_OUT(layer),
    "lecun_normal": _law(lambda weight: nn.init.normal_(weight, std=weight[0].numel() ** -0.5)),
    "normal_1.2": _law(
        lambda weight: nn.init.normal_(weight, std=1.2 * weight[0].numel() ** -0.5),
        lambda bias: nn.init.normal_(bias, std=1.2 * bias.numel() ** -0.5),
    ),
    "normal_0.02": None,
    "gpt2": None,
    "ntk": None,
}
