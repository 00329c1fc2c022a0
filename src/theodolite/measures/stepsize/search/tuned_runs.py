"""Training runs at many settings on the same tasks, seeds and orders: one fleet for each task, and what is kept on disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from theodolite.errors import ArgumentError
from theodolite.measures.stepsize.search.search_space import Setting, fleet_settings
from theodolite.problem.calling import Loss
from theodolite.training import Fleet
from theodolite.training.fleets.state import Factory
from theodolite.training.interruption import load_state, save_state

Split = Literal["train", "valid"]

#: A run is truncated once the loss of a batch is so many times its first.
BLOWN_UP = 1e3
#: No run counts for more than this many times the loss at its start, so that one that blew up does not hide the others.
WORST = 10.0
#: Replicas of one fleet at most: what a kill can lose.
REPLICAS = 64


@dataclass(frozen=True)
class Task:
    """Samples to train on, and samples to score on if there are any."""

    train: Any
    valid: Any = None
    name: str = "train"  # of the argument


@dataclass(frozen=True)
class Scores:
    """Losses after the last step at K settings: (K, m), a column for each task and seed; `truncated` runs blew up.

    They have the loss that they count for, `WORST` times that at the start.
    """

    train: Tensor
    valid: Tensor | None
    truncated: Tensor

    def on(self, split: Split) -> Tensor:
        """The losses on the samples trained on, or on the others."""
        found = self.train if split == "train" else self.valid
        assert found is not None
        return found

    def best(self, split: Split) -> int:
        """The setting of the smallest mean loss, among those of which no run or the fewest were truncated."""
        lost = self.truncated.double().mean(1)
        mean = self.on(split).mean(1)
        return min(range(len(mean)), key=lambda k: (float(mean[k]), float(lost[k])))

    def mean(self, split: Split, k: int) -> tuple[float, float]:
        """Mean loss at setting k, and its standard error over runs (NaN for a single one)."""
        losses = self.on(split)[k]
        return float(losses.mean()), float(losses.std() / len(losses) ** 0.5) if len(losses) > 1 else math.nan

    def difference(self, split: Split, k: int) -> tuple[Tensor, Tensor]:
        """Mean and standard error (K,) of the difference to setting k, run by run: what runs share does not count."""
        losses = self.on(split)
        apart = losses - losses[k]
        runs = apart.shape[1]
        return apart.mean(1), (apart.std(1) / runs**0.5 if runs > 1 else torch.full((len(apart),), torch.nan))

    def rows(self, order: Sequence[int]) -> Scores:
        """Those of some settings."""
        rows = torch.tensor(order)
        return Scores(self.train[rows], None if self.valid is None else self.valid[rows], self.truncated[rows])

    @staticmethod
    def joined(parts: Sequence[Scores], dim: int) -> Scores:
        """Scores of further settings (dim 0), or of further tasks and seeds (dim 1)."""
        valid = [part.valid for part in parts if part.valid is not None]
        train, truncated = (torch.cat(columns, dim) for columns in zip(*((p.train, p.truncated) for p in parts), strict=True))
        return Scores(train, torch.cat(valid, dim) if valid else None, truncated)


class Ledger:
    """Finished pieces of work in order, kept in a folder: work that begins again takes them from there.

    Each piece depends on those before it and on the arguments alone, so a killed search goes on bitwise.
    """

    def __init__(self, folder: Path | None, identity: Mapping[str, Any], *, resume: bool) -> None:
        self.folder, self.identity = folder, dict(identity)
        self.done: list[Any] = []
        self.place = 0
        state = None if folder is None else load_state(folder)
        if state is None:
            return
        if not resume:
            raise ArgumentError(f"checkpoint: {folder} holds a search. Pass resume=True to go on with it, or another folder.")
        if state["identity"] != self.identity:
            raise ArgumentError(f"checkpoint: {folder} holds a search of other data, models or settings. Give another folder.")
        self.done = state["done"]

    def piece(self, work: Callable[[], Any]) -> Any:
        """The next piece of work: what was found before, or what is found now."""
        if self.place == len(self.done):
            self.done.append(work())
            if self.folder is not None:
                save_state(self.folder, {"identity": self.identity, "done": self.done})
        self.place += 1
        return self.done[self.place - 1]


@dataclass(frozen=True)
class TunedRuns:
    """How a setting is tried: models, steps, batches.

    `held` are the optimizer's settings where they are not tuned, `parts` the parameters of layers and groups, `own_rates` what
    the optimizer gives to every parameter.
    """

    factory: Factory
    optimizer: Any
    loss: Loss
    steps: int
    batch_size: int | None
    held: Mapping[str, float]
    parts: Mapping[str, Sequence[str]]
    own_rates: Mapping[str, float]
    ledger: Ledger
    advance: Callable[[int], None] = field(default=lambda units: None)

    def scores(self, settings: Sequence[Setting], tasks: Sequence[tuple[Task, list[int]]]) -> Scores:
        """Train at all settings, each task and seed with the same weights and the same orders of the data."""
        return Scores.joined([self.run(settings, task, seeds) for task, seeds in tasks], 1)

    def run(self, settings: Sequence[Setting], task: Task, seeds: Sequence[int]) -> Scores:
        """The same on one task, in fleets that are pieces of the ledger."""
        at_once = max(1, REPLICAS // len(seeds))
        parts = [settings[first : first + at_once] for first in range(0, len(settings), at_once)]
        return Scores.joined([self._piece(task, part, seeds) for part in parts], 0)

    def _piece(self, task: Task, settings: Sequence[Setting], seeds: Sequence[int]) -> Scores:
        found = Scores(**self.ledger.piece(lambda: self._fleet(task, settings, seeds)))
        self.advance(len(settings) * len(seeds) * self.steps)
        return found

    def _fleet(self, task: Task, settings: Sequence[Setting], seeds: Sequence[int]) -> dict[str, Tensor | None]:
        """Settings times seeds as replicas of one fleet."""
        every = [setting for setting in settings for _ in seeds]
        own = fleet_settings(every, self.held, self.parts, self.own_rates)
        fleet = Fleet(self.factory, [*seeds] * len(settings), loss=self.loss, optimizer=self.optimizer, **own)
        trace = fleet.train(
            task.train,
            steps=self.steps,
            batch_size=self.batch_size,
            test=task.valid,
            every=[0],
            blow_up=BLOWN_UP,
            evaluate=True,
            progress=False,
        )
        assert trace.final_loss is not None
        tested, first = trace.test_loss, trace.loss[:, 0].double()
        truncated = torch.tensor(trace.diverged) | ~(trace.final_loss < WORST * first.abs())
        train = _capped(trace.final_loss.double(), first, truncated)
        valid = None if tested is None else _capped(tested[:, -1], tested[:, 0], truncated)
        found = {"train": train, "valid": valid, "truncated": truncated}
        return {name: None if t is None else t.view(len(settings), len(seeds)) for name, t in found.items()}


def _capped(losses: Tensor, start: Tensor, truncated: Tensor) -> Tensor:
    """Losses of runs, at most `WORST` times that at the start, which is what truncated ones have."""
    limit = WORST * start.abs()
    return torch.where(truncated | ~(losses < limit), limit, losses)
