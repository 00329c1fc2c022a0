"""Features learned by SGD with batches of different sizes: Table 4.1, Figures 4.9, 4.10, C.18 to C.21 and C.23."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import ge, le
from typing import Any, NamedTuple

from theodolite.experiments import Figure, Params, at_least, at_most, equal, rows, within
from theodolite.experiments.catapult_features import tasks
from theodolite.experiments.catapult_features.stacked_networks import critical_rate, train
from theodolite.experiments.catapult_features.tasks import LOWEST, Setting, TaskStudy, judged, prepare, score_of, setting_of
from theodolite.experiments.claims import Claims
from theodolite.experiments.lab.panels import Panel as Drawing
from theodolite.experiments.lab.panels import curves, draw_columns, draw_panels, split, titled
from theodolite.experiments.query import Column, Value, select, values_of
from theodolite.experiments.study import grid
from theodolite.results import Row

#: Losses on all points are taken once in an epoch, but not more often than every so many steps.
CHECK = 20
#: The critical rate of all points is looked at every so many steps of gradient descent.
KERNEL_EVERY = 10
#: Steps that count as the start of a run.
EARLY = 100
#: Steps of the source's size.
STEPS = 30_000


class Panel(NamedTuple):
    """A task with its batch sizes; the last is all points: gradient descent."""

    setting: Setting
    batches: tuple[int, ...]
    steps: int


class BatchSizes(TaskStudy):
    """SGD in batches of several sizes at `ratios` times the critical rate of all points, all seeds as one stack.

    Rows are a "run" for each network and its validation "curve".
    """

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for panel in p.panels:
            task = {"setting": panel.setting._asdict(), "steps": panel.steps}
            yield from grid({**p, **task}, "seeds", "init", *task, ratio=p.ratios, batch=panel.batches, seed=[0])

    def run(self, job: Mapping[str, Any], reference: Sequence[Row] = ()) -> Iterator[Row]:
        setting, seeds, batch, ratio = Setting(**job["setting"]), range(job["seeds"]), job["batch"], job["ratio"]
        start = prepare(setting, seeds, job["init"], reference=reference)
        points = start.splits.train
        critical = critical_rate(start.networks, points.x)
        history = train(
            *(start.networks, start.splits),
            rates=ratio * critical,
            batch=batch,
            steps=job["steps"],
            check=max(CHECK, -(-points.size // batch), job["steps"] // 1500),
            seeds=seeds,
            kernel_every=KERNEL_EVERY,
        )
        mark = {"panel": setting.title, "data": start.origin, "ratio": ratio}
        mark |= {"batch": min(batch, setting.n), "all": batch >= setting.n}
        at_end = tasks.alignments(start.networks, points.x, start.target)
        for r, row in enumerate(judged(start, history)):
            to_best, in_all = history.catapults(r)
            early = sum(bool(flags[r]) for flags in history.exceeded[:EARLY])
            counts = {"catapults": to_best, "catapults_in_all": in_all, "early_catapults": early}
            ends = {"alignment_at_end": at_end[r], "rate": ratio * float(critical[r])}
            yield {"kind": "run", **mark, "seed": r, **counts, **row, **ends}
        for row in history.curves:
            yield {"kind": "curve", **mark, "seed": row["replica"], "step": row["step"], "validation": row["validation"]}


# Sizes

#: Batch sizes of the source, with all points as the last.
ALL = (5, 10, 50, 100, 2000)


def panels(size: str, *tasks: tuple[str, tuple[int, ...], int], **changes: Any) -> tuple[Panel, ...]:
    """Some tasks at a size with their batch sizes and steps; `changes` of the settings hold for all of them."""
    return tuple(Panel(setting_of(size, task, **changes), batches, steps) for task, batches, steps in tasks)


RANK_2 = {
    "tiny": panels("tiny", ("rank-2", (5, 10, 50, 80), 3000)),
    "laptop": panels("paper", ("rank-2", (5, 10, 50, 2000), STEPS)),
    "paper": panels("paper", ("rank-2", ALL, STEPS)),
}
OTHERS = {
    "tiny": panels("tiny", ("rank-3", (5, 20, 150), 400), ("svhn", (5, 20), 200), ("celeba", (5, 60), 300)),
    "laptop": panels("laptop", ("rank-3", (5, 20, 500), 4000))
    + panels("laptop", ("svhn", (5, 20, 300), 1500), ("celeba", (5, 20, 300), 3000), n=300),
    "paper": panels("paper", ("rank-3", ALL, STEPS), ("svhn", ALL, STEPS), ("celeba", ALL, STEPS), n=2000),
}
#: `ratios` are rates over the critical one of all training points.
FOUR = {size: Params(panels=RANK_2[size] + OTHERS[size], ratios=(0.5,), seeds=3, init="ntk") for size in RANK_2}
SMALLER_RANK_2 = ("rank-2", (5, 20, 500))
TORCH = {size: p.but(init="torch") for size, p in FOUR.items()}
TORCH["laptop"] = TORCH["laptop"].but(panels=panels("laptop", (*SMALLER_RANK_2, 10_000)) + OTHERS["laptop"])
FURTHER_PANELS = {
    "tiny": panels("tiny", ("rank-4", (5, 20, 150), 400))
    + panels("tiny", ("usps", (5, 60), 300), ("fashion", (5, 60), 300), noise=0.1),
    "laptop": panels("laptop", ("rank-4", (5, 20, 500), 4000))
    + panels("laptop", ("usps", (5, 20, 100), 3000), ("fashion", (5, 20, 500), 3000), noise=0.1),
    "paper": panels("paper", ("rank-4", ALL, STEPS), n=2000)
    + panels("paper", ("usps", ALL[:-1], STEPS), noise=0.1)
    + panels("paper", ("fashion", ALL, STEPS), n=2000, noise=0.1),
}
FURTHER = {size: FOUR[size].but(panels=found) for size, found in FURTHER_PANELS.items()}
LARGE, SMALL = 0.5, 1 / 40
#: The rate 0.1 of Figure C.23 over the critical rate computed for the rank-2 task.
SMALLER = 0.1 / 6.15
TWO_PANELS = {
    "tiny": panels("tiny", ("rank-2", (5, 10, 50, 80), 1500))
    + panels("tiny", ("rank-3", (5, 20, 60), 1000), n=60, held_out=300, width=32),
    "laptop": panels("laptop", (*SMALLER_RANK_2, 24_000)) + panels("laptop", ("rank-3", (5, 20, 500), 12_000), width=128),
    "paper": FOUR["paper"].panels,
}
TWO_RATES = {size: FOUR[size].but(panels=found, ratios=(LARGE, SMALL)) for size, found in TWO_PANELS.items()}


# What the rows say


def by_batch(panel: str, measure: str | Value, **where: Any) -> Column:
    """Mean of a column over the seeds, or another measure, by batch size, smallest first."""
    measure = rows.mean(measure) if isinstance(measure, str) else measure

    def compute(table: list[Row]) -> list[float]:
        mine = sorted(select(table, panel=panel, **where), key=lambda row: row["batch"])
        if len(values_of(mine, "batch")) < 2:
            raise ValueError(f"no two batch sizes of {panel}")
        return rows.by("batch").each(measure)(mine)

    return Column(compute)


def lowest(panel: str) -> Column:
    """Lowest validation loss of each run, mean over the seeds, by batch size."""
    return by_batch(panel, rows.by("seed").each(LOWEST).mean())


def monotone(values: Column, *, falling: bool = True) -> Value:
    """Share of the steps from one batch size to the next in which the mean falls (or rises), or stays."""
    return values.steps(ge if falling else le).mean()


def gain(panel: str, column: str) -> Value:
    """The mean at the smallest batch minus that at all points."""
    return by_batch(panel, column).first() - by_batch(panel, column).last()


def quotient(values: Column) -> Value:
    """The mean at the smallest batch over that at all points."""
    return values.first() / values.last()


def spread(values: Column) -> Value:
    """Largest minus smallest mean over the batch sizes, over their mean."""
    return (values.max() - values.min()) / values.mean()


# Measured once at laptop size. Rank-2, the source's own setting: alignment 0.956, 0.896, 0.839, 0.827 and test loss 0.364,
# 0.603, 0.727, 0.747 with batches of 5, 10, 50 and all. Rank-3 diverges with batches of 5: its labels have variance 14, and
# the kernel grows tenfold within 60 steps. On images gradient descent hovers at the edge of stability and so has more
# supercritical steps than SGD (SVHN-2: 667 against 54). At a fortieth of the critical rate test losses spread by 0.4 %
# (rank-2), 0.6 % (rank-3).

PANELS = ("rank-2", "rank-3", "SVHN-2", "CelebA")
MORE, LARGER, LESS = "more for smaller batches", "larger for smaller batches", "smaller for smaller batches"


def rank_2_claims(where: str = "") -> Claims:
    """What a smaller version of the rank-2 task must still show."""
    return {
        "rank-2: the number of catapults does not rise from any batch size to the next (share of them)": equal(
            1.0, monotone(by_batch("rank-2", "catapults")), says=MORE, where=where
        ),
        "rank-2: alignment with batches of 5 less that of gradient descent": at_least(
            0.05, gain("rank-2", "alignment"), says=LARGER, where=where, since="laptop"
        ),
        "rank-2: test loss with batches of 5 over that of gradient descent": at_most(
            0.85, quotient(by_batch("rank-2", "test_loss")), says=LESS, where=where, since="laptop"
        ),
    }


def trends(panel: str) -> Claims:
    """The same in kind, for the tasks without a measure of how much."""
    score, name = score_of(panel)
    return {
        f"{panel}: catapults with the smallest batches less those of gradient descent": at_least(
            1.0, gain(panel, "catapults"), says=MORE, since="laptop"
        ),
        f"{panel}: alignment with the smallest batches less that of gradient descent": at_least(
            0.0, gain(panel, "alignment"), says=LARGER, since="laptop"
        ),
        f"{panel}: {name} with the smallest batches less that of gradient descent": at_most(
            0.0, gain(panel, score), says=LESS, since="laptop"
        ),
    }


class BatchFigure(Figure):
    """Catapults, AGOP alignment and test performance against the batch size, one column of panels for each task."""

    view = rows(kind="run")
    departs = (
        "Networks have no biases and the points of synthetic tasks are drawn anew for each seed. Losses on all points are taken "
        "once in an epoch, or every 20 steps where that is longer; with batches of all points the critical rate is looked "
        "at every 10 steps and stands for those up to the next time. For SVHN the pair of digits 0 and 2 and the five-layer "
        "convolutional network of the caption take the place of all ten digits and Myrtle-5. CelebA and USPS are not available "
        "here: generated images of two classes and digits 0 and 2 of scikit-learn stand in, with a tenth of the training "
        "labels flipped. The reference network is a Myrtle-5 of 32 filters trained here on training and validation "
        "points. Below paper size most sets are smaller and images have fewer pixels."
    )

    def draw(self, rows: list[Row]) -> Any:
        def column(title: str, mine: list[Row]) -> Iterator[Drawing]:
            yield against_batch(mine, y="catapults", labels="none", title=titled(title, mine))
            for y, label in (("alignment", "AGOP alignment"), score_of(title)):
                yield against_batch(mine, y=y, labels="none", ylabel=label)

        mine = split(rows, "panel")
        return draw_columns(*map(column, mine, mine.values()), size=(3.4, 2.6))


against_batch = partial(curves, x="batch", band="std", log="x", labels="legend", xlabel="batch size")


class CurvesFigure(BatchFigure):
    """Validation loss during training for each batch size, one panel for each task."""

    view = rows(kind="curve")

    def draw(self, rows: list[Row]) -> Any:
        mine = split(select(rows, seed=0, step=lambda step: step > 0), "panel")
        panels = [curves(found, "step", "validation", title=titled(title, found)) for title, found in mine.items()]
        return draw_panels(*panels, size=(4.4, 3.2), by="batch", log="xy", labels="legend", ylabel="validation loss")


#: Alignment and test loss of the source by batch size; None is gradient descent.
TABLE_4_1: dict[int | None, tuple[float, float]] = {None: (0.81, 0.74), 50: (0.84, 0.71), 10: (0.89, 0.59), 5: (0.95, 0.42)}


def table_claims(batch: int | None, alignment: float, loss: float) -> Claims:
    """A line of the table."""
    mine, who = (rows(all=True), "all points (GD)") if batch is None else (rows(batch=batch), f"batches of {batch}")
    return {
        f"alignment with {who}": within(0.06, None, mine.mean("alignment"), reported=alignment, since="laptop"),
        f"test loss with {who}": within(0.12, None, mine.mean("test_loss"), reported=loss, since="laptop"),
    }


class Table41(BatchFigure):
    """Smaller batches, better features: AGOP alignment and test loss of rank-2 by batch size.

    A two-layer network is trained on x₁x₂ with noise at half the critical rate until the training loss is below 10⁻³, and
    judged at its best validation loss. At laptop size this is the source's own setting.
    """

    study = BatchSizes(sizes={size: FOUR[size].but(panels=found) for size, found in RANK_2.items()})
    item, where = "zhu-2024 Table 4.1", "section 4.1; settings of Figure 4.9"
    claims = (
        {
            "alignment falls from each batch size to the next (share of them)": equal(
                1.0, monotone(by_batch("rank-2", "alignment")), says="0.95, 0.89, 0.84, 0.81", since="laptop"
            ),
            "test loss rises from each batch size to the next (share of them)": equal(
                1.0, monotone(by_batch("rank-2", "test_loss"), falling=False), says="0.42, 0.59, 0.71, 0.74", since="laptop"
            ),
        },
        *(table_claims(batch, *values) for batch, values in TABLE_4_1.items()),
        rank_2_claims("Zhu 2024, Figure 4.9"),
    )

    def draw(self, rows: list[Row]) -> Any:
        largest, columns = max(row["batch"] for row in rows), {"alignment": "AGOP alignment", "test_loss": "test loss"}
        known = [{"batch": k or largest, **dict(zip(columns, values, strict=True))} for k, values in TABLE_4_1.items()]
        both = [{**row, "where": "here"} for row in rows] + [{**row, "where": "Table 4.1"} for row in known]
        panels = [against_batch(both, y=column, by="where", ylabel=label) for column, label in columns.items()]
        return draw_panels(*panels, size=(4.4, 3.3))


class Figure49(BatchFigure):
    """SGD: smaller batches make more catapults, better aligned features and better tests.

    All batch sizes of a task have the same rate, half the critical one of all training points. Catapults are the steps whose
    rate is above the critical one of their batch, up to the best validation loss.
    """

    study, item, where = BatchSizes(sizes=FOUR), "zhu-2024 Figure 4.9", "section 4.4"
    claims = (rank_2_claims(), *map(trends, ("rank-3", "SVHN-2", "CelebA")))


def best_falls(panel: str) -> Claims:
    """The lowest validation loss is smaller for the smallest batches."""
    return {
        f"{panel}: lowest validation loss with the smallest batches over that of gradient descent": at_most(
            1.0, quotient(lowest(panel)), says=LESS, since="laptop"
        )
    }


class FigureC19(CurvesFigure):
    """SGD: validation loss during training by batch size; the runs of Figure 4.9."""

    study, item, where = BatchSizes(sizes=FOUR), "zhu-2024 Figure C.19", "appendix C.5"
    claims = [best_falls(panel) for panel in PANELS]


_TORCH_DEPARTS = (
    f"{BatchFigure.departs} Networks have torch's biases here. The source's rates (0.01, 0.01, 0.05, 1) are replaced by half "
    "the measured critical rate."
)


class FigureC18(BatchFigure):
    """SGD in torch's own parameterisation: smaller batches, more catapults, better features."""

    study, item, where = BatchSizes(sizes=TORCH), "zhu-2024 Figure C.18", "appendix C.5"
    claims = [trends(panel) for panel in PANELS]
    departs = _TORCH_DEPARTS


class FigureC20(CurvesFigure):
    """SGD in torch's own parameterisation: validation loss during training; the runs of Figure C.18."""

    study, item, where = BatchSizes(sizes=TORCH), "zhu-2024 Figure C.20", "appendix C.5"
    claims = [best_falls(panel) for panel in PANELS]
    departs = _TORCH_DEPARTS


class FigureC21(BatchFigure):
    """SGD on further tasks: rank-4, USPS and Fashion-MNIST, the last two with a tenth of the training labels flipped."""

    study, item, where = BatchSizes(sizes=FURTHER), "zhu-2024 Figure C.21", "appendix C.5"
    claims = [trends(panel) for panel in ("rank-4", "USPS", "Fashion-MNIST")]
    departs = f"{BatchFigure.departs} The rate is half the critical one; classes 0 and 2 are taken of Fashion-MNIST."


class Figure410(BatchFigure):
    """At a small rate the batch size does not matter.

    Half the critical rate against a fortieth of it: with the small one no batch is supercritical, and all sizes test alike.
    """

    study, item, where = BatchSizes(sizes=TWO_RATES), "zhu-2024 Figure 4.10", "section 4.4"
    claims = (
        *(
            {
                f"{panel} at a fortieth of the critical rate: spread of the test loss over the batch sizes": at_most(
                    0.1, spread(by_batch(panel, "test_loss", ratio=SMALL)), says="little effect"
                ),
                f"{panel} at a fortieth of the critical rate: supercritical steps among the first hundred": equal(
                    0, rows(panel=panel, ratio=SMALL).max("early_catapults"), says="no catapults", where="Zhu 2024, section 4.4"
                ),
            }
            for panel in ("rank-2", "rank-3")
        ),
        {
            "rank-2 at half the critical rate: test loss with batches of 5 over that of gradient descent": at_most(
                0.85, quotient(by_batch("rank-2", "test_loss", ratio=LARGE)), says=LESS, since="laptop"
            ),
        },
    )

    def draw(self, rows: list[Row]) -> Any:
        def panel(title: str, mine: list[Row]) -> Drawing:
            column, label = score_of(title)
            return against_batch(mine, y=column, by="rate", ylabel=label, title=title)

        names = {LARGE: "η_crit/2", SMALL: "η_crit/40"}
        mine = split([{**row, "rate": names[row["ratio"]]} for row in rows], "panel")
        return draw_panels(*map(panel, mine, mine.values()), size=(4.2, 3.2))


class FigureC23(CurvesFigure):
    """Validation loss by batch size at a small rate: all alike.

    The source's rate of 0.1, a sixtieth of the critical one of rank-2.
    """

    study = BatchSizes(sizes={size: p.but(panels=p.panels[:2], ratios=(SMALLER,)) for size, p in TWO_RATES.items()})
    item, where = "zhu-2024 Figure C.23", "appendix C.5"
    claims = {
        f"{panel}: spread of the lowest validation loss over the batch sizes": at_most(0.1, spread(lowest(panel)), says="similar")
        for panel in ("rank-2", "rank-3")
    }
    departs = f"{BatchFigure.departs} The rate is 0.1/6.15 of the measured critical rate for both tasks."
