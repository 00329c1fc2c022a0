"""Forward mode: one tangent of weights and optimizer state for each hyperparameter, carried along with the run.

T ← A T + b in every step (`update_rules`), with the Hessian products of all tangents from one pass of the batch. Each tangent is
kept as a direction and the logarithm of its length, so that nothing overflows and memory does not depend on the number of steps.
How much longer A makes it, without b, is the growth of a perturbation in that step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from theodolite.errors import NonFiniteError
from theodolite.measures.stepsize.meta_gradients.objectives import Objective, Scaled, score, score_slope
from theodolite.measures.stepsize.meta_gradients.unrolled import Slope, Unrolled, log_norms
from theodolite.measures.stepsize.meta_gradients.update_rules import Moved, Value, add_to

#: Directions of lengths outside these bounds are brought back to length one.
SHORT, LONG = 1e-3, 1e3
#: Lengths are looked at after so many steps at most: a look reads all tangents twice.
LOOK = 4


@dataclass
class Walk:
    """What was seen along a run: the losses of the batches; the logarithms of the tangents' lengths and their growth in one step.

    Lengths are those after every `every`-th step.
    """

    losses: list[float] = field(default_factory=list)
    lengths: list[list[float]] = field(default_factory=list)
    growths: list[list[float]] = field(default_factory=list)
    every: int = 1
    products: int = 0
    gradients: int = 0
    bytes: int = 0

    @property
    def diverged(self) -> bool:
        return bool(self.losses) and not math.isfinite(self.losses[-1])


@dataclass(frozen=True)
class Evaluated:
    """The objective at some values of the hyperparameters: F, its derivative, the loss that is scored, and the walk there."""

    value: float
    loss: float
    gradient: Scaled | None
    walk: Walk
    error: Tensor | None = None  # standard errors of a gradient that was estimated


class Tangents:
    """Rows (k, 1 + columns, p), each times e^length."""

    def __init__(self, count: int, unrolled: Unrolled) -> None:
        shape = (count, 1 + len(unrolled.rule.columns), len(unrolled.vector))
        self.rows = unrolled.vector.new_zeros(shape)
        self.lengths = torch.zeros(count, dtype=torch.float64)
        self.largest = 0.8 * math.log(torch.finfo(self.rows.dtype).max)
        self.every = max(1, min(LOOK, unrolled.steps // 50))

    @property
    def of_weights(self) -> Tensor:
        return self.rows[:, 0]

    def normalise(self) -> Tensor:
        """Bring rows back to length one where they have left it; the logarithms of all lengths."""
        norms = log_norms(self.rows)
        known = torch.isfinite(norms)
        if bool((known & ((norms < math.log(SHORT)) | (norms > math.log(LONG)))).any()):
            shift = torch.where(known, norms, 0.0)
            self.rows *= (-shift).exp().to(self.rows)[:, None, None]
            self.lengths += shift
            norms = torch.where(known, 0.0, norms)
        return self.lengths + norms

    def along(self, gradient: Tensor) -> Scaled:
        """The products of a gradient (p,) with the tangents of the weights."""
        return Scaled((self.of_weights.double() @ gradient.double()).cpu(), self.lengths.clone())


def run_forward(
    unrolled: Unrolled,
    objective: Objective,
    shifts: Tensor,
    *,
    tangents: bool = True,
    count: Callable[[int], None] = lambda steps: None,
) -> Evaluated:
    """Train from the start where θ has moved by `shifts`; without `tangents` only F is found."""
    hyper, rule, walk = unrolled.hyper, unrolled.rule, Walk()
    settings, slopes = hyper.at(shifts), hyper.slopes(shifts)
    total, gradient = 0.0, Scaled.zeros(len(hyper.named)) if tangents else None
    with unrolled.training():
        weights, columns = unrolled.fresh()
        carried = Tangents(len(hyper.named), unrolled) if tangents else None
        for step, batch in enumerate(unrolled.batches()):
            slope = unrolled.slope(batch, step, products=tangents)
            walk.losses.append(slope.loss)
            walk.gradients += 1
            if not math.isfinite(slope.loss):
                break
            at = settings(step)
            moved = rule.advance(weights, columns, slope.gradient, at, step)
            if carried is not None:
                _carry(carried, unrolled, slope, moved, at, slopes(step), step, walk)
            weights.copy_(moved.weights)
            columns = moved.columns
            if objective == "segment_mean":
                loss, pull = _scored(unrolled, carried)
                total += loss / unrolled.steps
                gradient = gradient.plus(pull.times(1.0 / unrolled.steps)) if pull is not None and gradient is not None else None
            count(1)
        if walk.diverged:
            return Evaluated(math.inf, math.inf, None, walk)
        if objective != "segment_mean":
            total, gradient = _scored(unrolled, carried)
            if gradient is not None:
                gradient = gradient.times(score_slope(objective, total, unrolled.steps))
    return Evaluated(score(objective, total, unrolled.steps), total, gradient, walk)


def _carry(
    carried: Tangents,
    unrolled: Unrolled,
    slope: Slope,
    moved: Moved,
    at: dict[str, Value],
    slopes: list[tuple[str, Value]],
    step: int,
    walk: Walk,
) -> None:
    """T ← A T + b, before the weights move."""
    assert slope.products is not None
    products = slope.products(carried.of_weights)
    walk.products += len(products)
    walk.bytes = max(walk.bytes, slope.bytes + 3 * carried.rows.nbytes + products.nbytes)
    look = step % carried.every == carried.every - 1
    rows = carried.rows
    before = log_norms(rows) if look else None
    unrolled.rule.carry(rows, products, moved, at, step)
    if before is not None:
        walk.growths.append((log_norms(rows) - before).tolist())
    for row, length, (name, by) in zip(rows, carried.lengths.tolist(), slopes, strict=True):
        # A source that would have to be enlarged beyond the range of the numbers is below it, and zero.
        share = math.exp(min(-length, carried.largest))
        if share > 0.0:
            for place, vector, factor in unrolled.rule.source(name, by * share, moved, at, step):
                add_to(row[place], vector, factor)
    if look:
        walk.every = carried.every
        walk.lengths.append(carried.normalise().tolist())


def _scored(unrolled: Unrolled, carried: Tangents | None) -> tuple[float, Scaled | None]:
    """The loss that is scored at the weights as they stand, and its derivative along the tangents."""
    try:
        if carried is None:
            return unrolled.score.loss(), None
        loss, gradient = unrolled.score.loss_and_gradient()
    except NonFiniteError:
        return math.inf, None
    return loss, carried.along(gradient)
