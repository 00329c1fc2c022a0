"""Short training runs on a copy: what would happen at this learning rate?"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

from torch.optim import SGD, AdamW, Optimizer

from theodolite.errors import NonFiniteError
from theodolite.measures.dynamics.stability_laws import weight_decay
from theodolite.problem import Problem
from theodolite.progress import Advance

#: A loss this many times the first one has diverged.
BLOWN_UP = 1e8


def run_trial(
    problem: Problem, rate: float, *, optimizer: Optimizer | None = None, steps: int = 60, advance: Advance | None = None
) -> tuple[float, ...]:
    """Losses before each of `steps` full-batch steps on a copy of the model, and after the last.

    The run ends early, with infinity as its last loss, once it has diverged. Coupled weight decay is part of what descends,
    so the losses hold ½ Σ wd w² too; decoupled decay, which descends nothing, is left out. Nothing of the user's is touched.
    """
    decay = None if optimizer is None or decoupled(optimizer) else weight_decay(optimizer, problem)
    losses: list[float] = []
    for taken, loss, trial in descend(problem, rate, steps, optimizer, decoupled_decay=False):
        if decay is not None:
            loss += 0.5 * float((decay * trial.vector.double().square()).sum())
        losses.append(loss if not losses or abs(loss) <= BLOWN_UP * max(abs(losses[0]), 1e-30) else math.inf)
        if taken and advance is not None:
            advance(1)
        if not math.isfinite(losses[-1]):
            return tuple(losses)
    return tuple(losses) if len(losses) == steps + 1 else (*losses, math.inf)


def descend(
    problem: Problem, rate: float, steps: int, optimizer: Optimizer | None = None, *, decoupled_decay: bool = True
) -> Iterator[tuple[int, float, Problem]]:
    """Full-batch steps on a copy: (steps taken, loss, the copy as it stands) before each step and after the last.

    The optimizer is copied with its state; its groups keep the ratio of their rates to the first. `decoupled_decay=False`
    leaves the decay of AdamW out. The run ends early where the loss is not finite. Half-precision models are trained in
    float64, where small steps do not get lost.
    """
    trial = problem.in_float64() if problem.half_precision else problem.copied()
    stepper = copy_optimizer(optimizer, problem, trial, rate)
    if decoupled(optimizer) and not decoupled_decay:
        for group in stepper.param_groups:
            group["weight_decay"] = 0.0
    for taken in range(steps + 1):
        try:
            loss, gradient = trial.loss_and_gradient() if taken < steps else (trial.loss(), None)
        except NonFiniteError:
            return
        yield taken, loss, trial
        if gradient is None:
            return
        for p, g in zip(trial.parameters, trial.split(gradient).values(), strict=True):
            p.grad = g.to(p.dtype).reshape(p.shape)
        stepper.step()


def decoupled(optimizer: Optimizer | None) -> bool:
    """Whether an optimizer shrinks the weights beside the gradient step."""
    groups = [] if optimizer is None else optimizer.param_groups
    return isinstance(optimizer, AdamW) or any(group.get("decoupled_weight_decay") for group in groups)


def copy_optimizer(optimizer: Optimizer | None, problem: Problem, trial: Problem, rate: float) -> Optimizer:
    """The optimizer with its settings and state, for the parameters of a copy, its first group at `rate`."""
    if optimizer is None:
        return SGD(trial.parameters, lr=rate)
    twin = {id(p): q for p, q in zip(problem.parameters, trial.parameters, strict=True)}
    first = float(optimizer.param_groups[0]["lr"]) or 1.0
    state = copy.deepcopy(optimizer.state_dict())
    # Parameters that are not measured do not move; dummies keep the numbering of the state.
    groups = [
        {"params": [twin[id(p)] if id(p) in twin else p.detach().clone() for p in group["params"]], "lr": float(group["lr"])}
        for group in optimizer.param_groups
    ]
    kind: Any = type(optimizer)
    fresh: Optimizer = kind(groups, lr=rate)
    fresh.load_state_dict(state)
    for group in fresh.param_groups:
        group["lr"] = float(group["lr"]) / first * rate
    return fresh
