"""Features after none, one, two, ... catapults of gradient descent: what the figures of section 4.4 on GD share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from theodolite.experiments.catapult_features.feature_raising import Raises, descend
from theodolite.experiments.catapult_features.feature_tasks import REAL, TASKS, Init, Setting, agops, alignments, prepare
from theodolite.experiments.catapult_features.feature_training import critical_rate
from theodolite.experiments.figure import Experiment
from theodolite.measures.dynamics import spike_events
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Steps and rates of the raises, as multiples of the critical rate at the start. The source's rates are divided by the critical
#: rates computed for its settings, 6.15 (rank-2) and 6.0 (full rank). Its rates for the other tasks fit no critical rate
#: of ours (40 for rank-3 against 7.4): there the rate is raised to 1.6 times the critical one of the moment.
TABLES = {
    "rank-2": tuple(zip((50, 150, 220, 280, 350, 400), (rate / 6.15 for rate in (8, 16, 30, 50, 75, 80)), strict=True)),
    "full": tuple(zip((30, 120, 180, 280), (rate / 6.0 for rate in (7, 12, 40, 80)), strict=True)),
}
FACTOR = 1.6
#: Near zero the kernel is small, but only at the start: the rate begins at so many times the usual one. Three other layers at a
#: tenth of their size make a plateau that the usual rate leaves after thousands of steps.
NEAR_ZERO = 5.0
#: Rows and columns of an AGOP that are kept.
BLOCK = 10


@dataclass(frozen=True)
class Params:
    """Tasks at their sizes; `raises` is the largest number of raises, of which all smaller ones are run too."""

    settings: tuple[Setting, ...]
    raises: int
    steps: int
    seeds: int = 3
    check: int = 10
    scheduled: bool = True  # raise by the source's table where there is one


@dataclass(frozen=True, eq=False)
class Outcome:
    """Of one task: a row for each run, validation curves, and the first rows and columns of each run's AGOP."""

    runs: tuple[Row, ...]
    curves: tuple[Row, ...]
    blocks: tuple[Row, ...]


@lru_cache(maxsize=16)
def raised(setting: Setting, raises: int, seeds: int, steps: int, check: int, scheduled: bool, init: Init = "ntk") -> Outcome:
    """Gradient descent with 0 .. `raises` raises for each seed, all as one stack; figures of the same runs share them."""
    copies = raises + 1
    start = prepare(setting, range(seeds), init, copies=copies)
    x = start.splits.train.x
    usual = start.networks if init == "ntk" else prepare(setting, range(seeds), copies=copies).networks
    critical = critical_rate(usual, x) * (1.0 if init == "ntk" else NEAR_ZERO)
    wanted = torch.arange(copies).repeat_interleave(seeds)
    table = TABLES.get(setting.task) if scheduled else None
    rule = Raises(wanted, critical, table=table, factor=FACTOR)
    history, losses = descend(start.networks, start.splits, rule, steps=steps, check=check)
    marks = [
        {"panel": TASKS[setting.task].title, "data": start.origin, "start": init, "raises": int(wanted[r]), "seed": r % seeds}
        for r in range(len(wanted))
    ]
    aligned = alignments(history.best, x, start.target)
    at_end = alignments(start.networks, x, start.target)
    test_loss, test_error = (
        score.tolist() for score in (start.splits.test.loss(history.best), start.splits.test.error(history.best))
    )
    runs = [
        {
            **marks[r],
            "spikes": len(spike_events([v for v in losses[:, r].tolist() if v == v])),
            "alignment": aligned[r],
            "alignment_at_end": at_end[r],
            "test_loss": test_loss[r],
            "test_error": test_error[r],
            **history.row(r),
            "restored": int(rule.restored[r]),
            "critical_rate": float(rule.critical[r]),
            "reference_error": start.reference_error,
        }
        for r in range(len(wanted))
    ]
    curves = [{**marks[row["replica"]], **{k: row[k] for k in ("step", "loss", "validation")}} for row in history.curves]
    return Outcome(tuple(runs), tuple(curves), tuple(_blocks(agops(history.best, x), start.target, marks)))


def _blocks(matrices: Tensor, target: Tensor, marks: Sequence[Row]) -> Iterator[Row]:
    """Entries of the top left blocks, mean over the seeds, each scaled to [0, 1]; the target's are marked -1 raises."""
    for raises in sorted({mark["raises"] for mark in marks}):
        mine = [r for r, mark in enumerate(marks) if mark["raises"] == raises]
        yield from _entries(matrices[mine].mean(0), {**marks[mine[0]], "seed": -1})
    yield from _entries(target, {**marks[0], "raises": -1, "seed": -1})


def _entries(matrix: Tensor, mark: Row) -> Iterator[Row]:
    block = matrix[:BLOCK, :BLOCK].abs()
    block = (block - block.min()) / (block.max() - block.min())
    for i, line in enumerate(block.tolist()):
        for j, value in enumerate(line):
            yield {**mark, "row": i, "column": j, "value": value}


class RaisedRates(Experiment):
    """Test performance and AGOP alignment against the number of catapults, one column of panels for each task."""

    near_zero: ClassVar[bool] = False  # also from weights near zero, without raises
    part: ClassVar[str] = "runs"  # of an Outcome
    departs = (
        "Rates are multiples of measured critical rates: for rank-2 and full rank the source's schedule divided by the critical "
        "rates computed for its settings, else 1.6 times the critical rate of the moment, once the last catapult is over. In "
        "between the rate is kept at 0.8 of the critical one, which is looked at every second step. Where a raise makes the "
        "loss 10⁴ times the first one, the weights before it are restored and the rate halved. Networks have no biases; "
        "images have a root mean square of 1.1. CelebA and USPS are not to be had here: generated images of two classes and "
        "digits 0 and 2 of scikit-learn stand in, with a tenth of the training labels flipped. The reference network is a "
        "Myrtle-5 of 32 filters trained here on training and validation points; the points of an image task are the same for "
        "all seeds. Below paper size sets are smaller and images have fewer pixels."
    )

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        for setting in p.settings:
            job = {
                "setting": asdict(setting),
                "raises": p.raises,
                "seeds": p.seeds,
                "steps": p.steps,
                "check": p.check,
                "scheduled": p.scheduled,
                "init": "ntk",
                "seed": 0,
            }
            yield job
            if self.near_zero:
                yield {**job, "raises": 0, "init": "ntk_small"}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        outcome = raised(
            Setting(**job["setting"]), job["raises"], job["seeds"], job["steps"], job["check"], job["scheduled"], job["init"]
        )
        yield from (dict(row) for row in getattr(outcome, self.part))

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        titles = list(dict.fromkeys(row["panel"] for row in rows))
        figure, axes = plots.panels(2 * len(titles), columns=max(len(titles), 2), size=(3.5, 2.9))
        for i, title in enumerate(titles):
            mine = [{**row, "start": STARTS[row["start"]]} for row in rows if row["panel"] == title]
            score, name = score_of(title)
            for ax, column, label in ((axes[i], score, name), (axes[i + len(titles)], "alignment", "AGOP alignment")):
                plots.curves(
                    mine,
                    "raises",
                    column,
                    by="start" if self.near_zero else None,
                    band="std",
                    labels="legend",
                    xlabel="raises of the rate",
                    ylabel=label,
                    title=with_origin(title, mine[0]["data"]) if column == score else None,
                    ax=ax,
                )
                ax.set_xticks(sorted({row["raises"] for row in mine}))
        return figure


STARTS = {"ntk": "σ = 1", "ntk_small": "σ = 0.1"}


def score_of(title: str) -> tuple[str, str]:
    """What a task is judged by: a column and its name."""
    images = next(task.images for task in TASKS.values() if task.title == title)
    return ("test_error", "test error") if images else ("test_loss", "test loss")


def with_origin(title: str, origin: str) -> str:
    """A panel's title, with what stands in for its data where something does."""
    return title if origin in (*TASKS, *REAL) else f"{title}\n({origin})"


# What the rows say


Measure = Callable[[list[Row]], float]


def runs_of(rows: list[Row], panel: str, raises: int | None = None, start: str = "ntk") -> list[Row]:
    """Runs of a panel by one number of raises; the largest if None."""
    mine = [row for row in rows if row["panel"] == panel and row["start"] == start]
    most = max(row["raises"] for row in mine) if raises is None else raises
    found = [row for row in mine if row["raises"] == most]
    if not found:
        raise ValueError(f"no run of {panel} with {most} raises")
    return found


def seeds_better(panel: str, column: str, raises: int | None = None, *, larger: bool = False) -> Measure:
    """Share of the seeds for which a column is better (smaller, or larger) with raises than without."""

    def measure(rows: list[Row]) -> float:
        with_raises, without = runs_of(rows, panel, raises), runs_of(rows, panel, 0)
        pairs = [(a[column], b[column]) for a, b in zip(with_raises, without, strict=True)]
        return fmean(bool(a > b if larger else a < b) for a, b in pairs)

    return measure


def change(panel: str, column: str, *, relative: bool = False) -> Measure:
    """Mean over the seeds of a column with the most raises less that without; relative to the latter if asked."""

    def measure(rows: list[Row]) -> float:
        after, before = (fmean(row[column] for row in runs_of(rows, panel, k)) for k in (None, 0))
        return after / before - 1 if relative else after - before

    return measure


def spikes_per_raise(panel: str) -> Measure:
    """Spikes of the training loss in a run with the most raises, mean over the seeds, over the raises."""

    def measure(rows: list[Row]) -> float:
        found = runs_of(rows, panel)
        return fmean(row["spikes"] for row in found) / float(found[0]["raises"])

    return measure


# Sizes

TINY = Params(
    settings=(
        Setting("rank-2", 80, 500, 20, 128),
        Setting("rank-3", 150, 500, 20, 64),
        Setting("svhn", 20, 60, 4, 4, "stand-in"),
        Setting("celeba", 60, 100, 6, 64, "stand-in"),
    ),
    raises=3,
    steps=200,
    scheduled=False,
)
LAPTOP = Params(
    settings=(
        Setting("rank-2", 500, 2000, 50, 512),
        Setting("rank-3", 1000, 2000, 50, 256),
        Setting("svhn", 200, 500, 8, 16),
        Setting("celeba", 300, 500, 8, 256),
    ),
    raises=3,
    steps=500,
)
PAPER = Params(
    settings=(
        Setting("rank-2", 2000, 5000, 100, 1024),
        Setting("rank-3", 1000, 5000, 100, 256),
        Setting("svhn", 1000, 5000, 32, 256, "files"),
        Setting("celeba", 1000, 5000, 32, 256),
    ),
    raises=6,
    steps=3000,
)


def only(p: Params, *tasks: str, **changes: Any) -> Params:
    """Some of the tasks, and other changes."""
    return replace(p, settings=tuple(s for s in p.settings if s.task in tasks), **changes)
