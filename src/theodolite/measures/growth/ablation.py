"""What each layer does for the loss: without it, and with it twice in a row.

Layer l of a residual model maps the stream x to y. Left out it gives x, repeated it gives the layer's value at y; all others stay
as they are. So many forward passes as there are layers, twice: nothing is trained, and nothing here is a forecast of training.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from theodolite.arguments import a_text, checked
from theodolite.interrupts import unbroken_context
from theodolite.measures.growth.body import find_body
from theodolite.measures.growth.diagnostics import paired_error, told_apart
from theodolite.measures.growth.lag import ROUNDING
from theodolite.measures.growth.residual_stream import stream_in
from theodolite.measures.growth.validation import in_parts, part_losses
from theodolite.problem import Problem
from theodolite.problem.activations import Call, Hooks
from theodolite.problem.arguments import a_problem
from theodolite.problem.calling import unwrap
from theodolite.problem.tensors import map_tensors
from theodolite.progress import counting
from theodolite.results import Cost, Result, Row
from theodolite.text import number

Change = Literal["left out", "repeated"]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LayerAblation(Result):
    """The rise of the loss with each layer left out, and with each repeated.

    Attributes:
        body: the name of the list of layers.
        loss: of the model as it is, in eval mode.
        left_out, left_out_error: by layer, the rise of the loss without it, with its paired error.
        repeated, repeated_error: by layer, the rise with the layer twice in a row.
        samples: how many samples the loss was taken on.
    """

    body: str
    loss: float
    left_out: tuple[float, ...]
    left_out_error: tuple[float, ...]
    repeated: tuple[float, ...]
    repeated_error: tuple[float, ...]
    samples: int

    @property
    def idle(self) -> tuple[int, ...]:
        """Layers without which the loss does not rise by twice the error."""
        pairs = zip(self.left_out, self.left_out_error, strict=True)
        return tuple(layer for layer, (rise, error) in enumerate(pairs) if rise <= 0 or not told_apart(rise, error))

    def rows(self) -> list[Row]:
        columns = zip(self.left_out, self.left_out_error, self.repeated, self.repeated_error, strict=True)
        names = ("left_out", "left_out_error", "repeated", "repeated_error")
        return [{"layer": layer, **dict(zip(names, values, strict=True))} for layer, values in enumerate(columns)]

    def sentence(self) -> str:
        least, most = (pick(range(len(self.left_out)), key=lambda layer: self.left_out[layer]) for pick in (min, max))
        rise = number(self.left_out[most], self.left_out_error[most])
        if most == least:
            return f"The loss is {number(self.loss)}; without its one layer it rises by {rise}."
        return (
            f"The loss is {number(self.loss)}; without layer {most} it rises by {rise}, the most, without layer {least} by "
            f"{number(self.left_out[least], self.left_out_error[least])}, the least."
        )


@checked(problem=a_problem, body=a_text)
def ablate_layers(problem: Problem, *, body: str | None = None, progress: bool | None = None) -> LayerAblation:
    """`ℓ(without layer l) − ℓ` and `ℓ(layer l twice) − ℓ` for each layer of a model, on its data and in eval mode.

    Rises have paired errors, from at least eight parts of the data where it can be cut. The model is left as found. A change of
    the loss right after a change of the model says little about the loss after training: `landscape_aware_growth` tries that.

    Args:
        body: the name of the list of layers, where there are several.

    Returns:
        The loss, and its rise by layer.

    >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    >>> for layer, weight in zip(model, (2.0, 3.0)):
    ...     _ = nn.init.constant_(layer.weight, weight)
    >>> ablate_layers(Problem(model, nn.MSELoss(), (Tensor([[1.0]]), Tensor([[6.0]])))).rows()[0]["left_out"]
    9.0
    """
    began = time.perf_counter()
    model = unwrap(problem.model)
    found = find_body(model, body)
    parts = in_parts(problem)
    weights = np.array(parts.weighting.weights)
    shares = weights / weights.sum()
    before = np.array(part_losses(parts, parts.model))
    loss = float(before @ shares)
    rises: dict[Change, list[tuple[float, float]]] = {"left out": [], "repeated": []}
    blocks = found.blocks(model)
    with counting("layers", progress=progress, total=2 * len(blocks)) as count:
        for block in blocks:
            for change, found_rises in rises.items():
                with _changed(block, change):
                    difference = np.array(part_losses(parts, parts.model)) - before
                error = max(paired_error(difference.tolist(), weights.tolist()), ROUNDING * abs(loss))
                found_rises.append((float(difference @ shares), error))
                count(1)
    (left_out, left_out_error), (repeated, repeated_error) = (tuple(zip(*pairs, strict=True)) for pairs in rises.values())
    return LayerAblation(
        body=found.path,
        loss=loss,
        left_out=left_out,
        left_out_error=left_out_error,
        repeated=repeated,
        repeated_error=repeated_error,
        samples=problem.samples,
        cost=Cost(time.perf_counter() - began, "forward passes"),
    )


@unbroken_context
def _changed(block: nn.Module, change: Change) -> Iterator[None]:
    """The model with this layer left out or repeated, within the `with` block."""
    found: list[Tensor] = []

    def note(call: Call) -> None:
        found[:] = [_stream(call.args or call.kwargs).clone()]  # what follows may work in place

    def replace(call: Call) -> Any:
        x, y = _stream(call.args or call.kwargs), _stream(call.output, found[0].shape)
        if change == "left out":
            return map_tensors(lambda t: found[0] if t is y else t, call.output)
        again = [_again(value, x, y) for value in call.args]
        return block.forward(*again, **{name: _again(value, x, y) for name, value in call.kwargs.items()})

    with Hooks({"layer": block}, note, before=True), Hooks({"layer": block}, replace):
        yield


def _stream(tree: Any, shape: Any = None) -> Tensor:
    stream = stream_in(tree, shape)
    if stream is None:
        raise ValueError("a layer does not map a tensor to one of the same shape, so none can be left out or repeated.")
    return stream


def _again(value: Any, x: Tensor, y: Tensor) -> Any:
    """An argument of the second call: y in the place of x, and no cache of keys and values, which holds those of the first."""
    if any(kind.__name__ == "Cache" for kind in type(value).__mro__):
        return None
    return map_tensors(lambda t: y if t is x else t, value)
