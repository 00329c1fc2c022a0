"""New weights for layers of a copy: as the layer itself draws them, or at the scale that its activation wants."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from theodolite.interrupts import called_within
from theodolite.measures.kernel.problem_views import reset_of
from theodolite.problem.state_guard import cuda_devices, own_random_state

#: Gains at which the variance of activations, and of gradients, stays about the same from layer to layer.
GAINS = {"relu": math.sqrt(2.0), "tanh": 5.0 / 3.0, "sigmoid": 4.0}
#: The mean of an activation's values; where it is not zero, biases are drawn so that the next layer still sees zero.
MEANS = {"sigmoid": 0.5}
#: Added to seeds: users' own are small numbers, and what they began with is not to be drawn again.
_OTHER = 7919
#: Entries from which on a matrix tells by itself whether it was drawn by a usual rule.
_TELLING = 512


def new_module(module: nn.Module, seed: int = 0) -> nn.Module | None:
    """A module of the same kind with newly drawn weights; None where it does not know how to draw them."""
    if reset_of(module) is None:
        return None
    fresh = copy.copy(module)  # with parameters and buffers of its own: nothing of the user's is drawn anew
    fresh._parameters = {n: None if p is None else nn.Parameter(torch.empty_like(p)) for n, p in module._parameters.items()}
    fresh._buffers = {n: None if b is None else b.clone() for n, b in module._buffers.items()}
    reset = reset_of(fresh)
    assert reset is not None
    with own_random_state(seed + _OTHER, cuda_devices(module)), torch.no_grad():
        try:
            reset()
        except Exception:  # an initialisation of the user's that reaches for more than its own weights
            return None
    return fresh


def looks_new(module: nn.Module) -> bool:
    """Whether the matrices of a module look newly drawn: as its own initialisation draws them, or by a usual rule.

    >>> layer = nn.Linear(30, 20)
    >>> looks_new(layer), looks_new(nn.Linear(30, 20).requires_grad_(False).apply(lambda m: m.weight.mul_(1.3)))
    (True, False)
    >>> _ = nn.init.kaiming_normal_(layer.weight)
    >>> looks_new(layer)
    True
    """
    fresh = new_module(module)
    if fresh is None:
        return False
    drawn = dict(fresh.named_parameters(recurse=False))
    pairs = [(p.detach().double(), drawn[n].detach().double()) for n, p in module.named_parameters(recurse=False) if p.ndim >= 2]
    return bool(pairs) and all(_alike(own, new) or _by_a_usual_rule(own) for own, new in pairs)


def _alike(own: Tensor, new: Tensor) -> bool:
    if own.numel() < 16 or not float(new.std()) > 0:
        return False
    spread = float(own.std() / new.std())
    largest = float(own.abs().max() / new.abs().max())
    near = abs(spread - 1.0) < _spread_error(own) and abs(largest - 1.0) < 0.07 + _spread_error(own)
    return near and _no_direction_stands_out(own.flatten(1), beside=_norm(new.flatten(1)))


def _by_a_usual_rule(own: Tensor) -> bool:
    """Independent entries of one of the scales of `torch.nn.init`: no heavy tails, no direction that sticks out."""
    matrix = own.flatten(1)  # (out, fan_in)
    out, fan_in = matrix.shape
    if matrix.numel() < _TELLING or not (scale := float(matrix.std())) > 0:
        return False
    fan_out = out * own[0, 0].numel()
    usual = [
        math.sqrt(2.0 / fan_in),
        math.sqrt(1.0 / fan_in),
        math.sqrt(2.0 / fan_out),
        math.sqrt(2.0 / (fan_in + fan_out)),
        0.02,
    ]
    tails = float((matrix / scale).pow(4).mean())  # 3 for Gaussian entries, 1.8 for uniform ones
    edge = scale * (math.sqrt(out) + math.sqrt(fan_in))  # of the singular values of independent entries
    return (
        any(abs(scale / rule - 1.0) < 0.03 + 3.0 / math.sqrt(2 * matrix.numel()) for rule in usual)
        and tails < 3.0 + 3.0 * math.sqrt(24.0 / matrix.numel())
        and _no_direction_stands_out(matrix, beside=edge)
    )


def _no_direction_stands_out(matrix: Tensor, beside: float) -> bool:
    """Whether the largest singular value is that of independent entries; training makes it grow first of all."""
    return matrix.numel() < _TELLING or _norm(matrix) < (1.05 + _spread_error(matrix)) * beside


def _norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


def _spread_error(own: Tensor) -> float:
    """How far the standard deviations of two draws of a matrix may lie apart, as a share."""
    return 0.03 + 3.0 / math.sqrt(own.numel())


@called_within(torch.no_grad)
def redraw(module: nn.Module, units: Tensor | None = None, seed: int = 0) -> None:
    """New weights for a module of a copy, or for some of its output units."""
    fresh = new_module(module, seed)
    if fresh is None:
        raise ValueError(f"{type(module).__name__} does not know how to draw new weights (it has no reset_parameters).")
    for name, p in fresh.named_parameters(recurse=False):
        own = module._parameters[name]
        assert own is not None
        if units is None:
            own.copy_(p)
        elif len(own) == len(units):
            own[units] = p[units]
    for name, b in fresh.named_buffers(recurse=False):
        if units is None:
            module.get_buffer(name).copy_(b)


@called_within(torch.no_grad)
def draw_at_scale(model: nn.Module, activations: Mapping[str, str], seed: int = 0) -> None:
    """New weights for the linear and convolutional layers of a copy, by name, at the scale of the activation behind each.

    Gaussian weights of variance gain²/fan-in, biases zero: He's for a ReLU, Xavier's where nothing follows. Behind a sigmoid,
    whose values have the mean ½, biases take that mean away again.
    """
    before = 0.0  # mean of what the layer is given
    with own_random_state(seed, cuda_devices(model)):
        for name, activation in activations.items():
            module = model.get_submodule(name)
            weight = getattr(module, "weight", None)
            if not isinstance(module, nn.Linear | nn.modules.conv._ConvNd) or not isinstance(weight, Tensor):
                continue
            fan = weight[0].numel()
            weight.copy_(torch.randn(weight.shape, dtype=torch.float64) * GAINS.get(activation, 1.0) / math.sqrt(fan))
            if module.bias is not None:
                module.bias.copy_(-before * weight.reshape(len(weight), -1).sum(1))
            before = MEANS.get(activation, 0.0)
