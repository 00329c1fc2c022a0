"""Training on copies: short runs at a learning rate, and a problem as replicas of a fleet."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from theodolite.errors import NonFiniteError
from theodolite.measures.dynamics.stability_laws import weight_decay
from theodolite.measures.kernel.problem_views import measured_copy
from theodolite.problem import Batch, Problem
from theodolite.progress import Advance
from theodolite.training import Fleet

# Short training runs on a copy: what would happen at this learning rate?

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


# A problem as replicas of a fleet: its data as one batch, its model under other seeds.

Factory = Callable[[int], nn.Module]


def whole_data(problem: Problem) -> Any:
    """`joined_data` for training on it: refused where the loss of the joined batch is not the objective of the problem."""
    data = joined_data(problem)
    if problem.num_weighted_batches < 2:
        return data
    given = problem.weighting.rule == "given"
    ours = problem.loss()
    whole = ours if given else Problem(problem.model, problem.loss_function, data, mode=problem.mode, check=False).loss()
    eps = torch.finfo(problem.dtype).eps
    if given or not abs(whole - ours) <= 8 * eps + 1e3 * eps * max(abs(whole), abs(ours)):
        why = "it has a batch_weight of its own" if given else f"its loss is {ours:.6g}, that of the joined batches {whole:.6g}"
        raise ValueError(
            f"Runs at many rates train on all {problem.num_weighted_batches} batches joined into one, and the objective of this "
            f"problem is another: {why}. Give the data as one batch, with any weights inside the loss."
        )
    return data


def joined_data(problem: Problem) -> Any:
    """All batches of a problem joined into one, as a fleet takes it: (inputs, target)."""
    batches = [batch for batch in problem.data if batch.size]
    try:
        joined = reduce(Batch.joined, batches[1:], batches[0])
    except RuntimeError as error:
        raise ValueError(
            f"The {len(batches)} batches of the problem have different shapes and cannot be trained on as one ({error}). "
            "Give the data as one batch, or pad its inputs to one shape."
        ) from error
    if problem.loss_function is None:
        return joined.kwargs
    inputs: Any = joined.kwargs or (joined.args[0] if len(joined.args) == 1 else joined.args)
    return inputs, joined.target


def reseeded(problem: Problem) -> Factory:
    """Models of the problem's architecture: its own weights for seed 0, re-initialised layers for other seeds."""

    def factory(seed: int) -> nn.Module:
        model = measured_copy(problem)
        if seed:
            _reset(model)
        return model.train(problem.mode == "train")

    return factory


def reset_of(module: nn.Module) -> Callable[[], None] | None:
    """What initialises a module; `nn.MultiheadAttention` hides it behind an underscore."""
    found = (getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters"))
    return next((reset for reset in found if callable(reset)), None)


def _reset(model: nn.Module) -> None:
    """Every layer draws its weights anew, from the seed that the fleet has set."""
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is None:
            continue
        reset = reset_of(module)
        if reset is None:
            raise ValueError(
                f"{name or type(module).__name__} cannot draw its weights anew: it has no reset_parameters(). "
                "Pass factory=, a function seed -> model, or seeds=1 for the model as it is."
            )
        with torch.no_grad():
            reset()


def fleet_of(problem: Problem, make: Factory, seeds: list[int], rates: list[float]) -> Fleet:
    """Replicas with the problem's loss and mode, one for each seed and rate."""
    mode = "train" if problem.mode == "train" else "eval"
    return Fleet(make, seeds, loss=problem.loss_function, rate=rates, mode=mode)


def seed_list(seeds: Any) -> list[int]:
    """Seeds from their number or as they are."""
    found = list(range(seeds)) if isinstance(seeds, int) and not isinstance(seeds, bool) else list(seeds)
    if not found or len(set(found)) != len(found):
        raise ValueError(f"seeds must be a positive number or different integers. Got {seeds!r}.")
    return found


def rate_list(name: str, rates: Any) -> list[float]:
    """Positive rates in order."""
    if isinstance(rates, int | float) or (isinstance(rates, Tensor) and rates.ndim != 1):
        raise ValueError(f"{name} must be a list of positive numbers. Got {rates!r}; one rate is {name}=[...].")
    found = [float(rate) for rate in rates]
    bad = [rate for rate in found if not rate > 0 or rate == float("inf")]
    if bad or not found:
        raise ValueError(f"{name} must be positive numbers. Got {bad or rates!r}.")
    return sorted(found)
