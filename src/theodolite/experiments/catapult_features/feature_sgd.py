"""Features learned by SGD with batches of different sizes: what Table 4.1 and the figures on SGD share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from theodolite.experiments.catapult_features.feature_gd import score_of, with_origin
from theodolite.experiments.catapult_features.feature_tasks import TASKS, Init, Setting, alignments, prepare
from theodolite.experiments.catapult_features.feature_training import critical_rate, train
from theodolite.experiments.figure import Experiment
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Losses on all points are taken once in an epoch, but not more often than every so many steps.
CHECK = 20
#: The critical rate of all points is looked at every so many steps of gradient descent.
KERNEL_EVERY = 10


@dataclass(frozen=True)
class Panel:
    """A task with its batch sizes; the last is all points: gradient descent."""

    setting: Setting
    batches: tuple[int, ...]
    steps: int = 30_000


@dataclass(frozen=True)
class Params:
    """`ratios` are rates over the critical one of all training points."""

    panels: tuple[Panel, ...]
    ratios: tuple[float, ...] = (0.5,)
    seeds: int = 3
    init: Init = "ntk"


@dataclass(frozen=True, eq=False)
class Outcome:
    """A row for each run, and validation curves."""

    runs: tuple[Row, ...]
    curves: tuple[Row, ...]


@lru_cache(maxsize=64)
def trained(setting: Setting, batch: int, steps: int, seeds: int, init: Init, ratio: float) -> Outcome:
    """SGD at `ratio` times the critical rate of all points, all seeds as one stack; figures of the same runs share them."""
    start = prepare(setting, range(seeds), init)
    train_points, test = start.splits.train, start.splits.test
    critical = critical_rate(start.networks, train_points.x)
    history = train(
        start.networks,
        start.splits,
        rates=ratio * critical,
        batch=batch,
        steps=steps,
        check=max(CHECK, -(-train_points.size // batch), steps // 1500),
        seeds=range(seeds),
        kernel_every=KERNEL_EVERY,
    )
    mark = {
        "panel": TASKS[setting.task].title,
        "data": start.origin,
        "ratio": ratio,
        "batch": min(batch, setting.n),
        "all": batch >= setting.n,
    }
    aligned = alignments(history.best, train_points.x, start.target)
    at_end = alignments(start.networks, train_points.x, start.target)
    test_loss, test_error = test.loss(history.best).tolist(), test.error(history.best).tolist()
    runs = []
    for r in range(seeds):
        to_best, in_all = history.catapults(r)
        runs.append(
            {
                **mark,
                "seed": r,
                "catapults": to_best,
                "catapults_in_all": in_all,
                "early_catapults": sum(bool(flags[r]) for flags in history.exceeded[:EARLY]),
                "alignment": aligned[r],
                "alignment_at_end": at_end[r],
                "test_loss": test_loss[r],
                "test_error": test_error[r],
                **history.row(r),
                "rate": ratio * float(critical[r]),
                "reference_error": start.reference_error,
            }
        )
    curves = [{**mark, "seed": row["replica"], "step": row["step"], "validation": row["validation"]} for row in history.curves]
    return Outcome(tuple(runs), tuple(curves))


#: Steps that count as the start of a run.
EARLY = 100


class BatchSizes(Experiment):
    """Catapults, AGOP alignment and test performance against the batch size, one column of panels for each task."""

    part: ClassVar[str] = "runs"  # of an Outcome
    departs = (
        "Networks have no biases and the points of synthetic tasks are drawn anew for each seed. Losses on all points are taken "
        "once in an epoch, or every 20 steps where that is longer; with batches of all points the critical rate is looked "
        "at every 10 steps and stands for those up to the next time. For SVHN the pair of digits 0 and 2 and the five-layer "
        "convolutional network of the caption take the place of all ten digits and Myrtle-5. CelebA and USPS are not to be had "
        "here: generated images of two classes and digits 0 and 2 of scikit-learn stand in, with a tenth of the training "
        "labels flipped. The reference network is a Myrtle-5 of 32 filters trained here on training and validation "
        "points. Below paper size most sets are smaller and images have fewer pixels."
    )

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        for panel in p.panels:
            for ratio in p.ratios:
                for batch in panel.batches:
                    yield {
                        "setting": asdict(panel.setting),
                        "batch": batch,
                        "steps": panel.steps,
                        "seeds": p.seeds,
                        "init": p.init,
                        "ratio": ratio,
                        "seed": 0,
                    }

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        setting = Setting(**job["setting"])
        outcome = trained(setting, job["batch"], job["steps"], job["seeds"], job["init"], job["ratio"])
        yield from (dict(row) for row in getattr(outcome, self.part))

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        titles = list(dict.fromkeys(row["panel"] for row in rows))
        figure, axes = plots.panels(3 * len(titles), columns=len(titles), size=(3.4, 2.6))
        for i, title in enumerate(titles):
            mine = [row for row in rows if row["panel"] == title]
            columns = (("catapults", "catapults"), ("alignment", "AGOP alignment"), score_of(title))
            for place, (column, label) in enumerate(columns):
                ax = axes[i + place * len(titles)]
                plots.curves(
                    mine,
                    "batch",
                    column,
                    band="std",
                    log="x",
                    labels="none",
                    xlabel="batch size",
                    ylabel=label,
                    title=with_origin(title, mine[0]["data"]) if place == 0 else None,
                    ax=ax,
                )
        return figure


class ValidationCurves(BatchSizes):
    """Validation loss during training for each batch size, one panel for each task."""

    part = "curves"

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        titles = list(dict.fromkeys(row["panel"] for row in rows))
        figure, axes = plots.panels(len(titles), size=(4.4, 3.2))
        for ax, title in zip(axes, titles, strict=True):
            mine = [row for row in rows if row["panel"] == title and row["seed"] == 0 and row["step"] > 0]
            plots.curves(
                mine,
                "step",
                "validation",
                by="batch",
                log="xy",
                labels="legend",
                ylabel="validation loss",
                title=with_origin(title, mine[0]["data"]),
                ax=ax,
            )
        return figure


# What the rows say


Measure = Callable[[list[Row]], float]


def means(rows: list[Row], panel: str, column: str, ratio: float | None = None) -> dict[int, float]:
    """Mean of a column over the seeds, by batch size, smallest first."""
    mine = [row for row in rows if row["panel"] == panel and (ratio is None or row["ratio"] == ratio)]
    if len({row["batch"] for row in mine}) < 2:
        raise ValueError(f"no two batch sizes of {panel}")
    return {b: fmean(row[column] for row in mine if row["batch"] == b) for b in sorted({row["batch"] for row in mine})}


def monotone(panel: str, column: str, *, falling: bool = True, ratio: float | None = None) -> Measure:
    """Share of the steps from one batch size to the next in which the mean falls (or rises), or stays."""

    def measure(rows: list[Row]) -> float:
        values = list(means(rows, panel, column, ratio).values())
        return fmean(bool(a >= b if falling else a <= b) for a, b in itertools.pairwise(values))

    return measure


def gain(panel: str, column: str, ratio: float | None = None) -> Measure:
    """The mean at the smallest batch less that at all points."""

    def measure(rows: list[Row]) -> float:
        values = list(means(rows, panel, column, ratio).values())
        return values[0] - values[-1]

    return measure


def quotient(panel: str, column: str, ratio: float | None = None) -> Measure:
    """The mean at the smallest batch over that at all points."""

    def measure(rows: list[Row]) -> float:
        values = list(means(rows, panel, column, ratio).values())
        return values[0] / values[-1]

    return measure


def at_batch(column: str, batch: int | None) -> Measure:
    """The mean of a column at a batch size, None for all points."""

    def measure(rows: list[Row]) -> float:
        found = [row[column] for row in rows if (row["all"] if batch is None else row["batch"] == batch)]
        return fmean(found) if found else math.nan

    return measure


def spread(panel: str, column: str, ratio: float | None = None) -> Measure:
    """Largest less smallest mean over the batch sizes, over their mean."""

    def measure(rows: list[Row]) -> float:
        values = list(means(rows, panel, column, ratio).values())
        return (max(values) - min(values)) / fmean(values)

    return measure


def lowest(panel: str) -> Callable[[list[Row]], dict[int, float]]:
    """Lowest validation loss of each run, mean over the seeds, by batch size."""

    def measure(rows: list[Row]) -> dict[int, float]:
        found: dict[tuple[int, int], list[float]] = {}
        for row in rows:
            if row["panel"] == panel:
                found.setdefault((row["batch"], row["seed"]), []).append(row["validation"])
        if len({batch for batch, _ in found}) < 2:
            raise ValueError(f"no two batch sizes of {panel}")
        return {b: fmean(min(v) for (batch, _), v in found.items() if batch == b) for b in sorted({b for b, _ in found})}

    return measure
