"""Figures 4.8 and C.13 to C.17: several catapults of gradient descent, and the features they leave."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from theodolite.experiments.catapult_features.feature_gd import (
    LAPTOP,
    PAPER,
    TINY,
    Measure,
    RaisedRates,
    change,
    only,
    runs_of,
    score_of,
    seeds_better,
    spikes_per_raise,
    with_origin,
)
from theodolite.experiments.catapult_features.feature_tasks import Setting
from theodolite.experiments.claims import Claim, Reported
from theodolite.results import Row
from theodolite.text import plural

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def two_of_three(text: str, measure: Measure, reported: Reported) -> Claim:
    """A claim on a share of the seeds."""
    return Claim(text, measure, rule="at least", expected=2 / 3, tolerance=1e-9, reported=reported, since="laptop")


def improves(panel: str, where: str) -> list[Claim]:
    """Test performance and alignment are better with the most raises than without."""
    score, name = score_of(panel)
    better = Reported("falls with the number of catapults", where), Reported("rises with the number of catapults", where)
    return [
        two_of_three(
            f"{panel}: the {name} is smaller with the most raises than with none (share of the seeds)",
            seeds_better(panel, score),
            better[0],
        ),
        two_of_three(
            f"{panel}: the alignment is larger with the most raises than with none (share of the seeds)",
            seeds_better(panel, "alignment", larger=True),
            better[1],
        ),
    ]


# Measured once at laptop size, rank-2 with 0, 1, 2, 3 raises: alignment 0.670, 0.830, 0.885, 0.947, test loss 0.831, 0.651,
# 0.555, 0.328, as many spikes as raises. The alignment of the full-rank target changes by 0.009, but its test loss falls by 27 %.


class Figure48(RaisedRates):
    """Gradient descent with several catapults: test performance and AGOP alignment.

    The rate is raised above the critical one none to several times; each network is judged at its best validation loss.
    """

    id = "catapult-features/figure-4.8"
    source = "003, section 4.4, Figure 4.8; settings in appendix C.6"
    item = "zhu-2024 Figure 4.8"
    sizes = {"tiny": TINY, "laptop": LAPTOP, "paper": PAPER}
    claims = (
        *(claim for panel in ("rank-2", "rank-3", "SVHN-2", "CelebA") for claim in improves(panel, "Figure 4.8")),
        Claim(
            "rank-2: every raise makes a spike of the training loss (spikes per raise)",
            spikes_per_raise("rank-2"),
            rule="at least",
            expected=1.0,
            tolerance=0.1,
            reported=Reported("one catapult for each raise", "section 4.3"),
        ),
    )


def lowest_share(rows: list[Row], panel: str) -> float:
    """Share of the seeds whose lowest validation loss is smaller with the most raises than with none."""
    lowest = []
    for raises in (None, 0):
        by_seed: dict[int, float] = {}
        for row in runs_of(rows, panel, raises):
            if not math.isnan(row["validation"]):
                by_seed[row["seed"]] = min(row["validation"], by_seed.get(row["seed"], math.inf))
        lowest.append(by_seed)
    return fmean(lowest[0][seed] < lowest[1][seed] for seed in lowest[1])


class FigureC13(RaisedRates):
    """Gradient descent with several catapults: validation loss during training.

    The runs of Figure 4.8; a raise of the rate shows as a spike.
    """

    id = "catapult-features/figure-C.13"
    source = "003, appendix C.4, Figure C.13"
    item = "zhu-2024 Figure C.13"
    part = "curves"
    sizes = Figure48.sizes
    claims = tuple(
        two_of_three(
            f"{panel}: the lowest validation loss is smaller with the most raises than with none (share of the seeds)",
            partial(lowest_share, panel=panel),
            Reported("falls with the number of catapults", "Figure C.13"),
        )
        for panel in ("rank-2", "rank-3", "SVHN-2", "CelebA")
    )

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        titles = list(dict.fromkeys(row["panel"] for row in rows))
        figure, axes = plots.panels(len(titles), size=(4.4, 3.2))
        for ax, title in zip(axes, titles, strict=True):
            mine = [row for row in rows if row["panel"] == title and row["seed"] == 0]
            shown = [{**row, "validation": min(row["validation"], 1e6)} for row in mine]
            plots.curves(
                shown,
                "step",
                "validation",
                by="raises",
                log="y",
                labels="legend",
                ylabel="validation loss",
                title=with_origin(title, mine[0]["data"]),
                ax=ax,
            )
        return figure


def ahead_of_all(panel: str, column: str, *, larger: bool = False) -> Measure:
    """How far the start near zero is ahead of the best number of raises, in means over the seeds."""

    def measure(rows: list[Row]) -> float:
        small = fmean(row[column] for row in runs_of(rows, panel, 0, "ntk_small"))
        counts = sorted({row["raises"] for row in rows if row["panel"] == panel and row["start"] == "ntk"})
        means = [fmean(row[column] for row in runs_of(rows, panel, k)) for k in counts]
        return small - max(means) if larger else min(means) - small

    return measure


def ahead_of_plain(rows: list[Row]) -> float:
    """Alignment of rank-2 from near zero less that of plain gradient descent from the usual start."""
    small, plain = runs_of(rows, "rank-2", 0, "ntk_small"), runs_of(rows, "rank-2", 0)
    return fmean(row["alignment"] for row in small) - fmean(row["alignment"] for row in plain)


class FigureC14(RaisedRates):
    """Several catapults against a start near zero.

    Weights from N(0, 0.1²) in place of N(0, 1), trained by gradient descent without raises, beside the runs of Figure 4.8.
    """

    id = "catapult-features/figure-C.14"
    source = "003, appendix C.4, Figure C.14"
    item = "zhu-2024 Figure C.14"
    near_zero = True
    sizes = Figure48.sizes
    claims = (
        Claim(
            "rank-2: the alignment from near zero is larger than that of plain gradient descent (difference)",
            ahead_of_plain,
            rule="at least",
            expected=0.0,
            reported=Reported("the best alignment", "Figure C.14"),
        ),
        *(
            Claim(
                f"{panel}: from near zero the {name} is {word} than after any number of raises (by how much)",
                ahead_of_all(panel, column, larger=column == "alignment"),
                rule="at least",
                expected=0.0,
                reported=Reported(f"the {'largest' if column == 'alignment' else 'smallest'}", "Figure C.14"),
                since="laptop",
            )
            for panel in ("rank-2", "rank-3", "SVHN-2", "CelebA")
            for column, name, word in ((*score_of(panel), "smaller"), ("alignment", "alignment", "larger"))
        ),
    )
    departs = (
        f"{RaisedRates.departs} The rate from near zero is not stated: "
        "it begins at 5 times the usual one and is kept subcritical."
    )


def block_distance(rows: list[Row], raises: int) -> float:
    """Root mean square distance of a scaled AGOP block from the target's."""
    target = {(row["row"], row["column"]): row["value"] for row in rows if row["raises"] == -1}
    mine = [row for row in rows if row["raises"] == raises]
    return math.sqrt(fmean((row["value"] - target[row["row"], row["column"]]) ** 2 for row in mine))


def nearer(rows: list[Row]) -> float:
    """Distance with the most raises over that with none."""
    return block_distance(rows, max(row["raises"] for row in rows)) / block_distance(rows, 0)


class FigureC15(RaisedRates):
    """The AGOP of rank-2 after more and more catapults.

    The first ten rows and columns, scaled to [0, 1] and averaged over the seeds, beside those of the target.
    """

    id = "catapult-features/figure-C.15"
    source = "003, appendix C.4, Figure C.15"
    item = "zhu-2024 Figure C.15"
    part = "blocks"
    sizes = {name: only(p, "rank-2") for name, p in Figure48.sizes.items()}
    claims = (
        Claim(
            "the AGOP is closer to the true one with the most raises than with none (distance over distance)",
            nearer,
            rule="at most",
            expected=1.0,
            reported=Reported("closer with a greater number of catapults", "Figure C.15"),
        ),
    )

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        counts = sorted({row["raises"] for row in rows if row["raises"] >= 0})
        figure, axes = plots.panels(len(counts) + 1, size=(3.2, 2.8))
        size = 1 + max(row["row"] for row in rows)
        for ax, raises in zip(axes, [*counts, -1], strict=True):
            values = [[0.0] * size for _ in range(size)]
            for row in rows:
                if row["raises"] == raises:
                    values[row["row"]][row["column"]] = row["value"]
            title = "true AGOP" if raises < 0 else plural(raises, "raise")
            plots.matrix(values, limits=(0.0, 1.0), center=None, annotate=False, title=title, ax=ax)
        return figure


MORE = {
    "tiny": replace(
        TINY,
        settings=(
            Setting("rank-4", 150, 500, 20, 64),
            Setting("usps", 60, 100, 8, 64, "stand-in"),
            Setting("fashion", 60, 100, 6, 64, "stand-in"),
        ),
    ),
    "laptop": replace(
        LAPTOP,
        settings=(
            Setting("rank-4", 500, 2000, 50, 256),
            Setting("usps", 100, 100, 8, 256),
            Setting("fashion", 500, 2000, 14, 256),
        ),
    ),
    "paper": replace(
        PAPER,
        settings=(
            Setting("rank-4", 1000, 5000, 100, 256),
            Setting("usps", 100, 100, 8, 256),
            Setting("fashion", 1000, 5000, 28, 256, "files"),
        ),
        raises=3,
    ),
}


class FigureC16(RaisedRates):
    """Several catapults of gradient descent on further tasks: rank-4, USPS, Fashion-MNIST."""

    id = "catapult-features/figure-C.16"
    source = "003, appendix C.4, Figure C.16"
    item = "zhu-2024 Figure C.16"
    sizes = MORE
    claims = tuple(claim for panel in ("rank-4", "USPS", "Fashion-MNIST") for claim in improves(panel, "Figure C.16"))
    departs = f"{RaisedRates.departs} Classes 0 and 2 are taken of Fashion-MNIST."


class FigureC17(RaisedRates):
    """A target of full rank: catapults teach nothing.

    ‖x‖/√d depends on all directions alike, so that there are no few features to find.
    """

    id = "catapult-features/figure-C.17"
    source = "003, appendix C.4, Figure C.17"
    item = "zhu-2024 Figure C.17"
    sizes = {
        "tiny": replace(TINY, settings=(Setting("full", 60, 500, 20, 128),), raises=4, steps=400, scheduled=True),
        "laptop": replace(LAPTOP, settings=(Setting("full", 128, 2000, 100, 1024),), raises=4, steps=500),
        "paper": replace(PAPER, settings=(Setting("full", 128, 2000, 100, 1024),), raises=4, steps=3000),
    }
    claims = (
        Claim(
            "after four raises the alignment is not larger by 0.05 (change)",
            change("full rank", "alignment"),
            rule="at most",
            expected=0.05,
            reported=Reported("not improved", "Figure C.17"),
        ),
        Claim(
            "after four raises the test loss is not smaller by a tenth (relative change)",
            change("full rank", "test_loss", relative=True),
            rule="at least",
            expected=-0.1,
            reported=Reported("not improved", "Figure C.17"),
            since="laptop",
        ),
    )
