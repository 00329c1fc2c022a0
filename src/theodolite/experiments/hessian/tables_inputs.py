"""The inputs of a trained network's layers: what Tables 6, 7 and 8 share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from torch import nn

from theodolite.experiments.hessian.networks import Setup, trained
from theodolite.experiments.hessian.tables_reported import Line
from theodolite.measures.hessian import autocorrelation
from theodolite.operators import kronecker_factors
from theodolite.problem import Problem
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Samples taken at a time: the patches of a convolution are many.
CHUNK = 500
NAMES = {"digits": "digits", "mnist": "MNIST", "cifar10": "CIFAR10", "cifar100": "CIFAR100"}


@dataclass(frozen=True)
class Params:
    setups: tuple[Setup, ...]
    seeds: int


def line_jobs(p: Params) -> Iterator[dict[str, Any]]:
    """One job for each network and seed."""
    for setup in p.setups:
        for seed in range(p.seeds):
            yield {**asdict(setup), "seed": seed}


def input_rows(job: Mapping[str, Any], layers: Callable[[str, bool], bool]) -> Iterator[Row]:
    """A row for each wanted layer of the trained network: (v₁·μ̂)², λ₁/λ₂ and its bound.

    `layers` says of a layer's name, and of whether it is the first, if it is wanted.
    """
    setup = Setup(**{key: value for key, value in job.items() if key != "seed"})
    model, (x, y) = trained(setup, job["seed"])
    batches = [(x[i : i + CHUNK], y[i : i + CHUNK]) for i in range(0, len(x), CHUNK)]
    problem = Problem(model, nn.CrossEntropyLoss(), batches)
    names = list(problem.layers)
    wanted = [name for name in names if layers(name, name == names[0])]
    for name, factors in kronecker_factors(problem, wanted).items():
        found = autocorrelation(factors)
        yield {
            "line": f"{NAMES[setup.data]} {setup.network}",
            "data": setup.data,
            "network": setup.network,
            "seed": job["seed"],
            "layer": name,
            "part": "conv" if "conv" in name else "fc",
            "first": name == names[0],
            "squared_dot": found.squared_dot,
            "ratio": found.ratio,
            "bound": found.bound,
        }


def column(name: str, reduce: Callable[[list[float]], float], wanted: Callable[[Row], bool]) -> Callable[[list[Row]], float]:
    """A column of the wanted rows, reduced to a number; NaN where there are none."""

    def measure(rows: list[Row]) -> float:
        values = [float(row[name]) for row in rows if wanted(row)]
        return reduce(values) if values and not any(map(math.isnan, values)) else math.nan

    return measure


def off_lines(name: str, field: str, distance: Callable[[float, float], float], table: Mapping[str, Line], part: str) -> Any:
    """The largest distance between our mean of a line and the printed one; NaN where no line of the table was trained."""

    def measure(rows: list[Row]) -> float:
        lines = {row["line"] for row in rows if row["part"] == part and row["line"] in table}
        means = {line: column(name, fmean, _of(line, part))(rows) for line in sorted(lines)}
        far = [distance(mean, getattr(table[line], field)) for line, mean in means.items()]
        return max(far) if far and not any(map(math.isnan, far)) else math.nan

    return measure


def gap(measured: float, printed: float) -> float:
    """How far two numbers lie apart."""
    return abs(measured - printed)


def factor(measured: float, printed: float) -> float:
    """By which factor two positive numbers differ."""
    return max(measured / printed, printed / measured)


def least_over_bound(wanted: Callable[[Row], bool]) -> Callable[[list[Row]], float]:
    """The smallest λ₁/λ₂ in units of its lower bound ‖μ‖²/‖Σ‖."""

    def measure(rows: list[Row]) -> float:
        shares = [row["ratio"] / row["bound"] for row in rows if wanted(row)]
        return min(shares) if shares and not any(map(math.isnan, shares)) else math.nan

    return measure


def draw_lines(rows: list[Row], table: Mapping[str, Line]) -> Figure:
    """Both quantities by line of the table: ours layer by layer, the source's mean and range beside them."""
    from theodolite import plots

    names = list(dict.fromkeys(row["line"] for row in rows))
    figure, axes = plots.panels(2, size=(2.6 + 0.55 * min(len(names), 10), 3.6))
    for ax, name, fields in (
        (axes[0], "squared_dot", ("dot", "dot_min", "dot_max")),
        (axes[1], "ratio", ("ratio", "ratio_min", "ratio_max")),
    ):
        ours = [{"place": names.index(r["line"]) - 0.15, name: r[name], "from": f"here, {r['layer']}"} for r in rows]
        plots.scatter(ours, "place", name, by="from", log="y" if name == "ratio" else "", xlabel="", ylabel=LABELS[name], ax=ax)
        for place, line in enumerate(names):
            if line in table:
                mean, low, high = (getattr(table[line], field) for field in fields)
                ax.errorbar(place + 0.2, mean, [[mean - low], [high - mean]], fmt="_", color="#444444", capsize=3, ms=9)
        if any(line in table for line in names):
            ax.errorbar([], [], [], fmt="_", color="#444444", label="source: mean, range")
        low, high = ax.get_ylim()  # a few points that agree must not look scattered
        ax.set_ylim((low / 1.2, high * 1.2) if name == "ratio" else (min(low, 0.985), max(high, 1.001)))
        _legend_beside(ax, shown=ax is axes[1])
        ax.set_xticks(range(len(names)), names, rotation=35, ha="right")
        ax.set_xlim(-0.6, len(names) - 0.4)
    return figure


def _legend_beside(ax: Any, *, shown: bool) -> None:
    """One legend, to the right of the figure: inside it would hide points."""
    if shown:
        ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    elif ax.get_legend() is not None:
        ax.get_legend().remove()


LABELS = {"squared_dot": "squared dot product (v₁·μ̂)²", "ratio": "spectral ratio λ₁/λ₂"}


def _of(line: str, part: str) -> Callable[[Row], bool]:
    return lambda row: row["line"] == line and row["part"] == part
