"""`growth_study`: all operators trained to the end, and what choosing early would have cost."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from theodolite.arguments import a_path, a_text, checked, count, each, one_of, positive, whole
from theodolite.arguments import seed as a_seed
from theodolite.measures.growth import diagnostics
from theodolite.measures.growth.diagnostics import over_seeds, ranks_mean_something
from theodolite.measures.growth.lag import TrialCurves
from theodolite.measures.growth.operators import GrowthOperator
from theodolite.measures.growth.optimizer_state import STATES
from theodolite.measures.growth.runs import Arm, refuse_other_streams, step_flops
from theodolite.measures.growth.search import looks_at, prepared, resting_place, some_baselines
from theodolite.problem.arguments import a_loss, a_model
from theodolite.problem.calling import Loss
from theodolite.progress import counting
from theodolite.results import Cost, Outcome, Result, Row
from theodolite.text import grouped, number
from theodolite.training.schedules import Schedule

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class GrowthStudy(Result):
    """Validation losses of all operators from growing to the end.

    Rank statistics are None where the spread of the final losses is below three times the noise, unless they are asked for with
    `anyway=True`.

    Attributes:
        operators: in the order in which ties are broken.
        steps: where losses were looked at, counted from growing.
        losses: (seeds, operators, looks), infinite where a run diverged.
        seeds: of the order of the data, of random layers and of dropout.
        sampling_error: (operators,), the paired error of each final loss against the best one, from the parts of the validation
            data; zero for the best.
        step_flops, small_step_flops: floating-point operations of one step of the grown and of the small model.
        baselines: rows for the small model trained on and for one from scratch, for the FLOPs of one grown run.
    """

    operators: tuple[GrowthOperator, ...]
    steps: tuple[int, ...]
    losses: Tensor
    seeds: tuple[int, ...]
    sampling_error: Tensor
    step_flops: float
    small_step_flops: float
    baselines: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the operators."""
        return tuple(operator.name for operator in self.operators)

    @property
    def curves(self) -> Array:
        """(operators, looks), the mean over seeds."""
        return over_seeds(self.losses.numpy())[0]

    @property
    def errors(self) -> Array:
        """(operators, looks), the standard error over seeds; infinite for one seed."""
        return over_seeds(self.losses.numpy())[1]

    @property
    def final(self) -> Array:
        """(operators,), the losses at the end."""
        found: Array = self.curves[:, -1]
        return found

    @property
    def noise(self) -> float:
        """What final losses differ by without reason: over seeds where there are several, else over the validation data."""
        if len(self.seeds) > 1:
            return over_seeds(self.losses.numpy())[2] / math.sqrt(len(self.seeds))
        others = np.delete(self.sampling_error.numpy(), self.best_index)
        known = others[np.isfinite(others)]
        return float(np.median(known)) if len(known) else 0.0

    @property
    def spread(self) -> float:
        """The largest final loss minus the least, of runs that did not diverge."""
        ends = self.final[np.isfinite(self.final)]
        return float(ends.max() - ends.min()) if len(ends) else 0.0

    @property
    def ranks_mean_something(self) -> bool:
        """Whether the spread is at least three times the noise."""
        return ranks_mean_something(self.final, self.noise)

    @property
    def best_index(self) -> int:
        return int(np.argmin(self.final))

    @property
    def best(self) -> GrowthOperator:
        """The operator with the least final loss."""
        return self.operators[self.best_index]

    # Diagnostics, one number per look unless it says otherwise

    def smoothed(self, window: int = diagnostics.WINDOW) -> Array:
        """(operators, looks), means over a centred window of looks, cut off at the ends."""
        return diagnostics.smoothed(self.curves, window)

    def _curves(self, smooth: int) -> Array:
        return self.smoothed(smooth) if smooth > 1 else self.curves

    def _until(self, until: int | None) -> int:
        return len(self.steps) if until is None else max(1, sum(step <= until for step in self.steps))

    @checked(until=whole, smooth=count)
    def heatmap(self, *, until: int | None = None, smooth: int = 1, anyway: bool = False) -> Array | None:
        """`H[t, t'] = Spearman(ℓ_t, ℓ_t')` of the looks up to step `until`, over windows of `smooth` looks."""
        if not (anyway or self.ranks_mean_something):
            return None
        return diagnostics.heat_map(self._curves(smooth)[:, : self._until(until)])

    @checked(kind=one_of("spearman", "pearson"), smooth=count)
    def final_correlation(
        self, kind: Literal["spearman", "pearson"] = "spearman", *, smooth: int = 1, anyway: bool = False
    ) -> Array | None:
        """`h(t)`, the correlation of the losses at each look with the final ones."""
        if not (anyway or self.ranks_mean_something):
            return None
        return diagnostics.final_correlation(self._curves(smooth), self.final, kind)

    @checked(r=count, smooth=count)
    def recall(self, r: int = 1, *, smooth: int = 1, anyway: bool = False) -> Array | None:
        """Whether the finally best operator is among the r best at each look, 0 or 1."""
        if not (anyway or self.ranks_mean_something):
            return None
        return diagnostics.recall(self._curves(smooth), r, self.final)

    @checked(smooth=count)
    def regret(self, *, smooth: int = 1) -> Array:
        """`ℓ(G^t) − ℓ_min`: what choosing the operator with the least loss at each look costs in the end."""
        return diagnostics.regret(self._curves(smooth), self.final)

    @checked(smooth=count)
    def relative_regret(self, *, smooth: int = 1, anyway: bool = False) -> Array | None:
        """The regret over the spread of the final losses, from 0 to 1; it says nothing of other pools of operators."""
        if not (anyway or self.ranks_mean_something):
            return None
        return diagnostics.relative_regret(self._curves(smooth), self.final)

    @checked(until=whole, smooth=count)
    def transition(self, *, until: int | None = None, smooth: int = 1, anyway: bool = False) -> float | None:
        """The step from which on the ranks agree with those at step `until`: Spearman at least 0.8 at all looks in between."""
        if not (anyway or self.ranks_mean_something):
            return None
        kept = self._until(until)
        return diagnostics.transition(self.steps[:kept], self._curves(smooth)[:, :kept])

    @checked(lag=whole)
    def chosen(self, lag: int) -> GrowthOperator:
        """LAG@q: the operator with the least loss at the look nearest to step `lag`."""
        look = int(np.argmin([abs(step - lag) for step in self.steps]))
        return self.operators[int(np.argmin(self.curves[:, look]))]

    def rows(self) -> list[Row]:
        """One row per seed, operator and look, then the baselines."""
        return [
            {
                "operator": name,
                "seed": seed,
                "step": step,
                "loss": float(self.losses[s, c, t]),
                "flops": step * self.step_flops,
                "equal_to": "",
            }
            for s, seed in enumerate(self.seeds)
            for c, name in enumerate(self.names)
            for t, step in enumerate(self.steps)
        ] + [dict(row) for row in self.baselines]

    def sentence(self) -> str:
        final, error = self.final, float(self.errors[self.best_index, -1])
        if not math.isfinite(final[self.best_index]):
            return "All operators diverged: lower the learning rate."
        parts = [
            f"Of {len(self.operators)} operators {self.best.name} has the least validation loss after {self.steps[-1]} steps, "
            f"{number(float(final[self.best_index]), error)}; all lie within {number(self.spread)}."
        ]
        if self.ranks_mean_something:
            h = self.final_correlation()
            assert h is not None
            turned = self.transition()
            at = "never before the end" if turned is None else f"from step {turned:g} on"
            if not math.isnan(h[0]):
                parts.append(f"The losses right after growing have rank correlation {number(float(h[0]))} with those at the end.")
            parts.append(f"The ranks agree with the last ones {at}.")
            first = self.regret()[0]
            parts.append(f"Choosing right after growing costs {number(float(first))}.")
        else:
            of = "over seeds" if len(self.seeds) > 1 else "of the validation data"
            parts.append(f"That is less than three times the noise {of}, {number(self.noise)}: no rank statistic is given.")
        for name, words in (("small", "The small model trained on"), ("scratch", "The grown model from scratch")):
            if ends := [row["loss"] for row in self.baselines if row["operator"] == name and row["equal_to"]]:
                parts.append(f"{words} has {number(sum(ends) / len(ends))} for the same FLOPs.")
        total = len(self.operators) * len(self.seeds) * self.steps[-1]
        return " ".join([*parts, f"{total} steps, {grouped(total * self.step_flops)} FLOPs.", *self.notes])


def _seeds(name: str, value: Any) -> list[int]:
    """Seeds, or a number of them: 0, 1, ..."""
    return (
        list(range(count(name, value))) if isinstance(value, int) and not isinstance(value, bool) else each(a_seed)(name, value)
    )


@checked(
    model=a_model, loss=a_loss, layers=count, steps=count, seeds=_seeds, baselines=some_baselines, checkpoint=a_path,
    batch_size=count, first=whole, state=one_of(*STATES), body=a_text, clip=positive, target=a_text,
)  # fmt: skip
def growth_study(
    model: nn.Module,
    loss: Loss,
    data: Any,
    optimizer: Any,
    *,
    layers: int,
    validation: Any,
    steps: int,
    operators: Any = "all",
    every: int | Sequence[int] | None = None,
    seeds: int | Sequence[int] = 1,
    schedule: Schedule | Mapping[int, float] | float | None = None,
    baselines: Sequence[str] = (),
    engine: Any = "serial",
    checkpoint: str | PathLike[str] | None = None,
    resume: bool = False,
    batch_size: int | None = None,
    shuffle: bool = True,
    first: int = 0,
    clip: float | None = None,
    state: Literal["copy", "zero_new", "reset"] = "copy",
    body: str | None = None,
    target: str = "labels",
    progress: bool | None = None,
) -> GrowthStudy:
    """Grow a model by all operators, train each to the end, and see when the best could have been told.

    Args:
        steps: how long each grown model is trained.
        every: steps between looks at the validation loss, or a list of them; by default twenty looks.
        seeds: how many runs of each operator, or their seeds. They differ in the order of the data, in random layers and
            dropout; one seed gives no error of a run.
        baselines: "small" and "scratch", trained for the FLOPs of one grown run.
        model, loss, data, optimizer, layers, validation, operators, schedule, engine, checkpoint, resume, batch_size, shuffle,
            first, clip, state, body, target: as in `landscape_aware_growth`.

    Returns:
        The study: losses of all operators, and when their ranks settled.

    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
    >>> x = torch.randn(32, 4)
    >>> study = growth_study(
    ...     model, nn.MSELoss(), (x[:16], x[:16]), "adam", schedule=0.01, validation=(x[16:], x[16:]), layers=3, steps=4, every=2)
    >>> study.steps, tuple(study.losses.shape), float(study.relative_regret(anyway=True)[-1])
    ((0, 2, 4), (1, 5, 3), 0.0)
    """
    began = time.perf_counter()
    seeds = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    recipe, chosen = prepared(
        model, loss, data, optimizer, validation, operators, layers, steps, seeds[0],
        schedule=schedule, batch_size=batch_size, shuffle=shuffle, first=first, state=state, body=body, target=target, clip=clip,
    )  # fmt: skip
    looks = looks_at(every, steps, max(1, steps // 20))
    arms: list[Arm] = [*chosen, *baselines]  # type: ignore[list-item]
    settings = {"seeds": seeds, "steps": steps, "looks": looks}
    with (
        resting_place(recipe, arms, engine, checkpoint, resume, settings, rests=False) as runs,
        counting("training grown models", progress=progress, total=len(seeds) * len(arms)) as count_run,
    ):
        batch = next(recipe.batches(seeds[0]))
        flops, small = step_flops(runs.open(0, seeds[0]).model, recipe, batch), step_flops(recipe.model, recipe, batch)
        ends = {"small": round(steps * flops / small), "scratch": steps}
        jobs = [{"arm": c, "seed": seed, "looks": looks, "rests": False} for seed in seeds for c in range(len(chosen))]
        jobs += [
            {"arm": len(chosen) + i, "seed": seed, "looks": sorted({0, ends[name]}), "rests": False}
            for seed in seeds
            for i, name in enumerate(baselines)
        ]
        rows = runs.perform(jobs, engine, count_run)
    grown = [row for row in rows if row["arm"] < len(chosen)]
    names = [operator.name for operator in chosen]
    refuse_other_streams((row for row in grown if row["step"] == looks[-1] and np.isfinite(row["parts"]).all()), names)
    weights = np.array(recipe.validation.weighting.weights)
    table = _table(grown, seeds, len(chosen), looks, len(weights))
    losses = np.where(np.isfinite(table), table, 0.0) @ (weights / weights.sum())
    losses[~np.isfinite(table).all(axis=-1)] = math.inf
    return GrowthStudy(
        operators=tuple(chosen),
        steps=tuple(looks),
        losses=torch.from_numpy(losses),
        seeds=tuple(seeds),
        sampling_error=torch.from_numpy(_sampling_error(tuple(names), looks[-1], table[:, :, -1], weights)),
        step_flops=flops,
        small_step_flops=small,
        baselines=tuple(_baseline_row(row, arms, ends, weights, flops, small) for row in rows if row["arm"] >= len(chosen)),
        notes=tuple(dict.fromkeys(note for row in grown for note in row["notes"])),
        outcome=Outcome.FINISHED if np.isfinite(losses[:, :, -1]).any() else Outcome.DIVERGED,
        seed=seeds[0],
        cost=Cost(time.perf_counter() - began, engine if isinstance(engine, str) else engine.name),
    )


def _table(rows: Sequence[Row], seeds: Sequence[int], operators: int, looks: Sequence[int], parts: int) -> Array:
    """(seeds, operators, looks, parts)."""
    found = np.full((len(seeds), operators, len(looks), parts), math.inf)
    for row in rows:
        found[seeds.index(row["seed"]), row["arm"], looks.index(row["step"])] = row["parts"]
    return found


def _sampling_error(names: tuple[str, ...], step: int, parts: Array, weights: Array) -> Array:
    """The paired error of each operator against the best, from losses (seeds, operators, parts)."""
    mean = parts.mean(axis=0)
    curves = TrialCurves(names, (step,), np.where(np.isfinite(mean).all(axis=-1), mean.T, math.inf).T[:, None], weights)
    return np.array([curves.behind(c)[1] for c in range(len(names))])


def _baseline_row(row: Row, arms: Sequence[Arm], ends: Mapping[str, int], weights: Array, flops: float, small: float) -> Row:
    name = str(arms[row["arm"]])
    loss = float(np.array(row["parts"]) @ (weights / weights.sum()))
    cost = row["step"] * (small if name == "small" else flops)
    equal = "one grown run" if row["step"] == ends[name] else ""
    return {"operator": name, "seed": row["seed"], "step": row["step"], "loss": loss, "flops": cost, "equal_to": equal}
