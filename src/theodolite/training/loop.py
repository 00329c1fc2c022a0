"""`train`: one model, any torch optimizer, a trace of every step; a killed run goes on where it was."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from os import PathLike
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from theodolite.arguments import a_mapping, a_path, a_text, checked, count, finite, given, nonnegative, positive, whole
from theodolite.arguments import seed as a_seed
from theodolite.errors import ArgumentError
from theodolite.interrupts import unbroken_context
from theodolite.problem import Batch, Problem
from theodolite.problem.arguments import a_loss, a_model, a_plain_function
from theodolite.problem.batches import BatchParser
from theodolite.problem.calling import Loss, ModelCall, unwrap
from theodolite.problem.optimizers import as_optimizer, needs_closure
from theodolite.problem.state_guard import cuda_devices, modes_kept, own_random_state, random_states_kept
from theodolite.progress import counting
from theodolite.results import Cost, Outcome
from theodolite.training.interruption import NAME, deferred_interrupt, load_state, save_state
from theodolite.training.schedules import Feed, Schedule, as_schedule, as_steps, check_length
from theodolite.training.trace import Trace

Observer = Callable[[int, nn.Module, Batch, Optimizer], None]
OptimizerFactory = Callable[[Any], Optimizer]

#: Entries of parameter groups that change no step, or that have a check of their own.
_NO_SETTINGS = {"params", "param_names", "initial_lr", "foreach", "fused", "capturable", "differentiable"}
_REMEDY = (
    "Give the same to go on with that run. To train on from its weights otherwise, load them into the model "
    "and give another folder."
)


@checked(
    model=a_model,
    loss=a_loss,
    steps=count,
    epochs=count,
    batch_size=count,
    until=finite,
    clip=positive,
    measure=a_mapping,
    every=given,
    first=whole,
    observe=a_plain_function,
    checkpoint=a_path,
    checkpoint_every=count,
    target=a_text,
    seed=a_seed,
)
def train(
    model: nn.Module,
    loss: Loss,
    data: Any,
    optimizer: Optimizer | OptimizerFactory | str,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    shuffle: bool = True,
    schedule: Schedule | Mapping[int, float] | float | LRScheduler | None = None,
    until: float | None = None,
    clip: float | None = None,
    measure: Mapping[str, Callable[[nn.Module], float]] | None = None,
    every: int | Sequence[int] = 1,
    first: int = 0,
    observe: Observer | None = None,
    evaluate: bool = False,
    checkpoint: str | PathLike[str] | None = None,
    checkpoint_every: int = 100,
    resume: bool = False,
    target: str = "labels",
    seed: int = 0,
    progress: bool | None = None,
) -> Trace:
    """Train `model` in place and return the `Trace` of the run.

    Args:
        loss: `(output, target) -> scalar`, or None for models that return their own `.loss`.
        data: `(inputs, targets)` with `batch_size` (None: the whole data in every step), a list of batches or a DataLoader.
        optimizer: a torch optimizer, a function of the parameters that makes one, or, with a `schedule`, a name such as "sgd".
        steps, epochs: how long; give one of them. With `resume` they count from the very start.
        schedule: learning rate as a function of the step, a table `{first step: rate}`, a number, or a torch scheduler, which is
            stepped after every optimizer step. With several parameter groups the others keep their ratio to the first.
        until: stop once the loss of a batch is at most this.
        clip: largest norm of the gradient.
        measure, every: columns of the trace by name, each a function of the model, taken every so many steps, or at the steps
            listed, before the step; a list may end with the step after the last one.
        first: the number of the first step: a run that continues an earlier one has its schedule and its order of the data from
            there, as if so many steps had been taken. A torch scheduler has a place of its own; a loader that shuffles does so
            anew by `seed`. Steps in `every`, in `observe` and in the trace are numbered from here.
        observe: called as `observe(step, model, batch, optimizer)` after backward and before the optimizer's step.
        evaluate: also compute the loss on the whole data after the last step.
        checkpoint, checkpoint_every, resume: folder for the state of the run, how often it is saved, and whether to go on from
            it. Ctrl-C saves too, after the step under way. A resumed run takes the same steps as an undisturbed one; what came
            after the last save is done anew. Raises where the folder holds a run and `resume` is False, and where the data, the
            batch size, the learning rate or other settings are not those that the run began with.
        seed: of the order of the data and of the model's own randomness, by torch's generator (randomness that comes from NumPy
            or Python is not followed by a resume); the caller's random state is left alone.

    Returns:
        The `Trace`: a row for each step that was recorded, and how the run ended.

    >>> model = nn.Linear(1, 1, bias=False).double()
    >>> _ = nn.init.constant_(model.weight, 1.0)
    >>> x = torch.ones(1, 1).double()
    >>> trace = train(model, nn.MSELoss(), (x, 0 * x), torch.optim.SGD(model.parameters(), lr=0.25), steps=3)
    >>> trace.loss                                     # w halves in every step
    (1.0, 0.25, 0.0625)
    """
    check_length(steps, epochs)
    due = as_steps("every", every, steps, first)
    feed = Feed(data, BatchParser.of(unwrap(model), loss, target), batch_size=batch_size, shuffle=shuffle, seed=seed)
    optimizer = _own_optimizer(optimizer, model, schedule)
    run = _Run(model, ModelCall(model, loss), optimizer, schedule, until, clip, dict(measure or {}), due, observe, feed.generator)
    run.first, (run.epoch, run.place) = first, feed.place_of(first)
    last = None if epochs is None else run.epoch + epochs
    folder = None if checkpoint is None else Path(checkpoint)
    if folder is not None:
        if not resume:
            _refuse_existing(folder)
        run.settings = {"seed": seed, "clip": clip, **feed.identity(), **_optimizer_settings(optimizer, schedule)}
        if first:
            run.settings["first"] = first
    began = time.perf_counter()
    with _training(model, seed + first if seed + first < 2**63 else first):  # a later part of a run draws other dropout
        if folder is not None and resume:
            run.restore(load_state(folder), folder)
        with counting("training", progress=progress, total=steps) as count:
            if folder is None:
                for _ in run.steps(feed, steps, last):
                    count(1)
            else:
                _with_checkpoints(run, run.steps(feed, steps, last), folder, checkpoint_every, count)
        ends = run.measured_at_the_end(every)
    final = Problem(model, loss, data, target=target, check=False).loss() if evaluate and not run.diverged else None
    return run.trace(seed, final, ends, time.perf_counter() - began)


def _own_optimizer(optimizer: Any, model: nn.Module, schedule: Any) -> Optimizer:
    """The optimizer of the run; one without a learning rate of its own gets those of the schedule, step by step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    first = schedule if isinstance(schedule, int | float) else None if schedule is None else 1.0
    found = as_optimizer(optimizer, trained, lr=first, needs_rate=True, rate="schedule=0.1")
    if found is None:
        raise ArgumentError("optimizer is missing: give a torch optimizer such as torch.optim.SGD(model.parameters(), lr=0.1).")
    return found


class _Run:
    """The state of a run: where it is, and what it saw."""

    def __init__(
        self,
        model: nn.Module,
        call: ModelCall,
        optimizer: Optimizer,
        schedule: Any,
        until: float | None,
        clip: float | None,
        measure: dict[str, Callable[[nn.Module], float]],
        due: Callable[[int], bool],
        observe: Observer | None,
        generator: torch.Generator | None,
    ) -> None:
        self.model, self.call, self.optimizer = model, call, optimizer
        self.scheduler = _own_scheduler(schedule, optimizer)
        self.schedule = None if self.scheduler else as_schedule(schedule)
        self.until, self.clip, self.measure, self.due, self.observe = until, clip, measure, due, observe
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.needs_closure = needs_closure(optimizer)
        # A schedule sets the rate of the first group; the others keep their ratio to it.
        first = float(optimizer.param_groups[0]["lr"]) if "lr" in optimizer.param_groups[0] else 1.0
        self.shares = [float(group.get("lr", 1.0)) / first if first else 1.0 for group in optimizer.param_groups]
        self.device = self.parameters[0].device
        self.step = self.epoch = self.place = self.first = 0
        self.random = RandomState(generator)
        self.epoch_random = self.random.state()
        self.columns: dict[str, list[Any]] = {"loss": [], "rate": [], "epoch": []}
        self.measured: dict[str, list[float | None]] = {name: [] for name in measure}
        self.stopped = "all steps were taken"
        self.ended = False
        self.settings: dict[str, Any] = {}  # what a run that goes on must have in common with this one
        own = {id(p) for owner in (model, call.loss) if isinstance(owner, nn.Module) for p in owner.parameters()}
        self.foreign = [p for p in self.parameters if id(p) not in own]

    @property
    def diverged(self) -> bool:
        return bool(self.columns["loss"]) and not math.isfinite(self.columns["loss"][-1])

    def steps(self, feed: Feed, steps: int | None, epochs: int | None) -> Iterator[None]:
        """Take the steps that remain, yielding after each."""
        # Nothing is drawn from a loader beyond the last step: its random state must stand where the run stops.
        while not self._over(steps) and (epochs is None or self.epoch < epochs):
            for batch in self._rest_of_epoch(feed):
                self._take(batch)
                self.place += 1
                yield
                if self._over(steps):
                    return
            if self.place == 0:
                raise ValueError("data holds no batches.")
            self.epoch, self.place = self.epoch + 1, 0

    def _over(self, steps: int | None) -> bool:
        return self.ended or (steps is not None and self.step >= steps)

    def _rest_of_epoch(self, feed: Feed) -> Iterator[Batch]:
        """The batches from `place` on; a loader's order follows from the random state at the start of its epoch."""
        now = self.random.state()
        if self.place == 0:
            self.epoch_random = now
        self.random.restore(self.epoch_random)
        batches = feed.epoch(self.epoch)
        for _ in range(self.place):
            next(batches, None)
        if self.place:
            self.random.restore(now)
        yield from batches

    def _take(self, batch: Batch) -> None:
        if self.device.type != "cpu":
            batch = batch.to(self.device, None)
        if self.schedule is not None:
            at = self.first + self.step
            rate = nonnegative(f"what schedule gives for step {at}", self.schedule(at))
            for group, share in zip(self.optimizer.param_groups, self.shares, strict=True):
                group["lr"] = rate * share
        self._measure()
        self.columns["rate"].append(float(self.optimizer.param_groups[0]["lr"]))
        self.columns["epoch"].append(self.epoch)
        first: list[float] = []

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            value = self.call({}, batch, self.place).loss
            first.append(float(value.detach()))
            if math.isfinite(first[0]):
                value.backward()
                if self.foreign:
                    _refuse_unreached(self.foreign, len(self.parameters))
                    self.foreign = []
                if self.clip is not None:
                    nn.utils.clip_grad_norm_(self.parameters, self.clip)
                if self.observe is not None and len(first) == 1:
                    self.observe(self.first + self.step, self.model, batch, self.optimizer)
            return value

        if self.needs_closure:
            self.optimizer.step(closure)  # type: ignore[arg-type]
        else:
            closure()
            if math.isfinite(first[0]):
                self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self._note(first[0])

    def _measure(self) -> None:
        """Measuring must not change the run: the random state is given back."""
        due = self.due(self.first + self.step)
        with random_states_kept(cuda_devices(self.model)) if due and self.measured else nullcontext():
            for name, column in self.measured.items():
                column.append(float(self.measure[name](self.model)) if due else None)

    def measured_at_the_end(self, every: int | Sequence[int]) -> dict[str, float]:
        """The columns after the last step, where a list of steps names it."""
        if isinstance(every, int) or not self.measured or not self.due(self.first + self.step) or self.ended:
            return {}
        with random_states_kept(cuda_devices(self.model)):
            return {name: float(self.measure[name](self.model)) for name in self.measured}

    def _note(self, loss: float) -> None:
        self.columns["loss"].append(loss)
        self.step += 1
        if not math.isfinite(loss):
            self.ended, self.stopped = True, "the loss became NaN or infinite"
        elif self.until is not None and loss <= self.until:
            self.ended, self.stopped = True, f"the loss fell to {self.until:g}"

    def state(self) -> dict[str, Any]:
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": _plain_scheduler(self.scheduler),
            "place": [self.step, self.epoch, self.place],
            "random": [self.random.state(), self.epoch_random],
            "columns": {name: torch.tensor(column, dtype=torch.float64) for name, column in self.columns.items()},
            "measured": {name: _with_gaps(column) for name, column in self.measured.items()},
            "ended": [self.ended, self.stopped],
            "settings": self.settings,
        }

    def restore(self, state: dict[str, Any] | None, folder: Path) -> None:
        """Go on from a saved state; nothing happens if there is none."""
        if state is None:
            return
        # Those of earlier versions say no more than the seed.
        saved = {"columns": sorted(state["measured"]), **state.get("settings", {"seed": state.get("seed")})}
        here = {"columns": sorted(self.measured), **self.settings}
        _check_optimizer(self.optimizer, state["optimizer"])
        _check_same_settings(folder, saved, here)
        _check_same_rates(folder, self.schedule, state["columns"]["rate"].tolist(), self.first)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.step, self.epoch, self.place = state["place"]
        random, self.epoch_random = state["random"]
        self.random.restore(random)
        self.columns = {name: column.tolist() for name, column in state["columns"].items()}
        self.columns["epoch"] = [int(epoch) for epoch in self.columns["epoch"]]
        self.measured = {name: _without_gaps(*column) for name, column in state["measured"].items()}
        self.ended, self.stopped = state["ended"]

    def trace(self, seed: int, final: float | None, ends: dict[str, float], seconds: float) -> Trace:
        columns: dict[str, Any] = {name: tuple(column) for name, column in self.columns.items()}
        return Trace(
            **columns,
            measured={name: (*column, ends[name]) if ends else tuple(column) for name, column in self.measured.items()},
            first=self.first,
            final_loss=final,
            stopped=self.stopped,
            outcome=Outcome.DIVERGED if self.diverged else Outcome.FINISHED,
            seed=seed,
            cost=Cost(seconds=seconds, route=type(self.optimizer).__name__),
        )


def _with_checkpoints(run: _Run, steps: Iterator[None], folder: Path, every: int, count: Callable[[int], None]) -> None:
    """Take the steps and save the state every so many, at the end, and on Ctrl-C."""
    with deferred_interrupt() as interrupted:
        for _ in steps:
            count(1)
            if interrupted():
                save_state(folder, run.state())
                raise KeyboardInterrupt
            if run.step % every == 0:
                save_state(folder, run.state())
        save_state(folder, run.state())


@unbroken_context
def _training(model: nn.Module, seed: int) -> Iterator[None]:
    """Train mode and a random state of its own; both are given back."""
    with own_random_state(seed, cuda_devices(model)), torch.inference_mode(False), torch.enable_grad(), modes_kept(model):
        model.train()
        yield


class RandomState:
    """torch's random state, and that of a loader's own generator."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator

    def state(self) -> list[Tensor | None]:
        return [torch.get_rng_state(), None if self.generator is None else self.generator.get_state()]

    def restore(self, state: list[Tensor | None]) -> None:
        own, loader = state
        assert own is not None
        torch.set_rng_state(own)
        if self.generator is not None and loader is not None:
            self.generator.set_state(loader)


def _with_gaps(column: list[float | None]) -> list[Tensor]:
    """Values, and where there are any."""
    present = torch.tensor([value is not None for value in column], dtype=torch.bool)
    return [torch.tensor([0.0 if value is None else value for value in column], dtype=torch.float64), present]


def _without_gaps(values: Tensor, present: Tensor) -> list[float | None]:
    return [value if here else None for value, here in zip(values.tolist(), present.tolist(), strict=True)]


# What a training that goes on must have in common with the run that its folder holds


def _refuse_existing(folder: Path) -> None:
    """Raise if a folder holds a run."""
    if (folder / NAME).exists():
        raise FileExistsError(
            f"{folder} already holds a training run. Go on with it by resume=True, give another folder, or remove {NAME} there."
        )


def _optimizer_settings(optimizer: Optimizer, schedule: Any) -> dict[str, Any]:
    """What an optimizer was given: settings by name, one value for each parameter group."""
    groups = [{k: v for k, v in group.items() if k not in _NO_SETTINGS} for group in optimizer.param_groups]
    found = {name: [_plain(group.get(name)) for group in groups] for name in groups[0] if name != "lr"}
    rates: Any = [_plain(group.get("lr")) for group in optimizer.param_groups]
    if isinstance(schedule, LRScheduler):  # may turn other settings too; the rates it began with stand beside today's
        found, rates = {}, [_plain(group.get("initial_lr")) for group in optimizer.param_groups]
    elif schedule is not None:
        ratios = [f"{rate / rates[0]:.6g}" if rates[0] else "1" for rate in rates]
        rates = "of a schedule" if len(set(ratios)) == 1 else f"of a schedule, groups as {' : '.join(ratios)}"
    return {"optimizer": type(optimizer).__name__, "learning rate": rates, **found}


def _plain(value: Any) -> Any:
    """As it is read back from a checkpoint."""
    value = value.tolist() if isinstance(value, Tensor) else value
    return tuple(map(_plain, value)) if isinstance(value, tuple | list) else value


def _check_same_settings(folder: Path, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise where a setting is not the one that the run in the folder began with."""
    others = [f"{name} {_shown(saved[name])}, not {_shown(here.get(name))}" for name in saved if saved[name] != here.get(name)]
    if others:
        raise ValueError(f"The run in {folder} was made with {'; '.join(others)}. {_REMEDY}")


def _shown(value: Any) -> str:
    if isinstance(value, list) and len(value) == 1:  # of the only parameter group
        return _shown(value[0])
    return value if isinstance(value, str) else repr(value)


def _check_same_rates(folder: Path, schedule: Schedule | None, rates: Sequence[float], first: int) -> None:
    """Raise where a schedule, which is a function of the step, gives other rates than those of the steps taken.

    Objects that drive the rate and keep a state of their own are not asked about steps that are over.
    """
    if not isinstance(schedule, FunctionType) or not rates:
        return
    for step in sorted({0, len(rates) // 2, len(rates) - 1}):
        if not math.isclose(rate := float(schedule(first + step)), rates[step]):
            raise ValueError(
                f"The run in {folder} took step {first + step} with learning rate {rates[step]:g}; the schedule has {rate:g} "
                f"there. {_REMEDY}"
            )


def _check_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Refuse the state of another kind of optimizer: torch would take it and fail at the next step."""
    here, there = set(optimizer.state_dict()["param_groups"][0]), set(state["param_groups"][0])
    if here != there:
        raise ValueError(
            f"The checkpoint was made with another optimizer than {type(optimizer).__name__} (its settings are "
            f"{', '.join(sorted(there - {'params'}))}). Use the same, or another folder."
        )


def _refuse_unreached(foreign: list[nn.Parameter], total: int) -> None:
    """Raise where parameters that are not the model's had no part in the loss: stepping them trains nothing."""
    lost = sum(p.grad is None for p in foreign)
    if lost:
        raise ValueError(
            f"{lost} of the optimizer's {total} parameters are not the model's, and the loss does not depend on them: it was "
            "made for another model, or before layers were replaced. Make it from model.parameters(), or give a function of "
            "the parameters, such as lambda p: torch.optim.SGD(p, lr=0.1)."
        )


def _plain_scheduler(scheduler: LRScheduler | None) -> dict[str, Any] | None:
    """A scheduler's state without the functions it may hold."""
    if scheduler is None:
        return None
    return {k: v for k, v in scheduler.state_dict().items() if not callable(v) and not k.startswith("_get")}


def _own_scheduler(schedule: Any, optimizer: Optimizer) -> LRScheduler | None:
    if not isinstance(schedule, LRScheduler):
        return None
    if isinstance(schedule, ReduceLROnPlateau):
        raise ValueError("ReduceLROnPlateau follows a validation loss, which train does not have; use a function of the step.")
    if schedule.optimizer is not optimizer:
        raise ValueError(
            "schedule is bound to another optimizer. Make the optimizer first, pass it, and bind the schedule to it."
        )
    return schedule
