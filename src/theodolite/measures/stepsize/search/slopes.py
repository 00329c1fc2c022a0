"""The slope of a training's loss in its hyperparameters, at one setting on one task: by meta-gradient, or smoothed by runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from theodolite.measures.stepsize.meta_gradients.meta_gradient import AGREES, NOTHING, ONE_PERCENT, MetaObjective
from theodolite.measures.stepsize.meta_gradients.unrolled import Task as Training
from theodolite.measures.stepsize.search.search_space import Setting, Space
from theodolite.measures.stepsize.search.tuned_runs import Split, Task, TunedRuns

#: What a product of the Hessian with a vector counts as, in gradients of a batch: five at once took 3.3 on a small classifier.
PRODUCT = 1.0
#: Pairs of opposite settings that a smoothed slope is made of at most, and how far they lie from the place, in units.
PAIRS, SPREAD = 4, 0.1


@dataclass(frozen=True)
class Slope:
    """The logarithm of the loss at a setting, its derivative (h,) in units, its health, and the gradients of a batch it took."""

    value: float
    gradient: Tensor
    health: str
    gradients: float


@dataclass(frozen=True)
class Slopes:
    """How slopes are found: the training, with the optimizer's own settings as a start, and the space they are taken in."""

    factory: Any
    optimizer: Any
    loss: Any
    space: Space
    start: Mapping[str, float]
    split: Split
    runs: TunedRuns
    made: dict[tuple[int, int], MetaObjective] = field(default_factory=dict)

    def objective(self, task: Task, seed: int) -> MetaObjective:
        """The training on one task as a function of its hyperparameters."""
        settings: dict[str, Any] = dict(self.start)
        if "beta1" in settings:
            settings["betas"] = (settings.pop("beta1"), settings.pop("beta2"))
        training = Training(
            self.factory,
            self.optimizer,
            task.train,
            task.valid if self.split == "valid" else None,
            self.loss,
            self.runs.steps,
            self.space.names,
            settings,
            self.split,
            batch_size=self.runs.batch_size,
            seed=seed,
        )
        return MetaObjective(training, "log_last")

    def exact(self, setting: Setting, task: Task, seed: int) -> Slope:
        """The meta-gradient, and whether the loss over one percent along it has the same slope."""
        key = id(task), seed
        training = self.made.get(key) or self.objective(task, seed)
        shifts = training.unrolled.hyper.shifts(setting)
        found = training.derivative(shifts)
        result = training.result(found, {}, shifts)
        gradient = torch.tensor(list(result.gradient.values()), dtype=torch.float64)
        steps, health = self.runs.steps, str(result.health)
        spent = result.gradients + PRODUCT * result.products
        if health == "ok":
            kinked, more = _kinked(training, shifts, gradient)
            health, spent = "kinked" if kinked else health, spent + more
        if not training.unrolled.double:  # one that went over to double precision begins anew, as in a search that is resumed
            self.made[key] = training
        value = math.log(found.loss) if 0 < found.loss < math.inf else math.inf
        return Slope(value, steps * gradient, health, float(spent))

    def smoothed(self, setting: Setting, task: Task, seed: int, number: int) -> Slope:
        """The mean slope between opposite settings around the place, by runs on the same weights and orders."""
        u = self.space.place(setting)
        directions = _directions(len(u), number)
        pairs = len(directions)
        apart = SPREAD * torch.cat([directions, -directions])
        scores = self.runs.run([self.space.at(self.space.inside(u + d)) for d in apart], task, [seed])
        logs = scores.on(self.split)[:, 0].clamp_min(1e-300).log()
        gradient = ((logs[:pairs] - logs[pairs:])[:, None] * directions).sum(0) / (2 * SPREAD)
        lost = bool(scores.truncated.all())
        return Slope(float(logs.mean()), gradient, "diverged" if lost else "ok", float(2 * pairs * self.runs.steps))


def _directions(size: int, number: int) -> Tensor:
    """Up to four hyperparameters one by one; of more, four random mixtures, whose slopes add up to that of all on average."""
    if size <= PAIRS:
        return torch.eye(size, dtype=torch.float64)
    drawn = torch.randn(PAIRS, size, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    return drawn.div(PAIRS**0.5)


def _kinked(training: MetaObjective, shifts: Tensor, gradient: Tensor) -> tuple[bool, float]:
    """Whether the objective one percent to either side, along the gradient, has another slope than the gradient says."""
    length = float(gradient.norm())
    if length == 0:
        return False, 0.0
    along = ONE_PERCENT * gradient / length
    high, low = (training.evaluate(shifts + side * along) for side in (1, -1))
    slope = (high.value - low.value) / (2 * ONE_PERCENT)
    agrees = 1 - abs(slope - length) / max(abs(slope), length) if math.isfinite(slope) else 0.0
    unit = 1 / training.task.steps
    kinked = agrees < AGREES and not abs(slope - length) <= NOTHING * unit
    return kinked, float(high.walk.gradients + low.walk.gradients)


#: (setting, task, seed, number of the step, whether smoothed) -> slope
SlopeOf = Callable[[Setting, Task, int, int, bool], Slope]


def slope_of(slopes: Slopes) -> SlopeOf:
    """Slopes as pieces of the ledger of the runs."""

    def find(setting: Setting, task: Task, seed: int, number: int, smoothed: bool) -> Slope:
        if smoothed:  # its runs are pieces of the ledger themselves
            return slopes.smoothed(setting, task, seed, number)
        found = slopes.runs.ledger.piece(lambda: vars(slopes.exact(setting, task, seed)).copy())
        slopes.runs.advance(round(found["gradients"]))
        return Slope(**found)

    return find
