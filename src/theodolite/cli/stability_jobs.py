"""A stability study as jobs, one per seed-trial and size: what a worker does, what comes back, and how long it may take."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from theodolite.cli.sources.study import Study, StudyWords, check_data_stays, job_of, load_study, words_of
from theodolite.errors import NotRepeatableError
from theodolite.measures.mode_connectivity.linear_path import POINTS, LinearPath
from theodolite.measures.stability.config import StabilityConfig, check_loss
from theodolite.measures.stability.pairs import Swap, check_size, draw_swaps
from theodolite.measures.stability.study import (
    CHECK_STEPS,
    Measured,
    StabilityResult,
    joined,
    measure_size,
    with_length,
)
from theodolite.measures.stability.training_pairs import Bench, Recipe, compare_pairs, null_swap
from theodolite.results import Cost, Outcome, Row

SIZES, LARGEST = 4, 0.8  # default: so many sizes, each twice the one before, up to this share of the pool
TRIED, MOST_TRIED, LONG_ENOUGH = 2, 200, 0.3  # steps that the estimate is made of, and seconds they should take

_TENSORS = ("alphas", "train_loss", "train_accuracy", "test_loss", "test_accuracy")
_NUMBERS = ("train_samples", "test_samples", "barrier_train_error", "barrier_test_error", "batchnorm", "forward_passes", "chance")


@dataclass(frozen=True)
class Plan:
    """What is measured: `pairs` pairs at each of `sizes` in each of `trials` seed-trials."""

    words: StudyWords
    sizes: tuple[int, ...]
    pairs: int
    trials: int
    checkpoints: tuple[int, ...] = ()
    paths: int = 0

    def config(self, sizes: Sequence[int] | None = None, paths: int | None = None) -> StabilityConfig:
        return StabilityConfig(
            sizes=self.sizes if sizes is None else tuple(sizes),
            pairs=self.pairs,
            checkpoints=self.checkpoints,
            trials=tuple(range(self.trials)),
            pair_seed=self.words.seed,
            paths=self.paths if paths is None else paths,
        )

    def jobs(self, study: Study) -> list[dict[str, Any]]:
        """Plain values; data and starting weights enter by their digest, so that no result of others is taken for one."""
        ends = (min(self.sizes), max(self.sizes))
        return [
            job_of(
                self.words,
                trial=trial,
                m=m,
                pairs=self.pairs,
                checkpoints=list(self.checkpoints),
                paths=self.paths if m in ends else 0,
                content=content,
            )
            for trial in range(self.trials)
            for content in [study.fingerprint(trial)]
            for m in self.sizes
        ]


def default_sizes(pool: int) -> tuple[int, ...]:
    """Sizes that double, up to four fifths of the pool.

    >>> default_sizes(1000)
    (100, 200, 400, 800)
    """
    largest = max(1, int(LARGEST * pool))
    return tuple(sorted({max(1, largest // 2**k) for k in range(SIZES)}))


def check_sizes(sizes: Sequence[int], pool: int) -> None:
    for m in sizes:
        check_size(m, pool)


def measure_job(job: Mapping[str, Any]) -> list[Row]:
    """All pairs of one size in one trial, as rows: those of the pairs, of the paths, and one on the whole."""
    words = words_of(job)
    study = _study(json.dumps(job_of(words)))
    if study.fingerprint(job["trial"]) != job["content"]:
        raise NotRepeatableError(
            "The words of the command gave other data or other weights here than where the run was started: they must depend "
            "on their seed alone."
        )
    m, trial = job["m"], job["trial"]
    config = Plan(words, (m,), job["pairs"], trial + 1, tuple(job["checkpoints"]), job["paths"]).config()
    recipe = with_length(study.recipe, m, words.stop, words.steps, words.epochs)
    found = measure_size(recipe, study.bench, config, m, trial, progress=False)
    return as_rows(found)


@lru_cache(maxsize=1)
def _study(words: str) -> Study:
    """One study at a time stays in memory."""
    return load_study(words_of(json.loads(words)))


def open_study(words: StudyWords) -> Study:
    """The study of the words, checked; the jobs done in this process share it."""
    study = _study(json.dumps(job_of(words)))
    check_data_stays(study)
    return study


def as_rows(found: Measured) -> list[Row]:
    """What was measured as plain rows, to be kept or sent."""
    whole = {"part": "job", "check": found.check, "notes": list(found.notes), "route": found.route}
    pairs = [{"part": "pair", **row} for row in found.rows]
    return [whole, *pairs, *({"part": "path", "name": name, **_path_row(path)} for name, path in found.paths.items())]


def from_rows(rows: Iterable[Row]) -> list[Measured]:
    """What jobs measured, from their rows one after the other."""
    found: list[Measured] = []
    for row in rows:
        rest = {key: value for key, value in row.items() if key != "part"}
        if row["part"] == "job":
            found.append(Measured([], {}, rest["check"], tuple(rest["notes"]), rest["route"]))
        elif row["part"] == "pair":
            found[-1].rows.append(rest)
        else:
            found[-1].paths[rest.pop("name")] = _path_from(rest)
    return found


def result_of(plan: Plan, study: Study, rows: Iterable[Row], seconds: float) -> StabilityResult:
    """The rows of all jobs as one result."""
    words = plan.words
    recipe = with_length(study.recipe, max(plan.sizes), words.stop, words.steps, words.epochs)
    return joined(from_rows(rows), plan.config(), study.bench, recipe, stop=words.stop, epochs=words.epochs, seconds=seconds)


def _path_row(path: LinearPath) -> Row:
    tensors = {name: None if (t := getattr(path, name)) is None else t.tolist() for name in _TENSORS}
    return {**tensors, **{name: getattr(path, name) for name in _NUMBERS}, "seconds": path.cost.seconds}


def _path_from(row: Row) -> LinearPath:
    def tensor(values: list[float] | None) -> Tensor | None:
        return None if values is None else torch.tensor(values, dtype=torch.float64)

    fields: dict[str, Any] = {name: tensor(row[name]) for name in _TENSORS}
    fields |= {name: row[name] for name in _NUMBERS}
    return LinearPath(**fields, outcome=Outcome.FINISHED, cost=Cost(row["seconds"]))


def estimate_seconds(plan: Plan, study: Study) -> float:
    """How long all jobs take on one core, from some steps of all pairs of the largest size.

    A null swap comes first, so that what cannot be measured shows here.
    """
    m = max(plan.sizes)
    swaps = draw_swaps(len(study.bench.train), len(study.bench.test), m, plan.pairs, plan.words.seed)
    recipe = replace(study.recipe, loss_target=None)
    check_loss(recipe, study.bench)
    began = time.perf_counter()
    null_swap(recipe, study.bench, swaps, TRIED)
    building = time.perf_counter() - began
    step, compared = _timed(recipe, study.bench, swaps)
    return plan.trials * sum(
        _steps(plan, study, size) * step
        + 2 * building
        + compared * (1 + len(plan.checkpoints))
        + _path_seconds(plan, size, compared)
        for size in plan.sizes
    )


def _timed(recipe: Recipe, bench: Bench, swaps: Sequence[Swap]) -> tuple[float, float]:
    """Seconds of one step of all pairs, and of comparing them once."""
    index = torch.cat([swap.rows(len(bench.train)) for swap in swaps])
    fleet = recipe.fleet(len(index))
    trace = recipe.train(fleet, bench.joined, index, steps=TRIED, progress=False)
    steps, took = TRIED, trace.cost.seconds
    while trace.outcome is not Outcome.DIVERGED and steps < MOST_TRIED:
        trace = recipe.train(fleet, bench.joined, index, steps=steps, progress=False)
        took = trace.cost.seconds
        if took > LONG_ENOUGH:
            break
        steps *= 4
    began = time.perf_counter()
    compare_pairs(fleet, recipe, bench, swaps)
    return took / trace.loss.shape[1], time.perf_counter() - began


def _steps(plan: Plan, study: Study, m: int) -> int:
    """Updates of a size with those of the null swap."""
    steps = with_length(study.recipe, m, plan.words.stop, plan.words.steps, plan.words.epochs).steps
    return steps + min(steps, max(CHECK_STEPS, steps // 10))


def _path_seconds(plan: Plan, m: int, compared: float) -> float:
    """A path evaluates one model at so many points; comparing the pairs evaluates two models of each once."""
    return plan.paths * POINTS * compared / (2 * plan.pairs) if m in (min(plan.sizes), max(plan.sizes)) else 0.0
