"""Two ways to the critical rate, by the tangent kernel and by the Hessian: the same for wide networks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from torch import nn

from theodolite.experiments.catapult.sweeping import Panel, network
from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.figure import Experiment
from theodolite.experiments.lab.datasets import Source, two_classes
from theodolite.measures.dynamics import critical_learning_rate
from theodolite.problem import Problem
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Params:
    widths: tuple[int, ...]
    seeds: int
    n: int
    side: int
    source: Source


def distance(rows: list[Row], width: int) -> float:
    """|ratio − 1|, mean over the starts."""
    return fmean(abs(float(row["ratio"]) - 1) for row in rows if row["width"] == width)


def widest(rows: list[Row]) -> float:
    """The distance at the width of 2048."""
    return distance(rows, 2048)


def smallest_fall(rows: list[Row]) -> float:
    """The smallest factor by which the distance falls from one width to the next."""
    widths = sorted({row["width"] for row in rows})
    found = [distance(rows, width) for width in widths]
    return min(before / after for before, after in itertools.pairwise(found))


_REPORTED = Reported("λ_max(H) ≈ λ_max(K) for wide networks", "003, section 3.2, after Definition 3.2.2")


class CriticalRate(Experiment):
    """The critical learning rate by the kernel and by the Hessian, against the width.

    2/λ_max of the Hessian of the loss at the start, and the same with the tangent kernel in its place, for a two-layer ReLU
    network on 20 images of two classes. The Hessian is JᵀJ + Σ rᵢHᵢ, and the second part falls with the width.
    """

    id = "catapult/critical-rate"
    source = "003, section 3.2, Definition 3.2.2"
    sizes = {
        "tiny": Params(widths=(128, 512, 2048), seeds=3, n=20, side=8, source="stand-in"),
        "laptop": Params(widths=(32, 128, 512, 2048, 8192), seeds=5, n=20, side=8, source="either"),
        "paper": Params(widths=(128, 512, 2048, 8192, 32768), seeds=5, n=20, side=32, source="files"),
    }
    claims = (
        Claim(
            "at width 2048 the two rates agree (|ratio − 1|, mean over the starts)",
            widest,
            rule="at most",
            expected=0.1,
            reported=_REPORTED,
        ),
        Claim(
            "their distance falls from each width to the next (smallest factor)",
            smallest_fall,
            rule="at least",
            expected=1.0,
            reported=_REPORTED,
        ),
    )

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        for width in p.widths:
            for seed in range(p.seeds):
                yield {"width": width, "n": p.n, "side": p.side, "source": p.source, "seed": seed}

    def run(self, job: Mapping[str, Any]) -> Row:
        points = two_classes("cifar10", job["n"], job["n"], side=job["side"], source=job["source"], seed=job["seed"])
        model = network(Panel("cifar10"), points.shape, job["width"], job["seed"]).double()
        problem = Problem(model, nn.MSELoss(), (points.x.double(), points.y.double()))
        kernel, hessian = (critical_learning_rate(problem, by=by, tol=1e-7, progress=False).value for by in ("kernel", "hessian"))
        return {
            "width": job["width"],
            "seed": job["seed"],
            "data": points.origin,
            "by_kernel": kernel,
            "by_hessian": hessian,
            "ratio": kernel / hessian,
        }

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        shown = [{**row, "distance": abs(row["ratio"] - 1)} for row in rows]
        figure, (ax,) = plots.panels(1, letters=False, size=(5.0, 3.8))
        plots.log_log(shown, "width", "distance", guides=(-0.5,), ylabel="|η_crit(kernel) / η_crit(Hessian) − 1|", ax=ax)
        return figure
