"""The sharp output directions of a layer from the weights above it alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import torch

from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.figure import Experiment
from theodolite.experiments.hessian.networks import Setup, problem_of
from theodolite.experiments.query import Measured
from theodolite.linalg import subspace_overlap
from theodolite.measures.hessian import firing_rates, sharp_subspace, weight_product
from theodolite.operators import kronecker_factors
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Params:
    setups: tuple[Setup, ...]
    seeds: int
    random_seeds: int


#: 002 Table 10: fc1, fc2, fc3. The fully connected network has a fourth layer, LeNet5 has not.
TABLE_10: dict[str, tuple[float, float, float]] = {
    "MNIST F-1500^3": (0.602, 0.967, 0.982),
    "MNIST LeNet5": (0.890, 0.931, 0.999),
    "MNIST-R F-1500^3": (0.235, 0.801, 0.998),
    "MNIST-R LeNet5": (0.518, 0.912, 0.999),
    "CIFAR10 F-1500^3": (0.880, 0.943, 0.993),
    "CIFAR10 LeNet5": (0.951, 0.972, 0.999),
    "CIFAR10-R F-1500^3": (0.903, 0.931, 0.996),
    "CIFAR10-R LeNet5": (0.213, 0.701, 0.999),
}
NAMES = {"digits": "digits", "mnist": "MNIST", "cifar10": "CIFAR10"}


def printed(line: str) -> Setup:
    """The source's own training for a column of the table."""
    data, network = line.split(" ")
    return Setup(
        network,
        data=data.removesuffix("-R").lower(),
        labels="random" if data.endswith("-R") else "true",
        epochs=1000,
        until=0.0,
        rate=0.01,
        batch=128,
        samples=10000,
        flat=network.startswith("F-"),
    )


def chosen(rows: list[Row], labels: str, layer: str, column: str) -> list[float]:
    """A column of one layer of the networks on digits."""
    return [row[column] for row in rows if row["data"] == "digits" and row["labels"] == labels and row["layer"] == layer]


def mean_at(labels: str, layer: str, column: str = "plain") -> Callable[[list[Row]], Measured]:
    """The mean over seeds with its standard error; one seed has none."""

    def measure(rows: list[Row]) -> Measured:
        values = chosen(rows, labels, layer, column)
        return Measured(fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None)

    return measure


def rise(labels: str) -> Callable[[list[Row]], float]:
    """By how much fc3 >= fc2 >= fc1 − 0.05 holds for the overlaps, means over seeds: the smaller of the two margins."""

    def measure(rows: list[Row]) -> float:
        fc1, fc2, fc3 = (fmean(chosen(rows, labels, layer, "plain")) for layer in ("fc1", "fc2", "fc3"))
        return min(fc3 - fc2, fc2 - fc1 + 0.05)

    return measure


def gated_wins(rows: list[Row]) -> float:
    """The share of seeds in which the gated product is at least as good as the plain one, mean over the hidden layers."""
    true = [row for row in rows if row["data"] == "digits" and row["labels"] == "true" and not row["last"]]
    seeds = sorted({row["seed"] for row in true})
    gains = [fmean(row["gated"] - row["plain"] for row in true if row["seed"] == seed) for seed in seeds]
    if any(map(math.isnan, gains)):
        return math.nan
    return fmean(gain >= 0 for gain in gains)


def gain(labels: str) -> Callable[[list[Row]], float]:
    """How much better the gated product is, mean over seeds and hidden layers."""
    return lambda rows: fmean(
        row["gated"] - row["plain"] for row in rows if row["data"] == "digits" and row["labels"] == labels and not row["last"]
    )


def farthest(rows: list[Row]) -> float:
    """The largest distance of a mean overlap from the printed one; NaN where no column of the table was trained."""
    gaps = []
    for line, values in TABLE_10.items():
        for layer, value in zip(("fc1", "fc2", "fc3"), values, strict=True):
            ours = [row["plain"] for row in rows if row["line"] == line and row["layer"] == layer]
            gaps += [abs(fmean(ours) - value)] if ours else []
    return max(gaps) if gaps and not any(map(math.isnan, gaps)) else math.nan


DIGITS = Setup("F-100^3")
DIGITS_R = replace(DIGITS, labels="random", epochs=200)


class Table10(Experiment):
    """The top eigenspace of the output Hessian from products of the weights above, at minima.

    The span of Sᵀv over all v orthogonal to the ones vector, S the product of the weights above the layer, against the
    c − 1 leading eigenvectors of E[M]; for true and for random labels. Beside it the gated product, in which every hidden
    unit counts as often as it fires: what the product leaves out is mainly which units are on.
    """

    id = "hessian/table-10"
    source = "002, appendix H.4, Table 10"
    item = "wu-zhu-2020 Table 10"
    sizes = {
        "tiny": Params(setups=(DIGITS, replace(DIGITS_R, epochs=100)), seeds=5, random_seeds=1),
        "laptop": Params(
            setups=(
                DIGITS,
                DIGITS_R,
                Setup("LeNet5", data="mnist", epochs=3, until=0.0, batch=128, samples=2000, flat=False),
            ),
            seeds=5,
            random_seeds=5,
        ),
        "paper": Params(setups=(DIGITS, DIGITS_R, *(printed(line) for line in TABLE_10)), seeds=5, random_seeds=5),
    }
    claims = (
        *(
            Claim(
                f"{labels} labels: the overlap rises with depth, fc3 >= fc2 >= fc1 − 0.05 (smaller margin)",
                rise(labels),
                rule="at least",
                expected=0.0,
                reported=Reported(value, f"Table 10, {line}: fc3 over fc2"),
            )
            for labels, value, line in (("true", 0.015, "MNIST F-1500³"), ("random", 0.197, "MNIST-R F-1500³"))
        ),
        Claim(
            "the last hidden layer's subspace is that of the product",
            mean_at("true", "fc3"),
            rule="at least",
            expected=0.9,
            reported=Reported(0.982, "Table 10, MNIST F-1500³"),
        ),
        Claim(
            "the last hidden layer's subspace is that of the gated product",
            mean_at("true", "fc3", "gated"),
            rule="at least",
            expected=0.9,
        ),
        Claim(
            "the last layer's subspace is orthogonal to the ones vector, exactly (smallest overlap)",
            lambda rows: min(row["plain"] for row in rows if row["last"]),
            rule="at least",
            expected=1 - 1e-8,
            reported=Reported(0.999, "Table 10, LeNet5 fc3"),
        ),
        Claim(
            "the gated product is at least as good, mean over the layers (share of the seeds)",
            gated_wins,
            rule="at least",
            expected=0.8,
        ),
        Claim("true labels: how much better the gated product is", gain("true"), rule="at least", expected=0.0),
        Claim(
            "random labels: the last hidden layer's subspace is that of the product",
            mean_at("random", "fc3"),
            rule="at least",
            expected=0.9,
            reported=Reported(0.998, "Table 10, MNIST-R F-1500³"),
        ),
        Claim("random labels: overlap in fc1", mean_at("random", "fc1")),
        Claim("random labels: how much better the gated product is", gain("random")),
        Claim(
            "column by column: largest distance from the printed overlap",
            farthest,
            rule="at most",
            expected=0.1,
            reported=Reported("0.213 to 0.999", "Table 10"),
            since="paper",
        ),
    )
    departs = (
        "Beside the source's product of weights the gated one is measured, which the corrected theorem asks for: hidden inputs "
        "have a mean, so units do not fire half of the time each. The subspace is the range of SᵀAS."
    )

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        for setup in p.setups:
            for seed in range(p.seeds if setup.labels == "true" and setup.data == "digits" else p.random_seeds):
                yield {**asdict(setup), "seed": seed}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        setup = Setup(**{key: value for key, value in job.items() if key != "seed"})
        problem = problem_of(setup, job["seed"])
        names, weights, rates = firing_rates(problem, "fc*")
        factors: Any = kronecker_factors(problem, names)
        for place, name in enumerate(names):
            c = len(weights[-1])
            top = torch.linalg.eigh(factors[name].output)[1].flip(1)[:, : c - 1]
            last = place == len(names) - 1
            above, fires = weights[place + 1 :], rates[place:]
            plain = torch.eye(c, dtype=torch.float64) if last else weight_product(above)
            gated = plain if last else weight_product(above, fires)
            yield {
                "line": f"{NAMES[setup.data]}{'-R' if setup.labels == 'random' else ''} {setup.network}",
                "data": setup.data,
                "labels": setup.labels,
                "seed": job["seed"],
                "layer": name,
                "place": place + 1,
                "last": last,
                "plain": subspace_overlap(top, sharp_subspace(plain)),
                "gated": subspace_overlap(top, sharp_subspace(gated)),
                "complement": subspace_overlap(top, sharp_subspace(plain, definition="B")),
            }

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        lines = list(dict.fromkeys(row["line"] for row in rows))
        figure, axes = plots.panels(len(lines), size=(3.6, 3.0), share_y=True)
        for ax, line in zip(axes, lines, strict=True):
            here = [row for row in rows if row["line"] == line]
            drawn = [{"place": r["place"], "value": r[k], "product": k} for r in here for k in ("plain", "gated")]
            drawn += [{"place": i, "value": v, "product": "source"} for i, v in enumerate(TABLE_10.get(line, ()), start=1)]
            plots.curves(
                drawn, "place", "value", by="product", labels="legend", xlabel="layer", ylabel="overlap", title=line, ax=ax
            )
            places = sorted({r["place"] for r in here})
            ax.set_xticks(places, [f"fc{i}" for i in places])
            ax.legend(fontsize=8, loc="lower right", title="product of weights", title_fontsize=8)
        axes[0].set_ylim(top=1.03)
        return figure
