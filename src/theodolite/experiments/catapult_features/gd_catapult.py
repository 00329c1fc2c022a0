"""Gradient descent above the critical rate: one catapult, in the top eigenspace of the kernel."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import ClassVar

from theodolite.experiments.catapult_features.panels import (
    GD_SIZES,
    Panel,
    PanelExperiment,
    by_run,
    end_over_start,
    finished,
    highest_spike,
    kernel_end_over_start,
    kernel_falls,
    only,
    peak_over_start,
    rises_of_rest,
    share_of_rise,
)
from theodolite.experiments.claims import Claim, Reported
from theodolite.results import Row

DEPARTS = (
    "Rates are multiples of the critical one of each start, n/λ₁(K) for the mean squared error; the multiples are those of the "
    "source's settings. Biases and the scale of images are not stated: ours are none, and a root mean square of 1.1 without "
    "centring. Below paper size images have 8 × 8 pixels and networks are narrower; where files are not there, generated images "
    "(digits of scikit-learn for ten classes) stand in. WRN has no normalisation: the kernel of a sample needs that."
)


def images_of_fcn(row: Row) -> bool:
    """The setting of which more is asked: a fully connected network on images."""
    return bool(row["kind"] == "5-FCN" and row["data"] != "rank-2")


def catapult_claims(where: str, *, rank: int = 5, since: str = "tiny") -> tuple[Claim, ...]:
    """What every catapult figure of gradient descent shows; the first three are asked of the FCN on images.

    `since` is the size from which on the rest of the loss is expected to fall in networks that are not fully connected.
    """
    plot = {what: Reported(what, where, read_from="plot") for what in ("a spike", "falls", "the norm falls in the spike")}
    return (
        Claim(
            "FCN on images: the loss rises (peak over first loss, smallest)",
            only(images_of_fcn, peak_over_start),
            rule="at least",
            expected=1.5,
            reported=plot["a spike"],
        ),
        Claim(
            "FCN on images: and falls far below its start (last over first loss, largest)",
            only(images_of_fcn, end_over_start),
            rule="at most",
            expected=0.1,
            reported=plot["falls"],
        ),
        Claim(
            "FCN on images: the kernel is smaller at the end (last over first norm, largest)",
            only(images_of_fcn, kernel_end_over_start),
            rule="at most",
            expected=0.9,
            reported=plot["the norm falls in the spike"],
        ),
        Claim(
            "every network has a spike (highest over the loss before it, smallest)",
            highest_spike,
            rule="at least",
            expected=1.2,
            reported=plot["a spike"],
        ),
        Claim(
            "share of the spikes that came back after which the kernel is smaller",
            kernel_falls,
            rule="at least",
            expected=0.8,
            reported=plot["the norm falls in the spike"],
        ),
        Claim(
            f"share of the rise in the top {rank} eigendirections per output (smallest)",
            share_of_rise(rank),
            rule="at least",
            expected=0.9,
            reported=Reported("the spike lies in the top eigenspace", where),
        ),
        Claim(
            "the rest of the loss almost never rises: steps above 2 % of the first loss (most)",
            rises_of_rest(rank),
            rule="at most",
            expected=3,
            reported=Reported("decreases almost monotonically", where),
            since=since,
        ),
        Claim("share of the rise in the top direction per output (smallest)", share_of_rise(1)),
    )


def largest_rise_below(rows: list[Row]) -> float:
    """The largest rise of the loss in one step below the critical rate, over the first loss."""
    runs = by_run(rows, lambda row: row["ratio"] < 1)
    return max(float((b["loss"] - a["loss"]) / run[0]["loss"]) for run in runs for a, b in itertools.pairwise(finished(run)))


def rises_without_reason(rows: list[Row]) -> int:
    """Steps that raise the loss by a thousandth of the first although the rate is below the critical one of that step."""
    runs = by_run(rows, lambda row: row["ratio"] < 1)
    return sum(
        b["loss"] - a["loss"] > 1e-3 * run[0]["loss"] and a["rate"] < a["critical"]
        for run in runs
        for a, b in itertools.pairwise(finished(run))
    )


class Figure43(PanelExperiment):
    """A catapult of gradient descent lies in the top eigenspace of the tangent kernel.

    The loss shoots up, the norm of the kernel falls until the rate is stable again, and the loss settles. Split along the
    eigenvectors of the current kernel, the spike is in the top five directions; the rest of the loss decreases almost
    monotonically. Below the critical rate the loss only falls.
    """

    id = "catapult-features/figure-4.3"
    source = "003, sections 4.2 and 4.3, Figures 4.2 and 4.3, appendix C.2, Figure C.2"
    item = ("zhu-2024 Figure 4.2", "zhu-2024 Figure 4.3", "zhu-2024 Figure C.2")
    sizes = GD_SIZES
    departs = DEPARTS
    panels: ClassVar = (
        Panel("5-FCN", "cifar10", 1.67),
        Panel("5-CNN", "cifar10", 1.78),
        Panel("5-FCN", "cifar10", 0.8),
    )
    claims = (
        *catapult_claims("003, Figures 4.3 and C.2"),
        Claim(
            "at 0.8 of the critical rate no step raises the loss by more than a thousandth of the first",
            largest_rise_below,
            rule="at most",
            expected=1e-3,
            reported=Reported("no catapult below the critical rate", "003, section 4.2", read_from="theory"),
        ),
        Claim(
            "nor does any step that is below the critical rate of its own weights (steps that do)",
            rises_without_reason,
            rule="equal",
            expected=0,
            reported=Reported("no catapult below the critical rate", "003, section 4.2", read_from="theory"),
        ),
    )


class FigureC3(PanelExperiment):
    """Catapults of gradient descent on other data and with another network: SVHN, a rank-2 target, a wide residual network.

    The same picture: the spike in the top five directions, a smaller kernel afterwards.
    """

    id = "catapult-features/figure-C.3"
    source = "003, appendix C.2, Figures C.3 and C.4"
    item = ("zhu-2024 Figure C.3", "zhu-2024 Figure C.4")
    sizes = GD_SIZES
    departs = (
        DEPARTS + " The FCN on the rank-2 target is taken to have five layers; its critical rate of 1.9 fits no choice of biases."
    )
    panels: ClassVar = (
        Panel("5-FCN", "svhn", 1.76),
        Panel("5-CNN", "svhn", 1.88),
        Panel("5-FCN", "rank-2", 2.63),
        Panel("WRN", "cifar10", 2.0),
    )
    claims = catapult_claims("003, Figures C.3 and C.4", since="laptop")


class FigureC5(PanelExperiment):
    """With several classes the spike of a catapult lies in the top s directions for each output.

    One-hot targets and a mean over points and classes: the critical rate is n·k/λ₁ of the kernel of all n·k outputs.
    """

    id = "catapult-features/figure-C.5"
    source = "003, appendix C.2, Figure C.5"
    item = "zhu-2024 Figure C.5"
    sizes = {**GD_SIZES, "tiny": replace(GD_SIZES["tiny"], n=24, slow_n=12, slow_steps=30)}
    departs = DEPARTS + " Below paper size there are four classes."
    panels: ClassVar = (Panel("5-FCN", "cifar10", 2.94, many=True), Panel("5-CNN", "cifar10", 5.0, many=True))
    claims = catapult_claims("003, Figure C.5", since="laptop")
