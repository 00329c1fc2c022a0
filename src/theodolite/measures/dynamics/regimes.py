"""What a training run did, and what one at a given learning rate will do: settle, catapult, or diverge."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch.optim import Optimizer

from theodolite.arguments import also_called, checked, nonnegative, number_in, positive, seed, series, series_with_gaps, whole
from theodolite.measures.dynamics.critical import CriticalRate, critical_learning_rate, edge_is_no_limit
from theodolite.measures.dynamics.optimizers import BLOWN_UP, never_rises, run_trial
from theodolite.problem import Problem
from theodolite.problem.arguments import a_problem
from theodolite.problem.optimizers import as_optimizer
from theodolite.progress import counting
from theodolite.results import Outcome, Result, Row, number
from theodolite.training import Trace

Word = Literal["monotone", "catapult", "divergent", "other"]

#: A wide quadratic model climbs further than others before it settles.
BLOWN_UP_QUADRATIC = 1e12
#: Columns of a trace in which the norm of the tangent kernel may stand.
KERNEL_COLUMNS = ("lambda_1", "kernel_norm")


@checked(
    kernel=series_with_gaps,
    blown_up=positive,
    rise=nonnegative,
    settled=number_in(above=0, most=1),
    kernel_fall=nonnegative,
    slack=nonnegative,
)
def classify_run(
    trace: Trace | Iterable[float],
    *,
    kernel: Iterable[float | None] | None = None,
    quadratic: bool = False,
    blown_up: float | None = None,
    rise: float = 0.05,
    settled: float = 0.5,
    kernel_fall: float = 0.01,
    slack: float = 1e-6,
) -> Word:
    """The regime of a run in one word.

    "divergent": a loss is not finite, or above `blown_up` times the first one. "monotone": no loss exceeds the one before
    by more than the share `slack`. "catapult": the loss rose by more than the share `rise` over the first one, ended below
    the first one and below the share `settled` of its peak, and the largest kernel eigenvalue fell by more than the share
    `kernel_fall`. "other": none of these.

    The eigenvalue is read from `kernel`, or from the column "lambda_1" or "kernel_norm" of a trace, first entry against
    last. Where it was not measured the loss alone decides, and a rise for another reason also reads "catapult".

    Args:
        trace: a `Trace` (its final loss counts as the last one) or losses in order.
        quadratic: the model is a quadratic one: `blown_up` is then 1e12 by default and not 1e8.

    Returns:
        One of the words above.

    >>> classify_run([2.0, 1.0, 0.5]), classify_run([1.0, 30.0, 0.2], kernel=[4.0, 2.0, 1.5])
    ('monotone', 'catapult')
    >>> classify_run([1.0, 30.0, 0.2], kernel=[4.0, 4.0, 4.0]), classify_run([1.0, 30.0, float("inf")])
    ('other', 'divergent')
    """
    losses, measured = _read(trace, kernel)
    limit = (BLOWN_UP_QUADRATIC if quadratic else BLOWN_UP) if blown_up is None else blown_up
    word = classify_losses(losses, blown_up=limit, rise=rise, settled=settled, slack=slack)
    if word == "catapult" and measured and not measured[-1] < (1.0 - kernel_fall) * measured[0]:
        return "other"
    return word


def classify_losses(
    losses: Sequence[float], *, blown_up: float = BLOWN_UP, rise: float = 0.05, settled: float = 0.5, slack: float = 1e-6
) -> Word:
    """The same word from the losses alone.

    >>> classify_losses([1.0, 2.0, 1.5])
    'other'
    """
    first, last, most = losses[0], losses[-1], max(losses)
    scale = max(abs(first), 1e-30)
    if not all(map(math.isfinite, losses)) or most > blown_up * scale:
        return "divergent"
    if never_rises(losses, slack):
        return "monotone"
    if rose(losses, rise) and last < first and most - last > (1.0 - settled) * abs(most):
        return "catapult"
    return "other"


def rose(losses: Sequence[float], rise: float = 0.05) -> bool:
    """Whether the loss was once above the first one by more than this share of it."""
    return max(losses) > losses[0] + rise * max(abs(losses[0]), 1e-30)


def _read(trace: Trace | Iterable[float], kernel: Iterable[float | None] | None) -> tuple[list[float], list[float]]:
    """Losses and kernel norms as plain numbers, None taken out of the latter."""
    column: Any = kernel
    if isinstance(trace, Trace):
        losses = [*trace.loss, *([] if trace.final_loss is None else [trace.final_loss])]
        if column is None:
            column = next((trace.measured[name] for name in KERNEL_COLUMNS if name in trace.measured), None)
    else:
        losses = series("trace", trace)
    if not losses:
        raise ValueError("trace must hold at least one loss. Got none; train for at least one step.")
    return losses, [float(value) for value in column if value is not None] if column is not None else []


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Regime(Result):
    """What to expect at a learning rate.

    `regime` is one of "monotone" (below the edge), "stable" (below it, with momentum: oscillations fade), "uneven" (below it, and
    the loss falls, but not in every step), "catapult" (the loss rises, then settles in a flatter place), "edge of stability"
    (above the edge, yet the loss of the trial stays below its start), "edge is no limit" (above it, where a quadratic loss would
    have blown up, and the loss never rises), "divergence expected", "unstable" (it neither settled nor blew up within the trial)
    and "unknown" (above the edge, not tried). `ratio` is the rate over the critical one; `losses` are those of a short run on a
    copy, empty where theory is `exact` (a quadratic loss and an optimizer that is linear on it), or where no trial was asked for.
    """

    regime: str
    rate: float
    ratio: float
    error: float
    critical: CriticalRate
    losses: tuple[float, ...]
    exact: bool

    def rows(self) -> list[Row]:
        return [{"step": i, "loss": loss, "rate": self.rate, "seed": self.seed} for i, loss in enumerate(self.losses)]

    def sentence(self) -> str:
        times = f"{number(self.ratio, self.error)} times the critical rate {number(self.critical.value, self.critical.error)}"
        return f"A learning rate of {self.rate:.4g} is {times}: {self.regime}."


@also_called(lr="rate")
@checked(problem=a_problem, rate=positive, steps=whole, seed=seed)
def expected_regime(
    problem: Problem,
    rate: float,
    *,
    optimizer: Optimizer | str | None = None,
    critical: CriticalRate | None = None,
    steps: int = 60,
    seed: int = 0,
    progress: bool | None = None,
) -> Regime:
    """The regime of training at `rate`, from the critical rate and a short full-batch run on a copy.

    On a quadratic loss theory is exact and nothing is run. Elsewhere `steps` steps are taken on a copy of the model (0: none),
    and the word says what that run did.

    >>> import torch
    >>> model = torch.nn.Linear(1, 1, bias=False).double()
    >>> x = torch.tensor([[3.0]]).double()
    >>> problem = Problem(model, torch.nn.MSELoss(), (x, 0 * x))          # λ = 18, critical rate 1/9
    >>> expected_regime(problem, 0.1).regime, expected_regime(problem, 0.12).regime
    ('monotone', 'divergence expected')
    """
    began = time.perf_counter()
    optimizer = as_optimizer(optimizer, problem.parameters, lr=rate)
    if critical is None:
        critical = critical_learning_rate(problem, optimizer=optimizer, seed=seed, progress=progress)
    ratio = rate / critical.value if math.isfinite(critical.value) else 0.0
    error = ratio * critical.error / critical.value if ratio else 0.0
    exact = critical.quadratic and critical.linear
    losses: tuple[float, ...] = ()
    if steps and not exact:
        with counting("trial run", progress=progress, total=steps) as advance:
            losses = run_trial(problem, rate, optimizer=optimizer, steps=steps, advance=advance)
    if losses:
        word = classify(losses, ratio, has_momentum(optimizer))
    elif ratio <= 1.0:
        word = "stable" if has_momentum(optimizer) else "monotone"
    else:
        word = "divergence expected" if exact else "unknown"
    return Regime(
        regime=word,
        rate=rate,
        ratio=ratio,
        error=error,
        critical=critical,
        losses=losses,
        exact=exact,
        outcome=critical.outcome if not critical.outcome.good else Outcome.FINISHED,
        seed=seed,
        cost=replace(critical.cost, seconds=time.perf_counter() - began),
    )


def has_momentum(optimizer: Optimizer | None) -> bool:
    """Whether a stable run may oscillate on its way down."""
    groups = [] if optimizer is None else optimizer.param_groups
    return any(group.get("momentum") or group.get("betas") for group in groups)


def classify(losses: Sequence[float], ratio: float, momentum: bool = False) -> str:
    """The regime a trial run shows.

    >>> classify([1.0, 0.5, 0.2], 0.5), classify([1.0, 3.0, 0.2], 1.5), classify([1.0, 40.0, float("inf")], 5.0)
    ('monotone', 'catapult', 'divergence expected')
    """
    word = classify_losses(losses)
    if edge_is_no_limit(losses, ratio):
        return "edge is no limit"
    if word == "monotone":
        return word if ratio <= 1.0 else "edge of stability"
    if word != "other":
        return "divergence expected" if word == "divergent" else word
    if rose(losses) or losses[-1] >= losses[0]:
        return "unstable"
    if ratio > 1.0:
        return "edge of stability"
    return "stable" if momentum else "uneven"
