"""The Hessian of a linear layer under squared loss is a Kronecker product."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.figure import Experiment
from theodolite.experiments.query import Measured
from theodolite.linalg import top_eigenpairs
from theodolite.operators import DenseOperator, hessian
from theodolite.problem import Problem
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Params:
    shapes: tuple[tuple[int, int], ...]  # (outputs, inputs)
    samples: int
    seeds: int


def largest(column: str) -> Any:
    """The largest value of a column over the layers."""

    def measure(rows: list[Row]) -> Measured:
        return Measured(max(row[column] for row in rows if row["kind"] == "layer"))

    return measure


def wrong_copies(rows: list[Row]) -> int:
    """How many layers show their top eigenvalue another number of times than they have outputs."""
    return sum(row["copies"] != row["outputs"] for row in rows if row["kind"] == "layer")


class KroneckerIdentity(Experiment):
    """The Hessian of a linear layer with squared loss is I ⊗ E[xxᵀ], exactly.

    For z = Wx and the loss ½ |z − y|², averaged over the data, the output Hessian is the identity for every input, so
    the decoupling E[M ⊗ xxᵀ] = E[M] ⊗ E[xxᵀ] holds without error: every eigenvalue of E[xxᵀ] appears once per output.
    Products of the Hessian are compared with products of the Kronecker operator, and the top eigenvalue's copies are
    counted by the eigen-solver, which has to find all of them.
    """

    id = "checks/kronecker-identity"
    source = "002, section 3: the decoupling of the layer-wise Hessian; exact where the output Hessian is constant"
    sizes = {
        "tiny": Params(shapes=((3, 5), (4, 8)), samples=50, seeds=2),
        "laptop": Params(shapes=((5, 20), (10, 64), (10, 100)), samples=1000, seeds=5),
        "paper": Params(shapes=((10, 784), (200, 200)), samples=10000, seeds=5),
    }
    claims = (
        Claim(
            "products of the Hessian equal products of I ⊗ E[xxᵀ] (largest relative distance)",
            largest("distance"),
            rule="at most",
            expected=1e-10,
            reported=Reported("equal", "002, decoupling for a constant output Hessian", read_from="theory"),
        ),
        Claim(
            "every eigenvalue of E[xxᵀ] appears once per output: layers where the top one's copies are miscounted",
            wrong_copies,
            rule="equal",
            expected=0,
            reported=Reported("m copies", "002, eigenvalues of a Kronecker product", read_from="theory"),
        ),
        Claim(
            "the eigenvalues of the Hessian are those of E[xxᵀ] (largest relative distance)",
            largest("eigenvalue_distance"),
            rule="at most",
            expected=1e-3,
            reported=Reported("equal", "002, eigenvalues of a Kronecker product", read_from="theory"),
        ),
    )

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        for outputs, inputs in p.shapes:
            for seed in range(p.seeds):
                yield {"outputs": outputs, "inputs": inputs, "samples": p.samples, "seed": seed}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        m, n, count = job["outputs"], job["inputs"], job["samples"]
        generator = torch.Generator().manual_seed(job["seed"])
        # Uneven features, so that the eigenvalues of E[xxᵀ] lie apart.
        x = torch.randn(count, n, generator=generator, dtype=torch.float64) * torch.linspace(0.5, 2.0, n, dtype=torch.float64)
        y = torch.randn(count, m, generator=generator, dtype=torch.float64)
        problem = Problem(_layer(n, m, generator), lambda z, t: 0.5 * (z - t).square().sum(1).mean(), (x, y))
        H = hessian(problem)
        correlation = x.T @ x / count
        kronecker = DenseOperator(torch.eye(m, dtype=torch.float64)).kron(DenseOperator(correlation))
        probes = torch.randn(m * n, 4, generator=generator, dtype=torch.float64)
        truth = kronecker @ probes
        predicted = torch.linalg.eigvalsh(correlation).flip(0)
        pairs = top_eigenpairs(H, m + 1, tol=1e-6, seed=job["seed"])
        layer = f"{m} x {n}"
        gap = float(predicted[0] - predicted[1])
        wanted = torch.cat([predicted[:1].repeat(m), predicted[1:2]])
        yield {
            "kind": "layer",
            "layer": layer,
            "outputs": m,
            "seed": job["seed"],
            "distance": float((H @ probes - truth).norm() / truth.norm()),
            "copies": int((pairs.values > predicted[0] - 0.5 * gap).sum()),
            "eigenvalue_distance": float((pairs.values - wanted).abs().max() / wanted[0]),
        }
        for i, value in enumerate(pairs.values.tolist()):
            yield {
                "kind": "eigenvalue",
                "layer": layer,
                "seed": job["seed"],
                "index": i,
                "hessian": value,
                "predicted": float(wanted[i]),
            }

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        values = [row for row in rows if row["kind"] == "eigenvalue"]
        layers = [row for row in rows if row["kind"] == "layer"]
        figure, (left, right) = plots.panels(2)
        plots.scatter(
            values,
            "predicted",
            "hessian",
            by="layer",
            identity=True,
            xlabel="eigenvalue of I ⊗ E[xxᵀ]",
            ylabel="eigenvalue of the Hessian",
            ax=left,
        )
        plots.scatter(layers, "outputs", "copies", by="layer", identity=True, xlabel="outputs", ylabel="copies found", ax=right)
        return figure


def _layer(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(torch.randn(outputs, inputs, generator=generator, dtype=torch.float64))
    return layer
