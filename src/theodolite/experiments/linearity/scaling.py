"""How the Hessian of the output shrinks with the width, architecture by architecture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from theodolite.experiments.figure import Experiment
from theodolite.experiments.linearity.architectures import ARCHITECTURES, INPUTS, built, gaussian_inputs, scalar_of
from theodolite.experiments.linearity.ensembles import Weights, added, hessian_norms
from theodolite.experiments.linearity.scaling_claims import CLAIMS, medians
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Families of this experiment; the last two belong to the figure on bottlenecks.
FAMILIES = tuple(name for name in ARCHITECTURES if not name.startswith("m, 2, m"))
DECAYING = ("three layers", "m, m²", "skip", "dense", "dropped edges", "convolution", "two bottlenecks")
STAYING = ("narrow first", "narrow second", "tanh output", "narrow first, upper blocks", "half bottlenecks", "two layers")
#: Where a neuron's in-degree is not m alone, other widths.
SQUARED = "m, m²"


@dataclass(frozen=True)
class Params:
    widths: tuple[int, ...]
    squared: tuple[int, ...]  # of the network m, m²
    seeds: int
    away: tuple[str, ...]  # families also measured at distance 1
    steps: int = 24


class HessianScaling(Experiment):
    """The Hessian of the output shrinks like 1/√m with the smallest in-degree m behind the first layer.

    Spectral norms of the Hessian of one output for tanh networks of growing width, at the initialisation and at a random
    point at distance 1: fully connected (two and three layers), with skips, densely connected, with half of the edges
    dropped, convolutional, with bottleneck neurons, with a narrow layer and with an activation on the output. A narrow
    layer and an output activation keep the norm from shrinking; only in-degrees above a block's layers matter for it.
    """

    id = "linearity/hessian-scaling"
    source = "003, Theorems 2.3.6, 2.3.8, A.4.1, A.5.1; Corollary A.3.1; Lemma A.2.2; section A.6"
    sizes = {
        "tiny": Params(widths=(16, 36, 80), squared=(8, 14, 24), seeds=10, away=("three layers",)),
        "laptop": Params(widths=(16, 32, 64, 128, 256, 512), squared=(8, 16, 32, 64), seeds=10, away=FAMILIES),
        "paper": Params(widths=(16, 32, 64, 128, 256, 512, 1024, 2048), squared=(8, 16, 32, 64), seeds=20, away=FAMILIES),
    }
    claims = CLAIMS
    departs = (
        "Logarithms in the bound make slopes flatter than −1/2 at these widths; the claims allow for it. That few bottlenecks "
        "are harmless is sufficient and not necessary: half of the neurons with in-degree 1 but different sources is shown too."
    )

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        for name in FAMILIES:
            for m in p.squared if name == SQUARED else p.widths:
                for distance in (0.0, 1.0) if name in p.away else (0.0,):
                    yield {"family": name, "m": m, "distance": distance, "seeds": p.seeds, "steps": p.steps, "seed": 0}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        yield from hessian_rows(job)

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        found = medians(rows)
        figure, axes = plots.panels(2, columns=1, size=(7.6, 3.6))
        for ax, names in zip(axes, (DECAYING, STAYING), strict=True):
            plots.log_log(
                [row for row in found if row["family"] in names and row["distance"] == 0.0],
                "m",
                "norm",
                by="family",
                order=names,
                guides=(-0.5,),
                xlabel="width m",
                ylabel="‖H‖ of the output, median over seeds",
                ax=ax,
            )
        return figure


def hessian_rows(job: Mapping[str, Any]) -> Iterator[Row]:
    """One row per seed: the Hessian norm of a family's networks of one width."""
    name, m = job["family"], job["m"]
    seeds = range(job["seed"], job["seed"] + job["seeds"])
    networks = built(name, m, seeds)
    x = gaussian_inputs(seeds, 1, INPUTS)
    weights = networks.weights
    if job["distance"]:
        step = networks.direction(torch.Generator().manual_seed(777 + job["seed"]))
        weights = added(weights, [job["distance"] * part for part in step])
    shared = {"family": name, "m": m, "distance": job["distance"]}
    architecture = ARCHITECTURES[name]
    found = [
        hessian_norms(scalar_of(name, networks, x, k), weights, layers=architecture.layers, steps=job["steps"])
        for k in range(architecture.outputs)
    ]
    values = torch.stack([value for value, _ in found])  # (outputs, S)
    residuals = torch.stack([residual for _, residual in found]).amax(0)
    tensors = _tensor_norms(networks, weights, x, architecture.outputs, job["steps"]) if architecture.outputs > 1 else None
    for i, seed in enumerate(seeds):
        row = {**shared, "seed": seed, "norm": float(values[:, i].max()), "residual": float(residuals[i])}
        yield row if tensors is None else {**row, "tensor_norm": max(row["norm"], float(tensors[i]))}


def _tensor_norms(networks: Any, weights: Weights, x: Tensor, outputs: int, steps: int) -> Tensor:
    """The largest Hessian norm of a unit combination of the outputs, of three random ones, (S,)."""
    generator = torch.Generator().manual_seed(5)
    combinations = torch.randn(3, outputs, generator=generator, dtype=torch.float64)
    found = []
    for s in combinations / combinations.norm(dim=1, keepdim=True):

        def combined(w: Weights, s: Tensor = s) -> Tensor:
            together: Tensor = networks(w, x)[:, 0] @ s
            return together

        found.append(hessian_norms(combined, weights, steps=steps)[0])
    return torch.stack(found).amax(0)
