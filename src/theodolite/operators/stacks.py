"""Recognises plain stacks of Linear layers, whose derivatives can be written down instead of traced by autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _torch_module

from theodolite.problem import Batch, Problem

#: More outputs than this make the stored curvature of the loss costlier than a graph.
MAX_OUTPUTS = 32

PIECEWISE_LINEAR = (nn.ReLU, nn.LeakyReLU)
SMOOTH = (nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Softplus, nn.ELU)

#: Losses that are sums over the samples, so that their curvature in the outputs is one (c, c) matrix per sample.
_LOSSES = (nn.CrossEntropyLoss, nn.MSELoss)


def plain_stack(problem: Problem, activations: tuple[type[nn.Module], ...]) -> list[nn.Module] | None:
    """The modules of a problem that is a Sequential of Linear layers and these activations, all weights measured.

    None where anything else happens: other modules, a layer used twice, hooks, another loss, half precision.
    """
    modules = _flat_modules(problem.model, activations)
    if modules is None or type(problem.loss_function) not in _LOSSES or problem.half_precision:
        return None
    linear = linear_layers(modules)
    if not linear or len({id(m) for m in linear}) < len(linear) or linear[-1].out_features > MAX_OUTPUTS:
        return None
    if modules[-1] is not linear[-1] or _changed([*problem.model.modules(), problem.loss_function]):
        return None
    layers = [layer for layer in problem.layers.values() if layer.kind == "Linear"]
    if len(layers) != len(linear) or any(len(layer.weights) != 1 for layer in layers):
        return None  # some weights are not measured
    return modules


def linear_layers(modules: list[nn.Module]) -> list[nn.Linear]:
    return [m for m in modules if isinstance(m, nn.Linear)]


def loss_derivatives(problem: Problem, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """`∂loss/∂z` (B, c) and `∂²loss/∂z²` of each sample (B, c, c): one pass per output does for a sum over samples."""
    assert problem.loss_function is not None
    with torch.enable_grad():
        z = output.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(problem.loss_function(z, batch.target), z, create_graph=True)
        columns = [torch.autograd.grad(gradient[:, j].sum(), z, retain_graph=True)[0] for j in range(z.shape[1])]
    return gradient.detach(), torch.stack(columns, dim=1).detach()


def _flat_modules(model: nn.Module, activations: tuple[type[nn.Module], ...]) -> list[nn.Module] | None:
    """The modules of a (nested) Sequential made of Linear, Identity, Flatten and the given activations only."""
    if type(model) is nn.Sequential:
        parts = [_flat_modules(child, activations) for child in model]
        return None if any(p is None for p in parts) else [m for p in parts if p is not None for m in p]
    if type(model) in activations:
        return None if getattr(model, "inplace", False) else [model]
    if type(model) is nn.Flatten:
        return [model] if (model.start_dim, model.end_dim) == (1, -1) else None
    return [model] if type(model) in (nn.Linear, nn.Identity) else None


def _changed(modules: list[Any]) -> bool:
    """Whether a call does more than the class's own forward: hooks of the module or of all modules, a forward of its own."""
    if _torch_module._global_forward_hooks or _torch_module._global_forward_pre_hooks:
        return True
    return any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in modules)
