"""Pairs of models trained on sets that differ in one example: the runs that the figures of this chapter look at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from theodolite.experiments import Params, Study
from theodolite.experiments.stability.configurations import LAPTOP, LOGISTIC_SIZES, PAPER, TINY, Setting, Task, recipe_of, task_of
from theodolite.experiments.study import Computation
from theodolite.measures.stability import convex_bounds, largest_norm, largest_smoothness
from theodolite.measures.stability.study import STOPPING, Measured, StabilityConfig, measure_size, with_length
from theodolite.measures.stability.training_pairs import draw_swaps
from theodolite.results import Row
from theodolite.training.schedules import epoch_order

#: Seed-trials; the main text shows the first.
TRIALS = (0, 1, 2)
#: Updates of the null swap that precedes every measurement.
CHECK_STEPS = 20
#: Columns that figures and claims use.
COLUMNS = (
    *("trial", "m", "pair", "step", "steps_taken", "visits", "stab", "stab_excl_z", "gap_loss", "gap_01", "dist", "norm_S"),
    *("norm_S2", "ndist", "train_loss", "test_loss", "train_accuracy", "test_accuracy", "diverged"),
)
#: Batches of each pair whose smoothness is computed, from the first on.
BATCHES = 500

#: Algorithms, sizes m, and pairs at each; seed-trials after the first have `further` pairs. Figures that compare seed-trials take
#: that many of all, for a maximum grows with their number.
DEEP_SIZES = {
    "tiny": Params(settings=TINY, ms=(100, 200, 400, 800), pairs=4, further=4, trials=TRIALS),
    "laptop": Params(settings=LAPTOP, ms=(500, 1000, 2000, 4000, 8000), pairs=8, further=4, trials=TRIALS),
    "paper": Params(settings=PAPER, ms=tuple(range(15_000, 50_001, 5_000)), pairs=40, further=40, trials=TRIALS),
}
REGRESSION_SIZES = {
    size: Params(settings=(LOGISTIC_SIZES[size],), ms=ms, pairs=pairs, further=pairs, trials=(0,))
    for size, ms, pairs in (
        ("tiny", (200, 400, 800, 1600, 3200), 12),
        ("laptop", (800, 1600, 3200, 6400, 12_800), 12),
        ("paper", (800, 1600, 3200, 6400, 12_800), 90),
    )
}


class Pairs(Study):
    """All pairs of one algorithm, seed-trial and size, measured at all its checkpoints, from one run to 3T/2.

    `compared` marks the pairs that figures of several seed-trials take.
    """

    sizes = DEEP_SIZES

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for part in p.get("parts", (p,)):
            for setting, trial, m in product(part.settings, part.trials, part.ms):
                yield pair_job(setting, trial, m, part)

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        setting = Setting.of(job["setting"])
        checkpoints = setting.checkpoints
        for row in pair_rows(setting, job["trial"], job["m"], job["pairs"], tuple(checkpoints)):
            yield {**row, "time": checkpoints[row["step"]], "compared": row["pair"] < job["compared"]}


def pair_job(setting: Setting, trial: int, m: int, p: Params) -> dict[str, Any]:
    """A job of `Pairs`."""
    pairs = p.further if trial else p.pairs
    shared = {"configuration": setting.name, "setting": asdict(setting), "trial": trial, "m": m}
    return {**shared, "pairs": pairs, "compared": p.further, "seed": trial}


def pair_rows(setting: Setting, trial: int, m: int, pairs: int, checkpoints: tuple[int, ...]) -> list[Row]:
    """All pairs of one size and seed-trial at some updates, from one run."""
    task = own_task(setting)
    recipe = replace(recipe_of(setting, task), steps=checkpoints[-1])
    return _kept(setting, task, measure_size(recipe, task.bench, _config(m, pairs, checkpoints), m, trial, progress=False))


def own_task(setting: Setting) -> Task:
    """The data of a setting."""
    return task_of(setting.data, setting.source, setting.tested, setting.binary)


def _config(m: int, pairs: int, checkpoints: tuple[int, ...]) -> StabilityConfig:
    return StabilityConfig(sizes=(m,), pairs=pairs, checkpoints=checkpoints, check_steps=CHECK_STEPS)


def _kept(setting: Setting, task: Task, found: Measured) -> list[Row]:
    mark = {"configuration": setting.name, "data": task.origin}
    return [{**mark, **{name: row[name] for name in COLUMNS}} for row in found.rows]


class Paths(Study):
    """Accuracies on the lines through both models of the first pairs at T updates; pairs are drawn at random, so any are."""

    sizes = {size: p.but(joined=joined) for (size, p), joined in zip(DEEP_SIZES.items(), (2, 4, 10), strict=True)}

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for setting, trial, (end, pick) in product(p.settings, p.trials, (("smallest", min), ("largest", max))):
            shared = {"configuration": setting.name, "setting": asdict(setting), "trial": trial, "m": pick(p.ms), "size": end}
            yield {**shared, "pairs": p.joined, "seed": trial}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        setting, m, trial = Setting.of(job["setting"]), job["m"], job["trial"]
        task = own_task(setting)
        config = replace(_config(m, job["pairs"], ()), paths=job["pairs"])
        found = measure_size(recipe_of(setting, task), task.bench, config, m, trial, progress=False)
        mark = {"configuration": setting.name, "data": task.origin, "trial": trial, "m": m, "size": job["size"]}
        for name, path in sorted(found.paths.items()):
            pair = {"pair": int(name.rpartition(" ")[2])}
            summary = {key: path.summary()[key] for key in ("barrier_train", "barrier_test", "connected", "conclusive")}
            yield from ({**mark, **pair, **row, **summary} for row in path.rows())


class Stopped(Study):
    """Configuration 1a by each stopping rule: after T updates, after a number of epochs, or at a training loss.

    Runs that a loss stops end after 5T updates at the latest.
    """

    sizes = {
        size: DEEP_SIZES[size].but(epochs=epochs, loss_target=target)
        for size, epochs, target in (("tiny", 10, 0.5), ("laptop", 48, 0.1), ("paper", 100, 0.01))
    }

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for rule, m in product(STOPPING, p.ms):
            yield {**pair_job(p.settings[0], 0, m, p), "rule": rule, "epochs": p.epochs, "loss_target": p.loss_target}

    def needs(self, job: Mapping[str, Any]) -> list[Computation]:
        own = ("rule", "epochs", "loss_target")
        return [Pairs().job(**{k: v for k, v in job.items() if k not in own})] if job["rule"] == "updates" else []

    def run(self, job: Mapping[str, Any], *trained: list[Row]) -> Iterator[Row]:
        if trained:
            found = [row for row in trained[0] if row["time"] == "T" and row["compared"]]
        else:
            found = self._by_rule(Setting.of(job["setting"]), job)
        yield from ({**row, "rule": job["rule"]} for row in found)

    @staticmethod
    def _by_rule(setting: Setting, job: Mapping[str, Any]) -> list[Row]:
        task = own_task(setting)
        recipe = replace(recipe_of(setting, task), loss_target=job["loss_target"])
        recipe = with_length(recipe, job["m"], job["rule"], 5 * setting.steps, job["epochs"])
        config = _config(job["m"], job["compared"], ())
        return _kept(setting, task, measure_size(recipe, task.bench, config, job["m"], 0, progress=False))


# The convex case


class ConvexPairs(Study):
    """Pairs of logistic regressions, with distance and stability as shares of their bounds and the rate as a share of 2/β_s.

    The bounds are `D ≤ (2ηL/B) h` with the visits h so far, and `stability ≤ L_test D` with the measured D; where nothing has
    moved yet the shares are 0.
    """

    sizes = REGRESSION_SIZES

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        return Pairs().jobs(p)

    def needs(self, job: Mapping[str, Any]) -> list[Computation]:
        return [Pairs().job(**job)]

    def run(self, job: Mapping[str, Any], trained: list[Row]) -> Iterator[Row]:
        setting = Setting.of(job["setting"])
        constants, tested = batch_constants(setting, job["m"], job["pairs"])
        for row in trained:
            largest, smoothness = constants[row["pair"]]
            bounds = convex_bounds(
                largest_input=largest,
                largest_test_input=tested,
                rate=setting.rate,
                batch=min(setting.batch, job["m"]),
                visits=row["visits"],
                smoothness=smoothness,
            )
            shares = {
                "distance_share": share(row["dist"], float(bounds.distance_bound)),
                "stability_share": share(row["stab"], tested * row["dist"]),
                "rate_share": setting.rate / bounds.largest_rate,
            }
            yield {**row, **shares}


def batch_constants(setting: Setting, m: int, pairs: int) -> tuple[list[tuple[float, float]], float]:
    """L and the largest β_s of each pair, and L of the test examples."""
    bench = own_task(setting).bench
    inputs = bench.joined[0]
    places = batch_places(m, setting.batch, min(BATCHES, setting.steps))
    found = []
    for swap in draw_swaps(len(bench.train), len(bench.test), m, pairs, 0):
        both = swap.rows(len(bench.train))
        batches = both[:, places].flatten(0, 1).unique(dim=0)  # those of S and S' are mostly the same
        smoothness = largest_smoothness(inputs, batches, enough=2.0 / setting.rate)
        found.append((largest_norm(inputs[both.unique()]), smoothness))
    return found, largest_norm(bench.evaluation[0])


def batch_places(m: int, batch: int, count: int, *, order_seed: int = 0) -> Tensor:
    """Places (count, B) of the training set in the first batches of the common order, incomplete ones left out.

    >>> batch_places(5, 2, 3).shape
    torch.Size([3, 2])
    """
    width = min(batch, m)
    each = m // width
    epochs = [epoch_order(order_seed, epoch, m)[: each * width].reshape(each, width) for epoch in range(-(-count // each))]
    return torch.cat(epochs)[:count]


def share(value: float, bound: float) -> float:
    """A value over its bound; nothing is no share of anything."""
    return value / bound if bound else 0.0 if value == 0 else float("inf")
