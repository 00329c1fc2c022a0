"""Is it learning? The loss against the best constant prediction, its trend in a short run on a copy, and the validation gap."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from theodolite.arguments import a_number, an_error, checked, count, finite, optional, positive, seed, series
from theodolite.measures.dynamics.noise import random_parts
from theodolite.measures.progress.trivial import LossKind, Trivial, loss_kind, trivial_prediction
from theodolite.measures.trials import Setup, copied_setup, in_one_batch, in_training, random_batches, run_steps, usual_batch_size
from theodolite.problem import Batch, Problem
from theodolite.problem.accuracy import right_answers
from theodolite.problem.arguments import a_problem, an_optimizer
from theodolite.results import Cost, Outcome, Result, Row

State = Literal["learning", "learned", "not learning", "diverges", "unknown"]

#: A difference is seen where it is this many times its error.
SIGMAS = 3.0
#: Outputs fit their own targets better where that is so many times its error.
SURE = 4.0
#: Below the constant prediction by at least this share of it: something is known about the inputs.
BELOW = 0.02
#: A loss that stays above this share of the constant prediction's has learned little.
LITTLE = 0.8
#: A loss below this share of the constant prediction's leaves nothing to gain.
DONE = 0.02
#: A loss above the constant prediction's is on its way where it gets there in so many times the steps of the trial.
PATIENCE = 10.0
#: Twice the loss at the start, or that of the constant prediction: such a run has lost what it had.
LOST = 2.0
#: A loss that falls by less than this share of itself in a step does not get anywhere.
HARDLY = 1e-5
#: A fall by this share of the loss is worth having: without one, and where errors leave no room for one, it does not fall.
WORTH = 0.02
#: The loss of training is another one than that of evaluation where they differ by this share of the larger.
APART = 0.3
#: Groups of samples from which errors are computed.
GROUPS = 16
#: Outputs that vary over the samples by less than this share of their size are the same for all.
CONSTANT = 1e-5


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LearningProgress(Result):
    """Whether a training gets anywhere.

    `trivial` is the loss of the best prediction that is the same for all samples (`trivial_name` says which), None where the
    loss function is not known; `slope` the change of the loss per step in a run of `steps` steps on a copy, as it stands, None
    where no rate was given. `state` is "learning", "learned" (well below the constant prediction, and no fall is seen), "not
    learning", "diverges" or "unknown". `knows_more` says whether the run made the outputs fit their own targets better than
    those of other samples (None where that was not looked at), `constant` whether they are the same for all samples. `losses`
    are those of the batches of that run, `still` those of the same batches without training; their difference is the trend,
    free of what single batches bring. `later_fall` is the share of the loss that a longer run of `later_steps` steps took away,
    where one was made that shows a fall (`followed`). Errors are standard errors by the jackknife.
    """

    loss: float
    loss_error: float
    trivial: float | None = None
    trivial_name: str = ""
    accuracy: float | None = None
    valid_loss: float | None = None
    valid_error: float | None = None
    valid_accuracy: float | None = None
    gap: float | None = None
    gap_error: float | None = None
    slope: float | None = None
    slope_error: float | None = None
    state: State = "unknown"
    constant: bool = False
    knows_more: bool | None = None
    steps: int = 0
    batch_size: int = 0
    losses: tuple[float, ...] = ()
    still: tuple[float, ...] = ()
    later_fall: float | None = None
    later_steps: int = 0

    @property
    def learning(self) -> bool | None:
        """Whether it learns or has learned; None where that is not known."""
        return None if self.state == "unknown" else self.state in ("learning", "learned")

    @property
    def below(self) -> bool:
        """Whether the loss is below that of the constant prediction, by more than next to nothing."""
        return is_below(self.loss, self.trivial, 0.0)

    @property
    def little(self) -> bool:
        """Whether it stopped soon below the constant prediction."""
        return self.state == "learned" and self.trivial is not None and self.loss > LITTLE * self.trivial

    @property
    def hardly(self) -> bool:
        """Whether outputs come to fit their targets, but the loss does not fall, or too slowly to get anywhere."""
        if self.state != "learning" or self.trivial is None or self.slope is None or self.below:
            return False
        if self.later_fall is not None and is_below(self.loss * (1 - self.later_fall), self.trivial, 0.0):
            return False
        level = self.train_loss if self.trained_otherwise else self.loss
        return not (self.falls and _gets_below(level, self.trivial, self.slope, self.steps))

    @property
    def falls(self) -> bool:
        """Whether the loss falls in the run, by more than its error and more than next to nothing."""
        return _falls(self.loss, self.slope, self.slope_error)

    @property
    def flat(self) -> bool:
        """Whether the error of the trend leaves no room for a fall worth having in so many steps."""
        if self.slope is None or self.slope_error is None:
            return False
        return (SIGMAS * self.slope_error - self.slope) * self.steps < WORTH * abs(self.loss)

    @property
    def train_loss(self) -> float:
        """The loss in train mode, of the weights as they stand."""
        return sum(self.still) / len(self.still) if self.still else math.nan

    @property
    def trained_otherwise(self) -> bool:
        """Whether what falls in the run is far from the loss in eval mode, as running statistics and dropout can make it."""
        return abs(self.train_loss - self.loss) > APART * max(abs(self.train_loss), abs(self.loss))

    @property
    def lost_share(self) -> float | None:
        """The share of what was gained over the constant prediction that is not there on validation data."""
        if self.gap is None or self.trivial is None or not self.trivial > self.loss:
            return None
        return self.gap / (self.trivial - self.loss)

    @checked(start=finite, end=a_number, steps=count)
    def followed(self, start: float, end: float, steps: int) -> LearningProgress:
        """The same, with what a longer run of the same training brought: where the loss fell there, it learns."""
        fall = (start - end) / max(abs(start), 1e-300)
        if self.state == "diverges" or not fall > WORTH:
            return self
        unfinished = self.trivial is None or (self.below and self.loss > DONE * abs(self.trivial))
        learns = unfinished or (not self.below and is_below(self.loss * (1 - fall), self.trivial, 0.0))
        return replace(self, state="learning" if learns else self.state, later_fall=fall, later_steps=steps)

    def rows(self) -> list[Row]:
        found = [
            ("loss", self.loss, self.loss_error),
            (f"loss of {self.trivial_name}", self.trivial, None),
            ("accuracy", self.accuracy, None),
            ("validation loss", self.valid_loss, self.valid_error),
            ("validation accuracy", self.valid_accuracy, None),
            ("validation gap", self.gap, self.gap_error),
            (f"change of the loss per step, over {self.steps} steps", self.slope, self.slope_error),
        ]
        return [{"quantity": name, "value": value, "error": error} for name, value, error in found if value is not None]

    def curve(self) -> list[Row]:
        """The run on a copy: the loss of each batch, with training and without."""
        runs = {"as it stands": self.losses, "without training": self.still}
        return [{"run": run, "step": i, "loss": loss} for run, losses in runs.items() for i, loss in enumerate(losses)]

    def sentence(self) -> str:
        against = "" if self.trivial is None else f", where {self.trivial_name} gives {_shown(self.trivial)}"
        said = f"loss {_shown(self.loss)}{against}"
        head = f"L{said[1:]}" if self.state == "unknown" else f"It {self._verb()}: {said}"
        return " ".join([f"{head}{self._trend()}.", *self._validation()])

    def _verb(self) -> str:
        if self.state == "learning":
            begins = self.trivial is not None and not self.below
            return "hardly learns yet" if self.hardly else "begins to learn" if begins else "learns"
        if self.state == "learned":
            return "has learned little" if self.little else "has learned"
        return "does not learn" if self.state == "not learning" else "diverges"

    def _trend(self) -> str:
        if self.state == "diverges":
            last = self.losses[-1]
            end = "is not finite any more" if not math.isfinite(last) else f"rises to {_shown(last)}"
            return f", and it {end} within {len(self.losses)} steps on a copy"
        if self.constant and self.state == "not learning":
            return "; its outputs are the same for all samples"
        if self.slope is None or (self.falls and self.state == "learned"):
            return ""
        if not self.falls:
            return self._without_a_trend()
        if self.trained_otherwise:
            return f"; in train mode, where it is {_shown(self.train_loss)}, it falls by {_shown(-self.slope)} per step"
        fall = f"; it falls by {_shown(-self.slope)} per step"
        if self.hardly or (not self.learning and self.knows_more is None):
            return f"{fall}, too slowly to get there"
        return fall if self.learning else f"{fall}, without fitting its inputs any better"

    def _without_a_trend(self) -> str:
        """That it falls in a longer run, that it does not fall, or that this cannot be told."""
        if self.later_fall is not None:
            lower = f"lower it by {100 * self.later_fall:.2g} %"
            return f"; {self.later_steps} steps on a copy, the last of them at a falling rate, {lower}"
        learned = self.state == "learned"
        if self.flat:
            how_far = " any further" if learned else " yet" if self.hardly else ""
            return f"; it does not fall{how_far} in {self.steps} steps on a copy"
        return f"; whether it {'still ' if learned else ''}falls cannot be told from {self.steps} steps on a copy"

    def _validation(self) -> Iterator[str]:
        if self.valid_loss is not None:
            yield f"The validation loss is {_shown(self.valid_loss)}."


def _shown(value: float) -> str:
    return f"{value:.3g}" if not 1e3 <= abs(value) < 1e6 else f"{value:.0f}"


def _falls(loss: float, slope: float | None, error: float | None) -> bool:
    return slope is not None and slope < -max(SIGMAS * (error or 0.0), HARDLY * abs(loss))


@checked(problem=a_problem, lr=positive, optimizer=an_optimizer, valid=a_problem, steps=count, batch_size=count, seed=seed)
def learning_progress(
    problem: Problem,
    *,
    lr: float | None = None,
    optimizer: Optimizer | None = None,
    valid: Problem | None = None,
    batch_size: int | None = None,
    steps: int = 40,
    seed: int = 0,
) -> LearningProgress:
    """The loss against the best constant prediction, and what a short run on a copy does to it.

    Args:
        lr, optimizer: what the user trains with; without a rate no run is made.
        valid: the same problem on validation data.
        batch_size: of the random batches of the run; None is that of the problem's own, or 32 where there is one only.

    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> _ = torch.nn.init.zeros_(model.weight)
    >>> x = torch.tensor([[-1.0], [1.0]] * 8)
    >>> found = learning_progress(Problem(model, torch.nn.MSELoss(), (x, 3 * x)), lr=0.1)
    >>> found.loss, found.trivial, found.state                    # targets ±3 with mean 0
    (9.0, 9.0, 'learning')
    """
    began = time.perf_counter()
    train = _measured(problem, seed)
    held = None if valid is None else _measured(valid, seed)
    run: dict[str, Any] = {}
    constant = train.constant
    knows_more = None
    if lr is not None and any(p.requires_grad for p in problem.parameters):
        width = usual_batch_size(problem) if batch_size is None else batch_size
        run, ended = _short_run(problem, lr, optimizer, width, steps, seed)
        if ended is not None and not train.below:
            after = _measured(ended, seed)
            constant, knows_more = constant and after.constant, _knows_more(train, after)
    state = judge_state(
        train.loss,
        train.trivial,
        train.margin_error,
        run.get("slope"),
        run.get("slope_error"),
        losses=run.get("losses", ()),
        knows_more=knows_more,
    )
    gap = None if held is None else held.loss - train.loss
    return LearningProgress(
        loss=train.loss,
        loss_error=train.loss_error,
        trivial=train.trivial,
        trivial_name=train.trivial_name,
        accuracy=train.accuracy,
        valid_loss=None if held is None else held.loss,
        valid_error=None if held is None else held.loss_error,
        valid_accuracy=None if held is None else held.accuracy,
        gap=gap,
        gap_error=None if held is None else math.hypot(held.loss_error, train.loss_error),
        state=state,
        constant=constant,
        knows_more=knows_more,
        **run,
        outcome=Outcome.ESTIMATED,
        seed=seed,
        cost=Cost(seconds=time.perf_counter() - began, route="losses of groups, and a short run on a copy"),
    )


@checked(
    loss=finite,
    trivial=optional(finite),
    margin_error=an_error,
    slope=optional(a_number),
    slope_error=optional(an_error),
    losses=series,
)
def judge_state(
    loss: float,
    trivial: float | None,
    margin_error: float,
    slope: float | None,
    slope_error: float | None,
    *,
    losses: tuple[float, ...] = (),
    knows_more: bool | None = None,
) -> State:
    """What the numbers say, by explicit rules.

    It diverges where the run blows up or loses what was known. Below the constant prediction it has learned, and is learning
    where the loss still falls. At or above it, it is learning where the run makes the outputs fit their own targets better
    (`knows_more`), not only all targets alike, and the loss does not rise; many a network stays on a plateau at first. Where that
    is not known, it is learning where the loss falls fast enough to get below.

    >>> judge_state(0.4, 2.3, 0.01, -0.01, 0.001), judge_state(2.3, 2.3, 0.01, 0.0, 0.001)
    ('learning', 'not learning')
    """
    steps = len(losses)
    end = loss if slope is None else loss + slope * steps
    if steps and (not math.isfinite(losses[-1]) or not math.isfinite(end)):
        return "diverges"
    falling = _falls(loss, slope, slope_error)
    rises = slope is not None and slope > SIGMAS * (slope_error or 0.0)
    if rises and end > LOST * max(abs(loss), abs(trivial or 0.0)):
        return "diverges"
    if trivial is None:
        return "learning" if falling else "unknown"
    if is_below(loss, trivial, margin_error):
        return "learning" if falling and loss > DONE * abs(trivial) else "learned"
    if slope is None:
        return "unknown"
    better = falling and _gets_below(loss, trivial, slope, steps) if knows_more is None else knows_more and not rises
    return "learning" if better else "not learning"


def _gets_below(loss: float, trivial: float, slope: float, steps: int) -> bool:
    """Whether a loss at this slope gets below the constant prediction's in a reasonable time."""
    return loss + PATIENCE * max(1, steps) * slope < trivial


def is_below(loss: float, trivial: float | None, error: float) -> bool:
    """Whether a loss is below that of the constant prediction by more than its error and more than next to nothing."""
    return trivial is not None and trivial - loss > max(SIGMAS * error, BELOW * abs(trivial))


@dataclass(frozen=True)
class _Measured:
    """One data set: loss, constant prediction, accuracy."""

    loss: float
    loss_error: float
    trivial: float | None
    trivial_name: str
    margin_error: float
    accuracy: float | None
    constant: bool
    shares: Tensor
    advantage: Tensor  # by group: what the loss rises by where targets are exchanged between samples

    @property
    def below(self) -> bool:
        return is_below(self.loss, self.trivial, self.margin_error)


def _knows_more(before: _Measured, after: _Measured) -> bool | None:
    """Whether outputs fit their own targets better than before, compared with those of other samples."""
    grown = after.advantage - before.advantage
    if len(grown) < 2 or not bool(torch.isfinite(grown).all()):
        return None
    return float(before.shares @ grown) > SURE * jackknife(before.shares, grown)


def _measured(problem: Problem, seed: int) -> _Measured:
    """One pass over groups of samples."""
    parts = random_parts(problem, GROUPS, seed)
    columns: list[tuple[float, ...]] = []
    constants: list[list[float]] = []
    right = counted = 0
    kind: LossKind | None = None
    trivial: Trivial | None = None
    outputs: list[Tensor] = []
    summed = parts.weighting.rule == "sum"
    with parts.session(second=False):
        tensors = parts.tensors(parts.leaves(grad=False))
        for i, share, batch in parts.iterate():
            found = parts.evaluate(tensors, batch, i)
            if not columns:
                kind = loss_kind(parts, found, batch)
                trivial = None if kind is None else trivial_prediction(parts, kind, found)
            fraction = batch.size / parts.samples if summed else share
            scale = 1.0 / fraction if summed else 1.0  # a sum over a part, as the whole would have it
            loss, exchanged = float(found.loss.detach()), _exchanged_loss(parts, kind, found.output, batch)
            constants.append([scale * value for value in _constant_losses(parts, trivial, found.output, batch)])
            columns.append((fraction, scale * loss, scale * (exchanged - loss)))
            bits = right_answers(
                found.output.detach(), batch.target, parts.loss_function, shift=0 if kind is None else kind.shift
            )
            right, counted = (right, counted) if bits is None else (right + int(bits.sum()), counted + bits.numel())
            outputs.append(_some_values(found.output))
    shares, losses, advantage = torch.tensor(columns, dtype=torch.float64).T
    shares = shares / shares.sum()
    constant = _best_constant(trivial, torch.tensor(constants, dtype=torch.float64), shares)
    return _Measured(
        loss=float(shares @ losses),
        loss_error=jackknife(shares, losses),
        trivial=None if constant is None else float(shares @ constant),
        trivial_name="" if trivial is None or constant is None else trivial.name,
        margin_error=math.inf if constant is None else jackknife(shares, constant - losses),
        accuracy=right / counted if counted else None,
        constant=_same_for_all(outputs),
        shares=shares,
        advantage=advantage,
    )


def _exchanged_loss(problem: Problem, kind: LossKind | None, output: Tensor, batch: Batch) -> float:
    """The loss where each sample has the target of another."""
    target = batch.target
    if kind is None or problem.loss_function is None or batch.size < 2 or target.ndim == 0 or len(target) != batch.size:
        return math.nan
    return float(problem.loss_function(output.detach(), target.roll(1, 0)).detach())


def _constant_losses(problem: Problem, trivial: Trivial | None, output: Tensor, batch: Batch) -> list[float]:
    """The losses of the constant predictions that could be the best, on a part."""
    if trivial is None:
        return []
    assert problem.loss_function is not None or not trivial.outputs
    loss: Any = problem.loss_function
    return [float(loss(make(output.detach()), batch.target).detach()) for make in trivial.outputs]


def _best_constant(trivial: Trivial | None, losses: Tensor, shares: Tensor) -> Tensor | None:
    """By group, the loss of the constant prediction that is best on all of them."""
    if trivial is None:
        return None
    if trivial.loss is not None:
        return torch.full_like(shares, trivial.loss)
    best = losses[:, (shares @ losses).argmin()]
    return best if bool(torch.isfinite(best).all()) else None


def _some_values(output: Tensor) -> Tensor:
    """A few outputs of a few samples, (samples, values)."""
    return output.detach()[:32].reshape(min(32, len(output)), -1)[:, :256] if output.ndim else output.detach().reshape(1, 1)


def _same_for_all(outputs: list[Tensor]) -> bool:
    """Whether outputs are the same for all samples, where there are several of one shape."""
    if len({o.shape[1] for o in outputs}) != 1 or sum(map(len, outputs)) < 2:
        return False
    every = torch.cat(outputs).double()
    return bool((every - every[0]).abs().max() <= CONSTANT * every.abs().max().clamp_min(1e-30))


def jackknife(shares: Tensor, values: Tensor) -> float:
    """Standard error of a weighted mean over groups, each left out in turn; infinite for a single one.

    >>> jackknife(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 3.0]))       # two groups that differ by 2: ± 1
    1.0
    """
    if len(values) < 2:
        return math.inf
    left_out = (float(shares @ values) - shares * values) / (1.0 - shares)
    return math.sqrt((len(values) - 1) * float((left_out - left_out.mean()).square().mean()))


def _short_run(
    problem: Problem, lr: float, optimizer: Optimizer | None, width: int, steps: int, seed: int
) -> tuple[dict[str, Any], Problem | None]:
    """The trend of a run on a copy, from the same batches with training and without; and the copy where it ended."""
    whole = in_one_batch(problem)
    still = _without_training(copied_setup(whole, lr, optimizer, width), steps, seed)
    setup = copied_setup(whole, lr, optimizer, width)
    losses = run_steps(setup, steps, seed=seed)
    found: dict[str, Any] = {"losses": tuple(losses), "still": tuple(still), "steps": len(losses), "batch_size": width}
    if not math.isfinite(losses[-1]):
        return found, None
    slope, error = trend([a - b for a, b in zip(losses, still, strict=True)])
    rounding = 1e-6 * max(map(abs, still)) / len(still)  # of a float32 loss
    return {**found, "slope": slope, "slope_error": max(error, rounding)}, problem.with_model(setup.model)


def trend(changes: list[float]) -> tuple[float, float]:
    """Change per step and its error, from the second half of the changes since the start.

    >>> trend([0.0, -1.0, -2.0, -3.0])[0]
    -1.0
    """
    half = len(changes) // 2
    last = torch.tensor(changes[half:], dtype=torch.float64)
    steps = torch.arange(half, len(changes), dtype=torch.float64).mean().clamp_min(1.0)
    error = float(last.std() / math.sqrt(len(last))) if len(last) > 1 else math.inf
    return float(last.mean() / steps), float(error / steps)


def _without_training(setup: Setup, steps: int, seed: int) -> list[float]:
    """The losses of the same batches, with the same dropout, of the weights as they stand."""
    with in_training(setup.problem, seed):
        batches = random_batches(setup.problem, setup.batch_size, steps, seed)
        return [float(setup.problem.live_loss(batch).detach()) for batch in batches]
