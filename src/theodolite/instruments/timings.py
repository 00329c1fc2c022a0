"""`Timings`: what a gradient and a Hessian product take here, so that a survey can be priced before it is made."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from theodolite.errors import DerivativeError, SecondOrderError, SymmetryError
from theodolite.operators import LinearOperator, hessian
from theodolite.problem import Problem

#: A gradient that takes longer is timed on a part of the data.
LONG = 0.5
#: With a budget: one that takes longer than this part of it. Timing needs some fifteen of them.
GRADIENTS = 150.0

#: Seconds a solver spends on one product beside the product: interpreter, and orthogonalising n numbers against a basis.
_FIXED = 4e-4
_PER_ENTRY = 9e-8


@dataclass(frozen=True)
class Work:
    """What an instrument needs, in units that timings can price.

    `gradients` are passes forward and backward over the data, `products` Hessian products one at a time, `block_products`
    those made several at once, `seconds` anything else, `bytes` the memory beside kept graphs.
    """

    gradients: float = 0.0
    products: float = 0.0
    block_products: float = 0.0
    seconds: float = 0.0
    bytes: int = 0

    def __add__(self, other: Work) -> Work:
        units = ("gradients", "products", "block_products", "seconds")
        sums = {unit: getattr(self, unit) + getattr(other, unit) for unit in units}
        return Work(**sums, bytes=max(self.bytes, other.bytes))


@dataclass(frozen=True)
class Timings:
    """Seconds of a gradient, of a Hessian product, and of one in a block."""

    gradient: float
    product: float
    block_product: float
    graph_bytes: int
    share: float
    spent: float
    size: int
    operator: LinearOperator | None = field(default=None, repr=False)
    refused: str = ""  # why there are no Hessian products here

    def seconds(self, work: Work) -> float:
        """What this work will take."""
        aside = _FIXED + _PER_ENTRY * self.size
        return (
            work.gradients * self.gradient
            + work.products * (self.product + aside)
            + work.block_products * (self.block_product + aside / 4)
            + work.seconds
        )

    def gradients(self, work: Work) -> float:
        """The same in gradients."""
        return self.seconds(work) / self.gradient


def measure_timings(problem: Problem, budget: float | None = None) -> Timings:
    """Time a gradient and Hessian products: on all the data where that is quick, else on a part, scaled up.

    A budget in seconds bounds what is quick: timing takes about a tenth of it.
    """
    began = time.perf_counter()
    long = LONG if budget is None else min(LONG, budget / GRADIENTS)
    part, share = _part(problem, long)
    gradient = quickest(part.gradient)
    refused, op = "", None
    product = together = 0.0
    try:
        op = hessian(part)
        product, together = _time_products(op, long)
    except (SecondOrderError, SymmetryError, DerivativeError) as error:
        refused, op = str(error), None
    return Timings(
        gradient=gradient / share,
        product=product / share,
        block_product=together / share / 8,
        graph_bytes=0 if op is None else int(op.cost().peak_bytes / share),
        share=share,
        spent=time.perf_counter() - began,
        size=problem.size,
        operator=op if part is problem else None,
        refused=refused,
    )


def _time_products(op: LinearOperator, long: float) -> tuple[float, float]:
    """Seconds of one product and of eight at once, when the first of their kind, which do more, are done.

    Where eight would take long they count as eight single ones, which they never exceed by much.
    """
    block = columns_for(op, 8, torch.Generator().manual_seed(0))
    op @ block[:, 0]
    product = quickest(lambda: op @ block[:, 0])
    if 8 * product > 4 * long:
        return product, 8 * product
    op @ block[:, :2]  # the block route proves itself on its first use
    return product, quickest(lambda: op @ block, least=0.0)


def columns_for(op: LinearOperator, count: int, generator: torch.Generator) -> Tensor:
    """So many random vectors that the operator takes."""
    return torch.randn(op.shape[1], count, generator=generator, dtype=torch.float32).to(op.device, op.dtype)


def _part(problem: Problem, long: float) -> tuple[Problem, float]:
    """The problem, or a few samples of it where a gradient over all would take long; and their share of the data."""
    first, few = next(iter(problem.data)), problem.few(32)
    if few.size >= problem.samples or few is first:
        return problem, 1.0
    try:
        small = problem.with_batches([few])
    except ValueError:  # weights were given batch by batch
        return problem, 1.0
    _once(small.gradient)  # first calls pay for set-up inside torch
    seconds = _once(small.gradient) * problem.samples / few.size
    if seconds <= long:
        return problem, 1.0
    few = first.part(slice(0, max(few.size, math.ceil(problem.samples * long / seconds))))
    return problem.with_batches([few]), few.size / problem.samples


def _once(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def quickest(work: Callable[[], Any], least: float = 0.03) -> float:
    """Seconds of one call: the quickest of at least three, for whatever else the machine does only makes it slower."""
    seconds = [_once(work)]
    while len(seconds) < 3 or (sum(seconds) < least and len(seconds) < 30):
        seconds.append(_once(work))
        if sum(seconds) > 2 * LONG:
            break
    return min(seconds)
