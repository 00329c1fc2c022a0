"""Smoothed mode: the slope of the score averaged over a neighbourhood, from runs alone, all trained as one fleet.

∇ E F(θ + σε) = E (F(θ + σε) − F(θ − σε)) ε / 2σ with Gaussian ε. Where there are at least twice as many pairs as hyperparameters
the differences are fitted by a linear function of ε instead of averaged, which has the same limit and loses nothing where F is
linear. Both ends of a pair, and all pairs, share start and order of the data, so that only the hyperparameters tell them apart.
No derivative is taken: models that have none, and runs whose derivative explodes, do as well.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from theodolite.measures.stepsize.meta_gradients.forward import Evaluated, Walk
from theodolite.measures.stepsize.meta_gradients.hyperparameters import Hyperparameters
from theodolite.measures.stepsize.meta_gradients.objectives import Objective, Scaled, score
from theodolite.measures.stepsize.meta_gradients.unrolled import Task
from theodolite.measures.stepsize.meta_gradients.update_rules import AdaptiveMoments, Descent, RootMeanSquare
from theodolite.training import Fleet

#: A run that diverged counts as one whose loss has grown by this factor.
BLOWN_UP = 1e8


def run_smoothed(
    task: Task,
    hyper: Hyperparameters,
    names: tuple[str, ...],
    objective: Objective,
    shifts: Tensor,
    *,
    pairs: int,
    spread: float,
    count: Callable[[int], None] = lambda steps: None,
) -> tuple[Evaluated, Tensor]:
    """F at θ, the slope smoothed over `spread`, and its standard errors (k,)."""
    draws = torch.randn(pairs, len(shifts), generator=torch.Generator().manual_seed(task.seed), dtype=torch.float64)
    every = torch.cat([shifts[None], shifts + spread * draws, shifts - spread * draws])
    fleet = Fleet(task.factory, [task.seed] * len(every), loss=task.loss, target=task.target, **_settings(hyper, names, every))
    mean = objective == "segment_mean"
    run = fleet.train(
        task.train,
        steps=task.steps,
        batch_size=task.batch_size,
        schedule=[_factors(hyper, row) for row in every],
        test=task.train if task.split == "train" else task.valid,
        every=1 if mean else [task.steps],
        progress=False,
    )
    count(task.steps)
    assert run.test_loss is not None
    losses = run.test_loss[:, 1:].double().mean(1) if mean else run.test_loss[:, -1].double()
    lost = torch.tensor([at is not None for at in run.diverged_at]) | ~torch.isfinite(losses)
    losses = torch.where(lost, BLOWN_UP * run.loss[:, 0].double(), losses)
    walk = Walk(losses=run.loss[0].tolist(), gradients=task.steps * len(every))
    if bool(lost[0]):
        return Evaluated(math.inf, math.inf, None, walk), torch.full_like(shifts, math.nan)
    scores = torch.tensor([score(objective, loss, task.steps) for loss in losses.tolist()], dtype=torch.float64)
    up, down = scores[1:].split(pairs)
    slope, error = _slope((up - down) / (2.0 * spread), draws)
    return Evaluated(float(scores[0]), float(losses[0]), Scaled(slope, torch.zeros_like(slope)), walk), error


def _slope(differences: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """The slope of differences (n,) along draws (n, k), and its standard errors."""
    pairs, k = draws.shape
    if pairs < 2 * k or pairs == 1:
        terms = differences[:, None] * draws
        error = terms.std(0) / math.sqrt(pairs) if pairs > 1 else torch.full((k,), math.inf, dtype=torch.float64)
        return terms.mean(0), error
    slope = torch.linalg.lstsq(draws, differences[:, None]).solution[:, 0]
    variance = (differences - draws @ slope).square().sum() / (pairs - k)
    return slope, (variance * torch.linalg.inv(draws.T @ draws).diagonal()).sqrt()


def _settings(hyper: Hyperparameters, names: tuple[str, ...], every: Tensor) -> dict[str, Any]:
    """What the fleet is given: the optimizer, and its settings by replica."""
    rule = hyper.recipe.rule
    found: dict[str, Any] = {}
    if isinstance(rule, Descent):
        found = {"optimizer": "sgd", "dampening": rule.dampening, "nesterov": rule.nesterov}
    elif isinstance(rule, AdaptiveMoments):
        found = {"optimizer": "adamw" if rule.decoupled else "adam", "eps": rule.eps}
    elif isinstance(rule, RootMeanSquare):
        found = {"optimizer": "rmsprop", "eps": rule.eps}
    by_replica = [hyper.by_tensor(row) for row in every]
    for setting in rule.settings:
        values = torch.stack([settings[setting] for settings in by_replica])  # (R, parameter tensors)
        if bool((values == values[:, :1]).all()):
            found[setting] = values[:, 0].tolist()
        elif setting == "lr":
            found[setting] = {glob.escape(name): values[:, i].tolist() for i, name in enumerate(names)}
        else:
            raise ValueError(
                f"mode='smoothed' trains a fleet, in which {setting} is one for all parameters: take mode='forward' where layers "
                "or groups have their own."
            )
    if "beta1" in found:
        found["betas"] = (found.pop("beta1"), found.pop("beta2"))
    return found


def _factors(hyper: Hyperparameters, shifts: Tensor) -> Callable[[int], float]:
    return lambda step: float(hyper.factor(step, shifts))
