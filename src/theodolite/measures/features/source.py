"""What is differentiated with respect to what: the model behind a `Problem`, its inputs or the value of one of its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from theodolite.errors import BatchCoupledError, nearest
from theodolite.operators.tangent_kernels.tangent_kernel import CHECKED
from theodolite.problem import Batch, Problem
from theodolite.problem.tensors import map_tensors, named_tensors

QUANTITY = "An average gradient outer product"

#: How far the output of a sample taken alone may be from that in a batch, relative to the largest output.
COUPLING = 1e-3


class Function(nn.Module):
    """A function of a batch, or a module with nothing to train, as a module with one (unused) parameter."""

    def __init__(self, function: Callable[..., Any], dtype: torch.dtype) -> None:
        super().__init__()
        self.function = function
        self.unused = nn.Parameter(torch.zeros((), dtype=dtype))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def as_source(model_or_problem: Any, inputs: Any, *, check: bool = True) -> Problem:
    """A problem as it is; a module or function on `inputs`, in eval mode, with a loss that nobody looks at."""
    if isinstance(model_or_problem, Problem):
        return model_or_problem
    if not callable(model_or_problem):
        raise TypeError(f"Expected a torch.nn.Module, a function of a batch or a Problem. Got {type(model_or_problem).__name__}.")
    if inputs is None:
        raise ValueError("inputs is missing: only a Problem brings inputs of its own.")
    problem = Problem(_module(model_or_problem, inputs), _no_loss, [(inputs, torch.zeros(1))], batch_weight=_size, check=False)
    if check:
        batch = next(iter(problem.data))
        problem.with_batches([batch.part(slice(0, CHECKED))] if batch.size > CHECKED else [batch]).check_repeatable()
    return problem


def _module(model: Any, inputs: Any) -> nn.Module:
    if isinstance(model, nn.Module) and any(p.requires_grad and p.is_floating_point() for p in model.parameters()):
        return model
    own = list(model.parameters()) if isinstance(model, nn.Module) else []
    floating = [t for _, t in named_tensors([own, inputs]) if t.is_floating_point()]
    return Function(model, floating[0].dtype if floating else torch.float32)


def _no_loss(output: Tensor, target: Any) -> Tensor:
    return output.sum()


def _size(batch: Batch) -> float:
    return float(batch.size)


def batches_of(problem: Problem, inputs: Any) -> Iterator[Batch]:
    """The given inputs, or the problem's own."""
    return iter(problem.data) if inputs is None else iter([problem.batch_of(inputs)])


class Point:
    """Where the gradient is taken: the floating inputs of a batch, or what the submodule `at` returns."""

    def __init__(self, problem: Problem, at: str | None) -> None:
        self.problem, self.at = problem, at
        self.module = None if at is None else _submodule(problem.model, at)

    def outputs(self, tensors: dict[str, Tensor], batch: Batch, index: int) -> tuple[Tensor, list[Tensor]]:
        """The outputs (n, k) of a batch of n samples and the tensors they are to be differentiated with respect to."""
        batch = replace(batch, args=map_tensors(_own, batch.args), kwargs=map_tensors(_own, batch.kwargs))
        if self.module is None:
            batch, places = _with_leaves(batch)
            output = self.problem.output(tensors, batch, index)
        else:
            with _watched(self.module, str(self.at)) as places:
                output = self.problem.output(tensors, batch, index)
            if len(places) != 1:
                raise ValueError(
                    f"at={self.at!r} must be called once per forward pass, and was called {len(places)} times. "
                    "Name another submodule."
                )
            if places[0].shape[0] != batch.size:
                raise ValueError(
                    f"at={self.at!r} must return one part per sample. Batch {index} has {batch.size} samples, but it returned "
                    f"shape {tuple(places[0].shape)}."
                )
        # Several rows per sample are those of its tokens, one sample after the other: `refuse_coupling` sees to that.
        if batch.size > 1 and (output.ndim == 0 or output.shape[0] % batch.size):
            raise ValueError(
                f"The gradient of each sample needs its own outputs. Batch {index} has {batch.size} samples, but the output has "
                f"shape {tuple(output.shape)}."
            )
        if not output.requires_grad:
            what = "the inputs" if self.at is None else f"what {self.at!r} returns"
            raise ValueError(f"The model's output does not depend on {what} in a way that can be differentiated.")
        return output.reshape(batch.size, -1), places

    def rows(self, values: Sequence[Tensor]) -> Tensor:
        """What belongs to the places (they themselves, or gradients) as (samples, d); for `at`, positions are samples."""
        if self.module is None:
            flat = [v.reshape(v.shape[0], -1) for v in values]
            return torch.cat(flat, dim=1) if len(flat) > 1 else flat[0]
        (value,) = values
        channels_first = value.ndim > 3 or (value.ndim == 3 and isinstance(self.module, _ConvNd | _BatchNorm))
        value = value.movedim(1, -1) if channels_first else value
        return value.reshape(-1, value.shape[-1])


def refuse_coupling(flat: Tensor, alone: Tensor) -> None:
    """Raise if the first of n samples has other outputs in its batch, `flat` (n, k), than alone, (1, k)."""
    flat, alone = flat.detach(), alone.detach()
    gap = float((flat[:1] - alone).abs().max()) if alone.shape[1] == flat.shape[1] else float("inf")
    if gap > COUPLING * float(flat.abs().max()):
        n = len(flat)
        raise BatchCoupledError(
            f"{QUANTITY} is taken sample by sample, but the first sample has other outputs alone than in a batch of {n} (they "
            f"differ by {gap:.2e}): (a) an output depends on the other samples; (b) an input whose first size happens to be {n} "
            "is not per sample: take another number of samples."
        )


def _own(t: Tensor) -> Tensor:
    """The same numbers, of no graph, and such that they may be in one."""
    return t.clone() if t.is_inference() else t.detach()


def _with_leaves(batch: Batch) -> tuple[Batch, list[Tensor]]:
    """The batch with its floating per-sample inputs as leaves that require grad, and these."""
    places: list[Tensor] = []

    def leaf(t: Tensor) -> Tensor:
        if not (t.is_floating_point() and t.ndim and t.shape[0] == batch.size):
            return t
        places.append(t.detach().requires_grad_())
        return places[-1]

    batch = replace(batch, args=map_tensors(leaf, batch.args), kwargs=map_tensors(leaf, batch.kwargs))
    if not places:
        kinds = ", ".join(f"{name} {str(t.dtype).removeprefix('torch.')}" for name, t in named_tensors(batch.inputs))
        raise TypeError(
            f"The inputs hold no floating tensor to differentiate with respect to ({kinds}). Name the layer that turns them into "
            "numbers, such as the embedding of a token model: at='embedding'."
        )
    return batch, places


@contextmanager
def _watched(module: nn.Module, name: str) -> Iterator[list[Tensor]]:
    """Collects what the module returns, made a leaf where no graph leads to it."""
    seen: list[Tensor] = []

    def watch(_: nn.Module, __: Any, output: Any) -> Any:
        first = next((t for _, t in named_tensors(output) if t.is_floating_point()), None)
        if first is None or first.ndim < 2:
            raise ValueError(f"at={name!r} must return a floating tensor (samples, ..., features).")
        place = first if first.requires_grad else first.detach().requires_grad_()
        seen.append(place)
        return map_tensors(lambda t: place if t is first else t, output)

    handle = module.register_forward_hook(watch)
    try:
        yield seen
    finally:
        handle.remove()


def _submodule(model: nn.Module, name: str) -> nn.Module:
    root = model.function if isinstance(model, Function) and isinstance(model.function, nn.Module) else model
    known: dict[str, nn.Module] = dict(root.named_modules())
    if not name or name not in known:
        near = ", ".join(nearest(name, [k for k in known if k])) or "none"
        raise ValueError(f"at={name!r} is no submodule of {type(root).__name__}. Nearest names: {near}.")
    return known[name]
