"""The largest learning rate at which training from these weights still converges, found by search."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from theodolite.measures.dynamics.classify import classify_run
from theodolite.measures.dynamics.critical import critical_learning_rate
from theodolite.measures.dynamics.replicas import reseeded, whole_data
from theodolite.problem import Problem
from theodolite.progress import counting
from theodolite.results import Cost, Outcome, Result, Row
from theodolite.training import Fleet

#: Rates tried at once; each round divides the bracket by one more than that.
AT_ONCE = 7
#: Rounds in which the upper end may be doubled.
DOUBLINGS = 6


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class MaximumRate(Result):
    """`value` is the largest rate tried that converges with larger ones diverging, `error` the width of the bracket.

    `critical` is the rate at which plain descent leaves its sharpest direction, `ratio` the value over that. `runs` has one
    row per rate tried. Without an upper end (nothing diverged) the outcome is not converged and `error` is infinite.
    """

    value: float
    error: float
    critical: float
    steps: int
    runs: tuple[Row, ...]

    @property
    def ratio(self) -> float:
        return self.value / self.critical

    def rows(self) -> list[Row]:
        return [dict(row) for row in self.runs]

    def sentence(self) -> str:
        if not math.isfinite(self.error):
            return f"Training converges at every rate tried, up to {self.value:.4g} ({self.ratio:.3g} times the critical rate)."
        return (
            f"Training converges up to a learning rate of {self.value:.4g} ± {self.error:.1g}, {self.ratio:.3g} times the "
            f"critical rate {self.critical:.4g} ({self.steps} steps a trial)."
        )


def find_max_learning_rate(
    problem: Problem,
    *,
    low: float | None = None,
    high: float | None = None,
    tol: float = 0.01,
    steps: int = 500,
    blown_up: float = 1e12,
    progress: bool | None = None,
) -> MaximumRate:
    """Search for the edge between rates at which full-batch descent converges and rates at which it diverges.

    A run converges if it does not blow up (`blown_up` times its first loss) and lowers the loss at least half as much as the
    run at `low` does: at very large rates a ReLU network may throw all its units out, which ends the rise and the training.
    Several rates are trained at once as one program, the bracket shrinks eightfold a round. Convergence need not be monotone in the rate near
    the edge: the largest converging rate below the first diverging one is returned.

    Parameters
    ----------
    low, high : a rate that converges and one that diverges; None means 0.9 and 8 times the critical rate. `high` is
        doubled as long as it converges, `low` halved as long as it does not.
    tol : width of the bracket, relative to the rate.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Linear(1, 1, bias=False).double()
    >>> x = torch.ones(1, 1).double()
    >>> found = find_max_learning_rate(Problem(model, nn.MSELoss(), (x, 0 * x)), progress=False)        # 2/λ = 1
    >>> abs(found.value - 1) <= 0.01 * found.value
    True
    """
    if not 0 < tol < 1:
        raise ValueError(f"tol must lie between 0 and 1. Got {tol!r}.")
    began = time.perf_counter()
    critical = critical_learning_rate(problem, progress=False).value
    bottom = 0.9 * critical if low is None else low
    top = 8.0 * critical if high is None else high
    if not (0 < bottom < top and math.isfinite(top)):
        raise ValueError(
            f"low and high must satisfy 0 < low < high and be finite. Got {bottom:.4g} and {top:.4g}; the critical rate is "
            f"{critical:.4g}."
        )
    search = _Search(problem, steps, blown_up)
    with counting("rounds of trials", progress=progress, total=_rounds(bottom, top, tol)) as advance:
        bottom, top = search.bracket(bottom, top)
        while math.isfinite(top) and top - bottom > tol * bottom:
            inner = [bottom + (top - bottom) * (i + 1) / (AT_ONCE + 1) for i in range(AT_ONCE)]
            bottom, top = search.narrow([bottom, *inner, top])
            advance(1)
    return MaximumRate(
        value=bottom,
        error=top - bottom,
        critical=critical,
        steps=steps,
        runs=tuple(sorted(search.rows, key=lambda row: row["rate"])),
        outcome=Outcome.CONVERGED if math.isfinite(top) else Outcome.UNBOUNDED,
        cost=Cost(time.perf_counter() - began, "fleet", 0, problem.notes),
    )


class _Search:
    """Trials of many rates, each rate once."""

    def __init__(self, problem: Problem, steps: int, blown_up: float) -> None:
        self.problem, self.steps, self.blown_up = problem, steps, blown_up
        self.data, self.make = whole_data(problem), reseeded(problem)
        self.rows: list[Row] = []
        self.progress = math.nan  # how far the run at the low end lowers the loss

    def bracket(self, bottom: float, top: float) -> tuple[float, float]:
        """A converging and a diverging rate; infinity where nothing diverges."""
        good = {bottom: self.converge([bottom])[0]}
        good[top] = self.converge([top])[0]
        for _ in range(DOUBLINGS):
            if good[bottom]:
                break
            top, bottom = bottom, bottom / 2
            good[bottom] = self.converge([bottom])[0]
        if not good[bottom]:
            raise ValueError(f"Training does not converge even at {bottom:.4g}. Give low=, or more steps (now {self.steps}).")
        for _ in range(DOUBLINGS):
            if not good[top]:
                return bottom, top
            bottom, top = top, 2 * top
            good[top] = self.converge([top])[0]
        return (bottom, top) if not good[top] else (top, math.inf)

    def narrow(self, rates: list[float]) -> tuple[float, float]:
        """The neighbours between which convergence is first lost; the ends are known."""
        good = [True, *self.converge(rates[1:-1]), False]
        first_bad = good.index(False)
        return rates[first_bad - 1], rates[first_bad]

    def converge(self, rates: list[float]) -> list[bool]:
        fleet = Fleet(
            self.make,
            [0] * len(rates),
            loss=self.problem.loss_function,
            rate=rates,
            mode="train" if self.problem.mode == "train" else "eval",
        )
        trace = fleet.train(self.data, steps=self.steps, blow_up=self.blown_up, until=1e-10, evaluate=True, progress=False)
        assert trace.final_loss is not None
        good = []
        for i, rate in enumerate(rates):
            first, last = float(trace.loss[i, 0]), float(trace.final_loss[i])
            word = classify_run(trace[i], blown_up=self.blown_up)
            if math.isnan(self.progress) and word != "divergent" and last < first:
                self.progress = first - last
            good.append(word != "divergent" and first - last >= 0.5 * self.progress)
            self.rows.append({"rate": rate, "regime": word, "first_loss": first, "final_loss": last, "converged": good[-1]})
        return good


def _rounds(bottom: float, top: float, tol: float) -> int:
    return max(1, math.ceil(math.log((top - bottom) / (tol * bottom)) / math.log(AT_ONCE + 1)))
