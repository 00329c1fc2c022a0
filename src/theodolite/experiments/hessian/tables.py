"""Is the input of a layer nearly one direction? Squared dot products and spectral ratios, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import fmean
from typing import TYPE_CHECKING, Any

from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.figure import Experiment
from theodolite.experiments.hessian.networks import Setup
from theodolite.experiments.hessian.tables_inputs import (
    Params,
    column,
    draw_lines,
    factor,
    gap,
    input_rows,
    least_over_bound,
    line_jobs,
    off_lines,
)
from theodolite.experiments.hessian.tables_reported import TABLE_6, TABLE_7
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Networks on digits, the small stand-ins.
DENSE, SMALL_LENET = Setup("F-40^2"), Setup("LeNet-mini", flat=False)
#: Trained half as long.
QUICK_LENET = Setup("LeNet-mini", flat=False, until=0.1)


def mnist(network: str, epochs: int = 15) -> Setup:
    """A fully connected network on all of MNIST, its layers looked at on 10000 images."""
    return Setup(network, data="mnist", epochs=epochs, until=0.01, batch=128, samples=10000)


def cifar(network: str, epochs: int) -> Setup:
    """A network on what there is of CIFAR-10, its layers looked at on 2000 images."""
    flat = network.startswith("F-")
    return Setup(network, data="cifar10", epochs=epochs, until=0.05, batch=128, samples=2000, flat=flat)


def as_printed(line: str) -> Setup:
    """The source's own training for a line of its tables: 1000 epochs, rate 0.01, batches of 128, the whole training set."""
    data, network = line.split(" ", 1)
    samples = 60000 if data == "MNIST" else 50000
    return Setup(
        network,
        data=data.lower(),
        epochs=1000,
        until=0.0,
        rate=0.01,
        batch=128,
        samples=samples,
        flat=network.startswith("F-"),
    )


def is_part(part: str) -> Callable[[Row], bool]:
    """Layers of one part, the first one never."""
    return lambda row: row["part"] == part and not row["first"]


def scaled(part: str) -> Callable[[Row], bool]:
    """The same on digits, for which thresholds were set beforehand."""
    return lambda row: is_part(part)(row) and row["data"] == "digits"


def overall(name: str, reduce: Callable[[list[float]], float]) -> Callable[[list[Row]], float]:
    """A column over all linear layers but the first, of the networks of Table 6, or of the small ones where only they are."""

    def measure(rows: list[Row]) -> float:
        printed = [row for row in rows if row["line"] in TABLE_6]
        return column(name, reduce, is_part("fc"))(printed or rows)

    return measure


def small_gap_of_convolutions(rows: list[Row]) -> float:
    """Mean λ₁/λ₂ of the convolutions over that of the linear layers, in VGG11 and ResNet18."""
    deep = [row for row in rows if row["network"].startswith(("VGG", "ResNet"))]
    conv, fc = (column("ratio", fmean, is_part(part))(deep) for part in ("conv", "fc"))
    return conv / fc


class Table6(Experiment):
    """The mean rules the input of fully connected layers: squared dot products and spectral ratios.

    Of every layer but the first: the squared dot product of the mean input with the leading eigenvector of E[xxᵀ], and
    the ratio of its two largest eigenvalues. Near 1 and large: E[xxᵀ] is nearly of rank one, and the top eigenvectors of
    the layer's Hessian are products with that one direction.
    """

    id = "hessian/table-6"
    source = "002, section 4.3 and appendix E.1; 000, section C.6.1"
    item = "wu-zhu-2020 Table 6"
    sizes = {
        "tiny": Params(setups=(DENSE, QUICK_LENET), seeds=2),
        "laptop": Params(
            setups=(DENSE, SMALL_LENET, mnist("F-200^2"), mnist("F-600^2", 8), cifar("F-600^2", 25), cifar("LeNet5", 40)), seeds=2
        ),
        "paper": Params(setups=(DENSE, SMALL_LENET, *(as_printed(line) for line in TABLE_6 if "second" not in line)), seeds=5),
    }
    claims = (
        Claim(
            "digits: the leading eigenvector of E[xxᵀ] is the mean (smallest squared dot product)",
            column("squared_dot", min, scaled("fc")),
            rule="at least",
            expected=0.98,
            reported=Reported(0.964, "section 4.3, smallest of all networks"),
        ),
        Claim(
            "digits: one eigenvalue of E[xxᵀ] stands out (smallest λ₁/λ₂)",
            column("ratio", min, scaled("fc")),
            rule="at least",
            expected=2.5,
            reported=Reported(2.28, "section 4.3, smallest of all networks"),
        ),
        Claim(
            "mean squared dot product over all layers and networks",
            overall("squared_dot", fmean),
            rule="within",
            tolerance=0.01,
            reported=Reported(0.997, "section 4.3"),
        ),
        Claim(
            "smallest squared dot product of all layers and networks",
            overall("squared_dot", min),
            rule="at least",
            reported=Reported(0.964, "section 4.3"),
        ),
        Claim(
            "smallest λ₁/λ₂ of all layers and networks",
            overall("ratio", min),
            rule="at least",
            reported=Reported(2.28, "section 4.3, where it is called ‖μμᵀ‖/‖Σ‖"),
        ),
        Claim(
            "mean λ₁/λ₂ over all layers and networks",
            overall("ratio", fmean),
            rule="relative",
            tolerance=0.2,
            reported=Reported(12.08, "section 4.3"),
            since="paper",
        ),
        Claim(
            "line by line: largest distance of the mean squared dot product from the printed one",
            off_lines("squared_dot", "dot", gap, TABLE_6, "fc"),
            rule="at most",
            expected=0.01,
            reported=Reported("0.990 to 1.000", "Table 6"),
            since="laptop",
        ),
        Claim(
            "line by line: largest factor between the mean λ₁/λ₂ and the printed one",
            off_lines("ratio", "ratio", factor, TABLE_6, "fc"),
            rule="at most",
            expected=2.0,
            reported=Reported("5.87 to 28.23", "Table 6"),
            since="laptop",
        ),
        Claim(
            "λ₁/λ₂ never lies below ‖μ‖²/‖Σ‖ (smallest ratio of the two)",
            least_over_bound(is_part("fc")),
            rule="at least",
            expected=1.0 - 1e-9,
            reported=Reported("usually; always above it less 1", "appendix E.1, (52)"),
        ),
    )
    departs = (
        "The bound is the sharper ‖μ‖²/‖Σ‖, which always holds: the mean is a test vector for λ₁ and λ₂ ≤ ‖Σ‖ by "
        "interlacing. One line of the table is printed under the name of another (VGG11-W64 twice) and is left out."
    )

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        return line_jobs(p)

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        return input_rows(job, lambda name, first: "fc" in name and not first)

    def draw(self, rows: list[Row]) -> Figure:
        return draw_lines([row for row in rows if row["part"] == "fc"], TABLE_6)


class Table7(Experiment):
    """The mean rules the input of convolutions too: squared dot products and spectral ratios.

    As Table 6 with patches for inputs: E[XXᵀ] is summed over the patches of an image, and the leading left singular
    vector of E[X] takes the place of the mean.
    """

    id = "hessian/table-7"
    source = "002, appendix E.1; 000, section C.6.1"
    item = "wu-zhu-2020 Table 7"
    sizes = {
        "tiny": Params(setups=(QUICK_LENET,), seeds=2),
        "laptop": Params(setups=(SMALL_LENET, cifar("LeNet5", 40), cifar("LeNet5-(fc1-80)", 40)), seeds=2),
        "paper": Params(setups=(SMALL_LENET, *(as_printed(line) for line in TABLE_7 if "second" not in line)), seeds=5),
    }
    claims = (
        Claim(
            "digits: the leading eigenvector of E[XXᵀ] is the mean patch (smallest squared dot product)",
            column("squared_dot", min, scaled("conv")),
            rule="at least",
            expected=0.98,
            reported=Reported(0.910, "Table 7, smallest of all networks"),
        ),
        Claim(
            "digits: one eigenvalue of E[XXᵀ] stands out (smallest λ₁/λ₂)",
            column("ratio", min, scaled("conv")),
            rule="at least",
            expected=2.5,
            reported=Reported(1.81, "Table 7, smallest of all networks"),
        ),
        Claim(
            "line by line: largest distance of the mean squared dot product from the printed one",
            off_lines("squared_dot", "dot", gap, TABLE_7, "conv"),
            rule="at most",
            expected=0.01,
            reported=Reported("0.981 to 0.999", "Table 7"),
            since="laptop",
        ),
        Claim(
            "line by line: largest factor between the mean λ₁/λ₂ and the printed one",
            off_lines("ratio", "ratio", factor, TABLE_7, "conv"),
            rule="at most",
            expected=2.0,
            reported=Reported("3.79 to 19.49", "Table 7"),
            since="laptop",
        ),
        Claim(
            "the gap of convolutions is smaller than that of linear layers in VGG11 and ResNet18 (ratio of the means)",
            small_gap_of_convolutions,
            rule="at most",
            expected=1.0,
            reported=Reported("generally smaller", "appendix E.1"),
            since="paper",
        ),
        Claim(
            "λ₁/λ₂ never lies below ‖μ‖²/‖Σ‖ (smallest ratio of the two)",
            least_over_bound(is_part("conv")),
            rule="at least",
            expected=1.0 - 1e-9,
            reported=Reported("usually; always above it less 1", "appendix E.1, (52)"),
        ),
    )
    departs = "One line of the table is printed under the name of another (VGG11-W64 twice) and is left out."

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        return line_jobs(p)

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        return input_rows(job, lambda name, first: not first)

    def draw(self, rows: list[Row]) -> Figure:
        return draw_lines([row for row in rows if row["part"] == "conv"], TABLE_7)
