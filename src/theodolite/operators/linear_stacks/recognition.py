"""Recognises plain stacks of Linear layers and runs them once: their derivatives can be written down instead of traced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _torch_module

from theodolite.interrupts import called_within, unbroken
from theodolite.problem import Batch, Problem
from theodolite.problem.derivatives.exact_derivatives import derivatives

#: More outputs than this make the stored curvature of the loss costlier than a graph.
MAX_OUTPUTS = 32

PIECEWISE_LINEAR = (nn.ReLU, nn.LeakyReLU)
SMOOTH = (nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Softplus, nn.ELU)

#: Losses that are sums over the samples, so that their curvature in the outputs is one (c, c) matrix per sample.
_LOSSES = (nn.CrossEntropyLoss, nn.MSELoss)


@dataclass(frozen=True)
class StackLayer:
    """A Linear layer, its name, and its places in the flat vector; `bias` is None where none is measured."""

    name: str
    linear: nn.Linear
    weight: slice
    bias: slice | None


@dataclass(frozen=True)
class StackRun:
    """One batch: per layer its input (B, n), σ' and σ'' of what follows it ((B, m); None: one and zero).

    `gradient` (B, c) and `curvature` (B, c, c) are the derivatives of the `loss` in the outputs.
    """

    layers: list[StackLayer]
    inputs: list[Tensor]
    slopes: list[Tensor | None]
    seconds: list[Tensor | None]
    output: Tensor
    loss: Tensor
    gradient: Tensor
    curvature: Tensor

    @property
    def piecewise_linear(self) -> bool:
        return all(second is None for second in self.seconds)


@dataclass(frozen=True)
class Stack:
    """A Sequential of Linear layers and elementwise activations, with its loss: what stays the same when weights move."""

    modules: list[nn.Module]
    layers: list[StackLayer]
    loss: nn.Module

    def run(self, batch: Batch) -> StackRun | None:
        """One batch through the weights as they stand; None where the inputs are no matrix of rows."""
        if len(batch.args) != 1 or batch.kwargs:
            return None
        found = _forward(self.modules, batch.args[0])
        if found is None:
            return None
        inputs, slopes, seconds, output = found
        return StackRun(self.layers, inputs, slopes, seconds, output, *_loss_derivatives(self.loss, output, batch.target))


def find_stack(problem: Problem) -> Stack | None:
    """The stack that a problem's model is.

    None where anything else happens: other modules, a layer used twice, hooks, another loss, half precision, or parameters that
    are not measured or belong to no layer.
    """
    modules = _flat_modules(problem.model)
    if modules is None or not _is_plain(problem, modules):
        return None
    layers = _layers(problem, [m for m in modules if isinstance(m, nn.Linear)])
    assert isinstance(problem.loss_function, nn.Module)
    return None if layers is None else Stack(modules, layers, problem.loss_function)


def run_stack(problem: Problem, tensors: dict[str, Tensor], batch: Batch, index: int) -> StackRun | None:
    """One batch of a problem whose model is such a stack, inside a `session`; None too where the output is not the model's."""
    stack = find_stack(problem)
    if stack is None:
        return None
    with unbroken(torch.no_grad()):
        expected = problem.evaluate(tensors, batch, index).output  # also for its checks
    run = stack.run(batch)
    if run is None or run.output.shape != expected.shape:
        return None
    # Else the model does something that the looks above do not see.
    return run if float((run.output - expected).norm()) <= 1e-3 * float(expected.norm()) else None


def _flat_modules(model: nn.Module) -> list[nn.Module] | None:
    """The modules of a (nested) Sequential made of Linear, Identity, Flatten and known activations only."""
    if type(model) is nn.Sequential:
        parts = [_flat_modules(child) for child in model]
        return None if any(p is None for p in parts) else [m for p in parts if p is not None for m in p]
    if type(model) in PIECEWISE_LINEAR + SMOOTH:
        return None if getattr(model, "inplace", False) else [model]
    if type(model) is nn.Flatten:
        return [model] if (model.start_dim, model.end_dim) == (1, -1) else None
    return [model] if type(model) in (nn.Linear, nn.Identity) else None


def _is_plain(problem: Problem, modules: list[nn.Module]) -> bool:
    if type(problem.loss_function) not in _LOSSES or problem.half_precision or problem.elsewhere:
        return False
    last = modules[-1] if modules else None
    if not isinstance(last, nn.Linear) or last.out_features > MAX_OUTPUTS:
        return False
    # A call must do no more than the class's own forward: no hooks of a module or of all modules, no forward of its own.
    kinds = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    if any(getattr(_torch_module, f"_global_{kind}") for kind in kinds):
        return False
    called: list[Any] = [*problem.model.modules(), problem.loss_function]
    return not any("forward" in vars(m) or any(getattr(m, f"_{kind}") for kind in kinds) for m in called)


def _layers(problem: Problem, linear: list[nn.Linear]) -> list[StackLayer] | None:
    """The layers with their places, found by the parameters themselves; None unless every weight and nothing else is measured."""
    sizes = problem.selection.sizes
    ends = torch.tensor(sizes).cumsum(0).tolist()
    places = {id(p): slice(end - n, end) for p, end, n in zip(problem.parameters, ends, sizes, strict=True)}
    owned = [p for layer in linear for p in (layer.weight, layer.bias) if p is not None]
    if len({id(p) for p in owned}) < len(owned) or not set(places) <= {id(p) for p in owned}:
        return None  # one place for two parts, or parameters of no layer
    if any(id(layer.weight) not in places for layer in linear) or {p.dtype for p in owned} != {problem.dtype}:
        return None
    names = {ends[layer.weights[0]]: layer.name for layer in problem.layers.values() if layer.weights}
    return [
        StackLayer(names[places[id(m.weight)].stop], m, places[id(m.weight)], None if m.bias is None else places.get(id(m.bias)))
        for m in linear
    ]


def _forward(modules: list[nn.Module], x: Tensor) -> tuple[list[Tensor], list[Tensor | None], list[Tensor | None], Tensor] | None:
    """Inputs of the linear layers, σ' and σ'' of what follows each of them, and the output; None if x is no matrix of rows."""
    places = [i for i, module in enumerate(modules) if isinstance(module, nn.Linear)]
    weight: Tensor = modules[places[0]].weight  # type: ignore[assignment]
    inputs: list[Tensor] = []
    slopes: list[Tensor | None] = []
    seconds: list[Tensor | None] = []
    with unbroken(torch.no_grad()):
        for module in modules[: places[0]]:
            x = module(x)
    if x.ndim != 2 or x.dtype != weight.dtype:
        return None
    for here, after in zip(places, [*places[1:], len(modules)], strict=True):
        inputs.append(x)
        linear: Any = modules[here]
        with unbroken(torch.no_grad()):
            z = nn.functional.linear(x, linear.weight, linear.bias)  # not its forward, which somebody may have replaced
        x, slope, second = _activate(modules[here + 1 : after], z)
        slopes.append(slope)
        seconds.append(second)
    return inputs, slopes, seconds, x


def _activate(modules: list[nn.Module], z: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """σ(z), σ'(z), σ''(z) of elementwise modules in a row; None for a slope of one and for a second derivative of zero."""
    active = [m for m in modules if isinstance(m, PIECEWISE_LINEAR + SMOOTH)]  # what else there is leaves rows alone
    if not active:
        return z, None, None
    if len(active) == 1 and type(active[0]) is nn.ReLU:
        return z.relu(), (z > 0).to(z.dtype), None
    values, slope, second = derivatives(nn.Sequential(*active), z)
    return values, slope, second if any(isinstance(m, SMOOTH) for m in active) else None


def _loss_derivatives(loss: nn.Module, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, `∂loss/∂z` (B, c) and `∂²loss/∂z²` of each sample (B, c, c)."""
    known = _known_derivatives(loss, output.detach(), target)
    if known is not None:
        return known
    with unbroken(torch.enable_grad()):  # one pass per output does for a sum over samples
        z = output.detach().requires_grad_()
        value = loss(z, target)
        (gradient,) = torch.autograd.grad(value, z, create_graph=True)
        columns = [torch.autograd.grad(gradient[:, j].sum(), z, retain_graph=True)[0] for j in range(z.shape[1])]
    return value.detach(), gradient.detach(), torch.stack(columns, dim=1).detach()


@called_within(torch.no_grad)
def _known_derivatives(loss: nn.Module, z: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """The same written down, for squared error and for cross-entropy of classes without weights, smoothing or ignored labels."""
    b, c = z.shape
    if isinstance(loss, nn.MSELoss) and loss.reduction in ("mean", "sum") and target.shape == z.shape:
        share = 2.0 / z.numel() if loss.reduction == "mean" else 2.0
        gap = z - target
        curvature = torch.eye(c, dtype=z.dtype, device=z.device).mul_(share).expand(b, c, c)
        return gap.square().sum() * (share / 2), gap * share, curvature
    if not isinstance(loss, nn.CrossEntropyLoss) or loss.weight is not None or loss.label_smoothing:
        return None
    if target.is_floating_point() or target.shape != (b,) or loss.reduction not in ("mean", "sum"):
        return None
    if bool((target == loss.ignore_index).any()):
        return None
    share = 1.0 / b if loss.reduction == "mean" else 1.0
    logs = z.log_softmax(1)
    value = -logs.gather(1, target[:, None]).sum() * share
    shares = logs.exp_()
    scaled = shares * share
    curvature = torch.diag_embed(scaled).baddbmm_(scaled[:, :, None], shares[:, None, :], alpha=-1)
    return value, scaled.scatter_add(1, target[:, None], scaled.new_full((b, 1), -share)), curvature
