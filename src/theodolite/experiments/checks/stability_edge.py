"""The stability edge of a linear model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.figure import Experiment
from theodolite.experiments.query import Measured
from theodolite.linalg import top_eigenpairs
from theodolite.operators import hessian
from theodolite.problem import Problem
from theodolite.results import Row
from theodolite.training import train

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Params:
    samples: int
    features: int
    seeds: int
    steps: int = 100
    bisections: int = 16


def half_sum(output: Tensor, target: Tensor) -> Tensor:
    """`½ Σ (f − y)²`, the loss of the source."""
    return 0.5 * (output - target).square().sum()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"half sum": half_sum, "mean": nn.MSELoss()}
#: Learning rate at the edge, in units of 1/λ_1(K): 2 for ½ Σ r², n for (1/n) Σ r².
KERNEL_EDGE = {"half sum": lambda n: 2.0, "mean": lambda n: float(n)}


def worst(column: str) -> Any:
    """Largest relative distance between the rate found by bisection and the one predicted in `column`."""

    def measure(rows: list[Row]) -> Measured:
        edges = [row for row in rows if row["kind"] == "edge"]
        gaps = [abs(row["bisected"] / row[column] - 1.0) for row in edges]
        return Measured(max(gaps), error=max(row["precision"] for row in edges))

    return measure


def growth_law(rows: list[Row]) -> float:
    """Largest distance between the measured growth of the loss per step above the edge and (1 − ηλ)²."""
    above = [row for row in rows if row["kind"] == "growth" and row["ratio"] > 1.0]
    return max(float(abs(row["growth"] - row["predicted"])) for row in above)


class StabilityEdge(Experiment):
    """The stability edge of a linear model: gradient descent converges below 2/λ and diverges above.

    A linear model with a squared loss is trained by gradient descent; bisection finds the largest learning rate at
    which the loss still falls. It is compared with 2/λ, λ the largest Hessian eigenvalue, and with the same edge
    written through the tangent kernel K = XXᵀ: 2/λ(K) for ½ Σ r² and n/λ(K) for the mean of r².
    """

    id = "checks/stability-edge"
    source = "003, chapter 3, equations (3.7) and (3.8): r(t+1) = (I − ηK) r(t)"
    sizes = {
        "tiny": Params(samples=40, features=6, seeds=2),
        "laptop": Params(samples=200, features=20, seeds=10),
        "paper": Params(samples=2000, features=100, seeds=20),
    }
    claims = (
        Claim(
            "the largest stable learning rate is 2/λ of the Hessian (largest relative distance)",
            worst("hessian_edge"),
            rule="at most",
            expected=1e-3,
            reported=Reported("2/λ", "003, below (3.8)"),
        ),
        Claim(
            "the same edge from the tangent kernel: 2/λ(K), and n/λ(K) for a mean loss (largest relative distance)",
            worst("kernel_edge"),
            rule="at most",
            expected=1e-3,
            reported=Reported("2/λ(K)", "003, below (3.8)"),
        ),
        Claim(
            "above the edge the loss grows by (1 − ηλ)² per step (largest distance)",
            growth_law,
            rule="at most",
            expected=1e-2,
            reported=Reported("(1 − ηλ)²", "003, (3.7)", read_from="theory"),
        ),
    )

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        for seed in range(p.seeds):
            for loss in LOSSES:
                yield {
                    "loss": loss,
                    "samples": p.samples,
                    "features": p.features,
                    "steps": p.steps,
                    "bisections": p.bisections,
                    "seed": seed,
                }

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        x, y = _data(job)
        loss = LOSSES[job["loss"]]
        problem = Problem(_model(x, y), loss, (x, y))
        edge = 2.0 / float(top_eigenpairs(hessian(problem), 1, tol=1e-8).values[0])
        kernel_edge = KERNEL_EDGE[job["loss"]](len(x)) / float(torch.linalg.eigvalsh(x @ x.T)[-1])
        lowest, highest = 0.5 * edge, 2.0 * edge
        for _ in range(job["bisections"]):
            rate = 0.5 * (lowest + highest)
            if _growth(job, rate, x, y) < 1.0:
                lowest = rate
            else:
                highest = rate
        shared = {"loss": job["loss"], "seed": job["seed"]}
        bisected = 0.5 * (lowest + highest)
        precision = (highest - lowest) / bisected
        yield {
            "kind": "edge",
            **shared,
            "bisected": bisected,
            "hessian_edge": edge,
            "kernel_edge": kernel_edge,
            "precision": precision,
        }
        for ratio in (0.9, 0.95, 0.98, 1.02, 1.05, 1.1):
            growth = _growth(job, ratio * edge, x, y)
            yield {"kind": "growth", **shared, "ratio": ratio, "growth": growth, "predicted": (1.0 - 2.0 * ratio) ** 2}

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        growth = [row for row in rows if row["kind"] == "growth"]
        edges = [{**row, "ratio": row["bisected"] / row["hessian_edge"]} for row in rows if row["kind"] == "edge"]
        figure, (left, right) = plots.panels(2)
        plots.curves(
            growth, "ratio", "growth", by="loss", xlabel="learning rate / (2/λ)", ylabel="growth of the loss per step", ax=left
        )
        plots.reference(left, x=1.0, label="edge 2/λ")
        plots.reference(left, y=1.0)
        plots.scatter(
            edges, "hessian_edge", "bisected", by="loss", log="xy", identity=True, xlabel="2/λ", ylabel="bisected", ax=right
        )
        return figure


def _data(job: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Inputs, and targets that the model can fit: the loss falls to zero, or all of it is excess."""
    generator = torch.Generator().manual_seed(job["seed"])
    x = torch.randn(job["samples"], job["features"], generator=generator, dtype=torch.float64)
    return x, x @ torch.randn(job["features"], 1, generator=generator, dtype=torch.float64)


def _model(x: Tensor, y: Tensor) -> nn.Linear:
    """The solution, moved along the sharpest direction and a thousand times less along the others.

    Near the edge neighbouring directions fade slowly; from here the sharpest one rules from the first step on.
    """
    gram = x.T @ x
    sharpest = torch.linalg.eigh(gram).eigenvectors[:, -1:]
    others = torch.linspace(-1.0, 1.0, len(gram), dtype=torch.float64)[:, None]
    model = nn.Linear(len(gram), 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_((torch.linalg.solve(gram, x.T @ y) + sharpest + 1e-3 * others).T)
    return model


def _growth(job: Mapping[str, Any], rate: float, x: Tensor, y: Tensor) -> float:
    """Growth of the loss per step over the second half of a run."""
    model = _model(x, y)
    trace = train(model, LOSSES[job["loss"]], (x, y), torch.optim.SGD(model.parameters(), lr=rate), steps=job["steps"])
    half = trace.steps // 2
    growth: float = (trace.loss[-1] / trace.loss[half]) ** (1.0 / (trace.steps - 1 - half))
    return growth
