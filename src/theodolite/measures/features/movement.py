"""How far a model's features have moved from those of a fresh network: the headline number of feature learning."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from theodolite.measures.features.alignment import agop_alignment
from theodolite.measures.features.gradients import Settings, chunks
from theodolite.measures.features.groups import Matrix, gathered
from theodolite.measures.features.source import Function, as_source
from theodolite.problem import Problem
from theodolite.problem.calling import copy_model
from theodolite.results import Cost, Outcome, Result, Row, number

#: A fall of the alignment that counts, beside the spread of fresh networks.
LEAST = 0.02


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class FeatureMovement(Result):
    """The AGOP of a model beside those of copies whose layers were initialised anew.

    `alignment` is the mean cosine of the model's AGOP with the fresh ones, with its standard error, and `between` the mean
    over pairs of fresh ones. `spread` is how much a fresh network's own mean alignment with the others varies from one to the
    next: a model whose features have not moved lies within it.
    """

    alignment: float
    error: float
    between: float
    spread: float
    copies: int

    @property
    def moved(self) -> bool:
        """Whether the model is further from fresh networks than they are from one another, beyond three spreads."""
        chance = 3.0 * self.spread * math.sqrt(1.0 + 1.0 / self.copies)
        return self.between - self.alignment > max(LEAST, chance)

    def rows(self) -> list[Row]:
        pairs = [("model and fresh", self.alignment, self.error), ("fresh and fresh", self.between, self.spread)]
        return [{"pair": n, "alignment": v, "error": e, "copies": self.copies, "seed": self.seed} for n, v, e in pairs]

    def sentence(self) -> str:
        numbers = (
            f"alignment {number(self.alignment, self.error)} with fresh networks, which have "
            f"{number(self.between, self.spread)} with one another"
        )
        if self.moved:
            return f"The features have moved away from those of a fresh network: {numbers}."
        return f"The features cannot be told from those of a fresh network: {numbers}."


def feature_movement(
    model_or_problem: Any,
    inputs: Any = None,
    *,
    copies: int = 8,
    at: str | None = None,
    batch_size: int | None = None,
    projections: int | None = None,
    seed: int = 0,
) -> FeatureMovement:
    """Compare a model's AGOP with those of copies initialised anew, by the `reset_parameters` of their layers.

    That is torch's default initialisation, or that of your own modules; a model that was initialised otherwise is compared
    with a start it did not have. The other arguments are those of `agop`.

    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    >>> feature_movement(model, torch.randn(50, 6)).moved
    False
    """
    if copies < 3:
        raise ValueError(f"copies must be at least 3: fresh networks are compared with one another too. Got {copies}.")
    began = time.perf_counter()
    problem = as_source(model_or_problem, inputs)
    reason = cannot_start_anew(problem.model)
    if reason:
        raise ValueError(f"No fresh copy of this model can be made: {reason}.")
    settings = Settings(at, batch_size, projections, seed)
    here = gathered(chunks(problem, inputs, settings))
    fresh = [gathered(chunks(p, inputs, settings)) for p in (_fresh(problem, seed + i) for i in range(copies))]
    to_fresh = [agop_alignment(here, one) for one in fresh]
    between, spread = _among(fresh)
    return FeatureMovement(
        alignment=statistics.mean(to_fresh),
        error=statistics.stdev(to_fresh) / math.sqrt(copies),
        between=between,
        spread=spread,
        copies=copies,
        outcome=Outcome.ESTIMATED,
        seed=seed,
        cost=Cost(time.perf_counter() - began, "input gradients", 0, problem.notes),
    )


def _among(fresh: list[Matrix]) -> tuple[float, float]:
    """The mean alignment of two, and the spread of each one's mean alignment with the others."""
    n = len(fresh)
    total = [0.0] * n
    for i, j in itertools.combinations(range(n), 2):
        cosine = agop_alignment(fresh[i], fresh[j])
        total[i] += cosine
        total[j] += cosine
    means = [t / (n - 1) for t in total]
    return statistics.mean(means), statistics.stdev(means)


def cannot_start_anew(model: nn.Module) -> str:
    """Why the layers of a model cannot be initialised anew, empty where they can."""
    if isinstance(model, Function):
        return "it has nothing to train"
    for name, module in model.named_modules():
        if isinstance(module, _NormBase) and module.running_mean is not None:
            return f"{name or 'it'} normalises by statistics of training, which a fresh network does not have"
        own = [key for key, _ in module.named_parameters(recurse=False)]
        if own and _reset_of(module) is None:
            return f"{name or type(module).__name__} holds {own[0]} but has no reset_parameters"
    return ""


def _reset_of(module: nn.Module) -> Callable[[], None] | None:
    """What initialises a module; `nn.MultiheadAttention` hides it behind an underscore."""
    found = (getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters"))
    return next((reset for reset in found if callable(reset)), None)


def _fresh(problem: Problem, seed: int) -> Problem:
    """The problem on a copy with all layers initialised anew; the random state is left as it was."""
    model = copy_model(problem.model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in reversed(list(model.modules())):  # inner ones first: an outer one may know better
            reset = _reset_of(module)
            if reset is not None:
                reset()
    return problem.with_model(model)
