"""Features after none, one, two, ... catapults of gradient descent: Figures 4.8 and C.13 to C.17."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from theodolite.experiments import Figure, at_least, at_most, rows, sizes
from theodolite.experiments.catapult_features import tasks
from theodolite.experiments.catapult_features.stacked_networks import Raises, critical_rate, descend_with_raises
from theodolite.experiments.catapult_features.tasks import LOWEST, Setting, TaskStudy, judged, prepare, score_of
from theodolite.experiments.claims import Claim, Claims
from theodolite.experiments.lab import zhu
from theodolite.experiments.lab.panels import Panel, curves, draw_columns, draw_panels, matrix, split, titled
from theodolite.experiments.query import Column, Value, select, values_of
from theodolite.experiments.study import grid
from theodolite.measures.dynamics import spike_events
from theodolite.results import Row

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

FOUR_TASKS = ("rank-2", "rank-3", "svhn", "celeba")
#: Tasks at their sizes; `raises` is the largest number of raises, of which all smaller ones are run too; `scheduled` raises by
#: the source's table where there is one.
FOUR = sizes(
    seeds=3,
    check=10,
    raises=3,
    scheduled=True,
    tiny={"settings": tasks.settings("tiny", *FOUR_TASKS), "steps": 200, "scheduled": False},
    laptop={"settings": tasks.settings("laptop", *FOUR_TASKS, n={"rank-3": 1000}), "steps": 500},
    paper={"settings": tasks.settings("paper", *FOUR_TASKS), "steps": 3000, "raises": 6},
)
MORE = {size: p.but(settings=tasks.settings(size, "rank-4", "usps", "fashion"), raises=3) for size, p in FOUR.items()}
FULL_RANK = {size: p.but(settings=tasks.settings(size, "full"), raises=4, scheduled=True) for size, p in FOUR.items()}
FULL_RANK["tiny"] = FULL_RANK["tiny"].but(steps=400)


class RaisedRates(TaskStudy):
    """Gradient descent with 0 .. `raises` raises of the rate for each seed, and without from weights near zero.

    Rows are a "run" for each network, its validation "curve", and a "block" for each entry of the AGOPs that is kept.
    """

    sizes = FOUR

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for job in grid(p, "seeds", "steps", "check", "scheduled", setting=[each._asdict() for each in p.settings], seed=[0]):
            yield {**job, "raises": p.raises, "init": "ntk"}
            yield {**job, "raises": 0, "init": "ntk_small"}

    def run(self, job: Mapping[str, Any], reference: Sequence[Row] = ()) -> Iterator[Row]:
        setting, init, seeds, copies = Setting(**job["setting"]), job["init"], range(job["seeds"]), job["raises"] + 1
        start = prepare(setting, seeds, init, copies=copies, reference=reference)
        x = start.splits.train.x
        usual = start.networks if init == "ntk" else prepare(setting, seeds, copies=copies, reference=reference).networks
        critical = critical_rate(usual, x) * (1.0 if init == "ntk" else NEAR_ZERO)
        wanted = torch.arange(copies).repeat_interleave(len(seeds))
        rule = Raises(wanted, critical, table=TABLES.get(setting.task) if job["scheduled"] else None, factor=FACTOR)
        history, losses = descend_with_raises(start.networks, start.splits, rule, steps=job["steps"], check=job["check"])
        shared = {"panel": setting.title, "data": start.origin, "start": init}
        marks = [{**shared, "raises": int(k), "seed": r % len(seeds)} for r, k in enumerate(wanted)]
        at_end = tasks.alignments(start.networks, x, start.target)
        for r, row in enumerate(judged(start, history)):
            spikes = len(spike_events([v for v in losses[:, r].tolist() if v == v]))
            rates = {"restored": int(rule.restored[r]), "critical_rate": float(rule.critical[r])}
            yield {"kind": "run", **marks[r], "spikes": spikes, **row, "alignment_at_end": at_end[r], **rates}
        for row in history.curves:
            yield {"kind": "curve", **marks[row["replica"]], **{k: row[k] for k in ("step", "loss", "validation")}}
        for row in _blocks(tasks.agops(history.best, x), start.target, marks):
            yield {"kind": "block", **row, "seed": -1}


def _blocks(matrices: Tensor, target: Tensor, marks: Sequence[Row]) -> Iterator[Row]:
    """Entries of the top left blocks, mean over the seeds, each scaled to [0, 1]; the target's are marked -1 raises."""
    for raises in sorted({mark["raises"] for mark in marks}):
        mine = [r for r, mark in enumerate(marks) if mark["raises"] == raises]
        yield from _entries(matrices[mine].mean(0), marks[mine[0]])
    yield from _entries(target, {**marks[0], "raises": -1})


def _entries(matrix: Tensor, mark: Row) -> Iterator[Row]:
    block = matrix[:BLOCK, :BLOCK].abs()
    block = (block - block.min()) / (block.max() - block.min())
    for i, line in enumerate(block.tolist()):
        for j, value in enumerate(line):
            yield {**mark, "row": i, "column": j, "value": value}


# What the rows say


def by_seed(panel: str, measure: str | Value, raises: int | None = None, start: str = "ntk") -> Column:
    """A column (or another measure) of the runs of a panel with one number of raises, the largest if None, seed by seed."""
    measure = rows.only(measure) if isinstance(measure, str) else measure

    def compute(table: list[Row]) -> list[Any]:
        mine = rows(panel=panel, start=start).found(table)
        most = max(row["raises"] for row in mine) if raises is None else raises
        return rows(raises=most).by("seed").each(measure)(mine)

    return Column(compute)


def seeds_better(panel: str, measure: str | Value, *, larger: bool = False) -> Value:
    """Share of the seeds for which a column is better (smaller, or larger) with the most raises than without."""
    change = by_seed(panel, measure) - by_seed(panel, measure, 0)
    return change.share(lambda difference: difference > 0 if larger else difference < 0)


def ahead_of_all(panel: str, column: str, *, larger: bool = False) -> Value:
    """How far the start near zero is ahead of the best number of raises, in means over the seeds."""
    small = by_seed(panel, column, 0, "ntk_small").mean()
    means = rows(panel=panel, start="ntk").by("raises").each(rows.mean(column))
    return small - means.max() if larger else means.min() - small


def block_distance(rows: list[Row], raises: int) -> float:
    """Root mean square distance of a scaled AGOP block from the target's."""
    target = {(row["row"], row["column"]): row["value"] for row in select(rows, raises=-1)}
    mine = select(rows, raises=raises)
    return math.sqrt(fmean((row["value"] - target[row["row"], row["column"]]) ** 2 for row in mine))


def nearer(rows: list[Row]) -> float:
    """Distance with the most raises over that with none."""
    return block_distance(rows, max(row["raises"] for row in rows)) / block_distance(rows, 0)


def two_of_three(share: Value, says: str) -> Claim:
    """A claim on a share of the seeds."""
    return at_least(2 / 3, share, tolerance=1e-9, says=says, since="laptop")


def improves(panel: str) -> Claims:
    """Test performance and alignment are better with the most raises than without."""
    score, name = score_of(panel)
    return {
        f"{panel}: the {name} is smaller with the most raises than with none (share of the seeds)": two_of_three(
            seeds_better(panel, score), "falls with the number of catapults"
        ),
        f"{panel}: the alignment is larger with the most raises than with none (share of the seeds)": two_of_three(
            seeds_better(panel, "alignment", larger=True), "rises with the number of catapults"
        ),
    }


# Measured once at laptop size, rank-2 with 0, 1, 2, 3 raises: alignment 0.670, 0.830, 0.885, 0.947, test loss 0.831, 0.651,
# 0.555, 0.328, as many spikes as raises. The alignment of the full-rank target changes by 0.009, but its test loss falls by 27 %.

PANELS = ("rank-2", "rank-3", "SVHN-2", "CelebA")
STARTS = {"ntk": "σ = 1", "ntk_small": "σ = 0.1"}


class RaisedFigure(Figure):
    """Test performance and AGOP alignment against the number of catapults, one column of panels for each task."""

    study = RaisedRates()
    only: Mapping[str, Any] = {"init": "ntk"}
    view = rows(kind="run")
    departs = (
        "Rates are multiples of measured critical rates: for rank-2 and full rank the source's schedule divided by the critical "
        "rates computed for its settings, else 1.6 times the critical rate of the moment, once the last catapult is over. In "
        "between the rate is kept at 0.8 of the critical one, which is looked at every second step. Where a raise makes the "
        "loss 10⁴ times the first one, the weights before it are restored and the rate halved. Networks have no biases; "
        "images have a root mean square of 1.1. CelebA and USPS are not available here: generated images of two classes and "
        "digits 0 and 2 of scikit-learn stand in, with a tenth of the training labels flipped. The reference network is a "
        "Myrtle-5 of 32 filters trained here on training and validation points; the points of an image task are the same for "
        "all seeds. Below paper size sets are smaller and images have fewer pixels."
    )

    def draw(self, rows: list[Row]) -> Any:
        def column(title: str, mine: list[Row]) -> list[Panel]:
            score, name = score_of(title)
            named = curves(mine, "raises", score, ylabel=name, title=titled(title, mine))
            both = named, curves(mine, "raises", "alignment", ylabel="AGOP alignment")
            return [panel.set(xticks=sorted(values_of(mine, "raises"))) for panel in both]

        mine = split([{**row, "start": STARTS[row["start"]]} for row in rows], "panel")
        look: dict[str, Any] = {"by": "start" if len(values_of(rows, "start")) > 1 else None, "band": "std", "labels": "legend"}
        look |= {"columns": max(len(mine), 2), "xlabel": "raises of the rate"}
        return draw_columns(*map(column, mine, mine.values()), size=(3.5, 2.9), **look)


class Figure48(RaisedFigure):
    """Gradient descent with several catapults: test performance and AGOP alignment.

    The rate is raised above the critical one none to several times; each network is judged at its best validation loss.
    """

    item, where = "zhu-2024 Figure 4.8", "section 4.4; settings in appendix C.6"
    claims = (
        *map(improves, PANELS),
        {
            "rank-2: every raise makes a spike of the training loss (spikes per raise)": at_least(
                1.0,
                by_seed("rank-2", "spikes").mean() / by_seed("rank-2", "raises").max(),
                tolerance=0.1,
                **zhu("one catapult for each raise", "section 4.3"),
            ),
        },
    )


class FigureC13(RaisedFigure):
    """Gradient descent with several catapults: validation loss during training.

    The runs of Figure 4.8; a raise of the rate shows as a spike.
    """

    item, where = "zhu-2024 Figure C.13", "appendix C.4"
    view = rows(kind="curve")
    claims = {
        f"{panel}: the lowest validation loss is smaller with the most raises than with none (share of the seeds)": two_of_three(
            seeds_better(panel, LOWEST), "falls with the number of catapults"
        )
        for panel in PANELS
    }

    def draw(self, rows: list[Row]) -> Any:
        shown = [{**row, "validation": min(row["validation"], 1e6)} for row in select(rows, seed=0)]
        panels = [curves(run, "step", "validation", title=titled(title, run)) for title, run in split(shown, "panel").items()]
        return draw_panels(*panels, size=(4.4, 3.2), by="raises", log="y", labels="legend", ylabel="validation loss")


class FigureC14(RaisedFigure):
    """Several catapults against a start near zero.

    Weights from N(0, 0.1²) in place of N(0, 1), trained by gradient descent without raises, beside the runs of Figure 4.8.
    """

    item, where = "zhu-2024 Figure C.14", "appendix C.4"
    only: Mapping[str, Any] = {}
    claims = (
        {
            "rank-2: the alignment from near zero is larger than that of plain gradient descent (difference)": at_least(
                0.0,
                by_seed("rank-2", "alignment", 0, "ntk_small").mean() - by_seed("rank-2", "alignment", 0).mean(),
                says="the best alignment",
            ),
        },
        {
            f"{panel}: from near zero the {name} is {word} than after any number of raises (by how much)": at_least(
                0.0,
                ahead_of_all(panel, column, larger=column == "alignment"),
                says=f"the {'largest' if column == 'alignment' else 'smallest'}",
                since="laptop",
            )
            for panel in PANELS
            for column, name, word in ((*score_of(panel), "smaller"), ("alignment", "alignment", "larger"))
        },
    )
    departs = (
        f"{RaisedFigure.departs} The rate from near zero is not stated: "
        "it begins at 5 times the usual one and is kept subcritical."
    )


class FigureC15(RaisedFigure):
    """The AGOP of rank-2 after more and more catapults.

    The first ten rows and columns, scaled to [0, 1] and averaged over the seeds, beside those of the target.
    """

    item, where = "zhu-2024 Figure C.15", "appendix C.4"
    only: Mapping[str, Any] = {"init": "ntk", "setting": lambda setting: setting["task"] == "rank-2"}
    view = rows(kind="block")
    claims = {
        "the AGOP is closer to the true one with the most raises than with none (distance over distance)": at_most(
            1.0, nearer, says="closer with a greater number of catapults"
        ),
    }

    def draw(self, rows: list[Row]) -> Any:
        def block(raises: int) -> Panel:
            values = [[row["value"] for row in line] for line in split(select(rows, raises=raises), "row").values()]
            title = "true AGOP" if raises < 0 else f"{raises} raise{'s' if raises != 1 else ''}"
            return matrix(values, limits=(0.0, 1.0), center=None, annotate=False, title=title)

        counts = sorted({row["raises"] for row in rows if row["raises"] >= 0})
        return draw_panels(*map(block, [*counts, -1]), size=(3.2, 2.8))


class FigureC16(RaisedFigure):
    """Several catapults of gradient descent on further tasks: rank-4, USPS, Fashion-MNIST."""

    study, item, where = RaisedRates(sizes=MORE), "zhu-2024 Figure C.16", "appendix C.4"
    claims = [improves(panel) for panel in ("rank-4", "USPS", "Fashion-MNIST")]
    departs = f"{RaisedFigure.departs} Classes 0 and 2 are taken of Fashion-MNIST."


class FigureC17(RaisedFigure):
    """A target of full rank: catapults teach nothing.

    ‖x‖/√d depends on all directions alike, so that there are no few features to find.
    """

    study, item, where = RaisedRates(sizes=FULL_RANK), "zhu-2024 Figure C.17", "appendix C.4"
    claims = {
        "after four raises the alignment is not larger by 0.05 (change)": at_most(
            0.05, by_seed("full rank", "alignment").mean() - by_seed("full rank", "alignment", 0).mean(), says="not improved"
        ),
        "after four raises the test loss is not smaller by a tenth (relative change)": at_least(
            -0.1,
            by_seed("full rank", "test_loss").mean() / by_seed("full rank", "test_loss", 0).mean() - 1,
            says="not improved",
            since="laptop",
        ),
    }
