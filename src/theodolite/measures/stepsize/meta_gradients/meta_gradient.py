"""`meta_gradient`: how a training's result would change with its learning rate and the like, and whether to believe it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from theodolite.arguments import a_text, also_called, checked, count, each, nonnegative, number_in, one_of, optional, positive
from theodolite.arguments import seed as a_seed
from theodolite.measures.stepsize.meta_gradients.forward import Evaluated, Walk, run_forward
from theodolite.measures.stepsize.meta_gradients.hyperparameters import Units, two_betas
from theodolite.measures.stepsize.meta_gradients.objectives import Objective, an_objective
from theodolite.measures.stepsize.meta_gradients.reverse import run_reverse
from theodolite.measures.stepsize.meta_gradients.smoothed import run_smoothed
from theodolite.measures.stepsize.meta_gradients.unrolled import Task, Unrolled, refuse_overlap
from theodolite.problem.arguments import a_factory, a_loss, some_data
from theodolite.progress import counting
from theodolite.results import Cost, Outcome, Result, Row
from theodolite.text import number

Mode = Literal["forward", "reverse", "smoothed"]
Split = Literal["train", "valid"]
Health = Literal["ok", "explodes", "vanishes", "kinked", "diverged"]

#: A perturbation that grows by more than this over the run is said to explode.
EXPLODES = math.log(1000.0)
#: A derivative that changes the loss by less than this share per e-fold has vanished.
VANISHES = 1e-8
#: The slope is taken over this much of a hyperparameter to either side, in θ: one percent.
ONE_PERCENT = 0.01
#: A derivative that agrees less with that slope is kinked, unless both change the loss by less than `NOTHING` per e-fold.
AGREES, NOTHING = 0.8, 0.01
#: Rows of the trace at most.
TRACE = 200


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class MetaGradient(Result):
    """The derivative of a training's score in its hyperparameters, each by name, and whether it can be used.

    `value` is the score F and `loss` the loss it is made of; `gradient` is dF/dθ, θ in `units`, at the hyperparameters `values`,
    and `log_scale` the logarithm of its size, which also holds where the number itself is too large for a float. `growth` is the
    rate at which a small change of the weights grows per step, `horizon` the steps in which it becomes e times as large (infinite
    where it does not; both are NaN where no derivative was taken). `slope` is that of F over one percent to either side, and
    `agreement` 1 where the derivative equals it, 0 and less where the two have nothing in common. `gradients` counts gradients of
    a batch and `products` those of Hessians with vectors, in all runs. `error` is the standard error of a smoothed gradient.
    """

    value: float
    loss: float
    gradient: dict[str, float]
    log_scale: dict[str, float]
    values: dict[str, float]
    growth: float
    horizon: float
    slope: dict[str, float]
    agreement: dict[str, float]
    health: Health
    objective: Objective
    split: Split
    mode: Mode
    units: Units
    steps: int
    gradients: int
    products: int
    error: dict[str, float] | None = None
    trace: tuple[Row, ...] = ()

    @property
    def usable(self) -> bool:
        """Whether a step along the gradient means anything."""
        return self.health == "ok"

    def rows(self) -> list[Row]:
        return [
            {
                "hyper": name,
                "value": self.values[name],
                "gradient": self.gradient[name],
                "log_scale": self.log_scale[name],
                "slope": self.slope.get(name),
                "agreement": self.agreement.get(name),
                "error": None if self.error is None else self.error[name],
                "health": self.health,
            }
            for name in self.gradient
        ]

    def sentence(self) -> str:
        where = ", ".join(f"{name} = {number(value)}" for name, value in self.values.items())
        data = "validation data" if self.split == "valid" else "training data"
        if self.health == "diverged":
            return (
                f"At {where} the training diverges within {self.steps} steps, so there is no derivative: lower the learning rate."
            )
        mean = "the mean loss" if self.objective == "segment_mean" else "the loss"
        found = f"At {where}, {mean} on the {data} is {number(self.loss)} after {self.steps} steps; {self._changes()}"
        return f"{found}. {self._judgement()}"

    def _changes(self) -> str:
        """What each hyperparameter does to the loss."""
        parts = []
        for name, log_size in self.log_scale.items():
            percent = log_size - self._log_of_relative()
            sign = "-" if math.copysign(1.0, self.gradient[name]) < 0 else "+"
            error = ""
            if self.error is not None and self.gradient[name]:
                error = f" (± {abs(100 * self.error[name] / self.gradient[name]):.2g} % of that)"
            parts.append(f"{name} {_as_percent(sign, percent)}{error}")
        unit = "1 % more" if self.units == "log" else "0.01 more"
        return f"{unit} of it changes that by, to first order: {', '.join(parts)}"

    @property
    def percents(self) -> dict[str, tuple[float, float]]:
        """By how many percent one percent more (of θ: 0.01 more) changes the loss: by the derivative, and by the slope."""
        unit = math.exp(self._log_of_relative())
        return {name: (self.gradient[name] / unit, slope / unit) for name, slope in self.slope.items()}

    def _log_of_relative(self) -> float:
        """The logarithm of a derivative that changes the loss by its own size."""
        if self.objective == "log_last":
            return -math.log(self.steps)
        return math.log(self.loss) if self.loss > 0 else 0.0

    def _judgement(self) -> str:
        if self.health == "explodes":
            return (
                f"But a perturbation grows e-fold in {number(self.horizon)} steps, so the derivative explodes and says nothing "
                "about a change one can make: take fewer steps, a lower rate, or a sweep."
            )
        if self.health == "vanishes":
            return "That is nothing: the derivative has vanished. Score the logarithm of the loss, or take fewer steps."
        if self.health == "kinked":
            worst = min(self.agreement, key=lambda name: self.agreement[name])
            return (
                f"But over one percent of {worst} to either side that is {number(self.percents[worst][1])} %: the loss "
                "is kinked, by ReLU or the like, or bent, near the edge of stability. Try a smooth activation, a lower rate or "
                "fewer steps, or take a sweep."
            )
        return "The derivative can be used" + (
            ", as far as was checked." if self.agreement else "; it was not checked against runs."
        )


def _as_percent(sign: str, log_size: float) -> str:
    """One percent of a relative derivative, by its logarithm."""
    if log_size == -math.inf:
        return "0 %"
    if log_size > 30:
        return f"{sign}10^{log_size / math.log(10):.0f} %"
    return f"{sign}{math.exp(log_size):.3g} %"


def _names(name: str, value: Any) -> Any:
    """One name or several."""
    return value if isinstance(value, str) else each(a_text)(name, value)


@also_called(rate="lr")
@checked(
    factory=a_factory,
    train=some_data,
    valid=optional(some_data),
    steps=count,
    loss=a_loss,
    hyper=_names,
    objective=an_objective,
    split=one_of("train", "valid", None),
    mode=one_of("forward", "reverse", "smoothed"),
    units=one_of("log", "natural"),
    batch_size=optional(count),
    segment=optional(count),
    lr=optional(nonnegative),
    momentum=optional(number_in(least=0, below=1)),
    dampening=optional(number_in(least=0, most=1)),
    weight_decay=optional(nonnegative),
    betas=optional(two_betas),
    eps=optional(nonnegative),
    alpha=optional(number_in(least=0, below=1)),
    knots=count,
    pairs=count,
    spread=positive,
    target=a_text,
    seed=a_seed,
)
def meta_gradient(
    factory: Any,
    optimizer: Any,
    train: Any,
    valid: Any = None,
    *,
    steps: int,
    loss: Any,
    hyper: str | Sequence[str] = ("lr",),
    objective: Objective = "log_last",
    split: Split | None = None,
    mode: Mode = "forward",
    units: Units = "log",
    batch_size: int | None = None,
    segment: int | None = None,
    lr: float | None = None,
    momentum: float | None = None,
    dampening: float | None = None,
    nesterov: bool | None = None,
    weight_decay: float | None = None,
    betas: tuple[float, float] | None = None,
    eps: float | None = None,
    alpha: float | None = None,
    schedule: Any = None,
    knots: int = 5,
    pairs: int = 16,
    spread: float = 0.1,
    check: bool = True,
    target: str = "labels",
    seed: int = 0,
    progress: bool | None = None,
) -> MetaGradient:
    """dF/dθ: how the score F of a whole training changes with its hyperparameters θ, exactly, with its health.

    F is the loss after the last step (`"last"`), its logarithm over the number of steps (`"log_last"`), or the mean of the losses
    after each step (`"segment_mean"`), on all training or validation data in eval mode.

    Args:
        factory: seed -> model, or a function of nothing; torch's generator is seeded before the call, and a copy is trained.
        optimizer: "sgd", "momentum", "nesterov", "adam", "adamw" or "rmsprop" with `lr=...`, or a function of the parameters that
            makes such a torch optimizer, also with several parameter groups.
        train: `(inputs, targets)` with `batch_size`, a list of batches or a loader, as for `th.train`, whose order of the data
            this is.
        valid: data that are not trained on.
        hyper: names: `lr`, `momentum`, `weight_decay`, `beta1`, `beta2`, `alpha`; `lr:fc1` is that of one layer, `lr:0` (or
            `lr:group0`) that of a parameter group; `schedule` are factors on the rate at `knots` evenly spaced steps,
            `schedule[0]` the first of them.
        split: the data that F is taken on; validation data where there are any.
        mode: `"forward"` carries one tangent for each name and needs no more memory for more steps; `"reverse"` goes back through
            the run in segments of `segment` steps (√steps), for many names; `"smoothed"` needs no derivatives.
        units: `"log"` for θ = log lr (weight decay, factors of the schedule too) and log-odds of momentum and betas, `"natural"`
            for the values themselves.
        lr, momentum, dampening, nesterov, weight_decay, betas, eps, alpha: of the optimizer; None keeps its own.
        schedule: factor on the learning rate as a function of the step, or a table `{first step: factor}`.
        pairs, spread: of the smoothed mode: runs on both sides of θ in Gaussian directions, and their standard deviation in θ.
        check: also train with each hyperparameter one percent up and down, for `slope` and `agreement`.
        seed: of the model and of the order of the data.

    Returns:
        The `MetaGradient`.

    >>> from torch import nn
    >>> x = torch.ones(1, 1).double()
    >>> def line(seed):
    ...     model = nn.Linear(1, 1, bias=False).double()
    ...     _ = nn.init.ones_(model.weight)
    ...     return model
    >>> found = meta_gradient(line, "sgd", (x, 0 * x), steps=3, loss=nn.MSELoss(), lr=0.25, objective="last", units="natural")
    >>> found.value, found.gradient["lr"]                  # F = (1 − 2η)⁶, dF/dη = −12 (1 − 2η)⁵
    (0.015625, -0.375)
    """
    began = time.perf_counter()
    names: tuple[str, ...] = (hyper,) if isinstance(hyper, str) else tuple(hyper)
    settings: dict[str, Any] = {
        "lr": lr,
        "momentum": momentum,
        "dampening": dampening,
        "nesterov": nesterov,
        "weight_decay": weight_decay,
    }
    settings |= {"betas": betas, "eps": eps, "alpha": alpha}
    task = Task(
        factory,
        optimizer,
        train,
        valid,
        loss,
        steps,
        names,
        settings,
        _split(split, valid),
        schedule,
        knots,
        units,
        batch_size,
        seed,
        target,
    )
    training = MetaObjective(task, objective, mode=mode, segment=segment, pairs=pairs, spread=spread)
    check = check and mode != "smoothed"
    with counting("meta-gradient", progress=progress, total=steps * (1 + (2 * len(training.names) if check else 0))) as tick:
        found = training.derivative(count=tick)
        slopes = training.slopes(found, count=tick) if check else {}
    return training.result(found, slopes, seconds=time.perf_counter() - began)


def _split(split: Split | None, valid: Any) -> Split:
    if split == "valid" and valid is None:
        raise ValueError("split='valid' needs validation data: give valid=(inputs, targets), or split='train'.")
    return split or ("train" if valid is None else "valid")


class MetaObjective:
    """A training's score as a function of its hyperparameters, at those of the optimizer and at others.

    `names` and `values` are the hyperparameters and what the optimizer was given; `at` gives the score and its derivative at
    other values by name, on the same model, data and order. Where a loss comes near the rounding of float32, all is repeated in
    float64, and stays there.
    """

    def __init__(
        self,
        task: Task,
        objective: Objective = "log_last",
        *,
        mode: Mode = "forward",
        segment: int | None = None,
        pairs: int = 16,
        spread: float = 0.1,
    ) -> None:
        if not task.hyper:
            raise ValueError("hyper must name at least one hyperparameter, such as 'lr'.")
        self.task, self.objective, self.mode, self.segment = task, objective, mode, segment
        self.pairs, self.spread = pairs, spread
        self.unrolled = Unrolled(task, derivatives=mode != "smoothed")
        if task.valid is not None:
            refuse_overlap(self.unrolled.score.on(task.train), self.unrolled.score.on(task.valid))
        self.notes: list[str] = []

    @property
    def names(self) -> tuple[str, ...]:
        return self.unrolled.hyper.names

    @property
    def values(self) -> dict[str, float]:
        return self.unrolled.hyper.values

    def at(self, values: Mapping[str, float] | None = None, *, derivative: bool = True) -> MetaGradient:
        """Score, derivative by name and growth at other values by name (None: the optimizer's); no slopes are taken."""
        shifts = self.unrolled.hyper.shifts(values)
        began = time.perf_counter()
        found = self.derivative(shifts) if derivative else self.evaluate(shifts)
        return self.result(found, {}, shifts, seconds=time.perf_counter() - began)

    def derivative(self, shifts: Tensor | None = None, *, count: Callable[[int], None] = lambda steps: None) -> Evaluated:
        """F and dF/dθ where θ has moved by `shifts`."""
        if self.mode == "smoothed":
            return self._smoothed(shifts, count)
        run = partial(run_reverse, segment=self.segment) if self.mode == "reverse" else run_forward
        return self._exact(run, shifts, count)

    def _smoothed(self, shifts: Tensor | None, count: Callable[[int], None]) -> Evaluated:
        moved = torch.zeros(len(self.names), dtype=torch.float64) if shifts is None else shifts
        names, how = self.unrolled.problem.selection.keys, {"pairs": self.pairs, "spread": self.spread}
        found, error = run_smoothed(self.task, self.unrolled.hyper, names, self.objective, moved, **how, count=count)  # type: ignore[arg-type]
        return replace(found, error=error)

    def evaluate(self, shifts: Tensor | None = None, *, count: Callable[[int], None] = lambda steps: None) -> Evaluated:
        """F alone."""
        return self._exact(partial(run_forward, tangents=False), shifts, count)

    def _exact(self, run: Any, shifts: Tensor | None, count: Callable[[int], None]) -> Evaluated:
        moved = torch.zeros(len(self.names), dtype=torch.float64) if shifts is None else shifts
        found = run(self.unrolled, self.objective, moved, count=count)
        if _at_rounding(found, self.unrolled.problem.dtype) and not self.unrolled.double:
            try:
                self.unrolled = Unrolled(self.task, double=True)
            except (RuntimeError, ValueError):  # the model holds numbers that are no buffers
                self.notes.append("the loss came near the rounding of float32, and the model cannot be run in float64")
                return found  # type: ignore[no-any-return]
            self.notes.append("the loss came near the rounding of float32: the run was repeated in float64")
            found = run(self.unrolled, self.objective, moved)
        return found  # type: ignore[no-any-return]

    def slopes(self, found: Evaluated, *, count: Callable[[int], None] = lambda steps: None) -> dict[str, tuple[float, int]]:
        """The slope of F over one percent of each hyperparameter to either side, in θ, and the gradients it took."""
        slopes: dict[str, tuple[float, int]] = {}
        if found.walk.diverged or not math.isfinite(found.value):
            return slopes
        hyper = self.unrolled.hyper
        for i, name in enumerate(self.names):
            ends = hyper.one_percent(i, ONE_PERCENT)
            if ends is None:
                continue
            low, high = (self.evaluate(shift, count=count) for shift in ends)
            slope = (high.value - low.value) / float(ends[1][i] - ends[0][i])
            slopes[name] = slope, low.walk.gradients + high.walk.gradients
        return slopes

    # The result

    def result(
        self, found: Evaluated, slopes: Mapping[str, tuple[float, int]], shifts: Tensor | None = None, *, seconds: float = 0.0
    ) -> MetaGradient:
        """What was found, with its health."""
        walk, hyper = found.walk, self.unrolled.hyper
        at = hyper.values if shifts is None else hyper.values_at(shifts)
        logs = [math.nan] * len(self.names) if found.gradient is None else found.gradient.logarithms().tolist()
        numbers = [math.nan] * len(self.names) if found.gradient is None else found.gradient.numbers()
        gradient, log_scale = (dict(zip(self.names, part, strict=True)) for part in (numbers, logs))
        slope = {name: value for name, (value, _) in slopes.items()}
        error = None if found.error is None else dict(zip(self.names, found.error.tolist(), strict=True))
        agreement = {name: _agreement(gradient[name], value) for name, value in slope.items()}
        growth, most = _growth(walk)
        health = _health(self, found, most, log_scale, gradient, slope, agreement)
        return MetaGradient(
            value=found.value,
            loss=found.loss,
            gradient=gradient,
            log_scale=log_scale,
            values=at,
            growth=growth,
            horizon=1.0 / growth if growth > 0 else growth if math.isnan(growth) else math.inf,
            slope=slope,
            agreement=agreement,
            health=health,
            objective=self.objective,
            split="train" if self.task.split == "train" else "valid",
            mode=self.mode,
            units=self.task.units,
            steps=self.task.steps,
            gradients=walk.gradients + sum(gradients for _, gradients in slopes.values()),
            products=walk.products,
            error=error,
            trace=_trace(walk, self.names),
            outcome=Outcome.DIVERGED if health == "diverged" else Outcome.FINISHED,
            seed=self.task.seed,
            cost=Cost(
                seconds,
                "one fleet" if self.mode == "smoothed" else self.unrolled.route,
                walk.bytes,
                tuple(dict.fromkeys(self.notes)),
            ),
        )


def _at_rounding(found: Evaluated, dtype: torch.dtype) -> bool:
    """Whether the loss has fallen to where numbers of a precision no longer tell it from rounding."""
    if found.walk.diverged or not found.walk.losses or dtype == torch.float64:
        return False
    return not found.loss > torch.finfo(dtype).eps ** 1.5 * abs(found.walk.losses[0])


def _growth(walk: Walk) -> tuple[float, float]:
    """The rate at which a perturbation grows per step, and the logarithm of the most that one has grown by.

    The rate is that of the second half of the run, or on the way to the most where that is `EXPLODES`, by the tangent that grows
    fastest. What a step makes of a tangent without its source overstates it where the source turns the tangent anew in every
    step; the slope of its length overstates it by 1/t where the source grows alike. The smaller is taken.
    """
    if not walk.growths:
        return math.nan, 0.0
    half = len(walk.growths) // 2
    found = [_mean(column) for column in zip(*walk.growths[half:], strict=True)]
    if walk.lengths:
        lengths = torch.tensor(walk.lengths, dtype=torch.float64)
        # A factor of the schedule has no tangent before its time, and then one that begins to grow.
        known = torch.isfinite(lengths[min(1, len(lengths) - 1)]).tolist()
        found = [min(a, b) for a, b, use in zip(found, _slopes(lengths[half:], walk.every), known, strict=True) if use]
        steps = torch.arange(len(lengths), dtype=torch.float64) * walk.every + walk.every
        first = torch.where(torch.isfinite(lengths), lengths, -math.inf)[: 2 * walk.every].amax(0)
        grown = (lengths - first - steps.log()[:, None])[:, known]  # sources alone make a tangent longer by t
    else:
        grown = torch.tensor(walk.growths, dtype=torch.float64).flip(0).cumsum(0)
    rate = max((growth for growth in found if math.isfinite(growth)), default=0.0)
    grown = torch.where(torch.isfinite(grown), grown, -math.inf).amax(1) if grown.numel() else torch.zeros(1).double()
    most, place = float(grown.max()), int(grown.argmax())
    on_the_way = most / ((place + 1) * walk.every) if most > EXPLODES else -math.inf
    return max(rate, on_the_way), max(most, rate * len(walk.losses))


def _slopes(columns: Tensor, every: int) -> list[float]:
    """Least-squares slopes of the columns against the step."""
    if len(columns) < 2:
        return [math.inf] * columns.shape[1]
    steps = torch.arange(len(columns), dtype=torch.float64) * every
    steps -= steps.mean()
    return ((steps @ (columns - columns.mean(0))) / steps.square().sum()).tolist()


def _mean(column: Sequence[float]) -> float:
    known = [g for g in column if math.isfinite(g)]
    return sum(known) / len(known) if known else math.nan


def _agreement(derivative: float, slope: float) -> float:
    size = max(abs(derivative), abs(slope))
    if not math.isfinite(size):
        return 0.0
    return 1.0 - abs(derivative - slope) / size if size > 0 else 1.0


def _health(
    training: MetaObjective,
    found: Evaluated,
    most: float,
    log_scale: Mapping[str, float],
    gradient: Mapping[str, float],
    slope: Mapping[str, float],
    agreement: Mapping[str, float],
) -> Health:
    if found.walk.diverged or not math.isfinite(found.loss):
        return "diverged"
    if most > EXPLODES or any(math.isinf(g) for g in gradient.values()):
        return "explodes"
    # How large a derivative changes the loss by its own size: the score is a logarithm over steps, or the loss itself.
    log = training.objective == "log_last"
    unit = 1.0 / training.task.steps if log else abs(found.loss)
    for name, value in agreement.items():
        if value < AGREES and abs(gradient[name] - slope[name]) > NOTHING * unit:
            return "kinked"
    start = 1.0 / training.task.steps if log else abs(found.walk.losses[0])
    if found.gradient is not None and start > 0 and all(size < math.log(VANISHES * start) for size in log_scale.values()):
        return "vanishes"
    return "ok"


def _trace(walk: Walk, names: Sequence[str]) -> tuple[Row, ...]:
    """Loss and lengths of the tangents at up to `TRACE` steps; the logarithms of lengths, NaN where there is no tangent."""
    every = walk.every * max(1, -(-len(walk.losses) // (TRACE * walk.every)))
    rows = []
    for step in range(walk.every - 1, len(walk.losses), every):
        place = step // walk.every
        lengths = walk.lengths[place] if place < len(walk.lengths) else [math.nan] * len(names)
        rows.append(
            {"step": step, "loss": walk.losses[step], **{f"length of {n}": v for n, v in zip(names, lengths, strict=True)}}
        )
    return tuple(rows)
