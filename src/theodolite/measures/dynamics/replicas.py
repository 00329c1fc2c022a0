"""A problem as replicas of a fleet: its data as one batch, its model under other seeds."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.problem import Batch, Problem
from theodolite.problem.calling import copy_model

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


def reseeded(problem: Problem, own_seed: int = 0) -> Factory:
    """Models of the problem's architecture: its own weights for `own_seed`, re-initialised layers for other seeds."""

    def factory(seed: int) -> nn.Module:
        model = copy_model(problem.model)
        if seed != own_seed:
            _reset(model)
        chosen = set(problem.selection.keys)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in chosen)
        return model.train(problem.mode == "train")

    return factory


def _reset(model: nn.Module) -> None:
    """Every layer draws its weights anew, from the seed that the fleet has set."""
    for name, module in model.named_modules():
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if not callable(reset):
            raise ValueError(
                f"{name or type(module).__name__} cannot draw its weights anew: it has no reset_parameters(). "
                "Pass factory=, a function seed -> model, or seeds=1 for the model as it is."
            )
        with torch.no_grad():
            reset()


def seed_list(seeds: int | list[int] | tuple[int, ...] | range) -> list[int]:
    """Seeds from their number or as they are."""
    found = list(range(seeds)) if isinstance(seeds, int) and not isinstance(seeds, bool) else list(seeds)  # type: ignore[arg-type]
    if not found or len(set(found)) != len(found):
        raise ValueError(f"seeds must be a positive number or different integers. Got {seeds!r}.")
    return found


def rate_list(name: str, rates: Any) -> list[float]:
    """Positive rates in order."""
    if isinstance(rates, int | float) or (isinstance(rates, Tensor) and rates.ndim != 1):
        raise ValueError(f"{name} must be a list of positive numbers. Got {rates!r}; one rate is {name}=[...].")
    found = [float(rate) for rate in (rates.tolist() if isinstance(rates, Tensor) else rates)]
    bad = [rate for rate in found if not rate > 0 or rate == float("inf")]
    if bad or not found:
        raise ValueError(f"{name} must be positive numbers. Got {bad or rates!r}.")
    return sorted(found)
