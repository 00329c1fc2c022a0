"""Advice is tried before it is given: short trainings of copies, as they are and with one change.

All runs of a comparison see the same batches in the same order, start from the same weights and are scored by the same loss, so
that what differs in the end is the change.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice, repeat

import torch
from torch import nn
from torch.optim import Optimizer

from theodolite.arguments import a_mapping, checked, count, instance, optional, positive, seed
from theodolite.errors import NonFiniteError
from theodolite.interrupts import unbroken_context
from theodolite.measures.dynamics.noise import joined_parts
from theodolite.measures.dynamics.optimizers import BLOWN_UP, copy_optimizer, first_rate, set_rate
from theodolite.measures.kernel.problem_views import reset_of
from theodolite.problem import Batch, Problem
from theodolite.problem.arguments import a_module, a_problem, an_optimizer
from theodolite.problem.calling.stand_ins import users_own
from theodolite.problem.state_guard import cuda_devices, gradients_kept, loss_kept, own_random_state
from theodolite.results import Cost, Outcome, Result, Row

#: Size of random batches where the data comes as one batch and nothing else is said.
USUAL_BATCH = 32
#: Places at which runs of different seeds begin in data that is read one batch after the other.
ORDERS = 4
#: Steps below which a trial says nothing.
FEWEST = 8
#: A change is better where it ends lower by these shares of the loss as it is and of the loss at the start. New weights may
#: start anywhere: that says nothing about what a little is.
BETTER, BETTER_THAN_START = 0.05, 0.01

Score = Callable[[nn.Module], float]


@dataclass
class Setup:
    """A training of a copy, before its first step: everything in it may be changed, and nothing of it is the user's.

    `problem` has the copied model, the loss and the data; `optimizer` moves the parameters of that copy; random batches of
    `batch_size` are drawn; the learning rate rises linearly over the first `warmup` steps and falls linearly towards zero over
    the last `cooldown`; `clip` is a largest gradient norm.
    """

    problem: Problem
    optimizer: Optimizer
    batch_size: int
    warmup: int = 0
    clip: float | None = None
    cooldown: int = 0

    @property
    def model(self) -> nn.Module:
        return self.problem.model

    @property
    def lr(self) -> float:
        return first_rate(self.optimizer)

    @checked(lr=positive)
    def set_lr(self, lr: float) -> None:
        """Another learning rate for the first group that moves; the others keep their ratio to it."""
        set_rate(self.optimizer, lr)


@dataclass(frozen=True)
class Remedy:
    """A piece of advice, and what it means for a training.

    `advice` is a clause to act on ("standardise the inputs", "re-initialise layer 3"). `change` does it to a `Setup`; None where
    it cannot be tried, for the reason `why_not`. `fresh`: both runs start from new weights, where the change only makes sense
    from the beginning. `score` judges the trained model; None is the loss of the problem. `lr` is the learning rate that the
    advice names, if it names one. `tried` is what became of it where the measurement has tried it already: steps, and the losses
    at the start, as it is (`own`) and `changed`.
    """

    advice: str
    change: Callable[[Setup], None] | None = None
    fresh: bool = False
    score: Score | None = None
    why_not: str = ""
    lr: float | None = None
    tried: Row | None = None


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class TrialRuns(Result):
    """What became of each change.

    `trials` has a row for each: cause, advice, steps, the score at the `start`, after training as it is (`own`) and with the
    change (`changed`), whether that is `better`, and why it was `not_tried`. `curves` holds the losses of the batches, by run.
    """

    trials: tuple[Row, ...]
    curves: tuple[Row, ...] = ()

    def of(self, cause: str) -> Row | None:
        """The trial of one cause."""
        return next((row for row in self.trials if row["cause"] == cause), None)

    def rows(self) -> list[Row]:
        return [dict(row) for row in self.trials]

    def sentence(self) -> str:
        if not self.trials:
            return "Nothing was tried."
        return " ".join(f"{row['advice'][0].upper()}{row['advice'][1:]}: {outcome_of(row)}." for row in self.trials)


@checked(trial=a_mapping)
def outcome_of(trial: Row) -> str:
    """What became of a change, as a sentence tells it.

    >>> outcome_of({"not_tried": "", "start": 2.3, "own": 2.3, "changed": 1.71, "steps": 60})
    'loss 2.3 → 1.71 in 60 steps (as it is: 2.3)'
    """
    if trial["not_tried"]:
        return f"not tried ({trial['not_tried']})"
    start, own, changed = (_shown(trial[name]) for name in ("start", "own", "changed"))
    return f"loss {start} → {changed} in {trial['steps']} steps (as it is: {own})"


def _shown(loss: float) -> str:
    return f"{loss:.3g}" if math.isfinite(loss) else "not finite"


@checked(
    problem=a_problem,
    remedies=a_mapping,
    lr=positive,
    optimizer=an_optimizer,
    steps=count,
    batch_size=count,
    score_on=a_problem,
    seconds=positive,
    seed=seed,
)
def try_changes(
    problem: Problem,
    remedies: Mapping[str, Remedy],
    *,
    lr: float,
    optimizer: Optimizer | None = None,
    steps: int = 60,
    batch_size: int | None = None,
    score_on: Problem | None = None,
    seconds: float | None = None,
    seed: int = 0,
) -> TrialRuns:
    """Train copies for some steps as they are and with each change, and compare their losses.

    Args:
        remedies: by cause.
        lr, optimizer: what the user trains with; the optimizer is copied with its state, plain descent where there is none.
        batch_size: of random batches; None is that of the problem's batches, or 32 where the data is one batch.
        score_on: the problem by whose loss runs are compared, by default the one that trains, in eval mode.
        seconds: about as long as it all may take; steps are fewer then, the same for all.
    """
    began = time.perf_counter()
    width = usual_batch_size(problem) if batch_size is None else batch_size
    arms = _Arms(problem, lr, optimizer, width, score_on or problem, seed)
    rows: list[Row] = []
    share = None if seconds is None else seconds / max(1, sum(r.change is not None for r in remedies.values()) + 1)
    for cause, remedy in remedies.items():
        row: Row = {"cause": cause, "advice": remedy.advice, "lr": remedy.lr, "steps": 0, "start": math.nan, "own": math.nan}
        row |= {"changed": math.nan, "better": False, "not_tried": remedy.why_not}
        if remedy.tried is not None:
            ends = (remedy.tried[name] for name in ("start", "own", "changed"))
            rows.append({**row, **remedy.tried, "better": _better(*ends)})
            continue
        if remedy.change is None:
            rows.append({**row, "not_tried": remedy.why_not or "it cannot be done to a copy"})
            continue
        try:
            rows.append({**row, **arms.compare(cause, remedy, steps, share)})
        except Exception as error:  # a remedy that cannot be applied here is no reason to lose the others
            rows.append({**row, "not_tried": f"{type(error).__name__}: {error}"})
    return TrialRuns(
        trials=tuple(rows),
        curves=tuple(arms.curves),
        outcome=Outcome.FINISHED,
        seed=seed,
        cost=Cost(time.perf_counter() - began, "short trainings of copies", 0, problem.notes),
    )


@checked(problem=a_problem)
def usual_batch_size(problem: Problem) -> int:
    """The size of the problem's own batches; where it has one only, that of usual random ones."""
    sizes = sorted(problem.data.sizes)
    if len(sizes) > 1:
        return sizes[len(sizes) // 2]
    return min(USUAL_BATCH, max(1, sizes[0] // 2))


class _Arms:
    """Runs from the same start on the same batches; that of the training as it is is made once."""

    def __init__(
        self, problem: Problem, lr: float, optimizer: Optimizer | None, batch_size: int, score_on: Problem, seed: int
    ) -> None:
        self.problem, self.lr, self.optimizer, self.batch_size = in_one_batch(problem), lr, optimizer, batch_size
        self.score_on, self.seed = score_on, seed
        self.curves: list[Row] = []
        self._own: dict[tuple[bool, Score | None], tuple[float, float]] = {}
        self._steps: int | None = None

    def compare(self, cause: str, remedy: Remedy, steps: int, seconds: float | None) -> Row:
        score = remedy.score or self._loss
        key = (remedy.fresh, remedy.score)
        if key not in self._own:
            self._own[key] = self._own_run(remedy, score, steps, seconds)
        start, own = self._own[key]
        assert self._steps is not None
        setup = self._setup(fresh=remedy.fresh)
        assert remedy.change is not None
        with own_random_state(self.seed, cuda_devices(setup.model)):
            remedy.change(setup)
        changed = self._ended(setup, self._steps, remedy.advice, score)
        return {
            "start": start,
            "own": own,
            "changed": changed,
            "steps": self._steps,
            "better": _better(0.0 if remedy.fresh else start, own, changed),
        }

    def _own_run(self, remedy: Remedy, score: Score, steps: int, seconds: float | None) -> tuple[float, float]:
        setup = self._setup(fresh=remedy.fresh)
        start = score(setup.model)
        name = "as it is, from new weights" if remedy.fresh else "as it is"
        if self._steps is None and seconds is not None:
            self._steps = self._affordable(setup, steps, seconds)
            setup = self._setup(fresh=remedy.fresh)
        self._steps = self._steps or steps
        return start, self._ended(setup, self._steps, name, score)

    def _affordable(self, setup: Setup, steps: int, seconds: float) -> int:
        """As many steps as fit, from the time that a few take."""
        began = time.perf_counter()
        run_steps(setup, 3, seed=self.seed)
        return max(FEWEST, min(steps, int(3 * seconds / (time.perf_counter() - began))))

    def _setup(self, *, fresh: bool) -> Setup:
        return copied_setup(self.problem, self.lr, self.optimizer, self.batch_size, fresh=fresh, seed=self.seed)

    def _ended(self, setup: Setup, steps: int, name: str, score: Score) -> float:
        losses = run_steps(setup, steps, seed=self.seed)
        self.curves += [{"run": name, "step": i, "loss": loss} for i, loss in enumerate(losses)]
        return score(setup.model) if math.isfinite(losses[-1]) else math.inf

    def _loss(self, model: nn.Module) -> float:
        return loss_of(model, self.score_on)


@checked(model=a_module, problem=a_problem)
def loss_of(model: nn.Module, problem: Problem) -> float:
    """The loss of another model on the data of a problem, infinite where it is not finite."""
    try:
        return problem.with_model(model).loss()
    except NonFiniteError:
        return math.inf


@checked(problem=a_problem, lr=positive, optimizer=optional(an_optimizer), batch_size=count, seed=seed)
def copied_setup(
    problem: Problem, lr: float, optimizer: Optimizer | None, batch_size: int, *, fresh: bool = False, seed: int = 0
) -> Setup:
    """A training of a copy as the user's stands, the optimizer with its state at the rate `lr`; `fresh`: from new weights."""
    trial = problem.copied_to_train()
    copied = copy_optimizer(optimizer, problem, trial, lr)
    if fresh:
        start_anew(trial.model, seed)
        copied.state.clear()
    return Setup(trial, copied, batch_size)


def _better(start: float, own: float, changed: float) -> bool:
    if not math.isfinite(changed):
        return False
    return not math.isfinite(own) or own - changed > max(BETTER * abs(own), BETTER_THAN_START * abs(start))


@checked(setup=instance(Setup), steps=count, seed=seed)
def run_steps(setup: Setup, steps: int, *, seed: int = 0) -> list[float]:
    """The losses of the batches of so many training steps; the last is not finite where the run blew up, and ends there."""
    optimizer = setup.optimizer
    targets = [float(group["lr"]) for group in optimizer.param_groups]
    losses: list[float] = []
    with in_training(setup.problem, seed):
        for step, batch in enumerate(random_batches(setup.problem, setup.batch_size, steps, seed)):
            ramp = min(1.0, (step + 1) / setup.warmup) if setup.warmup else 1.0
            ramp *= min(1.0, (steps - step) / setup.cooldown) if setup.cooldown else 1.0
            for group, lr in zip(optimizer.param_groups, targets, strict=True):
                group["lr"] = lr * ramp
            optimizer.zero_grad()
            loss = setup.problem.live_loss(batch)
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]) or abs(losses[-1]) > BLOWN_UP * max(abs(losses[0]), 1e-30):
                return [*losses[:-1], math.inf]
            loss.backward()
            if setup.clip is not None:
                nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], setup.clip)
            optimizer.step()
    return losses


@checked(problem=a_problem)
def in_one_batch(problem: Problem) -> Problem:
    """The problem with its samples joined, for many runs that draw from them; as it is where they are not held or do not fit."""
    joined = joined_parts(list(problem.data)) if problem.data.held else []
    with suppress(ValueError):  # weights that were given batch by batch
        return problem.with_batches(joined) if len(joined) == 1 < len(problem.data) else problem
    return problem


@checked(problem=a_problem, batch_size=count, steps=count, seed=seed)
def random_batches(problem: Problem, batch_size: int, steps: int, seed: int = 0) -> Iterator[Batch]:
    """So many random batches, epoch by epoch; where samples cannot be joined, the problem's own in random order.

    Data that is read anew each time gives its batches one after the other; another seed begins at another place.
    """
    if not problem.data.held:
        skipped = seed % ORDERS * steps % len(problem.data)
        yield from islice(chain.from_iterable(repeat(problem.data)), skipped, skipped + steps)
        return
    batches = list(problem.data)
    joined = joined_parts(batches)
    generator = torch.Generator().manual_seed(seed)
    drawn = 0
    while drawn < steps:
        if len(joined) == 1:
            whole = joined[0]
            order = torch.randperm(whole.size, generator=generator)
            width = min(batch_size, whole.size)
            parts = [order[i : i + width] for i in range(0, whole.size - width + 1, width)]
            epoch = [whole.part(rows) for rows in parts[: steps - drawn]]
        else:
            epoch = [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()][: steps - drawn]
        yield from epoch
        drawn += len(epoch)


@checked(problem=a_problem, seed=seed)
@unbroken_context
def in_training(problem: Problem, seed: int) -> Iterator[None]:
    """Train mode, gradients, and a random state of its own; what is the user's is given back: not the model, which is a copy."""
    model, loss = problem.model, users_own(problem.loss_function)
    with own_random_state(seed, cuda_devices(model)), loss_kept(loss), gradients_kept(loss), torch.enable_grad():
        model.train()
        yield
    model.eval()


@checked(model=a_module)
def cannot_restart(model: nn.Module) -> str:
    """Why the layers of a model cannot draw new weights; empty where they can."""
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None and reset_of(module) is None:
            return f"{name or type(module).__name__} has no reset_parameters"
    return ""


@checked(model=a_module, seed=seed)
def start_anew(model: nn.Module, seed: int) -> None:
    """New weights for every layer, from its own initialisation; those of embeddings no larger than they are now.

    By default an embedding has weights of size one, and hardly a language model leaves them so.
    """
    why = cannot_restart(model)
    if why:
        raise ValueError(f"The model cannot start from new weights: {why}.")
    with own_random_state(seed, cuda_devices(model)), torch.no_grad():
        for module in reversed(list(model.modules())):  # inner ones first: an outer one may know better
            reset = reset_of(module)
            table = module.weight if isinstance(module, nn.Embedding) and module.weight.numel() > 1 else None
            before = 0.0 if table is None else float(table.std())
            if reset is not None:
                reset()
            if table is not None and math.isfinite(before) and before > 0:
                table.mul_(min(1.0, before / float(table.std())))
