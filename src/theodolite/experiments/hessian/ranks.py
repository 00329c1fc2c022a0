"""The rank of a layer's top eigenvectors as matrices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.figure import Experiment
from theodolite.experiments.hessian.measuring import as_job, layer_factors, pairs_of, select, setup_of, values_of
from theodolite.experiments.hessian.networks import Setup
from theodolite.experiments.hessian.overlap import CIFAR, MINI, SOURCE
from theodolite.measures.hessian import rank_ratios
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAYERS = ("conv1", "conv2", "fc1", "fc2", "fc3")


@dataclass(frozen=True)
class Params:
    setup: Setup
    layers: tuple[str, ...]
    k: int
    seeds: int


def typical(rows: list[Row]) -> float:
    """The median of r(h_i) over all i, the smallest of the layers."""
    return float(min(median(row["ratio"] for row in select(rows, layer=layer)) for layer in values_of(rows, "layer")))


def worst_of_top(rows: list[Row]) -> float:
    """The smallest r(h_i) for i <= 10 over all layers and models."""
    return float(min(row["ratio"] for row in rows if not row["i"] > 10))


class Figure6(Experiment):
    """The top eigenvectors of a layer are nearly of rank one.

    The ratio of the largest singular value to the Frobenius norm of each eigenvector as a matrix: 1 for rank one, and
    1/√min(m, n) for no structure at all.
    """

    id = "hessian/figure-6"
    source = "002, section 5.2, Figure 6, and appendix F.2, Figure 22: LeNet5 on CIFAR10, the first 200 eigenvectors"
    item = ("wu-zhu-2020 Figure 6", "wu-zhu-2020 Figure 22")
    sizes = {
        "tiny": Params(MINI, LAYERS, k=30, seeds=1),
        "laptop": Params(CIFAR, ("conv2", "fc1", "fc2", "fc3"), k=60, seeds=1),
        "paper": Params(SOURCE, LAYERS, k=200, seeds=1),
    }
    claims = (
        Claim(
            "the eigenvectors are nearly of rank one (median of the ratio, smallest of the layers)",
            typical,
            rule="at least",
            expected=0.7,
            reported=Reported("usually much larger than 0.5", "002, section 5.2"),
        ),
        Claim(
            "the first ten have no exception (smallest ratio of all layers and models)",
            worst_of_top,
            rule="at least",
            expected=0.5,
            reported=Reported("usually much larger than 0.5", "002, section 5.2"),
        ),
    )

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        for seed in range(p.seeds):
            yield {"setup": as_job(p.setup), "layers": list(p.layers), "k": p.k, "seed": seed}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        model = (setup_of(job), job["seed"])
        pairs = pairs_of(model, tuple(job["layers"]), job["k"])
        for layer in job["layers"]:
            factors = layer_factors(model, layer)
            m, n = factors.output.shape[0], factors.input.shape[0]
            for i, ratio in enumerate(rank_ratios(pairs[layer].vectors, m, n).tolist()):
                yield {
                    "network": model[0].network,
                    "layer": layer,
                    "outputs": m,
                    "seed": job["seed"],
                    "i": i + 1,
                    "ratio": ratio,
                    "flat": min(m, n) ** -0.5,
                }

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        layers = values_of(rows, "layer")
        figure, axes = plots.panels(len(layers), share_y=True)
        for ax, layer in zip(axes, layers, strict=True):
            mine = select(rows, layer=layer)
            plots.curves(
                mine,
                "i",
                "ratio",
                band="range",
                markers=False,
                xlabel="index i of the eigenvector",
                ylabel="largest singular value / norm",
                title=f"{layer} of {mine[0]['network']}",
                ax=ax,
            )
            ax.set_ylim(0.0, 1.05)
            plots.reference(ax, y=0.5)
            plots.reference(ax, y=mine[0]["flat"], label="no structure")
            if mine[0]["outputs"] <= mine[-1]["i"]:
                plots.reference(ax, x=mine[0]["outputs"], label=f"m = {mine[0]['outputs']}")
        return figure
