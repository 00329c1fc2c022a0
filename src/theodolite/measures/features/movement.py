"""How far a model's features have moved from those of a fresh network: the headline number of feature learning."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from theodolite.measures.features.gradients import Function, Settings, as_source, chunks
from theodolite.measures.features.groups import Matrix, diagonal_of, gathered, inner_products
from theodolite.problem import Problem
from theodolite.problem.calling import copy_model
from theodolite.results import Cost, Outcome, Result, Row

#: How often a network that is fresh itself would be called moved if logarithms were normal, and the least change that
#: counts, as a share. Tails are heavier: 11 of 500 small fresh networks were called moved, at ten copies.
ALARM, LEAST = 0.002, 0.05

QUANTITIES = ("alignment with fresh networks", "effective rank", "coordinates in use")


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class FeatureMovement(Result):
    """The AGOP of a model beside those of copies whose layers were initialised anew, in three numbers.

    The mean alignment with the fresh ones; the effective rank (Tr G)²/‖G‖², which counts directions; and the same of the
    diagonal, (Σ Gᵢᵢ)²/Σ Gᵢᵢ², which counts coordinates. `values` are the model's, `fresh` the geometric means over the fresh
    networks (of each with the others), `spreads` the standard deviations of their logarithms.
    """

    values: tuple[float, ...]
    fresh: tuple[float, ...]
    spreads: tuple[float, ...]
    copies: int

    @property
    def alignment(self) -> float:
        """The mean cosine of the model's AGOP with a fresh one."""
        return self.values[0]

    @property
    def moved(self) -> tuple[str, ...]:
        """The numbers that lie where those of fresh networks do not: empty where the model cannot be told from one."""
        from scipy.stats import t

        quantile = t.ppf(1.0 - ALARM / (2 * len(QUANTITIES)), self.copies - 1)
        scale = float(quantile) * math.sqrt(1.0 + 1.0 / self.copies)
        found = zip(QUANTITIES, self.values, self.fresh, self.spreads, strict=True)
        return tuple(name for name, v, f, s in found if abs(math.log(v / f)) > max(LEAST, scale * s))

    def rows(self) -> list[Row]:
        found = zip(QUANTITIES, self.values, self.fresh, self.spreads, strict=True)
        return [
            {"quantity": name, "value": v, "fresh": f, "spread": s, "moved": name in self.moved, "seed": self.seed}
            for name, v, f, s in found
        ]

    def sentence(self) -> str:
        told = [row for row in self.rows() if row["moved"] or not self.moved]
        numbers = "; ".join(f"{r['quantity']} {r['value']:.3g}, of fresh ones {_range(r['fresh'], r['spread'])}" for r in told)
        if self.moved:
            return f"The features have moved away from those of a fresh network: {numbers}."
        return f"The features cannot be told from those of a fresh network: {numbers}."


def _range(mean: float, spread: float) -> str:
    """A geometric mean with one spread to either side."""
    return f"{mean:.3g} ({mean * math.exp(-spread):.2g} to {mean * math.exp(spread):.2g})"


def feature_movement(
    model_or_problem: Any,
    inputs: Any = None,
    *,
    copies: int = 16,
    at: str | None = None,
    batch_size: int | None = None,
    projections: int | None = None,
    seed: int = 0,
) -> FeatureMovement:
    """Compare a model's AGOP with those of copies initialised anew, by the `reset_parameters` of their layers.

    That is torch's default initialisation, or that of your own modules; a model that was initialised otherwise is compared
    with a start it did not have. The other arguments are those of `agop`.

    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    >>> model[0].weight.data[:, 1:] = 0.0                     # reads one input of twenty
    >>> "coordinates in use" in feature_movement(model, torch.randn(50, 20)).moved
    True
    """
    if copies < 3:
        raise ValueError(f"copies must be at least 3: fresh networks are compared with one another too. Got {copies}.")
    began = time.perf_counter()
    problem = as_source(model_or_problem, inputs)
    reason = cannot_start_anew(problem.model)
    if reason:
        raise ValueError(f"No fresh copy of this model can be made: {reason}.")
    settings = Settings(at, batch_size, projections, seed)
    networks = [problem, *(_fresh(problem, seed + i) for i in range(copies))]
    matrices = [gathered(chunks(network, inputs, settings)) for network in networks]
    products = inner_products(matrices)
    found = torch.stack([_alignments(products), *_counts(matrices, products)])  # (3, 1 + copies)
    return FeatureMovement(
        values=tuple(found[:, 0].tolist()),
        fresh=tuple(found[:, 1:].log().mean(1).exp().tolist()),
        spreads=tuple(found[:, 1:].log().std(1).tolist()),
        copies=copies,
        outcome=Outcome.ESTIMATED,
        seed=seed,
        cost=Cost(time.perf_counter() - began, "input gradients", 0, problem.notes),
    )


def _alignments(products: Tensor) -> Tensor:
    """The mean cosine of each matrix with the fresh ones, which are all but the first; with the others, for a fresh one."""
    if not bool((products.diagonal() > 0).all()):
        raise ValueError("The outputs of the model, or of a fresh copy, do not depend on the inputs at any of these samples.")
    sizes = products.diagonal().sqrt()
    cosines = (products / torch.outer(sizes, sizes)).fill_diagonal_(0.0)[:, 1:]
    fresh = cosines.shape[1]
    return (cosines.sum(1) / torch.tensor([fresh, *[fresh - 1] * fresh])).clamp_min(1e-12)


def _counts(matrices: list[Matrix], products: Tensor) -> tuple[Tensor, Tensor]:
    """How many directions, and how many coordinates, each matrix amounts to."""
    diagonals = torch.stack([diagonal_of(m) for m in matrices]).double().cpu()
    squared_traces = diagonals.sum(1).square()
    return squared_traces / products.diagonal(), squared_traces / diagonals.square().sum(1)


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
