"""The distance of a network from its linearisation, and Taylor's bound on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.figure import Experiment
from theodolite.experiments.linearity.architectures import INPUTS, gaussian_inputs
from theodolite.experiments.linearity.scaling_claims import log_slope
from theodolite.measures.linearity import linearity_deviation
from theodolite.models.dag import DagNetwork, densenet_graph, fcn_graph, with_skips
from theodolite.models.ntk import ntk_cnn
from theodolite.problem import Problem
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NETWORKS = ("fully connected", "dense", "skip", "convolution")


@dataclass(frozen=True)
class Params:
    widths: tuple[int, ...]
    radii: tuple[float, ...]
    directions: int
    segments: int
    seeds: int


def violations(rows: list[Row]) -> int:
    """Directions of smooth networks in which the deviation exceeds the bound by more than a thousandth."""
    smooth = [row for row in rows if row["activation"] == "tanh"]
    return sum(not row["deviation"] <= row["certificate"] * (1 + 1e-3) + 1e-12 for row in smooth)


def worst_slope(rows: list[Row]) -> float:
    """The slope of the worst deviation at distance 1 against the width, the flattest of the smooth networks."""
    slopes = []
    for name in NETWORKS:
        mine = [row for row in rows if row["network"] == name and row["radius"] == 1.0 and row["activation"] == "tanh"]
        widths = sorted({row["m"] for row in mine})
        slopes.append(log_slope([(m, max(row["deviation"] for row in mine if row["m"] == m)) for m in widths]))
    return max(slopes)


def excess_with_kinks(rows: list[Row]) -> float:
    """The largest deviation of a ReLU network in units of its bound, which does not hold there."""
    return max(float(row["deviation"] / row["certificate"]) for row in rows if row["activation"] == "relu")


class Taylor(Experiment):
    """Deviation from the linearisation against Taylor's bound ½R² max‖H‖.

    For tanh networks (fully connected, dense, with skips, convolutional) the deviation of the output from its first-order
    model at distance R is taken along random directions, the gradient and the top Hessian eigenvector, and compared with
    the bound from Hessian norms on the segment. ReLU has kinks that no Hessian sees: there the bound promises nothing.
    """

    id = "linearity/taylor"
    source = "003, Corollary 2.3.7, (2.9) and (2.10)"
    sizes = {
        "tiny": Params(widths=(16, 64), radii=(1.0,), directions=1, segments=3, seeds=1),
        "laptop": Params(widths=(16, 64, 256), radii=(0.5, 1.0, 2.0), directions=2, segments=4, seeds=1),
        "paper": Params(widths=(16, 64, 256, 1024), radii=(0.5, 1.0, 2.0), directions=8, segments=5, seeds=5),
    }
    claims = (
        Claim(
            "T2: smooth networks never exceed the bound (violations)",
            violations,
            rule="equal",
            expected=0,
            reported=Reported("at most ½R² sup‖H‖", "003, Corollary 2.3.7"),
        ),
        Claim(
            "T2: the worst deviation at distance 1 shrinks with the width (flattest slope)",
            worst_slope,
            rule="at most",
            expected=-0.2,
            reported=Reported("−1/2 up to logs", "003, Corollary 2.3.7"),
        ),
        Claim("ReLU, where the bound is not valid: the largest deviation over the bound", excess_with_kinks),
    )

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        for seed in range(p.seeds):
            for name, activation in (*((name, "tanh") for name in NETWORKS), ("fully connected", "relu")):
                for m in p.widths:
                    for radius in p.radii:
                        yield {
                            "network": name,
                            "activation": activation,
                            "m": m,
                            "radius": radius,
                            "directions": p.directions,
                            "segments": p.segments,
                            "seed": seed,
                        }

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        x = gaussian_inputs([job["seed"]], 1, INPUTS)[0]
        model = network(job["network"], job["m"], job["activation"], job["seed"])
        inputs = x[:, None] if job["network"] == "convolution" else x
        found = linearity_deviation(
            Problem(model, nn.MSELoss(), (inputs, torch.zeros(1, 1, dtype=torch.float64))),
            radius=job["radius"],
            directions=job["directions"],
            segments=job["segments"],
            tol=1e-3,
            seed=job["seed"],
            progress=False,
        )
        for row in found.rows():
            yield {"network": job["network"], "activation": job["activation"], "m": job["m"], **row}

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        named = [{**row, "which": row["network"] if row["activation"] == "tanh" else "fully connected, ReLU"} for row in rows]
        figure, (left, right) = plots.panels(2, size=(4.8, 4.0))
        shares = [{**row, "share": row["deviation"] / row["certificate"], "along": _kind(row["direction"])} for row in named]
        plots.scatter(
            shares,
            "certificate",
            "share",
            by="along",
            log="xy",
            xlabel="Taylor's bound ½R² max‖H‖",
            ylabel="deviation / bound",
            ax=left,
        )
        plots.reference(left, y=1.0, label="the bound")
        worst: dict[tuple[str, int], float] = {}
        for row in named:
            if row["radius"] == 1.0:
                key = (row["which"], row["m"])
                worst[key] = max(worst.get(key, 0.0), row["deviation"])
        plots.log_log(
            [{"which": name, "m": m, "deviation": value} for (name, m), value in worst.items()],
            "m",
            "deviation",
            by="which",
            guides=(-0.5,),
            xlabel="width m",
            ylabel="worst deviation at distance 1",
            ax=right,
        )
        return figure


def _kind(direction: str) -> str:
    return "random direction" if direction.startswith("random") else direction


def network(name: str, m: int, activation: str, seed: int) -> nn.Module:
    """A three-layer network of width m."""
    if name == "convolution":
        return ntk_cnn((1, INPUTS), [m, m], activation=activation, seed=seed).double()
    graphs = {
        "fully connected": lambda: fcn_graph(INPUTS, [m, m]),
        "dense": lambda: densenet_graph(INPUTS, [m, m]),
        "skip": lambda: with_skips(fcn_graph(INPUTS, [m, m])),
    }
    return DagNetwork(graphs[name](), activation=activation, seed=seed)
