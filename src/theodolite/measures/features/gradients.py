"""Gradients of all outputs with respect to the inputs, sample by sample: the factor of the average gradient outer product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from theodolite.measures.features.source import QUANTITY, Point, as_source, batches_of, refuse_coupling
from theodolite.problem import Batch, Problem

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
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, or None. Got {value!r}.")

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
