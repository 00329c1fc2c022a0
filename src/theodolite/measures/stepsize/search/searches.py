"""Searches for a setting at equal cost: a sweep, random draws, and steps along the meta-gradient where it can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.measures.stepsize.search.search_space import Setting, Space
from theodolite.measures.stepsize.search.slopes import Slope, SlopeOf
from theodolite.measures.stepsize.search.tuned_runs import Scores, Split, Task, TunedRuns
from theodolite.results import Row
from theodolite.text import listed

Tasks = Sequence[tuple[Task, list[int]]]  # each with the seeds it is trained on

#: The share of a sweep's settings that span the whole range; the others go between the neighbours of the best of these.
COARSE = 2 / 3
#: The share of a gradient search that walks; the rest tries places on the way on all tasks and seeds.
WALKED = 0.75
#: A step of the gradient search in units, at first and at the end: changes of a rate by e to that power.
FIRST_STEP, LAST_STEP = 0.5, 0.05
#: Meta-gradients that could not be used after which slopes are smoothed.
PATIENCE = 3
#: Decays of the averages of the slope and of its square.
DECAYS = (0.7, 0.9)


@dataclass(frozen=True)
class Search:
    """The settings that a search tried on all tasks and seeds, their losses, and what it took in gradients of a batch.

    `health` is that of the first meta-gradient that could not be used, "ok" where all could and empty where none was taken.
    """

    name: str
    settings: tuple[Setting, ...]
    scores: Scores
    gradients: float
    health: str = ""
    note: str = ""
    trace: tuple[Row, ...] = ()


def sweep(runs: TunedRuns, space: Space, tasks: Tasks, count: int, split: Split) -> Search:
    """A grid over the range, or over the values given; with one axis the last third of the settings goes around the best one."""
    given = any(one.values for one in space.hyper)
    refines = space.axes == 1 and not given and count >= 6
    settings = space.sweep(round(COARSE * count) if refines else count)
    scores = runs.scores(settings, tasks)
    if refines:
        further = space.refined(settings, scores.best(split), count - len(settings))
        scores, settings = Scores.joined([scores, runs.scores(further, tasks)], 0), settings + further
        order = sorted(range(len(settings)), key=lambda k: tuple(settings[k].values()))
        scores, settings = scores.rows(order), [settings[k] for k in order]
    return Search("sweep", tuple(settings), scores, _taken(runs, settings, scores))


def random_search(runs: TunedRuns, space: Space, tasks: Tasks, count: int, seed: int) -> Search:
    """Settings drawn by themselves, each hyperparameter evenly over its range."""
    settings = space.random(count, torch.Generator().manual_seed(seed))
    scores = runs.scores(settings, tasks)
    return Search("random", tuple(settings), scores, _taken(runs, settings, scores))


def _taken(runs: TunedRuns, settings: Sequence[Setting], scores: Scores) -> float:
    return float(len(settings) * scores.truncated.shape[1] * runs.steps)


def gradient_search(
    runs: TunedRuns, space: Space, tasks: Tasks, budget: float, slope_of: SlopeOf, *, smoothed: bool = False
) -> Search:
    """Steps along the slope, one task and seed after the other, of a length that falls; then places on the way are tried on all.

    A meta-gradient that explodes, vanishes or jumps is never used for a step. There, and where a run diverges, the search goes
    half of the way back; after `PATIENCE` of them slopes are those of the smoothed loss.
    """
    columns = [(task, seed) for task, seeds in tasks for seed in seeds]
    one_setting = float(len(columns) * runs.steps)
    walk = _Walk(space)
    unusable: list[str] = []
    name, note, health, spent, dearest = "smoothed" if smoothed else "gradient", "", "" if smoothed else "ok", 0.0, 0.0
    while spent + dearest <= WALKED * budget:
        step = len(walk.trace)
        found = slope_of(walk.setting, *columns[step % len(columns)], step, smoothed)
        spent, dearest = spent + found.gradients, max(dearest, found.gradients)
        walk.note(found, smoothed)
        if found.health == "ok":
            walk.step(found.gradient, min(1.0, spent / (WALKED * budget)))
            continue
        walk.step_back()
        if not smoothed:
            health = found.health if health == "ok" else health
            unusable.append(found.health)
        if not smoothed and len(unusable) == PATIENCE:
            smoothed, dearest = True, 0.0
            why = listed(dict.fromkeys(_WHY[word] for word in unusable))
            note = f"from step {step + 1} on by smoothed slopes: {PATIENCE} meta-gradients could not be used ({why})"
    places = walk.ends(max(1, round((budget - spent) / one_setting)))
    scores = runs.scores(places, tasks)
    return Search(name, tuple(places), scores, spent + _taken(runs, places, scores), health, note, tuple(walk.trace))


_WHY = {
    "diverged": "the run diverged",
    "explodes": "the derivative explodes",
    "vanishes": "the derivative has vanished",
    "kinked": "the loss has another slope over one percent",
}


class _Walk:
    """Where a gradient search is, in units, and where it was."""

    def __init__(self, space: Space) -> None:
        self.space, self.u = space, space.place(space.start)
        self.visited = [self.u]
        self.sound: list[int] = []  # places at which the run did not diverge
        self.trace: list[Row] = []
        self._mean, self._square, self._steps = torch.zeros_like(self.u), torch.zeros_like(self.u), 0

    @property
    def setting(self) -> Setting:
        return self.space.at(self.u)

    def note(self, found: Slope, smoothed: bool) -> None:
        """Keep what was found here."""
        if found.health == "ok":
            self.sound.append(len(self.visited) - 1)
        row: Row = {
            "step": len(self.trace),
            **self.setting,
            "log_loss": found.value,
            "health": found.health,
            "smoothed": smoothed,
        }
        self.trace.append(row | {f"slope of {name}": float(g) for name, g in zip(self.space.names, found.gradient, strict=True)})

    def step(self, slope: Tensor, share: float) -> None:
        """A step whose length in each hyperparameter is that of the averaged slope over its root mean square, as Adam's are."""
        self._steps += 1
        first, second = DECAYS
        self._mean.lerp_(slope, 1 - first)
        self._square.lerp_(slope.square(), 1 - second)
        mean, square = self._mean / (1 - first**self._steps), self._square / (1 - second**self._steps)
        length = FIRST_STEP * (LAST_STEP / FIRST_STEP) ** share
        self._go(self.u - length * mean / square.sqrt().clamp_min(1e-12))

    def step_back(self) -> None:
        """Half of the way to the last place that could be used; before there is one, every rate is divided by e."""
        self._mean.zero_()
        rates = torch.tensor([float(one.is_rate) for one in self.space.hyper], dtype=torch.float64)
        self._go((self.u + self.visited[self.sound[-1]]) / 2 if self.sound else self.u - rates)

    def _go(self, u: Tensor) -> None:
        self.u = self.space.inside(u)
        self.visited.append(self.u)

    def ends(self, count: int) -> list[Setting]:
        """So many places to try on all tasks and seeds: where the search ended, the mean of its second half, earlier ones."""
        half = torch.stack(self.visited[len(self.visited) // 2 :]).mean(0)
        places = [self.u, half, *reversed(self.visited[:-1])]
        generator = torch.Generator().manual_seed(count)
        while len(places) < count:  # near the end
            places.append(half + 2 * LAST_STEP * torch.randn(len(half), generator=generator, dtype=torch.float64))
        return [self.space.at(self.space.inside(u)) for u in places[:count]]
