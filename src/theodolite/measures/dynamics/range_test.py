"""The learning-rate range test: the rate rises step by step, and the loss says where it helps and where it is too much."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch.optim import Optimizer

from theodolite.arguments import checked, count, instance, positive, seed
from theodolite.errors import TheodoliteError
from theodolite.measures import trials
from theodolite.measures.dynamics.critical import CriticalRate, critical_learning_rate
from theodolite.measures.dynamics.optimizers import first_rate, has_law, plain_optimizer
from theodolite.problem import Problem
from theodolite.problem.arguments import a_problem
from theodolite.problem.optimizers import as_optimizer
from theodolite.progress import Advance, counting
from theodolite.results import Cost, Outcome, Result, Row

#: Weight of the past in the smoothed loss: an average over about five steps.
SMOOTHING = 0.8
#: The suggestion lies between the rate at which so much of the fall is reached and this share of the rate at which it rises.
FALLEN, BELOW_THE_RISE = 2 / 3, 1 / 4
#: The smoothed loss rises again where it is above its lowest by this share of its fall, or of its size.
RISEN, RISEN_OF_LOSS = 0.2, 0.05
#: A fall of less than this share of the loss is none.
FLAT = 0.002
#: A run is over once the loss has risen by so many times its size (or its fall, or its spread over batches).
OVER = 2.0
#: Sizes of a step over that of the weights between which the first, coarse look goes, and its steps.
SMALLEST_STEP, LARGEST_STEP, COARSE = 1e-5, 3.0, 40
#: Weights that are smaller than this on average, or zero, are taken to be so large.
SMALL_WEIGHT = 0.01
#: From and to which rate a sweep goes, in units of the rate from which on the loss rises.
FROM, TO = 1e-3, 10.0
#: Samples from which on the critical rate is that of so many of them.
MANY = 1000


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class RangeTest(Result):
    """The loss of mini-batches while the learning rate rises exponentially, in several sweeps with other batches.

    `suggestion` is a rate to train with and `error` its spread over the sweeps, None where there was one. `minimum_at` is the
    rate at which the smoothed loss was lowest, `rises_at` that from which on it rises (None if it never does), `diverged_at`
    that at which the first sweep blew up (None if none did). `critical` is the critical rate of the optimizer, with its catapult
    `window` where that is known; `lr` the rate that was asked about. `start` is the loss at the beginning.
    """

    points: tuple[Row, ...]
    suggestion: float
    error: float | None
    start: float
    minimum_at: float
    rises_at: float | None
    diverged_at: float | None
    critical: CriticalRate | None
    lr: float | None
    optimizer: str
    batch_size: int

    @property
    def window(self) -> tuple[float, ...] | None:
        """Rates above the critical one at which training still converges; None where nobody looked."""
        return None if self.critical is None else self.critical.window

    def rows(self) -> list[Row]:
        return [dict(row) for row in self.points]

    def sentence(self) -> str:
        falls = f"falls fastest up to a learning rate of about {self.suggestion:.2g}"
        rises = "" if self.rises_at is None else f" and rises from {self.rises_at:.2g} on"
        return f"With {self.optimizer} and batches of {self.batch_size} the loss {falls}{rises}."


@checked(
    problem=a_problem,
    lr=positive,
    batch_size=count,
    low=positive,
    high=positive,
    steps=count,
    sweeps=count,
    critical=instance(CriticalRate, bool, wanted="True, False or what critical_learning_rate found"),
    seed=seed,
)
def lr_range_test(
    problem: Problem,
    optimizer: Optimizer | str | None = None,
    *,
    lr: float | None = None,
    batch_size: int | None = None,
    low: float | None = None,
    high: float | None = None,
    steps: int = 100,
    sweeps: int = 3,
    critical: CriticalRate | bool = True,
    seed: int = 0,
    progress: bool | None = None,
) -> RangeTest:
    """The loss while the learning rate rises exponentially from `low` to `high`, on copies of the model.

    Each sweep takes one optimizer step per rate, on a random mini-batch. From the loss of a batch the loss of the first weights
    on the same batch is taken away, so that easy and hard batches do not show; what is left is averaged exponentially (with the
    correction of its bias), and the loss at the start added again. The suggestion is the geometric mean of two rates read from
    this curve, averaged over the sweeps: that at which two thirds of its whole fall are reached, and a quarter of that from which
    on it rises; the latter alone where the loss does not fall. The first is where learning is fast, the second keeps a distance
    from where it ends, and neither depends on the one steepest place of a noisy curve. A sweep ends where the loss is not finite
    or far above its start. The model and the optimizer are left as found.

    Args:
        optimizer: the optimizer as it stands, copied with its state, or a name ("sgd", "momentum", "adam", "adamw"); None is
            plain gradient descent. It need not have a law of stability.
        lr: the rate you train with, by default the optimizer's; it is drawn beside the curve.
        batch_size: of the mini-batches; None is that of the problem's own, or 32 where the data is one batch.
        low, high: the range. By default a coarse sweep finds where the loss begins to rise, and the range goes from a thousandth
            to ten times that rate.
        steps: of one sweep.
        sweeps: repetitions with other batches, whose spread is the error.
        critical: the critical rate to draw, where it is known; True measures it where the optimizer has a law of stability (on
            1000 samples at most), False leaves it out.

    Returns:
        A `RangeTest`: the suggested rate, where it blows up, the curves as rows, and `.plot()`.

    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> _ = torch.nn.init.zeros_(model.weight)
    >>> x, y = torch.ones(64, 1), 1.0 + 0.3 * torch.randn(64, 1, generator=torch.Generator().manual_seed(0))
    >>> found = lr_range_test(Problem(model, torch.nn.MSELoss(), (x, y)))        # the critical rate is 1
    >>> 0.01 < found.suggestion < 1 < found.diverged_at, round(found.critical.value, 3)
    (True, 1.0)
    """
    began = time.perf_counter()
    named = isinstance(optimizer, str)
    optimizer = as_optimizer(plain_optimizer(optimizer), problem.parameters)
    own = lr if lr is not None or optimizer is None or named else first_rate(optimizer) or None
    if low is not None and high is not None and not low < high:
        raise ValueError(f"low must lie below high. Got {low:g} and {high:g}.")
    width = trials.usual_batch_size(problem) if batch_size is None else batch_size
    runs = _Sweeps(problem, optimizer, width, seed)
    with counting("range test", progress=progress, total=COARSE + sweeps * steps) as advance:
        if low is None or high is None:
            rise = runs.rise(advance)
            low, high = low or min(FROM * rise, 0.1 * (high or math.inf)), high or max(TO * rise, 10.0 * (low or 0.0))
        factor = (high / low) ** (1.0 / max(1, steps - 1))
        found = [runs.sweep([low * factor**i for i in range(steps)], seed + 1 + i, advance) for i in range(sweeps)]
    curve = _mean(found)
    alone = [_suggested(sweep) for sweep in found]
    return RangeTest(
        points=tuple(row for i, sweep in enumerate(found) for row in sweep.rows(i)),
        suggestion=_suggested(curve),
        error=_suggested(curve) * statistics.stdev(map(math.log, alone)) if sweeps > 1 else None,
        start=curve.start,
        minimum_at=curve.rates[curve.lowest],
        rises_at=curve.rises_at,
        diverged_at=min((sweep.rates[-1] for sweep in found if sweep.over), default=None),
        critical=_critical(problem, optimizer, seed) if critical is True else critical or None,
        lr=own,
        optimizer="gradient descent" if optimizer is None else type(optimizer).__name__,
        batch_size=width,
        outcome=Outcome.ESTIMATED if sweeps > 1 else Outcome.FINISHED,
        seed=seed,
        cost=Cost(time.perf_counter() - began, f"{sweeps} sweeps on copies", 0, problem.notes),
    )


@dataclass
class _Sweep:
    """Losses by rate: of the batch itself, what that is more than with the first weights, and this smoothed.

    `over` says that it ended because the loss blew up.
    """

    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # the losses of the first weights on the same batches
    smoothed: list[float] = field(default_factory=list)
    over: bool = False

    @property
    def start(self) -> float:
        return statistics.fmean(self.first)

    @property
    def size(self) -> float:
        """What a change of the loss is measured by: the loss, or how it differs between batches where it happens to be near 0."""
        return max(abs(self.start), statistics.pstdev(self.first), 1e-30)

    @property
    def lowest(self) -> int:
        return min(range(len(self.smoothed)), key=self.smoothed.__getitem__)

    @property
    def fall(self) -> float:
        return max(0.0, -self.smoothed[self.lowest])

    @property
    def rises_at(self) -> float | None:
        """The rate from which on the smoothed loss is clearly above its lowest, None where it never is."""
        limit = self.smoothed[self.lowest] + max(RISEN * self.fall, RISEN_OF_LOSS * self.size)
        above = (i for i in range(self.lowest, len(self.rates)) if self.smoothed[i] > limit)
        return next((self.rates[i] for i in above), self.rates[-1] if self.over else None)

    def add(self, rate: float, loss: float, first: float) -> bool:
        """Another step; whether the sweep may go on."""
        if not math.isfinite(loss):
            self.over = True
            return False
        self.rates.append(rate)
        self.losses.append(loss)
        self.first.append(first)
        past, n = (self.smoothed[-1] if self.smoothed else 0.0), len(self.rates)
        weight = (1.0 - SMOOTHING) / (1.0 - SMOOTHING**n)
        self.smoothed.append((1.0 - weight) * past + weight * (loss - first))
        self.over = loss - first > OVER * max(self.size, self.fall)
        return not self.over

    def rows(self, sweep: int) -> list[Row]:
        columns = zip(self.rates, self.losses, self.smoothed, strict=True)
        return [{"sweep": sweep, "rate": r, "loss": x, "smoothed": self.start + s} for r, x, s in columns]


class _Sweeps:
    """Rising rates on copies of one training."""

    def __init__(self, problem: Problem, optimizer: Optimizer | None, batch_size: int, seed: int) -> None:
        self.problem, self.optimizer, self.batch_size, self.seed = trials.in_one_batch(problem), optimizer, batch_size, seed

    def sweep(self, rates: Sequence[float], seed: int, advance: Advance) -> _Sweep:
        """One step at each rate; a loss belongs to the rate of the step before it."""
        setup, still = self._setup(rates[0]), self._setup(rates[0])
        found = _Sweep()
        batches = trials.random_batches(setup.problem, self.batch_size, len(rates) + 1, seed)
        with trials.in_training(setup.problem, seed), trials.in_training(still.problem, seed):
            for place, batch in enumerate(batches):
                state = torch.get_rng_state()
                with torch.no_grad():
                    first = float(still.problem.live_loss(batch))
                torch.set_rng_state(state)  # dropout takes the same units of both
                setup.optimizer.zero_grad()
                loss = setup.problem.live_loss(batch)
                advance(1)
                if place and not found.add(rates[place - 1], float(loss.detach()), first):
                    break
                if place < len(rates):
                    loss.backward()
                    setup.set_lr(rates[place])
                    setup.optimizer.step()
        if not found.rates:
            raise ValueError(
                f"Already the first step, at a rate of {rates[0]:.2g}, gives a loss that is not finite. Choose low=."
            )
        return found

    def rise(self, advance: Advance) -> float:
        """The rate from which on the loss rises, by a coarse sweep over all sizes of a step that may matter."""
        one = self._relative_step()
        low, high = SMALLEST_STEP / one, LARGEST_STEP / one
        for _ in range(4):
            factor = (high / low) ** (1.0 / (COARSE - 1))
            found = self.sweep([low * factor**i for i in range(COARSE)], self.seed, advance)
            rise = found.rises_at
            if rise is None:
                low, high = found.rates[-1] / 100.0, found.rates[-1] * 1e3
            elif len(found.rates) < COARSE // 5:  # so low a rate is too much: little gradient, and much curvature
                low, high = low * 1e-4, 10.0 * rise
            else:
                return rise
        return rise or high

    def _relative_step(self) -> float:
        """The length of a step over that of the weights, per unit of the rate."""
        setup = self._setup(1.0)  # a step at a small rate would be lost in rounding
        before = setup.problem.vector
        with trials.in_training(setup.problem, self.seed):
            batch = next(trials.random_batches(setup.problem, self.batch_size, 1, self.seed))
            setup.problem.live_loss(batch).backward()
            setup.optimizer.step()
        moved = float((setup.problem.vector - before).double().norm())
        if not moved > 0:
            raise ValueError("A step does not move the weights: the gradient is zero, so there is no rate to look for.")
        return moved / max(float(before.double().norm()), SMALL_WEIGHT * math.sqrt(before.numel()))

    def _setup(self, lr: float) -> trials.Setup:
        return trials.copied_setup(self.problem, lr, self.optimizer, self.batch_size)


def _mean(sweeps: Sequence[_Sweep]) -> _Sweep:
    """The mean of several sweeps over the same rates, as far as all of them went."""
    columns = ([getattr(sweep, name) for sweep in sweeps] for name in ("losses", "first", "smoothed"))
    losses, first, smoothed = ([statistics.fmean(at) for at in zip(*column, strict=False)] for column in columns)
    return _Sweep(sweeps[0].rates[: len(losses)], losses, first, smoothed, any(sweep.over for sweep in sweeps))


def _suggested(sweep: _Sweep) -> float:
    """The rule of `lr_range_test`."""
    distant = BELOW_THE_RISE * (sweep.rises_at or sweep.rates[-1])
    if sweep.fall < FLAT * sweep.size:
        return distant
    fallen = next(r for r, s in zip(sweep.rates, sweep.smoothed, strict=True) if -s >= FALLEN * sweep.fall)
    return math.sqrt(fallen * distant)


def _critical(problem: Problem, optimizer: Optimizer | None, seed: int) -> CriticalRate | None:
    """The critical rate, None where the optimizer has no law or the model no second derivative."""
    if not has_law(optimizer):
        return None
    part = problem
    with suppress(TheodoliteError, ValueError, NotImplementedError):
        if problem.samples > MANY:
            part = problem.with_batches(list(trials.random_batches(problem, MANY, 1, seed)))
        return critical_learning_rate(part, optimizer=optimizer, tol=1e-2, seed=seed, progress=False)
    return None
