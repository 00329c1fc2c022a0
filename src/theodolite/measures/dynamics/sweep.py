"""Many learning rates trained side by side: where a network and its twins part, and the largest rate that still converges."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from typing import Any, Literal

import torch
from torch import Tensor, nn

from theodolite.arguments import (
    also_called,
    checked,
    count,
    each,
    fraction,
    one_or_each,
    positive,
    sequence,
    shown,
    whole,
)
from theodolite.interrupts import unbroken
from theodolite.linalg import top_eigenpairs
from theodolite.measures.dynamics.critical import critical_learning_rate
from theodolite.measures.dynamics.optimizers import BLOWN_UP
from theodolite.measures.dynamics.regimes import BLOWN_UP_QUADRATIC, Word, classify_run
from theodolite.measures.kernel.problem_views import measured_copy, reset_of, squared_loss_curvature
from theodolite.measures.kernel.twins import TaylorTwin, linearize, quadratize
from theodolite.operators import tangent_kernel_operator
from theodolite.operators.matrices import MatrixName, check_matrix_or_none
from theodolite.problem import Batch, Problem
from theodolite.problem.arguments import a_problem
from theodolite.problem.batches import holds_samples
from theodolite.problem.state_guard import cuda_devices, own_random_state
from theodolite.progress import counting
from theodolite.results import Cost, Outcome, Result, Row
from theodolite.text import quoted
from theodolite.training import Fleet, FleetTrace

Factory = Callable[[int], nn.Module]
Kind = Literal["network", "linear", "quadratic"]
_TWINS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "network": lambda model: model,
    "linear": linearize,
    "quadratic": quadratize,
}

#: Learning rates in units of the critical one.
GRID = (0.2, 0.4, 0.6, 0.8, 0.95, 1.05, 1.2, 1.5, 1.8, 2.0, 2.5, 3.0, 4.0, 5.0)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class CatapultSweep(Result):
    """Runs of a network and its twins over learning rates.

    `runs` has one row for each: model, seed, rate, ratio (rate over the critical rate of that seed's network at its start),
    regime, first, peak and final training loss, the step at which it diverged, and the best test loss and accuracy reached on
    the way (None for a run that diverged: the best of its first steps is no success, nor without test data).
    """

    runs: tuple[Row, ...]
    critical: dict[int, float]
    steps: int
    models: tuple[str, ...]

    def rows(self) -> list[Row]:
        return [dict(row) for row in self.runs]

    def select(self, **where: Any) -> list[Row]:
        """Rows with these values, in the order of their rates."""
        return [row for row in self.runs if all(row[name] == value for name, value in where.items())]

    def sentence(self) -> str:
        parts = []
        for model in self.models:
            rows = self.select(model=model)
            words = {word: [r["ratio"] for r in rows if r["regime"] == word] for word in ("monotone", "catapult", "divergent")}
            spans = {word: f"from {min(r):.3g} to {max(r):.3g}" for word, r in words.items() if len(set(r)) > 1}
            said = [f"{word} {spans.get(word, f'at {ratios[0]:.3g}')}" for word, ratios in words.items() if ratios]
            parts.append(f"{model}: {', '.join(said) or 'none of the regimes'}")
        return f"{len(self.runs)} runs of {self.steps} steps, rates in units of the critical one; " + "; ".join(parts) + "."


def rate_list(name: str, rates: Any) -> list[float]:
    """Positive rates in order."""
    if isinstance(rates, int | float) or (isinstance(rates, Tensor) and rates.ndim != 1):
        raise ValueError(f"{name} must be a list of positive numbers. Got {shown(rates)}; one rate is {name}=[...].")
    return sorted(each(positive)(name, rates))


@also_called(matrix="by")
@checked(
    problem=a_problem,
    models=sequence,
    steps=count,
    seeds=one_or_each(whole),
    batch_size=count,
    every=count,
    ratios=rate_list,
    rates=rate_list,
)
def catapult_sweep(
    problem: Problem,
    rates: Sequence[float] | None = None,
    *,
    models: Sequence[Kind] = ("network", "linear", "quadratic"),
    steps: int = 400,
    seeds: int | Sequence[int] = 1,
    test: Any = None,
    ratios: Sequence[float] = GRID,
    factory: Factory | None = None,
    batch_size: int | None = None,
    every: int = 1,
    by: MatrixName | None = None,
    twins: dict[str, Callable[[nn.Module], nn.Module]] | None = None,
    progress: bool | None = None,
) -> CatapultSweep:
    """Train the network and its Taylor twins at many learning rates, all rates and seeds of a model as one program.

    Args:
        rates: learning rates; None means `ratios` times the critical rate, which is measured for each seed's network.
        models: which of "network", "linear" and "quadratic" (its first and second order Taylor models at the same weights).
        steps: of gradient descent on all data, or of mini-batches of `batch_size`.
        seeds: how many initialisations, or which; seed 0 is the model as it is, others draw its layers' weights anew, and
            `factory` (seed -> model) replaces all of them.
        test: (inputs, targets) for the best test loss and accuracy, looked at every `every` steps.
        by: (or `matrix`) how the critical rate is measured; None means by the kernel for a squared loss and by the Hessian
            otherwise.
        twins: replaces how a kind of model is made from the network, for instance {"quadratic": a form of it known in closed
            form}.

    Returns:
        A `CatapultSweep` with a row for each model, rate and seed, `.select()` and `.plot()`.

    >>> model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1)).double()
    >>> x = torch.linspace(-1, 1, 6).double()[:, None]
    >>> problem = Problem(model, nn.MSELoss(), (x, x))
    >>> sweep = catapult_sweep(problem, ratios=[0.5, 1.2], models=["linear"], progress=False)
    >>> [row["regime"] for row in sweep.rows()]
    ['monotone', 'divergent']
    """
    unknown = [kind for kind in models if not isinstance(kind, str) or kind not in _TWINS]
    if unknown or not models:
        raise ValueError(f"models must be some of {quoted(_TWINS)}. Got {shown(unknown or list(models))}.")
    if set(models) != {"network"} and (problem.loss_function is None or problem.loss_takes_structure):
        raise ValueError(
            "The twins expand the outputs that a loss reads, as one tensor: they return no loss of the model's own and no "
            "structure. Give the Problem a loss function of one tensor and the targets, or sweep models=['network']."
        )
    began = time.perf_counter()
    absolute, relative = list(rates or []), list(ratios)
    kinds = {**_TWINS, **(twins or {})}
    make = reseeded(problem) if factory is None else factory
    chosen = seed_list(seeds)
    check_matrix_or_none(by)
    by = by or ("hessian" if squared_loss_curvature(problem) is None else "kernel")
    with counting("critical rates", progress=progress, total=len(chosen)) as advance:
        starts = {seed: _Start(problem, make, seed, by, advance) for seed in chosen}
    critical = {seed: start.critical for seed, start in starts.items()}
    pairs = [(seed, rate) for seed in chosen for rate in absolute or [r * critical[seed] for r in relative]]
    data = whole_data(problem)
    runs: list[Row] = []
    notes: list[str] = []
    for kind in models:
        fleet = fleet_of(problem, _once_a_seed(make, kinds[kind], problem), [s for s, _ in pairs], [r for _, r in pairs])
        limit = BLOWN_UP_QUADRATIC if kind == "quadratic" else BLOWN_UP
        trace = fleet.train(
            data,
            steps=steps,
            batch_size=batch_size,
            order_seeds=[seed for seed, _ in pairs],
            test=test,
            every=every,
            blow_up=limit,
            evaluate=True,
            progress=progress,
        )
        notes += [f"{kind}: {trace.route}", *trace.cost.notes]
        runs += [_row(fleet, trace, i, kind, starts[seed], rate) for i, (seed, rate) in enumerate(pairs)]
    return CatapultSweep(
        runs=tuple(runs),
        critical=critical,
        steps=steps,
        models=tuple(models),
        outcome=Outcome.FINISHED,
        seed=chosen[0],
        cost=Cost(time.perf_counter() - began, "fleet", 0, tuple(dict.fromkeys(notes))),
    )


def _once_a_seed(make: Factory, twin: Callable[[nn.Module], nn.Module], problem: Problem) -> Factory:
    """The twins' factory; the rates of a seed, which come in a row, start from copies of one model."""

    @lru_cache(maxsize=1)
    def factory(seed: int) -> nn.Module:
        model = twin(make(seed))
        if isinstance(model, TaylorTwin):  # it learns its cheapest form before the fleet calls it inside a transform
            batch = problem.placed(problem.few(8))
            model.prepare(*batch.args, **batch.kwargs)
        return model

    return factory


class _Start:
    """The network of one seed before training: its critical rate, and the norm of its kernel where that is asked for."""

    def __init__(self, problem: Problem, make: Factory, seed: int, by: MatrixName, advance: Callable[[int], None]) -> None:
        self.seed, self.outer = seed, problem
        with own_random_state(seed, cuda_devices(problem.model)):
            self.model = make(seed)
        self.critical = critical_learning_rate(problem.with_model(self.model), by=by, progress=False).value
        if not math.isfinite(self.critical):
            raise ValueError(f"No learning rate is critical for seed {seed}: no direction curves upwards, so there is no sweep.")
        advance(1)

    @cached_property
    def kernel_norm(self) -> float:
        return kernel_norm(self.outer, self.model)


def _row(fleet: Fleet, trace: FleetTrace, i: int, kind: str, start: _Start, rate: float) -> Row:
    losses = trace.loss[i]
    diverged = trace.diverged_at[i]
    test_loss, test_accuracy = (None, None) if diverged is not None else (trace.test_loss, trace.test_accuracy)
    return {
        "model": kind,
        "seed": start.seed,
        "rate": rate,
        "ratio": rate / start.critical,
        "regime": _regime(fleet, trace, i, kind, start),
        "first_loss": float(losses[0]),
        "peak_loss": float(losses.max()),
        "final_loss": math.inf if diverged is not None or trace.final_loss is None else float(trace.final_loss[i]),
        "diverged_at": diverged,
        "best_test_loss": None if test_loss is None else float(test_loss[i].nan_to_num(math.inf).min()),
        "best_test_accuracy": None if test_accuracy is None else float(test_accuracy[i].nan_to_num(0.0).max()),
    }


def _regime(fleet: Fleet, trace: FleetTrace, i: int, kind: str, start: _Start) -> Word:
    """A word for the losses; what looks like a catapult must also have lowered the kernel, which all three models start with."""
    quadratic = kind == "quadratic"
    word = classify_run(trace[i], quadratic=quadratic)
    if word != "catapult":
        return word
    if kind == "linear":  # its kernel never changes
        return "other"
    after = kernel_norm(start.outer, fleet.model(i))
    return classify_run(trace[i], kernel=(start.kernel_norm, after), quadratic=quadratic)


def kernel_norm(problem: Problem, model: nn.Module) -> float:
    """The largest eigenvalue of the tangent kernel of a model on the problem's inputs, to a part in a thousand."""
    # Not `problem.with_model`: a twin in closed form may name its parameters otherwise.
    own = Problem(model, problem.loss_function, joined_data(problem), mode=problem.mode, check=False)
    op = tangent_kernel_operator(own)
    return float(top_eigenpairs(op, 1, tol=1e-3, progress=False).values[0])


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


@checked(problem=a_problem, low=positive, high=positive, tol=fraction, steps=count, blown_up=positive)
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

    Returns:
        A `MaximumRate`: the edge between its two bracketing rates, and every rate that was tried.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Linear(1, 1, bias=False).double()
    >>> x = torch.ones(1, 1).double()
    >>> found = find_max_learning_rate(Problem(model, nn.MSELoss(), (x, 0 * x)), progress=False)        # 2/λ = 1
    >>> abs(found.value - 1) <= 0.01 * found.value
    True
    """
    if not 0 < tol < 1:
        raise ValueError(f"tol must lie between 0 and 1. Got {shown(tol)}.")
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
        good = {rate: self.converge([rate])[0] for rate in (bottom, top)}
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
        fleet = fleet_of(self.problem, self.make, [0] * len(rates), rates)
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


# A problem as replicas of a fleet: its data as one batch, its model under other seeds.


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
    if any(holds_samples(part, b.size) for b in batches for part in (*b.args, *b.kwargs.values(), b.target)):
        raise ValueError("The samples of the problem lie in a list, and many runs train on tensors: stack them into one.")
    try:
        joined = reduce(Batch.joined, batches[1:], batches[0])
    except RuntimeError as error:
        raise ValueError(
            f"The {len(batches)} batches of the problem have different shapes and cannot be trained on as one ({error}). "
            "Give the data as one batch, or pad its inputs to one shape."
        ) from error
    if problem.loss_function is None:
        return joined.kwargs or joined.args[0]
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
        with unbroken(torch.no_grad()):
            reset()


def fleet_of(problem: Problem, make: Factory, seeds: list[int], rates: list[float]) -> Fleet:
    """Replicas with the problem's loss and mode, one for each seed and rate."""
    mode: Literal["train", "eval"] = "train" if problem.mode == "train" else "eval"
    return Fleet(make, seeds, loss=problem.loss_function, rate=rates, mode=mode)


def seed_list(seeds: Any) -> list[int]:
    """Seeds from their number or as they are."""
    found = list(range(seeds)) if isinstance(seeds, int) and not isinstance(seeds, bool) else list(seeds)
    if not found or len(set(found)) != len(found):
        raise ValueError(f"seeds must be a positive number or different integers. Got {shown(seeds)}.")
    return found
