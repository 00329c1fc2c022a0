"""Two regimes of linear models, three of quadratic ones and of networks (Figure 3.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from theodolite.experiments.catapult.starts import draw, draw_quadratic, words
from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.figure import Experiment
from theodolite.measures.quadratic_models import Orbit, descend, gated_kernel, one_example, unit_sigma
from theodolite.measures.quadratic_models.models import gates
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TARGET = 1.0
MODELS = ("linear", "quadratic", "general quadratic", "network")
TITLES = {
    "linear": "linear model",
    "quadratic": "quadratic model of a network",
    "general quadratic": "general quadratic model",
    "network": "two-layer ReLU network",
}
WORDS = ("monotone", "catapult", "divergent", "other")


@dataclass(frozen=True)
class Params:
    width: int = 2000
    draws: int = 10
    steps: int = 400
    network_width: int = 1000
    ratios: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9, 1.1, 1.2, 1.4, 1.6, 1.8, 1.9, 2.1, 2.4, 3.0, 4.0, 5.0)


def share(model: str, word: str, low: float, high: float) -> Callable[[list[Row]], float]:
    """The share of runs with that word at rates between `low` and `high` critical rates, smallest over the rates."""

    def measure(rows: list[Row]) -> float:
        found = [row for row in rows if row["model"] == model and row["word"] == word and low < row["ratio"] < high]
        return min(float(row["share"]) for row in found)

    return measure


def _regime(model: str, text: str, word: str, low: float, high: float) -> Claim:
    return Claim(
        f"{TITLES[model]}: {text} (smallest share of runs)",
        share(model, word, low, high),
        rule="equal",
        expected=1.0,
        reported=Reported(word, "003, Figure 3.1"),
    )


class Figure31(Experiment):
    """Which learning rates make a run fall, catapult or diverge: linear models, quadratic models, networks.

    Every run is named by what its loss and its kernel do. Rates are in units of the critical rate 2/λ(0). The first three
    models see one example with target 1, the network eight random ones in ten dimensions: on a single example all its
    units may die in the catapult. The general quadratic model has φ a unit vector of 100 entries, Σ = diag(±1) and γ = 10⁻³.
    The theorems leave a margin of order log m/√m at both ends of the window, 0.1 critical rates for the network.
    """

    id = "catapult/figure-3.1"
    source = "003, Figure 3.1 (an illustration); here measured"
    item = "zhu-2024 Figure 3.1"
    sizes = {
        "tiny": Params(draws=6, steps=150),
        "laptop": Params(10_000, 20, 1000, 4000),
        "paper": Params(100_000, 50, 1000, 10_000),
    }
    claims = (
        _regime("linear", "falls below the critical rate", "monotone", 0.0, 1.0),
        _regime("linear", "diverges above", "divergent", 1.0, 5.5),
        _regime("quadratic", "falls below the critical rate", "monotone", 0.0, 1.0),
        _regime("quadratic", "catapults between one and two critical rates", "catapult", 1.0, 2.0),
        _regime("quadratic", "diverges above two", "divergent", 2.0, 5.5),
        _regime("general quadratic", "falls below the critical rate", "monotone", 0.0, 1.0),
        _regime("general quadratic", "catapults between one and two critical rates", "catapult", 1.0, 2.0),
        _regime("general quadratic", "diverges above two", "divergent", 2.0, 5.5),
        _regime("network", "falls below the critical rate", "monotone", 0.0, 1.0),
        _regime("network", "catapults from 1.15 to 1.95 critical rates", "catapult", 1.15, 1.95),
        _regime("network", "diverges at four and five critical rates", "divergent", 3.5, 5.5),
    )

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        for model in MODELS:
            for ratio in p.ratios:
                width = p.network_width if model == "network" else p.width
                yield {"model": model, "ratio": ratio, "width": width, "draws": p.draws, "steps": p.steps, "seed": 0}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        found = Counter(words(ORBITS[job["model"]](job), quadratic=job["model"] != "network"))
        for word in WORDS:
            yield {
                "model": job["model"],
                "ratio": job["ratio"],
                "word": word,
                "share": found[word] / job["draws"],
                "seed": job["seed"],
            }

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        figure, axes = plots.panels(4, columns=2, size=(4.2, 2.6), share_x=True, share_y=True)
        for model, ax in zip(MODELS, axes, strict=True):
            seen = [row for row in rows if row["model"] == model]
            shown = [word for word in WORDS if any(row["share"] > 0 for row in seen if row["word"] == word)]
            plots.curves(
                [row for row in seen if row["word"] in shown],
                "ratio",
                "share",
                by="word",
                order=shown,
                labels="legend",
                xlabel="learning rate / critical rate",
                ylabel="share of runs",
                title=TITLES[model],
                ax=ax,
            )
            ax.legend(loc="center right")
            plots.reference(ax, x=1.0)
            if model != "linear":
                plots.reference(ax, x=2.0)
        return figure


def _network_kind(c_of_width: Callable[[int], float]) -> Callable[[Mapping[str, Any]], Orbit]:
    def orbit(job: Mapping[str, Any]) -> Orbit:
        m = job["width"]
        start = draw(m, job["draws"], job["seed"])
        return one_example(start.output, start.kernel, TARGET, c_of_width(m), 2 * job["ratio"] / start.kernel, job["steps"])

    return orbit


def _network(job: Mapping[str, Any]) -> Orbit:
    generator = torch.Generator().manual_seed(job["seed"])
    x = torch.randn(8, 10, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 2, (8,), generator=generator).double() * 2 - 1
    start = draw(job["width"], job["draws"], job["seed"], d=10)
    kernel = gated_kernel(start.u, start.v, gates(start.u, x), x)
    rate = 2 * job["ratio"] / torch.linalg.eigvalsh(kernel)[:, -1]
    return descend(start.u, start.v, x, y, rate, job["steps"], frozen=False, until=1e-10)


def _general(job: Mapping[str, Any]) -> Orbit:
    gamma = 1e-3
    start = draw_quadratic(job["draws"], gamma, job["seed"])
    return unit_sigma(start.output, start.kernel, TARGET, start.bend, gamma, 2 * job["ratio"] / start.kernel, job["steps"])


#: With c = 0 the recursion of the gated network is that of the linear model.
ORBITS: Mapping[str, Callable[[Mapping[str, Any]], Orbit]] = {
    "linear": _network_kind(lambda m: 0.0),
    "quadratic": _network_kind(lambda m: 1.0 / m),
    "general quadratic": _general,
    "network": _network,
}
