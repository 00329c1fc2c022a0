"""The difference probe: what autograd returns is compared with differences of the loss and of its gradient.

A straight-through estimator, a reversed or stopped gradient, or a custom function with a wrong backward are seen by no other
probe. One random direction and a few samples tell: a right derivative agrees with the difference at every place. What
looks wrong there may be rounding or a kink (ReLU, max-pooling), so it is looked at again in float64, beside the current
parameters, in several directions and at several distances, and believed only if it is wrong in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from theodolite.errors import DerivativeError, TheodoliteError
from theodolite.problem.batches import Batch
from theodolite.problem.parameters import padding_rows
from theodolite.problem.weighting import counts, ignored_label

if TYPE_CHECKING:
    from theodolite.problem.problem import Problem

#: Samples that are looked at, and entries of a parameter that a direction moves at the most.
SAMPLES, ENTRIES = 4, 2**18
#: Distances of a difference, relative to the size of each parameter; the first one is that of the first look.
DISTANCES = {torch.float32: (3e-3, 1e-3), torch.float64: (1e-5, 1e-6)}
#: How far derivative and difference may lie apart, as a share of the larger one.
TOLERANCE = {torch.float32: 0.05, torch.float64: 1e-3}
#: Parameters up to which the first look is in float64.
SMALL = 5_000_000
#: Directions of a second look, and of a full check.
DIRECTIONS = 3

NOT_THE_GRADIENT = (
    "autograd's derivative is not that of the loss ({derivative:.3g} along a random direction, where the loss changes by "
    "{difference:.3g}): a straight-through estimator, fake quantisation, gradient reversal, or .detach() on a way from the "
    "parameters to the loss. What is measured describes what the optimizer follows, not the loss itself"
)
NOT_ITS_DERIVATIVE = (
    "Products with the Hessian are not the derivative of the gradient: they are off by {gap:.0%} along a random direction, and "
    "the gradient itself is right. Usual cause: a custom autograd.Function whose backward is not differentiable or is "
    "differentiated wrongly. Write its backward with differentiable torch operations, or measure all the same with "
    "Problem(..., check=False)."
)


@dataclass(frozen=True)
class Gap:
    """A derivative along a direction beside the difference; for products, their lengths and how far they lie apart."""

    derivative: float
    difference: float
    apart: float
    rounding: float  # what rounding alone may make of it

    @property
    def share(self) -> float:
        return self.apart / max(abs(self.derivative), abs(self.difference), 1e-300)

    def wrong(self, tolerance: float) -> bool:
        return self.apart > 4 * self.rounding and self.share > tolerance


Look = Callable[..., Gap]


def gradient_gap(problem: Problem, *, full: bool = False) -> Gap | None:
    """How far autograd's gradient is from the slope of the loss, or None where they agree."""
    return _confirmed(problem, _slope_gap, full=full)


def refuse_wrong_products(problem: Problem, *, full: bool = False) -> None:
    """Raise where double backward is not the derivative of the gradient."""
    gap = _confirmed(problem, _product_gap, full=full)
    if gap is not None:
        raise DerivativeError(NOT_ITS_DERIVATIVE.format(gap=gap.share))


def _confirmed(problem: Problem, look: Look, *, full: bool) -> Gap | None:
    """A gap that is no rounding and no kink."""
    for index, batch in _parts(problem, every=full):
        try:
            suspect = any(_suspect(problem, look, batch, index, seed) for seed in range(DIRECTIONS if full else 1))
            again = _second_look(problem, look, batch, index) if suspect else None
        except (TheodoliteError, RuntimeError, ValueError):  # neither loss nor model need be there beside these parameters
            continue
        if again is not None:
            return again
    return None


def _suspect(problem: Problem, look: Look, batch: Batch, index: int, seed: int) -> bool:
    """The first look: in float64 where a copy is small, since its short steps meet few kinks, else as the model computes."""
    if problem.dtype != torch.float64 and problem.size <= SMALL:
        with suppress(TheodoliteError, RuntimeError, ValueError):  # it may compute in float32 only
            wide = problem.in_float64(batches=[batch])
            return _wrong(wide, look, batch.in_float64(), index, seed)
    return _wrong(problem, look, batch, index, seed)


def _wrong(problem: Problem, look: Look, batch: Batch, index: int, seed: int) -> bool:
    gap = look(problem, batch, index, seed, DISTANCES[problem.dtype][0], shaken=False)
    return gap.wrong(TOLERANCE[problem.dtype])


def _second_look(problem: Problem, look: Look, batch: Batch, index: int) -> Gap | None:
    try:
        wide, widened = problem.in_float64(batches=[batch]), batch.in_float64()
        gaps = list(_looks(wide, look, widened, index))
    except (TheodoliteError, RuntimeError, ValueError):  # the model computes in float32 only
        gaps = list(_looks(problem, look, batch, index))
        wide = problem
    return gaps[0] if all(gap.wrong(TOLERANCE[wide.dtype]) for gap in gaps) else None


def _looks(problem: Problem, look: Look, batch: Batch, index: int) -> Iterator[Gap]:
    for seed, distance in product(range(DIRECTIONS), DISTANCES[problem.dtype]):
        yield look(problem, batch, index, seed, distance, shaken=True)


def _parts(problem: Problem, *, every: bool) -> Iterator[tuple[int, Batch]]:
    """A few samples of the first batch that counts, or of every one; whole batches where they cannot be cut."""
    ignored = ignored_label(problem.loss_function)
    for index, found in enumerate(problem.data):
        if not counts(found, ignored):
            continue
        batch = problem.placed(found)
        few = batch.part(slice(0, SAMPLES)) if batch.size > SAMPLES else batch
        yield index, few if few is not batch and counts(few, ignored) and _runs(problem, few, index) else batch
        if not every:
            return


def _runs(problem: Problem, batch: Batch, index: int) -> bool:
    try:
        with problem.session(second=False):
            problem.evaluate(problem.tensors(problem.leaves(grad=False)), batch, index)
    except (TheodoliteError, RuntimeError, ValueError, IndexError, KeyError, TypeError):
        return False
    return True


def _direction(problem: Problem, like: Sequence[Tensor], seed: int) -> Iterator[Tensor]:
    """A random direction, tensor by tensor, in which each moves by its own size; large ones in some entries, padding not."""
    generator = torch.Generator().manual_seed(seed)
    padding = padding_rows(problem.model)
    for own, p in zip(problem.parameters, like, strict=True):
        v = torch.zeros(p.numel(), dtype=p.dtype)
        width = min(p.numel(), ENTRIES)
        first = int(torch.randint(p.numel() - width + 1, (1,), generator=generator))
        v[first : first + width] = torch.randn(width, generator=generator, dtype=torch.float32).to(p.dtype)
        scale = p.detach().square().mean().sqrt() + 1e-2 if p.numel() else 1.0
        v = v.reshape(p.shape).to(p.device) * scale
        if id(own) in padding:
            v[padding[id(own)]] = 0.0
        yield v


def _place(problem: Problem, *, shaken: bool) -> list[Tensor]:
    """The parameters, or ones beside them."""
    leaves = problem.leaves(grad=False)
    if not shaken:
        return leaves
    # Smaller, so that a loss that is all but zero is curved again, and off any kink that they lie on.
    return [0.3 * p + 0.1 * v for p, v in zip(leaves, _direction(problem, leaves, 1000), strict=True)]


def _moved(place: Sequence[Tensor], direction: Sequence[Tensor], distance: float, *, grad: bool = False) -> list[Tensor]:
    """Leaves of their own, some way along the direction."""
    return [(p + distance * v).detach().requires_grad_(grad) for p, v in zip(place, direction, strict=True)]


def _slope_gap(problem: Problem, batch: Batch, index: int, seed: int, distance: float, *, shaken: bool) -> Gap:
    with problem.session(second=False):
        place = _place(problem, shaken=shaken)
        direction = list(_direction(problem, place, seed))
        leaves = _moved(place, direction, 0.0, grad=True)
        found = problem.evaluate(problem.tensors(leaves), batch, index)
        grads = torch.autograd.grad(found.loss, leaves, allow_unused=True) if found.loss.requires_grad else ()
        if all(g is None for g in grads):  # constant, or cut off: who asks for a gradient is told
            return Gap(0.0, 0.0, 0.0, 0.0)
        slope = _dot(grads, direction)
        ends = [
            float(problem.evaluate(problem.tensors(_moved(place, direction, side)), batch, index).loss.detach())
            for side in (distance, -distance)
        ]
        scale = max(abs(ends[0]), abs(ends[1]), float(found.output.detach().abs().max()) if found.output.numel() else 0.0)
    difference = (ends[0] - ends[1]) / (2 * distance)
    rounding = 8 * torch.finfo(problem.dtype).eps * scale / distance
    return Gap(slope, difference, abs(slope - difference), rounding)


def _product_gap(problem: Problem, batch: Batch, index: int, seed: int, distance: float, *, shaken: bool) -> Gap:
    with problem.session():
        place = _place(problem, shaken=shaken)
        direction = list(_direction(problem, place, seed))
        leaves = _moved(place, direction, 0.0, grad=True)
        loss = problem.evaluate(problem.tensors(leaves), batch, index).loss
        grads = problem.gradients_of(loss, leaves, batch, index, create_graph=True)
        inner = sum(((g * v).sum() for g, v in zip(grads, direction, strict=True) if g is not None), loss * 0)
        products = torch.autograd.grad(inner, leaves, allow_unused=True) if inner.requires_grad else [None] * len(leaves)
        ends = []
        for side in (distance, -distance):
            there = _moved(place, direction, side, grad=True)
            value = problem.evaluate(problem.tensors(there), batch, index).loss
            ends.append(problem.gradients_of(value, there, batch, index))
    # Entry by entry in units of each parameter's size, so that no layer hides behind a larger one.
    rounding = length = apart = difference = 0.0
    for p, hv, a, b in zip(leaves, products, *ends, strict=True):
        size = float(p.detach().square().mean().sqrt() + 1e-2) if p.numel() else 0.0
        slope = torch.zeros_like(p) if a is None or b is None else (a - b) / (2 * distance)
        exact = torch.zeros_like(p) if hv is None else hv
        length += size**2 * float(exact.double().square().sum())
        difference += size**2 * float(slope.double().square().sum())
        apart += size**2 * float((exact - slope).double().square().sum())
        rounding += 0.0 if a is None else size**2 * float(a.double().square().sum())
    noise = 8 * torch.finfo(problem.dtype).eps * rounding**0.5 / distance
    return Gap(length**0.5, difference**0.5, apart**0.5, noise)


def _dot(grads: Sequence[Tensor | None], direction: Sequence[Tensor]) -> float:
    return sum(float((g.double() * v.double()).sum()) for g, v in zip(grads, direction, strict=True) if g is not None)
