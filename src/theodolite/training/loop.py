"""`train`: one model, any torch optimizer, a trace of every step; a killed run goes on where it was."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from theodolite.problem import Batch, Problem
from theodolite.problem.calling import Loss, ModelCall
from theodolite.progress import counting
from theodolite.results import Cost, Outcome
from theodolite.training.checkpoints import load_state, save_state
from theodolite.training.feeding import Feed
from theodolite.training.schedules import Schedule, as_schedule
from theodolite.training.trace import Trace

Observer = Callable[[int, nn.Module, Batch, Optimizer], None]
OptimizerFactory = Callable[[Any], Optimizer]


def train(
    model: nn.Module,
    loss: Loss,
    data: Any,
    optimizer: Optimizer | OptimizerFactory,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    shuffle: bool = True,
    schedule: Schedule | Mapping[int, float] | float | LRScheduler | None = None,
    until: float | None = None,
    clip: float | None = None,
    measure: Mapping[str, Callable[[nn.Module], float]] | None = None,
    every: int = 1,
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

    Parameters
    ----------
    loss : `(output, target) -> scalar`, or None for models that return their own `.loss`.
    data : `(inputs, targets)` with `batch_size` (None: the whole data in every step), a list of batches or a DataLoader.
    optimizer : a torch optimizer, or a function of the parameters that makes one.
    steps, epochs : how long; give one of them. With `resume` they count from the very start.
    schedule : learning rate as a function of the step, a table `{first step: rate}`, a number, or a torch scheduler.
    until : stop once the loss of a batch is at most this.
    clip : largest norm of the gradient.
    measure, every : columns of the trace by name, each a function of the model, taken every so many steps before the step.
    observe : called as `observe(step, model, batch, optimizer)` after backward and before the optimizer's step.
    evaluate : also compute the loss on the whole data after the last step.
    checkpoint, checkpoint_every, resume : folder for the state of the run, how often it is saved, and whether to go on
        from it. A resumed run takes the same steps as an undisturbed one.
    seed : of the order of the data and of the model's own randomness; the caller's random state is left alone.

    >>> model = nn.Linear(1, 1, bias=False).double()
    >>> _ = nn.init.constant_(model.weight, 1.0)
    >>> x = torch.ones(1, 1).double()
    >>> trace = train(model, nn.MSELoss(), (x, 0 * x), torch.optim.SGD(model.parameters(), lr=0.25), steps=3)
    >>> trace.loss                                     # w halves in every step
    (1.0, 0.25, 0.0625)
    """
    feed = Feed(data, batch_size=batch_size, shuffle=shuffle, own_loss=loss is None, target=target, seed=seed)
    if not isinstance(optimizer, Optimizer):
        optimizer = optimizer([p for p in model.parameters() if p.requires_grad])
    run = _Run(model, ModelCall(model, loss), optimizer, schedule, until, clip, dict(measure or {}), every, observe)
    _check_length(steps, epochs, every, checkpoint_every)
    folder = None if checkpoint is None else Path(checkpoint)
    began = time.perf_counter()
    with _training(model, seed):
        if folder is not None and resume:
            run.restore(load_state(folder), seed=seed)
        with counting("training", progress=progress, total=steps) as count:
            for _ in run.steps(feed, steps, epochs):
                count(1)
                if folder is not None and run.step % checkpoint_every == 0:
                    save_state(folder, run.state(seed))
        if folder is not None:
            save_state(folder, run.state(seed))
    final = Problem(model, loss, data, target=target, check=False).loss() if evaluate and not run.diverged else None
    return run.trace(seed, final, time.perf_counter() - began)


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
        every: int,
        observe: Observer | None,
    ) -> None:
        self.model, self.call, self.optimizer = model, call, optimizer
        self.scheduler = schedule if isinstance(schedule, LRScheduler) else None
        self.schedule = None if self.scheduler else as_schedule(schedule)
        self.until, self.clip, self.measure, self.every, self.observe = until, clip, measure, every, observe
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.needs_closure = inspect.signature(optimizer.step).parameters["closure"].default is inspect.Parameter.empty
        self.device = self.parameters[0].device
        self.step = self.epoch = self.place = 0
        self.epoch_random = torch.get_rng_state()
        self.columns: dict[str, list[Any]] = {"loss": [], "rate": [], "epoch": []}
        self.measured: dict[str, list[float | None]] = {name: [] for name in measure}
        self.stopped = "all steps were taken"
        self.ended = False

    @property
    def diverged(self) -> bool:
        return bool(self.columns["loss"]) and not math.isfinite(self.columns["loss"][-1])

    def steps(self, feed: Feed, steps: int | None, epochs: int | None) -> Iterator[None]:
        """Take the steps that remain, yielding after each."""
        while not self.ended and (epochs is None or self.epoch < epochs):
            empty = True
            for batch in self._rest_of_epoch(feed):
                empty = False
                if steps is not None and self.step >= steps:
                    return
                self._take(batch)
                self.place += 1
                yield
                if self.ended:
                    return
            if empty and self.place == 0:
                raise ValueError("data holds no batches.")
            self.epoch, self.place = self.epoch + 1, 0

    def _rest_of_epoch(self, feed: Feed) -> Iterator[Batch]:
        """The batches from `place` on; a loader's order follows from the random state at the start of its epoch."""
        now = torch.get_rng_state()
        if self.place == 0:
            self.epoch_random = now
        torch.set_rng_state(self.epoch_random)
        batches = feed.epoch(self.epoch)
        for _ in range(self.place):
            next(batches, None)
        if self.place:
            torch.set_rng_state(now)
        yield from batches

    def _take(self, batch: Batch) -> None:
        if self.device.type != "cpu":
            batch = batch.to(self.device, None)
        if self.schedule is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = self.schedule(self.step)
        for name, column in self.measured.items():
            column.append(float(self.measure[name](self.model)) if self.step % self.every == 0 else None)
        self.columns["rate"].append(float(self.optimizer.param_groups[0]["lr"]))
        self.columns["epoch"].append(self.epoch)
        first: list[float] = []

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            value = self.call({}, batch, self.place).loss
            first.append(float(value.detach()))
            if math.isfinite(first[0]):
                value.backward()
                if self.clip is not None:
                    nn.utils.clip_grad_norm_(self.parameters, self.clip)
                if self.observe is not None and len(first) == 1:
                    self.observe(self.step, self.model, batch, self.optimizer)
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

    def _note(self, loss: float) -> None:
        self.columns["loss"].append(loss)
        self.step += 1
        if not math.isfinite(loss):
            self.ended, self.stopped = True, "the loss became NaN or infinite"
        elif self.until is not None and loss <= self.until:
            self.ended, self.stopped = True, f"the loss fell to {self.until:g}"

    def state(self, seed: int) -> dict[str, Any]:
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": _plain_scheduler(self.scheduler),
            "place": [self.step, self.epoch, self.place],
            "random": [torch.get_rng_state(), self.epoch_random],
            "columns": self.columns,
            "measured": self.measured,
            "ended": [self.ended, self.stopped],
            "seed": seed,
        }

    def restore(self, state: dict[str, Any] | None, *, seed: int) -> None:
        """Go on from a saved state; nothing happens if there is none."""
        if state is None:
            return
        if state["seed"] != seed or set(state["measured"]) != set(self.measured):
            raise ValueError(
                f"The checkpoint was made with seed {state['seed']} and columns {sorted(state['measured'])}, "
                f"not seed {seed} and {sorted(self.measured)}. Use the same, or another folder."
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.step, self.epoch, self.place = state["place"]
        random, self.epoch_random = state["random"]
        torch.set_rng_state(random)
        self.columns, self.measured = state["columns"], state["measured"]
        self.ended, self.stopped = state["ended"]

    def trace(self, seed: int, final: float | None, seconds: float) -> Trace:
        return Trace(
            loss=tuple(self.columns["loss"]),
            rate=tuple(self.columns["rate"]),
            epoch=tuple(self.columns["epoch"]),
            measured={name: tuple(column) for name, column in self.measured.items()},
            final_loss=final,
            stopped=self.stopped,
            outcome=Outcome.DIVERGED if self.diverged else Outcome.CONVERGED,
            seed=seed,
            cost=Cost(seconds=seconds, route=type(self.optimizer).__name__),
        )


@contextmanager
def _training(model: nn.Module, seed: int) -> Iterator[None]:
    """Train mode and a random state of its own; both are given back."""
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        torch.manual_seed(seed)
        model.train()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training


def _plain_scheduler(scheduler: LRScheduler | None) -> dict[str, Any] | None:
    """A scheduler's state without the functions it may hold."""
    if scheduler is None:
        return None
    return {k: v for k, v in scheduler.state_dict().items() if not callable(v) and not k.startswith("_get")}


def _check_length(steps: int | None, epochs: int | None, every: int, checkpoint_every: int) -> None:
    if (steps is None) == (epochs is None):
        raise ValueError(f"Give steps or epochs, one of them. Got steps={steps!r}, epochs={epochs!r}.")
    for name, value in (("steps", steps), ("epochs", epochs), ("every", every), ("checkpoint_every", checkpoint_every)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a positive integer. Got {value!r}.")
