"""The largest learning rate at which training from these weights still converges, found by search."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from theodolite.measures.dynamics.critical import critical_learning_rate
from theodolite.measures.dynamics.regimes import classify_run
from theodolite.measures.dynamics.trials import reseeded, whole_data
from theodolite.measures.kernel.scalar_output import require_problem
from theodolite.problem import Problem
from theodolite.progress import counting
from theodolite.results import Cost, Outcome, Result, Row
from theodolite.training import Fleet

#: Rates tried at once; each round divides the bracket by one more than that.
AT_ONCE = 7
#: Neighbours of the edge tried at the end, as shares of it.
NEIGHBOURS = (-0.3, -0.15, -0.08, -0.04, -0.02, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6)
#: Rounds in which the upper end may be doubled.
DOUBLINGS = 6
#: Where an edge is not sharp, rates so many times as far away as the farthest one on the wrong side are tried as well.
BEYOND = (1.2, 1.4, 1.7, 2.0, 2.5, 3.0)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class MaximumRate(Result):
    """`value` is a rate that converges, next to one that does not; `error` the width of that bracket.

    The edge need not be sharp: near it runs that converge and runs that do not may take turns, and another bracket may end
    at another place among them. Where that was seen (at rates tried on the way, or around the final bracket) `error` reaches
    to the farthest rate found on the wrong side, and `sharp` is false.
    `critical` is the rate at which plain descent leaves its sharpest direction, `ratio` the value over that. `runs` has one
    row per rate tried. Without an upper end (nothing diverged) the outcome is not converged and `error` is infinite.
    """

    value: float
    error: float
    critical: float
    steps: int
    runs: tuple[Row, ...]
    sharp: bool = True

    @property
    def ratio(self) -> float:
        return self.value / self.critical

    def rows(self) -> list[Row]:
        return [dict(row) for row in self.runs]

    def sentence(self) -> str:
        if not math.isfinite(self.error):
            return f"Training converges at every rate tried, up to {self.value:.4g} ({self.ratio:.3g} times the critical rate)."
        edge = "" if self.sharp else " The edge is not sharp: within the error, rates that converge and that do not take turns."
        return (
            f"Training converges up to a learning rate of {self.value:.4g} ± {self.error:.1g}, {self.ratio:.3g} times the "
            f"critical rate {self.critical:.4g} ({self.steps} steps a trial).{edge}"
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
    Several rates are trained at once as one program, the bracket shrinks eightfold a round. Convergence need not be monotone in
    the rate near the edge: of each round the first loss of convergence is followed, so another bracket may lead to another edge.
    Rates on both sides of it are tried at the end, and the error says over which range runs disagree.

    Args:
        low, high: a rate that converges and one that diverges; None means 0.9 and 8 times the critical rate. `high` is doubled as
            long as it converges, `low` halved as long as it does not.
        tol: width of the final bracket, relative to the rate.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Linear(1, 1, bias=False).double()
    >>> x = torch.ones(1, 1).double()
    >>> found = find_max_learning_rate(Problem(model, nn.MSELoss(), (x, 0 * x)), progress=False)        # 2/λ = 1
    >>> abs(found.value - 1) <= 0.01 * found.value
    True
    """
    require_problem(problem, "find_max_learning_rate")
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
    _refuse_minimum(problem, critical)
    search = _Search(problem, steps, blown_up)
    rounds = max(1, math.ceil(math.log((top - bottom) / (tol * bottom)) / math.log(AT_ONCE + 1)))
    with counting("rounds of trials", progress=progress, total=rounds) as advance:
        bottom, top = search.bracket(bottom, top)
        while math.isfinite(top) and top - bottom > tol * bottom:
            inner = [bottom + (top - bottom) * (i + 1) / (AT_ONCE + 1) for i in range(AT_ONCE)]
            bottom, top = search.narrow([bottom, *inner, top])
            advance(1)
        if math.isfinite(top):
            search.converge([rate for share in NEIGHBOURS if not bottom <= (rate := bottom * (1 + share)) <= top])
    error = search.extent(bottom, top)
    return MaximumRate(
        value=bottom,
        error=error,
        sharp=error <= top - bottom,
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

    def extent(self, bottom: float, top: float) -> float:
        """`disagreement`, once rates up to three times as far away hold no more of it: what is wrong at 15 % may go on beyond."""
        error = self.disagreement(bottom, top)
        for _ in range(DOUBLINGS):
            if not top - bottom < error < math.inf:
                break
            around = [bottom + side * share * error for side in (-1, 1) for share in BEYOND]
            self.converge([rate for rate in around if rate > 0])
            wider = self.disagreement(bottom, top)
            if wider == error:
                break
            error = wider
        return error

    def disagreement(self, bottom: float, top: float) -> float:
        """How far from `bottom` the farthest rate on the wrong side of the edge is; the width of the bracket at least."""
        wrong = [row["rate"] for row in self.rows if row["converged"] != (row["rate"] <= bottom)]
        farthest: float = max([top - bottom, *(abs(rate - bottom) for rate in wrong)])
        return farthest

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


def _refuse_minimum(problem: Problem, critical: float) -> None:
    """Raise where descent has nowhere to go from these weights."""
    loss, gradient = problem.loss_and_gradient()
    fall, eps = critical * float(gradient.double().square().sum()), torch.finfo(problem.dtype).eps
    if fall <= 10 * eps * max(abs(loss), 10 * eps):
        raise ValueError(
            f"The loss is already at its minimum ({loss:.4g}; a step at the critical rate would lower it by {fall:.1g}), so no "
            "run can show whether it converges. Start from other weights or other data."
        )
