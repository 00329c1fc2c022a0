"""Reverse mode: the run is taken once, and again segment by segment from the last to the first, backwards through each.

Only the states at the beginnings of segments are kept; with √t segments of √t steps memory grows with √t. The adjoint is kept as
a direction and the logarithm of its length between segments.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from theodolite.interrupts import unbroken
from theodolite.measures.stepsize.meta_gradients.forward import Evaluated, Walk
from theodolite.measures.stepsize.meta_gradients.objectives import Objective, Scaled, score, score_slope
from theodolite.measures.stepsize.meta_gradients.unrolled import Unrolled

State = tuple[Tensor, ...]  # the weights, then the columns of the rule


def run_reverse(
    unrolled: Unrolled,
    objective: Objective,
    shifts: Tensor,
    *,
    segment: int | None = None,
    count: Callable[[int], None] = lambda steps: None,
) -> Evaluated:
    """Train from the start where θ has moved by `shifts`, and go back through it, `segment` steps (√steps) at a time."""
    length = segment or max(1, math.isqrt(unrolled.steps))
    walk = Walk()
    with unrolled.training():
        states = _forward(unrolled, shifts, length, walk, count)
        if walk.diverged:
            return Evaluated(math.inf, math.inf, None, walk)
        loss, adjoint = 0.0, [torch.zeros_like(t) for t in states[-1]]
        if objective != "segment_mean":
            loss, adjoint[0] = _end(unrolled, states[-1][0])
            if not math.isfinite(loss):
                return Evaluated(math.inf, math.inf, None, walk)
        size, gradient = 0.0, Scaled.zeros(len(shifts))
        ends = []
        for i in range(len(states) - 2, -1, -1):
            first, last = i * length, min((i + 1) * length, unrolled.steps)
            before = _log_norm(adjoint)
            mean = objective == "segment_mean"
            adjoint, pulled, part = _back(unrolled, shifts, states[i], (first, last), adjoint, math.exp(-size) if mean else None)
            states.pop()
            loss += part
            gradient = gradient.plus(Scaled(pulled, torch.full_like(pulled, size)))
            walk.gradients += last - first
            walk.products += last - first
            after = _log_norm(adjoint)
            if math.isfinite(before) and math.isfinite(after):
                ends.append(((after - before) / (last - first), last - first))
            if math.isfinite(after):
                adjoint = [t * math.exp(-after) for t in adjoint]
                size += after
    walk.growths = [[growth] for growth, steps in reversed(ends) for _ in range(steps)]
    return Evaluated(
        score(objective, loss, unrolled.steps), loss, gradient.times(score_slope(objective, loss, unrolled.steps)), walk
    )


def _forward(unrolled: Unrolled, shifts: Tensor, length: int, walk: Walk, count: Callable[[int], None]) -> list[State]:
    """The states before every `length`-th step, and after the last."""
    settings, states = unrolled.hyper.at(shifts), []
    weights, columns = unrolled.fresh()
    for step, batch in enumerate(unrolled.batches()):
        if step % length == 0:
            states.append((weights.clone(), *columns))
        slope = unrolled.slope(batch, step)
        walk.losses.append(slope.loss)
        walk.gradients += 1
        if walk.diverged:
            return states
        moved = unrolled.rule.advance(weights, columns, slope.gradient, settings(step), step)
        weights.copy_(moved.weights)
        columns = moved.columns
        count(1)
    states.append((weights.clone(), *columns))
    walk.bytes = len(states) * sum(t.nbytes for t in states[0])
    return states


def _end(unrolled: Unrolled, weights: Tensor) -> tuple[float, Tensor]:
    """The loss that is scored, and its gradient."""
    with unbroken(torch.enable_grad()):
        leaf = weights.clone().requires_grad_()
        loss = unrolled.score_of(leaf)
        (gradient,) = torch.autograd.grad(loss, leaf)
    return float(loss.detach()), gradient


def _back(
    unrolled: Unrolled, shifts: Tensor, start: State, steps: tuple[int, int], adjoint: list[Tensor], mean: float | None
) -> tuple[list[Tensor], Tensor, float]:
    """One segment with its graph: the adjoint at its beginning, what it adds to the gradient, and its part of a mean of losses.

    `mean` is what a loss weighs beside the adjoint, which has been scaled; None where only the end of the run is scored.
    """
    first, last = steps
    part: Tensor | None = None
    with unbroken(torch.enable_grad()):
        moving = shifts.clone().requires_grad_()
        leaves = [t.detach().clone().requires_grad_() for t in start]
        weights, columns = leaves[0], list(leaves[1:])
        settings = unrolled.hyper.at(moving)
        for step, batch in zip(range(first, last), unrolled.batches(first, last), strict=True):
            loss = unrolled.loss_of(weights, batch, step)
            (slope,) = torch.autograd.grad(loss, weights, create_graph=True)
            moved = unrolled.rule.advance(weights, columns, slope, settings(step), step)
            weights, columns = moved.weights, moved.columns
            if mean is not None:
                scored = unrolled.score_of(weights) / unrolled.steps
                part = scored if part is None else part + scored
        outputs, pulls = [weights, *columns], list(adjoint)
        if part is not None:
            outputs.append(part)
            pulls.append(torch.full_like(part, mean if mean is not None else 0.0))
        pairs = [(o, pull) for o, pull in zip(outputs, pulls, strict=True) if o.requires_grad]
        found = torch.autograd.grad(
            [o for o, _ in pairs], [*leaves, moving], [pull for _, pull in pairs], allow_unused=True, materialize_grads=True
        )
    return list(found[:-1]), found[-1].detach(), 0.0 if part is None else float(part.detach())


def _log_norm(tensors: list[Tensor]) -> float:
    size = math.sqrt(sum(float(t.double().square().sum()) for t in tensors))
    return math.log(size) if size > 0 and math.isfinite(size) else -math.inf
