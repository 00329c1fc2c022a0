"""Gradients of all outputs with respect to the inputs, or to the value of one layer, sample by sample: the factor of the AGOP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from theodolite.arguments import optional_integer
from theodolite.errors import BatchCoupledError
from theodolite.operators.tangent_kernels.tangent_kernel import CHECKED
from theodolite.problem import Batch, Problem
from theodolite.problem.activations import Call, Hooks
from theodolite.problem.tensors import map_tensors, named_tensors
from theodolite.text import nearest

# What is differentiated with respect to what: the model behind a `Problem`, its inputs or the value of one of its layers.

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
    problem = Problem(
        _module(model_or_problem, inputs),
        lambda output, target: output.sum(),
        [(inputs, torch.zeros(1))],
        batch_weight=lambda batch: float(batch.size),
        check=False,
    )
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

    def watch(call: Call) -> Any:
        first = next((t for _, t in named_tensors(call.output) if t.is_floating_point()), None)
        if first is None or first.ndim < 2:
            raise ValueError(f"at={name!r} must return a floating tensor (samples, ..., features).")
        place = first if first.requires_grad else first.detach().requires_grad_()
        seen.append(place)
        return map_tensors(lambda t: place if t is first else t, call.output)

    with Hooks({name: module}, watch):
        yield seen


def _submodule(model: nn.Module, name: str) -> nn.Module:
    root = model.function if isinstance(model, Function) and isinstance(model.function, nn.Module) else model
    known: dict[str, nn.Module] = dict(root.named_modules())
    if not name or name not in known:
        near = ", ".join(nearest(name, [k for k in known if k])) or "none"
        raise ValueError(f"at={name!r} is no submodule of {type(root).__name__}. Nearest names: {near}.")
    return known[name]


# Gradients of all outputs with respect to the inputs, sample by sample: the factor of the average gradient outer product.

#: Numbers in the gradients that are held at once, and samples at once: enough to keep matrix products busy.
NUMBERS, SAMPLES = 2**21, 4096
#: Few outputs do not make chunks larger than this many would: the activations of the forward pass take memory too.
FEW = 8


@dataclass(frozen=True, eq=False)
class InputGradients:
    """The rows Γ (m, d) with `G = ΓᵀΓ / count`, m = count × outputs: the low-memory form of an AGOP where m < d."""

    rows: Tensor
    count: int

    @property
    def dim(self) -> int:
        """The number of input coordinates, d."""
        return self.rows.shape[1]

    def matrix(self) -> Tensor:
        """The average gradient outer product itself, (d, d)."""
        return self.rows.T @ self.rows / self.count


def input_gradients(
    model_or_problem: Any,
    inputs: Any = None,
    *,
    at: str | None = None,
    batch_size: int | None = None,
    projections: int | None = None,
    seed: int = 0,
) -> InputGradients:
    """The gradients behind `agop` (see there for the arguments), kept as rows instead of being summed to d × d.

    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 4.0]]))
    >>> gradients = input_gradients(model, torch.zeros(2, 2).double())
    >>> gradients.rows, gradients.count
    (tensor([[3., 4.],
            [3., 4.]], dtype=torch.float64), 2)
    """
    problem = as_source(model_or_problem, inputs)
    found = list(chunks(problem, inputs, Settings(at, batch_size, projections, seed)))
    return InputGradients(torch.cat([chunk.rows for chunk in found]), sum(chunk.count for chunk in found))


@dataclass(frozen=True)
class Settings:
    """Where and how gradients are taken; see `agop`."""

    at: str | None = None
    batch_size: int | None = None
    projections: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "projections"):
            optional_integer(name, getattr(self, name), least=1, wanted="a whole number of at least 1, or None")

    def passes(self, outputs: int) -> int:
        """Backward passes for so many outputs."""
        return outputs if self.projections is None else min(self.projections, outputs)


@dataclass(frozen=True, eq=False)
class Chunk:
    """Gradients (passes, positions, d) of some samples, and what they were taken at, (positions, d).

    The passes of many outputs come in several chunks, of which only the first counts its samples.
    """

    gradients: Tensor
    values: Tensor
    samples: int
    outputs: int
    first: bool

    @property
    def rows(self) -> Tensor:
        return self.gradients.reshape(-1, self.gradients.shape[-1])

    @property
    def count(self) -> int:
        return self.gradients.shape[1] if self.first else 0


def chunks(problem: Problem, inputs: Any, settings: Settings) -> Iterator[Chunk]:
    """The gradients of all samples, as many at once as make good use of memory.

    One forward pass serves a backward pass for each output, and only the place asks for gradients, so none of the weights'
    are computed. Batched backward passes (vmap) are no faster and not defined for all layers.
    """
    problem.refuse_batch_coupling(QUANTITY)
    point = Point(problem, settings.at)
    generator = torch.Generator().manual_seed(settings.seed)
    index = 0
    for batch in batches_of(problem, inputs):
        alone, size, group = _survey(point, batch, settings)
        for start in range(0, batch.size, size):
            part = batch.part(slice(start, start + size)) if batch.size > size else batch
            flat, places = _forward(point, part, index)
            if start == 0:
                refuse_coupling(flat, alone)
            weights = cotangents(flat, settings, generator)
            values = point.rows(places).detach()
            for first in range(0, settings.passes(flat.shape[1]), group):
                with problem.session(second=False):  # left before each yield: who takes the chunk may fail
                    gradients = pulled_back(point, flat, places, islice(weights, group))
                yield Chunk(gradients, values, part.size, flat.shape[1], first == 0)
            index += 1


def _forward(point: Point, batch: Batch, index: int) -> tuple[Tensor, list[Tensor]]:
    problem = point.problem
    with problem.session(second=False):
        return point.outputs(problem.tensors(problem.leaves(grad=False)), problem.placed(batch), index)


def _survey(point: Point, batch: Batch, settings: Settings) -> tuple[Tensor, int, int]:
    """The outputs of the first sample alone; how many samples to take at once, and how many passes."""
    alone, places = _forward(point, batch.part(slice(0, 1)) if batch.size > 1 else batch, 0)
    numbers, passes = sum(p.numel() for p in places), settings.passes(alone.shape[1])
    size = settings.batch_size or max(1, min(SAMPLES, NUMBERS // (max(passes, FEW) * numbers)))
    return alone.detach(), size, max(1, min(passes, NUMBERS // (min(size, batch.size) * numbers)))


def cotangents(flat: Tensor, settings: Settings, generator: torch.Generator) -> Iterator[Tensor]:
    """Weights (n, k) of the outputs, one for each backward pass: each output in turn, or random signs."""
    n, k = flat.shape
    passes = settings.passes(k)
    if passes == k:
        for j in range(k):
            one = torch.zeros_like(flat)
            one[:, j] = 1.0
            yield one
        return
    # Signs of their own for each sample: E[s sᵀ] = 1, so the mean of (Jᵀs)(Jᵀs)ᵀ is JᵀJ.
    signs = torch.randint(0, 2, (n, passes, k), generator=generator, dtype=torch.int8)
    for j in range(passes):
        yield (2 * signs[:, j].to(flat) - 1) / passes**0.5


def pulled_back(
    point: Point, flat: Tensor, places: list[Tensor], weights: Iterator[Tensor], *, create_graph: bool = False
) -> Tensor:
    """Gradients (passes, positions, d) of the weighted outputs."""
    rows = []
    for weight in weights:
        found = torch.autograd.grad(flat, places, weight, retain_graph=True, create_graph=create_graph, allow_unused=True)
        rows.append(point.rows([torch.zeros_like(p) if g is None else g for g, p in zip(found, places, strict=True)]))
    return torch.stack(rows)
