"""Runs that the figures share: each (algorithm, seed-trial, size) is trained once per process."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from theodolite.experiments.stability.configurations import Setting, Task, recipe_of, task_of
from theodolite.measures.stability.config import StabilityConfig, Stopping
from theodolite.measures.stability.study import Measured, measure_size, with_length
from theodolite.results import Row

#: Updates of the null swap that precedes every measurement.
CHECK_STEPS = 20
#: Columns that figures and claims use.
COLUMNS = (
    *("trial", "m", "pair", "step", "steps_taken", "visits", "stab", "stab_excl_z", "gap_loss", "gap_01", "dist", "norm_S"),
    *("norm_S2", "ndist", "train_loss", "test_loss", "train_accuracy", "test_accuracy", "diverged"),
)


def own_task(setting: Setting) -> Task:
    """The data of a setting."""
    return task_of(setting.data, setting.source, setting.tested, setting.binary)


@lru_cache(maxsize=512)
def measured(setting: Setting, trial: int, m: int, pairs: int) -> tuple[Row, ...]:
    """All pairs of one size and seed-trial at all checkpoints, from one run."""
    return _rows(setting, trial, m, pairs, tuple(setting.checkpoints))


def short_run(setting: Setting, trial: int, m: int, pairs: int) -> tuple[Row, ...]:
    """The same before the first update, at T/2 and at T."""
    return _rows(setting, trial, m, pairs, (0, setting.steps // 2, setting.steps))


def stopped(setting: Setting, m: int, pairs: int, stop: Stopping, epochs: int, loss_target: float) -> tuple[Row, ...]:
    """The first seed-trial after a number of epochs, or at a training loss (after 5T updates at the latest)."""
    task = own_task(setting)
    recipe = with_length(replace(recipe_of(setting, task), loss_target=loss_target), m, stop, 5 * setting.steps, epochs)
    found = measure_size(recipe, task.bench, _config(m, pairs, ()), m, 0, progress=False)
    return _kept(setting, task, found)


def profiles(setting: Setting, trial: int, m: int, pairs: int) -> tuple[Row, ...]:
    """Accuracies on the lines through both models of the first pairs at T updates; pairs are drawn at random, so any are."""
    task = own_task(setting)
    config = replace(_config(m, pairs, ()), paths=pairs)
    found = measure_size(recipe_of(setting, task), task.bench, config, m, trial, progress=False)
    rows: list[Row] = []
    for name, path in sorted(found.paths.items()):
        mark = {"configuration": setting.name, "data": task.origin, "trial": trial, "m": m, "pair": int(name.rpartition(" ")[2])}
        summary = {key: path.summary()[key] for key in ("barrier_train", "barrier_test", "connected", "conclusive")}
        rows += [{**mark, **row, **summary} for row in path.rows()]
    return tuple(rows)


def _rows(setting: Setting, trial: int, m: int, pairs: int, checkpoints: tuple[int, ...]) -> tuple[Row, ...]:
    task = own_task(setting)
    recipe = replace(recipe_of(setting, task), steps=checkpoints[-1])
    return _kept(setting, task, measure_size(recipe, task.bench, _config(m, pairs, checkpoints), m, trial, progress=False))


def _config(m: int, pairs: int, checkpoints: tuple[int, ...]) -> StabilityConfig:
    return StabilityConfig(sizes=(m,), pairs=pairs, checkpoints=checkpoints, check_steps=CHECK_STEPS)


def _kept(setting: Setting, task: Task, found: Measured) -> tuple[Row, ...]:
    mark = {"configuration": setting.name, "data": task.origin}
    return tuple({**mark, **{name: row[name] for name in COLUMNS}} for row in found.rows)
