"""Do gradients reach every layer? Layer by layer in the order of the forward pass: gradients, updates, scales, saturation."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from theodolite.arguments import checked, positive
from theodolite.measures.progress.new_weights import new_module
from theodolite.measures.trials import copied_setup
from theodolite.problem import Problem
from theodolite.problem.activations import Call, Hooks
from theodolite.problem.arguments import a_problem, an_optimizer, of_dimensions
from theodolite.problem.parameters import Layer
from theodolite.results import Cost, Outcome, Result, Row

#: Samples of the forward pass in which activations are looked at.
SAMPLES = 256
#: A unit is saturated where its slope is below this share of the steepest one.
SLOPE = 0.05
#: A row of a softmax is saturated where one entry holds this much of it.
ALL_ON_ONE = 0.999


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class GradientFlow(Result):
    """Layers with weight matrices in the order of the forward pass, one row each.

    `gradient_ratio` is the norm of the weights' gradient over their own, `update_ratio` the same for one step of the optimizer
    as it stands (None without a rate), `growth` the norm of the weights over that of new ones (None where the layer cannot
    draw new ones). `input_scale` and `output_scale` are root mean squares of what goes in and comes out; `activation` is the
    first one behind the layer, `saturated` the share of its values where it is flat, `alive` the share of its units that are
    not shut on all samples. `output_activation` is the function whose value the model returns, if it is a known one.
    """

    layers: tuple[Row, ...]
    lr: float | None = None
    optimizer: str = ""
    output_activation: str = ""
    input_scale: float = math.nan

    def rows(self) -> list[Row]:
        return [dict(row) for row in self.layers]

    @property
    def first_to_last(self) -> float | None:
        """The strongest gradient ratio in the first third of the layers over that in the last; None for fewer than three."""
        third = len(self.layers) // 3
        if not third:
            return None
        first, last = (max(row["gradient_ratio"] for row in part) for part in (self.layers[:third], self.layers[-third:]))
        return float(first / last) if last > 0 else None

    @property
    def amplification(self) -> float | None:
        """The scale of what the last layer gives over that of what the first one takes."""
        scales = [row[name] for row in self.layers for name in ("input_scale", "output_scale") if row[name] is not None]
        return float(scales[-1] / scales[0]) if len(scales) > 1 and scales[0] > 0 else None

    @property
    def saturation(self) -> float | None:
        """The median share of saturated values, over the layers whose activation can saturate."""
        shares = sorted(row["saturated"] for row in self.layers if row["saturated"] is not None)
        return float(shares[len(shares) // 2]) if shares else None

    def sentence(self) -> str:
        ratios = [row["update_ratio"] or row["gradient_ratio"] for row in self.layers]
        what = "gradient" if self.lr is None else "update"
        if not ratios:
            return "There is no layer with a weight matrix."
        return f"In {len(ratios)} layers the {what} is between {min(ratios):.2g} and {max(ratios):.2g} times the weights."


@checked(problem=a_problem, lr=positive, optimizer=an_optimizer, gradient=of_dimensions(1))
def gradient_flow(
    problem: Problem, *, lr: float | None = None, optimizer: Optimizer | None = None, gradient: Tensor | None = None
) -> GradientFlow:
    """Gradients and updates relative to the weights, and what happens to activations on the way.

    Args:
        lr, optimizer: what the user trains with; the update is that of one step on a copy, with the gradient of all the data.
        gradient: that gradient, if it is known.

    >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    >>> _ = [nn.init.constant_(p, 2.0) for p in model.parameters()]
    >>> problem = Problem(model, nn.MSELoss(), (torch.ones(1, 1), torch.zeros(1, 1)))
    >>> found = gradient_flow(problem, lr=0.1)          # loss (ab)², gradients 2ab² = 16 in both, over weights of 2
    >>> [row["gradient_ratio"] for row in found.layers], [round(row["update_ratio"], 6) for row in found.layers]
    ([8.0, 8.0], [0.8, 0.8])
    """
    began = time.perf_counter()
    seen = record_forward(problem)
    gradients = problem.split(problem.gradient() if gradient is None else gradient)
    updates = {} if lr is None else one_update(problem, lr, optimizer, gradients)
    layers = in_forward_order(layers_with_matrices(problem), seen.order)
    rows = [_row(problem, layer, matrices_of(problem, layer), gradients, updates, seen) for layer in layers]
    return GradientFlow(
        layers=tuple(rows),
        lr=lr,
        optimizer="gradient descent" if optimizer is None else type(optimizer).__name__,
        output_activation=seen.output_activation,
        input_scale=seen.input_scale,
        outcome=Outcome.FINISHED,
        cost=Cost(seconds=time.perf_counter() - began, route="one gradient and one forward pass"),
    )


def _row(
    problem: Problem,
    layer: Layer,
    matrices: Sequence[int],
    gradients: Mapping[str, Tensor],
    updates: Mapping[str, Tensor],
    seen: Recorded,
) -> Row:
    names = [problem.names[i] for i in matrices]
    weight = _norm(problem.parameters[i] for i in matrices)
    new = initial_norm(problem, layer, matrices)
    gradient = _norm(gradients[name] for name in names)
    facts = seen.layers.get(layer.name, _Facts())
    return {
        "layer": layer.name,
        "kind": layer.kind,
        "weight_norm": weight,
        "growth": weight / new if new else None,
        "gradient_norm": gradient,
        "gradient_ratio": gradient / max(weight, 1e-30),
        "update_ratio": _norm(updates[name] for name in names) / max(weight, 1e-30) if updates else None,
        "input_scale": facts.input_scale,
        "output_scale": facts.output_scale,
        "activation": facts.activation,
        "saturated": facts.saturated,
        "alive": facts.alive,
    }


def _norm(tensors: Any) -> float:
    return math.sqrt(sum(float(t.detach().double().square().sum()) for t in tensors))


def one_update(problem: Problem, lr: float, optimizer: Optimizer | None, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What one step of the optimizer, with its state, adds to each parameter; made on a copy."""
    setup = copied_setup(problem, lr, optimizer, 1)
    for p, g in zip(setup.problem.parameters, gradients.values(), strict=True):
        p.grad = g.to(p.dtype).reshape(p.shape)
    before = [p.detach().clone() for p in setup.problem.parameters]
    setup.optimizer.step()
    moved = zip(problem.names, setup.problem.parameters, before, strict=True)
    return {name: p.detach() - old for name, p, old in moved}


def initial_norm(problem: Problem, layer: Layer, matrices: Sequence[int]) -> float | None:
    """The norm that the layer's matrices have when its own initialisation draws them anew; None where it has none."""
    module = module_of(problem, layer.name)
    fresh = new_module(module)
    if fresh is None:
        return None
    own = {id(p): name for name, p in module.named_parameters(recurse=False)}
    drawn = dict(fresh.named_parameters(recurse=False))
    found = [drawn[own[id(problem.parameters[i])]] for i in matrices if id(problem.parameters[i]) in own]
    return _norm(found) if len(found) == len(matrices) else None


def module_path(problem: Problem, layer: str) -> str:
    """The module's own name of a layer, for `get_submodule`."""
    members = problem.layers[layer]
    return problem.selection.keys[(*members.weights, *members.biases)[0]].rpartition(".")[0]


def module_of(problem: Problem, layer: str) -> nn.Module:
    """The module that a layer of the problem is."""
    return problem.model.get_submodule(module_path(problem, layer))


def matrices_of(problem: Problem, layer: Layer) -> list[int]:
    """The weights of a layer that are matrices, or more: what is left are the gains of normalisations."""
    return [i for i in layer.weights if problem.parameters[i].ndim >= 2]


def layers_with_matrices(problem: Problem) -> list[Layer]:
    """Layers that mix their inputs."""
    return [layer for layer in problem.layers.values() if matrices_of(problem, layer)]


def in_forward_order(layers: Any, order: Mapping[str, int]) -> list[Layer]:
    """Layers as the forward pass calls them; one that is not called as a module stays behind its neighbour."""
    places: list[tuple[float, Layer]] = []
    last = -1.0
    for layer in layers:
        last = float(order[layer.name]) if layer.name in order else last + 1e-6
        places.append((last, layer))
    return [layer for _, layer in sorted(places, key=lambda place: place[0])]


# One forward pass with its activations


@dataclass
class _Facts:
    """What one layer let through, and what the activation behind it made of it."""

    input_scale: float | None = None
    output_scale: float | None = None
    activation: str = ""
    saturated: float | None = None
    alive: float | None = None


@dataclass
class Recorded:
    """One forward pass: in which `order` layers were called, facts of each, and the function that made the output."""

    order: dict[str, int] = field(default_factory=dict)
    layers: dict[str, _Facts] = field(default_factory=dict)
    output_activation: str = ""
    input_scale: float = math.nan
    output: Tensor | None = None


def record_forward(problem: Problem) -> Recorded:
    """One forward pass of a few samples; nothing of the model is changed."""
    seen = Recorded()
    modules = {name: module_of(problem, name) for name in problem.layers}
    batch = next(iter(problem.data)).part(slice(0, SAMPLES))
    watch = _Watch(seen, {layer.name for layer in layers_with_matrices(problem)})
    with problem.session(second=False), torch.no_grad(), Hooks(modules, watch.layer):
        tensors = problem.tensors(problem.leaves(grad=False))
        placed = problem.placed(batch)
        with watch:
            output = problem.output(tensors, placed, -1, check=False)
    inputs = [t for t in (*batch.args, *batch.kwargs.values()) if isinstance(t, Tensor) and t.is_floating_point()]
    seen.input_scale = _scale(inputs[0]) if inputs else math.nan
    seen.output = output
    seen.output_activation = watch.made_by(output)
    return seen


_FUNCTIONS: dict[Any, str] = {
    **dict.fromkeys((torch.sigmoid, torch.sigmoid_, Tensor.sigmoid, Tensor.sigmoid_, functional.sigmoid), "sigmoid"),
    **dict.fromkeys((torch.tanh, torch.tanh_, Tensor.tanh, Tensor.tanh_, functional.tanh), "tanh"),
    **dict.fromkeys((torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, functional.relu, functional.relu6), "relu"),
    **dict.fromkeys((torch.softmax, Tensor.softmax, functional.softmax), "softmax"),
    **dict.fromkeys((torch.log_softmax, Tensor.log_softmax, functional.log_softmax), "log_softmax"),
}


class _Watch(TorchFunctionMode):
    """Sees which layers are called and which activation follows each, as a module or as a function."""

    def __init__(self, seen: Recorded, matrices: set[str]) -> None:
        super().__init__()
        self._matrices = matrices
        self.seen, self._last, self._last_module = seen, "", nn.Module()
        self._results: dict[int, tuple[str, str]] = {}

    def layer(self, call: Call) -> None:
        """After each call of a layer."""
        self.seen.order.setdefault(call.name, len(self.seen.order))
        if call.name not in self._matrices:
            return  # a normalisation: what follows it is the activation of the layer before
        facts = self.seen.layers.setdefault(call.name, _Facts())
        if isinstance(call.input, Tensor) and call.input.is_floating_point():
            facts.input_scale = _scale(call.input)
        if isinstance(call.output, Tensor):
            facts.output_scale = _scale(call.output)
        self._last, self._last_module = call.name, call.module

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = _FUNCTIONS.get(func)
        if name is not None and isinstance(result, Tensor) and result.is_floating_point():
            self._results[result.data_ptr()] = (name, self._last)
            facts = self.seen.layers.get(self._last)
            if facts is not None and not facts.activation:
                facts.activation = name
                facts.saturated = _saturated(name, result)
                facts.alive = _alive(result, self._last_module) if name == "relu" else None
        return result

    def made_by(self, output: Tensor) -> str:
        """The function whose value this is; that it saturates is no fault then, for a model may be sure of its answers."""
        name, layer = self._results.get(output.data_ptr(), ("", ""))
        facts = self.seen.layers.get(layer)
        if facts is not None and facts.activation == name:
            facts.saturated = None
        return name


def _scale(t: Tensor) -> float:
    return float(t.detach().double().square().mean().sqrt()) if t.numel() else math.nan


def _saturated(name: str, values: Tensor) -> float | None:
    """The share of values at which an activation is flat."""
    if name == "sigmoid":
        flat = 4 * values * (1 - values) < SLOPE
    elif name == "tanh":
        flat = 1 - values.square() < SLOPE
    elif name == "softmax" and values.shape[-1] > 1:
        flat = values.amax(-1) > ALL_ON_ONE
    else:
        return None
    return float(flat.double().mean())


def _alive(values: Tensor, layer: nn.Module) -> float | None:
    """The share of units that are open on some sample."""
    if values.ndim < 2:
        return None
    axis = 1 if isinstance(layer, nn.modules.conv._ConvNd) else values.ndim - 1  # Hugging Face's Conv1D is a linear layer
    return float((values.movedim(axis, 0).reshape(values.shape[axis], -1) > 0).any(1).double().mean())
