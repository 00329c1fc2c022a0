"""Runs of candidates that can be compared: the same start, batches in the same order and validation data, look by look.

A run goes from look to look and may rest in between, in memory or in a folder: the next part begins with the weights, the
optimizer state and the step at which the last one ended. So a search that was killed goes on, and all engines take the same
steps.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from theodolite._names import room
from theodolite.arguments import shown
from theodolite.measures.growth import hugging_face, plain_models
from theodolite.measures.growth.growing import grow
from theodolite.measures.growth.operators import GrowthOperator
from theodolite.measures.growth.validation import batch_check_sum, part_losses
from theodolite.measures.trials import start_anew
from theodolite.operators.autograd.graphs import available_bytes
from theodolite.problem import Batch, Problem
from theodolite.problem.batches import BatchParser, has_length, is_bare
from theodolite.problem.calling import Loss, ModelCall, unwrap
from theodolite.problem.state_guard import cuda_devices, modes_kept, own_random_state
from theodolite.problem.tensors import bytes_of
from theodolite.progress import Advance
from theodolite.results import Row
from theodolite.training import train
from theodolite.training.interruption import load_state, save_state
from theodolite.training.own_order import OwnOrder
from theodolite.training.schedules import Feed, Schedule

Arm = GrowthOperator | Literal["small", "scratch"]
#: What new layers start from, where that is measured on a few inputs.
MEASURED = ("identity", "scaled")
#: The share of the memory that is free which resting runs may take.
RESTING = 1 / 3


def name_of(arm: Arm) -> str:
    """The name of what is trained: of an operator, or of a baseline."""
    return arm.name if isinstance(arm, GrowthOperator) else arm


@dataclass(frozen=True)
class Recipe:
    """What all runs have in common: the small model with its optimizer, the loss, the data from step `first` on, the schedule."""

    model: nn.Module
    optimizer: Optimizer
    loss: Loss
    data: Any
    validation: Problem
    operator: GrowthOperator  # any: for the depth of the model from scratch
    schedule: Schedule | Mapping[int, float] | float | None = None
    batch_size: int | None = None
    shuffle: bool = True
    first: int = 0
    state: Literal["copy", "zero_new", "reset"] = "copy"
    body: str | None = None
    target: str = "labels"
    clip: float | None = None

    def feed(self, seed: int, step: int) -> Any:
        """The data as `train` takes it, in an order that no model has a part in, for a run that is at this step."""
        if isinstance(self.data, list | tuple):
            return self.data
        return OwnOrder(self.data, seed, first=step // len(self.data))

    def batches(self, seed: int) -> Iterator[Batch]:
        """The batches that runs see, from step `first` on."""
        feed = Feed(self.feed(seed, self.first), self.parser, batch_size=self.batch_size, shuffle=self.shuffle, seed=seed)
        epoch, place = feed.place_of(self.first)
        for number in itertools.count(epoch):
            yield from itertools.islice(feed.epoch(number), place if number == epoch else 0, None)

    def sample(self) -> Any:
        """A few inputs, as the model is called with them."""
        batch = self.validation.placed(self.validation.few(2))
        return batch.kwargs or batch.args

    @property
    def parser(self) -> BatchParser:
        return BatchParser.of(unwrap(self.model), self.loss, self.target)


def finite_stream(data: Any, needed: int) -> Any:
    """Data with a length: of a source that has none, the first batches as a list."""
    if isinstance(data, list) or (isinstance(data, tuple) and data and is_bare(data[-1])):
        return data
    if isinstance(data, Iterator):
        raise ValueError(
            "data can be read only once, and every candidate has to see the same batches: give a list of batches, tensors or a "
            "DataLoader."
        )
    if not isinstance(data, Iterable) or isinstance(data, Mapping | str):
        raise ValueError(f"data must be (inputs, targets), a list of batches or a DataLoader. Got {shown(data)}.")
    return data if has_length(data) else list(itertools.islice(iter(data), needed))


def refuse_unrepeatable(recipe: Recipe, seed: int) -> None:
    """Raise where the data is not the same when it is read again."""
    one, two = ([batch_check_sum(b) for b in itertools.islice(recipe.batches(seed), 2)] for _ in range(2))
    if not one:
        raise ValueError("data holds no batches.")
    if one != two:
        raise ValueError(
            "data cannot be repeated: its first batches are others when it is read again, and every candidate has to see the "
            "same ones. Seed what draws them by the place in the data, or read some batches into a list and give that."
        )


@dataclass
class Run:
    """A training under way: the model and its optimizer, the step it has reached, and what was seen at each look."""

    model: nn.Module
    optimizer: Optimizer
    step: int = 0
    seen: dict[int, list[float]] = field(default_factory=dict)  # losses of the parts of the validation data, by step
    stream: int = 0  # check sum of all batches so far
    streams: dict[int, int] = field(default_factory=dict)  # the same by step: a run that goes on may be ahead of others
    notes: tuple[str, ...] = ()

    def advance(self, recipe: Recipe, look: int, seed: int) -> None:
        """Train up to a step and validate there."""
        if look > self.step and not self.lost:
            trace = train(
                self.model,
                recipe.loss,
                recipe.feed(seed, recipe.first + self.step),
                self.optimizer,
                steps=look - self.step,
                batch_size=recipe.batch_size,
                shuffle=recipe.shuffle,
                schedule=recipe.schedule,
                clip=recipe.clip,
                first=recipe.first + self.step,
                observe=self._note,
                target=recipe.target,
                seed=seed,
                progress=False,
            )
            if trace.diverged:
                self.seen[look] = [math.inf] * len(recipe.validation.data)
        self.step = look
        self.streams[look] = self.stream
        self.seen.setdefault(look, self.seen[self.last] if self.lost else part_losses(recipe.validation, self.model))

    @property
    def last(self) -> int:
        return max(self.seen, default=0)

    @property
    def lost(self) -> bool:
        """Whether it diverged: its losses stay infinite."""
        return bool(self.seen) and not all(map(math.isfinite, self.seen[self.last]))

    def _note(self, step: int, model: nn.Module, batch: Batch, optimizer: Optimizer) -> None:
        self.stream = batch_check_sum(batch, self.stream)

    def save(self, folder: Path) -> None:
        """Write it down, so that it can go on in another process."""
        looks = [[look, parts] for look, parts in self.seen.items()]
        streams = [[look, stream] for look, stream in self.streams.items()]
        record = {"step": self.step, "streams": streams, "seen": looks, "notes": list(self.notes)}
        save_state(folder, {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "run": record})

    def restore(self, state: Mapping[str, Any]) -> None:
        """Be where a saved run was."""
        record = state["run"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.notes = record["step"], tuple(record["notes"])
        self.streams = {int(look): stream for look, stream in record["streams"]}
        self.stream = self.streams[self.step]
        self.seen = {int(look): list(parts) for look, parts in record["seen"]}


def start(recipe: Recipe, arm: Arm, seed: int) -> Run:
    """A run before its first step; nothing in it is the user's."""
    if arm == "small":
        model, optimizer = copy.deepcopy((recipe.model, recipe.optimizer))  # together: one moves the other
        return Run(model, optimizer)
    operator = arm if isinstance(arm, GrowthOperator) else recipe.operator
    grown = grow(
        recipe.model,
        operator,
        optimizer=recipe.optimizer,
        state="reset" if arm == "scratch" else recipe.state,
        seed=seed,
        body=recipe.body,
        inputs=recipe.sample() if operator.init in MEASURED else None,
    )
    assert grown.model is not None
    assert grown.optimizer is not None
    run = Run(grown.model, grown.optimizer, notes=grown.notes)
    if arm == "scratch":
        _draw_all(run.model, seed)
    return run


def _draw_all(model: nn.Module, seed: int) -> None:
    """New weights for a whole model, by its own initialiser."""
    with own_random_state(seed, cuda_devices(model)), torch.no_grad():
        if hugging_face.pretrained_part(model, "") is not None:
            hugging_face.initialise_block(model, model)
        elif callable(getattr(model, "initialise_block", None)) or callable(getattr(model, "_init_weights", None)):
            for part in model.children():
                plain_models.initialise_block(model, part)
        else:
            start_anew(model, seed)


# Many runs


@dataclass
class Runs:
    """Runs by arm and seed, as a task that any engine performs: a job names arm, seed and looks, and gives a row for each look.

    Runs that rest are `held` in memory, or lie in `folder`, where they are read by other processes too.
    """

    recipe: Recipe
    arms: tuple[Arm, ...]
    folder: Path | None = None
    hold: bool = True
    held: dict[tuple[int, int], Run] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "held": {}, "hold": False}  # what rests in this process stays here

    def __call__(self, job: Mapping[str, Any]) -> list[Row]:
        key, looks = (job["arm"], job["seed"]), list(job["looks"])
        run = self.open(*key)
        for look in looks:
            if look not in run.seen:
                run.advance(self.recipe, look, job["seed"])
                if self.folder is not None:
                    run.save(self.place(*key))
        if self.hold and job["rests"]:
            self.held[key] = run
        facts = {"arm": job["arm"], "seed": job["seed"], "notes": list(run.notes)}
        return [{**facts, "step": look, "stream": run.streams[look], "parts": run.seen[look]} for look in looks]

    def place(self, arm: int, seed: int) -> Path:
        """The folder of a run."""
        assert self.folder is not None
        return self.folder / f"{seed}-{re.sub(r'[^A-Za-z0-9]+', '-', name_of(self.arms[arm]))[:60]}-{arm}"

    def open(self, arm: int, seed: int) -> Run:
        """A run where it was left, or at its start."""
        if (arm, seed) in self.held:
            return self.held[arm, seed]
        run = start(self.recipe, self.arms[arm], seed)
        if self.folder is not None and (state := load_state(self.place(arm, seed))) is not None:
            run.restore(state)
        return run

    def drop(self, arm: int, seed: int) -> None:
        """Forget a run that does not go on."""
        self.held.pop((arm, seed), None)

    def perform(self, jobs: Sequence[Row], engine: Any, count: Advance) -> list[Row]:
        """All jobs, here or by an engine; the rows in the order of the jobs."""
        if engine == "serial":
            rows = []
            for job in jobs:
                rows += self(job)
                count(1)
            return rows
        # Engines live in a room above this one: work is handed up to them.
        found: dict[int, list[Row]] = {}
        for finished in room("runners").finish_all(self, jobs, engine=engine, progress=False):
            if finished.failure is not None:
                name = name_of(self.arms[finished.job["arm"]])
                raise RuntimeError(f"The run of {name} failed: {finished.failure.error}\n{finished.failure.traceback}")
            found[finished.index] = finished.rows
            count(1)
        return [row for index in sorted(found) for row in found[index]]


def refuse_other_streams(rows: Iterable[Row], names: Sequence[str]) -> None:
    """Raise where runs of one seed saw other batches up to the same step."""
    seen: dict[tuple[int, int], tuple[int, str]] = {}
    for row in rows:
        stream, name = seen.setdefault((row["seed"], row["step"]), (row["stream"], names[row["arm"]]))
        if stream != row["stream"]:
            raise ValueError(
                f"data cannot be repeated: {names[row['arm']]} and {name} saw other batches up to step {row['step']}. Read the "
                "batches into a list and give that."
            )


# What runs take


def step_flops(model: nn.Module, recipe: Recipe, batch: Batch) -> float:
    """Floating-point operations of one training step on a batch: its forward and backward products, as torch counts them."""
    call = ModelCall(model, recipe.loss)
    gradients = [p.grad for p in model.parameters()]
    with (
        own_random_state(0, cuda_devices(model)),
        modes_kept(model),
        torch.enable_grad(),
        FlopCounterMode(display=False) as count,
    ):
        model.eval()  # counting leaves the statistics of normalisation as they are
        call({}, batch.to(next(model.parameters()).device, None), 0).loss.backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    return float(count.get_total_flops())


def run_bytes(recipe: Recipe, growth: float = 1.0) -> int:
    """Memory of a run: weights, gradients and the state of the optimizer, for a model that is larger by a factor."""
    weights = bytes_of(list(recipe.model.parameters()))
    return round(growth * (2 * weights + bytes_of([list(state.values()) for state in recipe.optimizer.state.values()])))


def refuse_without_room(recipe: Recipe) -> int:
    """Bytes of one run of a grown model; raises where there is no room for it beside the small one."""
    growth = recipe.operator.depth / recipe.operator.layers
    needed, free = run_bytes(recipe, growth), available_bytes(next(recipe.model.parameters()).device)
    if needed > free:
        raise ValueError(
            f"There is no room for two models: the grown one takes about {needed / 2**30:.3g} GiB with its gradients and "
            f"optimizer state, and {free / 2**30:.3g} GiB are free. Free some memory, load the weights in bfloat16, use an "
            "optimizer with less state, or work on a larger machine."
        )
    return needed
