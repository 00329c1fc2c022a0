"""A problem seen otherwise: one output of one sample as its objective, other weights, whether its loss or model is quadratic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.arguments import checked, one_or_each, shown, whole
from theodolite.interrupts import unbroken
from theodolite.problem import Batch, Problem, split_like
from theodolite.problem.arguments import a_problem
from theodolite.problem.batches import merge
from theodolite.problem.calling import copy_model

Choice = int | Sequence[int] | None

#: Backward nodes of functions with kinks or jumps: a Hessian at a point does not see them.
KINKS = (
    "Relu", "LeakyRelu", "Prelu", "RreluWithNoise", "Threshold", "Hardtanh", "Hardswish", "Hardsigmoid", "Softshrink",
    "Hardshrink", "Abs", "Clamp", "ClampMin", "ClampMax", "Max", "Min", "Amax", "Amin", "Maximum", "Minimum", "Sort", "Topk",
    "Median", "Kthvalue",
)  # fmt: skip


@dataclass(frozen=True)
class OutputEntry:
    """A loss that is one number of the output."""

    index: int

    def __call__(self, output: Tensor, target: Any) -> Tensor:
        return output.reshape(-1)[self.index]


def scalar_problem(problem: Problem, output: int, sample: int) -> Problem:
    """The problem whose objective is entry `output` of what the model returns for one sample."""
    scalar = problem.with_model(problem.model, OutputEntry(output))
    scalar._batch_weight = None  # weights of batches belong to the loss, which is not used
    return scalar.with_batches(picked(problem, torch.tensor([sample])))


def picked(problem: Problem, rows: Tensor) -> list[Batch]:
    """The samples of these numbers as one batch, where their shapes allow it."""
    found, before = [], 0
    wanted = rows.sort().values
    for batch in problem.data:
        mine = wanted[(wanted >= before) & (wanted < before + batch.size)] - before
        if len(mine):
            found.append(batch.part(mine))
        before += batch.size
    if len(found) == 1:
        return found
    return merge([part.part(slice(i, i + 1)) for part in found for i in range(part.size)])


def moved(problem: Problem, displacement: Tensor) -> Problem:
    """The same problem on a copy of the model whose measured parameters are displaced by a flat vector."""
    if displacement.shape != (problem.size,):
        raise ValueError(f"displacement must be a flat vector of {problem.size} numbers. Got shape {tuple(displacement.shape)}.")
    other = problem.in_float64() if problem.half_precision else problem.copied()
    with unbroken(torch.no_grad()):
        for p, step in zip(other.parameters, split_like(displacement.to(problem.device), other.parameters), strict=True):
            p.add_(step)
    return other


def measured_copy(problem: Problem) -> nn.Module:
    """A copy of the model in which only the measured parameters require a gradient."""
    model, chosen = copy_model(problem.model), set(problem.selection.keys)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)
    return model


def reset_of(module: nn.Module) -> Callable[[], None] | None:
    """What initialises a module; `nn.MultiheadAttention` hides it behind an underscore."""
    found = (getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters"))
    return next((reset for reset in found if callable(reset)), None)


def outputs_per_sample(problem: Problem) -> int:
    """How many numbers the model returns for a sample."""
    batch = next(iter(problem.data))
    with problem.session(second=False), torch.no_grad():
        output = problem.evaluate(problem.tensors(problem.leaves(grad=False)), problem.placed(batch), 0).output
    if output.numel() % batch.size:
        raise ValueError(f"An output of shape {tuple(output.shape)} cannot be shared among {batch.size} samples.")
    return output.numel() // batch.size


def chosen(problem: Problem, output: Choice, samples: Choice, *, name: str = "samples") -> list[tuple[int, int]]:
    """The (sample, output) pairs that the arguments name, the second of them `name`.

    `samples=None` is the first sample; `output=None` is allowed where the model has one output.
    """
    count = outputs_per_sample(problem)
    if output is None and count > 1:
        raise ValueError(
            f"The model returns {count} numbers for a sample, and a scalar is needed: choose one with output=0 .. "
            f"{count - 1}, or several with output=[...] (the largest is reported); {name}=... chooses the samples."
        )
    outputs = _whole("output", 0 if output is None else output, count)
    return [(s, o) for s in _whole(name, 0 if samples is None else samples, problem.samples) for o in outputs]


def _whole(name: str, choice: int | Sequence[int], count: int) -> list[int]:
    found = one_or_each(whole)(name, choice)
    places = found if isinstance(found, list) else [found]
    if not all(c < count for c in places):
        raise ValueError(f"{name} must lie in 0 .. {count - 1}. Got {shown(choice)}.")
    return places


def random_directions(problem: Problem, count: int, seed: int) -> Tensor:
    """Unit vectors, uniform on the sphere, (count, parameters)."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(count, problem.size, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(directions, dim=1).to(problem.device)


def unit(vector: Tensor) -> Tensor | None:
    """A vector of length one, or None where there is no direction in it."""
    length = float(vector.double().norm())
    return vector.double() / length if length > 0 else None


def kinks_of(problem: Problem) -> tuple[str, ...]:
    """Names of functions in the model that have no second derivative everywhere (ReLU and its like), as they are computed."""
    batch = problem.placed(next(iter(problem.data)))
    with problem.session(second=False):  # the session for second derivatives has a ReLU of its own
        output = problem.evaluate(problem.tensors(problem.leaves()), batch, 0).output
    names = {type(node).__name__.rstrip("0123456789").removesuffix("Backward") for node in _history(output)}
    return tuple(sorted(name for name in names if name in KINKS or name.startswith(("MaxPool", "AdaptiveMaxPool"))))


def _history(output: Tensor) -> Iterator[Any]:
    todo, seen = [output.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        todo.extend(following for following, _ in node.next_functions)


# Third differences along a random line: zero where a function of the weights is a quadratic.

#: Seeds of the two trial directions. Small seeds are what people draw their weights with, and a step parallel to the weights
#: would tell a function that is homogeneous in them (a ReLU network, say) for a quadratic.
TRIAL_SEEDS = (0x7E0D, 0x7E0E)


def trial_step(tensors: Mapping[str, Tensor], seed: int = TRIAL_SEEDS[0]) -> dict[str, Tensor]:
    """A random displacement of the size of the weights, for each named tensor: shapes, dtypes and devices are theirs."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(w.shape, generator=generator, dtype=torch.float32).to(w) * (w.detach().abs().mean() + 0.1)
        for name, w in tensors.items()
    }


def third_difference(values: Sequence[Tensor]) -> tuple[float, float]:
    """`‖f₃ − 3f₂ + 3f₁ − f₀‖` for four values at equal steps of a line, and the scale to judge it by: `max ‖fᵢ − f₀‖`.

    The scale is how much f varies, so a large constant part of f hides nothing; rounding of that part is taken off the size.

    >>> third_difference([torch.tensor([100.0 + t**2]) for t in range(4)])
    (0.0, 9.0)
    >>> third_difference([torch.tensor([100.0 + t**3]) for t in range(4)])[0] > 5.9
    True
    """
    first, second, third, fourth = (value.detach().double() for value in values)
    rounding = 8 * torch.finfo(values[0].dtype).eps * max(float(v.norm()) for v in (first, second, third, fourth))
    size = float((fourth - 3 * third + 3 * second - first).norm())
    scale = max(float((value - first).norm()) for value in (second, third, fourth))
    return max(size - rounding, 0.0), scale


# Whether a loss is a squared one, and in which convention: half a sum, a mean, half a mean, over samples or numbers.


@checked(problem=a_problem)
def squared_loss_curvature(problem: Problem) -> float | None:
    """The c of a loss (c/2) Σ r² over all outputs of the data; None where the loss is not of this form.

    Found by trial at made-up outputs: the gradient g must be c times the residual and the loss ‖g‖²/(2c).
    """
    if problem.loss_function is None:
        return None
    found: list[float] = []
    generator = torch.Generator().manual_seed(0)
    with problem.session():
        tensors = problem.tensors(problem.leaves(grad=False))
        for i, share, batch in problem.iterate():
            here = problem.evaluate(tensors, batch, i)
            output, loss_of = here.output.detach(), here.loss_of
            assert loss_of is not None
            for _ in range(2):
                noise = torch.randn(output.shape, generator=generator, dtype=torch.float32).to(output)
                found.append(_curvature_at(loss_of, output + noise, share))
    tolerance = 1e-8 if problem.dtype == torch.float64 else 1e-4
    middle = sum(found) / len(found)
    agree = all(abs(c - middle) <= tolerance * abs(middle) for c in found)  # false for NaN
    return middle if agree and middle > 0 else None


def _curvature_at(loss: Callable[[Tensor], Tensor], output: Tensor, share: float) -> float:
    """share · c at one place, NaN where the loss is not squared there."""
    output = output.clone().requires_grad_()
    value = loss(output)
    if not value.requires_grad:
        return math.nan
    [gradient] = torch.autograd.grad(value, output, create_graph=True)
    if not gradient.requires_grad:
        return math.nan
    generator = torch.Generator().manual_seed(1)
    v = torch.randn(output.shape, generator=generator, dtype=torch.float32).to(output)
    try:
        [image] = torch.autograd.grad(gradient, output, v)
    except RuntimeError:  # it has no second derivative in torch
        return math.nan
    c = float((v * image).sum() / v.square().sum())
    gradient, value = gradient.detach(), value.detach()
    precision = 1e-8 if output.dtype == torch.float64 else 1e-4
    straight = float((image - c * v).norm()) <= precision * abs(c) * float(v.norm())
    squared = abs(float(gradient.square().sum()) - 2 * c * float(value)) <= precision * abs(2 * c * float(value))
    return share * c if straight and squared and c > 0 else math.nan
