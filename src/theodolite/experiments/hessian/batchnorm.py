"""Batch norm takes the mean out of a layer's input, and with it the structure of the layer's Hessian."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.figure import Experiment
from theodolite.experiments.hessian.networks import Setup
from theodolite.experiments.hessian.tables import SMALL_LENET, as_printed, cifar, mnist
from theodolite.experiments.hessian.tables_inputs import Params, column, draw_lines, input_rows, line_jobs
from theodolite.experiments.hessian.tables_reported import TABLE_6, TABLE_8
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMALL_LENET_BN = replace(SMALL_LENET, network="LeNet-mini-BN")


def layers_of(*, normalised: bool, first: bool = False, family: str = "") -> Callable[[Row], bool]:
    """Fully connected layers of the networks with or without batch norm: all but the first, or only the first.

    `family` is how the networks' names begin.
    """
    return lambda row: (
        row["normalised"] == normalised and row["first"] == first and row["part"] == "fc" and row["network"].startswith(family)
    )


def of_layer(name: str) -> Callable[[Row], bool]:
    """The rows of one layer."""
    return lambda row: row["layer"] == name


def pooled_over_others(rows: list[Row]) -> float:
    """LeNet5-BN: the squared dot product of fc1, which is fed by a pooling, less the larger of those of fc2 and fc3."""
    lenet = [row for row in rows if row["network"] == "LeNet5-BN"]
    pooled = column("squared_dot", fmean, of_layer("fc1"))(lenet)
    return pooled - max(column("squared_dot", fmean, of_layer(name))(lenet) for name in ("fc2", "fc3"))


def first_over_others(rows: list[Row]) -> float:
    """Fully connected networks with batch norm: the first layer's λ₁/λ₂ over the largest of the others'."""
    dense = [row for row in rows if row["network"].startswith("F-")]
    first = column("ratio", min, layers_of(normalised=True, first=True))(dense)
    return first / column("ratio", max, layers_of(normalised=True))(dense)


class Table8(Experiment):
    """With batch norm the mean no longer rules: squared dot products and spectral ratios.

    As Table 6, for networks with a batch norm (no scale, no shift, statistics frozen) after each ReLU, beside the same
    networks without. The first layer has no norm before it and keeps its structure. A norm of a convolution centres each
    channel over all its places together: the means of single places remain, so fc1 of a LeNet keeps a mean.
    """

    id = "hessian/table-8"
    source = "002, appendix F.4; 000, section C.7.3"
    item = "wu-zhu-2020 Table 8"
    sizes = {
        "tiny": Params(setups=(Setup("F-40^2-BN"), Setup("F-40^2"), replace(SMALL_LENET_BN, epochs=10)), seeds=3),
        "laptop": Params(
            setups=(
                Setup("F-40^2-BN"),
                Setup("F-40^2"),
                SMALL_LENET_BN,
                mnist("F-200^2-BN", 10),
                mnist("F-200^2", 10),
                mnist("F-600^2-BN", 4),
                cifar("LeNet5-BN", 20),
            ),
            seeds=2,
        ),
        "paper": Params(
            setups=(*(as_printed(line) for line in TABLE_8), *(as_printed(line.removesuffix("-BN")) for line in TABLE_8)), seeds=3
        ),
    }
    claims = (
        Claim(
            "with batch norm the leading eigenvector is not the mean (mean squared dot product, fully connected networks)",
            column("squared_dot", fmean, layers_of(normalised=True, family="F-")),
            rule="at most",
            expected=0.3,
            reported=Reported("0.026 to 0.062", "Table 8"),
        ),
        Claim(
            "with batch norm no eigenvalue stands out (largest λ₁/λ₂, fully connected networks)",
            column("ratio", max, layers_of(normalised=True, family="F-")),
            rule="at most",
            expected=2.0,
            reported=Reported(1.30, "Table 8, largest"),
        ),
        Claim(
            "LeNets: with batch norm the leading eigenvector is not the mean (mean squared dot product)",
            column("squared_dot", fmean, layers_of(normalised=True, family="LeNet")),
            rule="at most",
            expected=0.3,
            reported=Reported(0.210, "Table 8, LeNet5-BN"),
        ),
        Claim(
            "LeNets: with batch norm no eigenvalue stands out (largest λ₁/λ₂)",
            column("ratio", max, layers_of(normalised=True, family="LeNet")),
            rule="at most",
            expected=2.0,
            reported=Reported(1.89, "Table 8, largest of LeNet5-BN"),
        ),
        Claim(
            "without batch norm it is the mean (smallest squared dot product)",
            column("squared_dot", min, layers_of(normalised=False)),
            rule="at least",
            expected=0.98,
            reported=Reported(0.997, "Table 6, smallest of these networks"),
        ),
        Claim(
            "without batch norm one eigenvalue stands out (smallest λ₁/λ₂)",
            column("ratio", min, layers_of(normalised=False)),
            rule="at least",
            expected=2.5,
            reported=Reported(5.88, "Table 6, smallest of these networks"),
        ),
        Claim(
            "the first layer has no norm before it and keeps its gap (its λ₁/λ₂ over the largest of the others)",
            first_over_others,
            rule="at least",
            expected=1.0,
            reported=Reported("except for the first layer", "appendix F.4"),
        ),
        Claim(
            "LeNet5-BN: the pooling after the norm brings the mean back in fc1 (squared dot product above fc2 and fc3)",
            pooled_over_others,
            rule="at least",
            expected=0.1,
            reported=Reported(0.803, "Table 8, largest of LeNet5-BN; that it is fc1 is our reading"),
            since="laptop",
        ),
    )

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        return line_jobs(p)

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        for row in input_rows(job, lambda name, first: "fc" in name):
            yield {**row, "normalised": job["network"].endswith("-BN")}

    def draw(self, rows: list[Row]) -> Figure:
        return draw_lines([row for row in rows if not row["first"]], {**TABLE_6, **TABLE_8})
