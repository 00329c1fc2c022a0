"""The Hessian of a linear layer under squared loss is a Kronecker product."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from theodolite.experiments import Experiment, at_most, cited, equal, rows, sizes
from theodolite.experiments.lab.panels import draw_panels, scatter
from theodolite.experiments.query import select
from theodolite.linalg import top_eigenpairs
from theodolite.operators import DenseOperator, hessian
from theodolite.problem import Problem
from theodolite.results import Row

layers = rows(kind="layer")


class KroneckerIdentity(Experiment):
    """The Hessian of a linear layer with squared loss is I ⊗ E[xxᵀ], exactly.

    For z = Wx and the loss ½ |z − y|², averaged over the data, the output Hessian is the identity for every input, so
    the decoupling E[M ⊗ xxᵀ] = E[M] ⊗ E[xxᵀ] holds without error: every eigenvalue of E[xxᵀ] appears once per output.
    Products of the Hessian are compared with products of the Kronecker operator, and the top eigenvalue's copies are
    counted by the eigen-solver, which has to find all of them.
    """

    id = "checks/kronecker-identity"
    where = "Wu, Zhu et al. 2020, section 3: the decoupling of the layer-wise Hessian; exact where the output Hessian is constant"
    #: Shapes are (outputs, inputs).
    sizes = sizes(
        tiny={"shapes": ((3, 5), (4, 8)), "samples": 50, "seeds": 2},
        laptop={"shapes": ((5, 20), (10, 64), (10, 100)), "samples": 1000, "seeds": 5},
        paper={"shapes": ((10, 784), (200, 200)), "samples": 10000, "seeds": 5},
    )
    claims = cited(
        "Wu, Zhu et al. 2020, eigenvalues of a Kronecker product",
        {
            "products of the Hessian equal products of I ⊗ E[xxᵀ] (largest relative distance)": at_most(
                1e-10, layers.max("distance"), says="equal", where="Wu, Zhu et al. 2020, decoupling for a constant output Hessian"
            ),
            "every eigenvalue of E[xxᵀ] appears once per output: layers where the top one's copies are miscounted": equal(
                0, (layers["copies"] - layers["outputs"]).count(lambda more: more != 0), says="m copies"
            ),
            "the eigenvalues of the Hessian are those of E[xxᵀ] (largest relative distance)": at_most(
                1e-3, layers.max("eigenvalue_distance"), says="equal"
            ),
        },
        read_from="theory",
    )

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for outputs, inputs in p.shapes:
            for seed in range(p.seeds):
                yield {"outputs": outputs, "inputs": inputs, "samples": p.samples, "seed": seed}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        m, n, count = job["outputs"], job["inputs"], job["samples"]
        generator = torch.Generator().manual_seed(job["seed"])
        # Uneven features, so that the eigenvalues of E[xxᵀ] lie apart.
        x = torch.randn(count, n, generator=generator, dtype=torch.float64) * torch.linspace(0.5, 2.0, n, dtype=torch.float64)
        y = torch.randn(count, m, generator=generator, dtype=torch.float64)
        model = nn.Linear(n, m, bias=False)
        model.weight = nn.Parameter(torch.randn(m, n, generator=generator, dtype=torch.float64))
        H = hessian(Problem(model, lambda z, t: 0.5 * (z - t).square().sum(1).mean(), (x, y)))
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
            values = {"index": i, "hessian": value, "predicted": float(wanted[i])}
            yield {"kind": "eigenvalue", "layer": layer, "seed": job["seed"], **values}

    def draw(self, rows: list[Row]) -> Any:
        values, labels = select(rows, kind="eigenvalue"), ("eigenvalue of I ⊗ E[xxᵀ]", "eigenvalue of the Hessian")
        return draw_panels(
            scatter(values, "predicted", "hessian", xlabel=labels[0], ylabel=labels[1]),
            scatter(layers.of(rows), "outputs", "copies", xlabel="outputs", ylabel="copies found"),
            by="layer",
            identity=True,
        )
