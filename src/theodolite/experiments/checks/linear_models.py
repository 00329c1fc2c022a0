"""Linear models with squared loss, where the answer is known: the Hessian as a Kronecker product, and the stability edge."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.experiments import Experiment, at_most, cited, equal, rows, sizes
from theodolite.experiments.lab.panels import curves, draw_panels, scatter
from theodolite.experiments.query import Value, select
from theodolite.experiments.study import grid
from theodolite.linalg import top_eigenpairs
from theodolite.measures.quadratic_models import critical_rate
from theodolite.operators import DenseOperator, hessian
from theodolite.problem import Problem
from theodolite.results import Row
from theodolite.training import train

# The Hessian of a linear layer


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


# The stability edge


def half_sum(output: Tensor, target: Tensor) -> Tensor:
    """`½ Σ (f − y)²`, the loss of the source."""
    return 0.5 * (output - target).square().sum()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"half sum": half_sum, "mean": nn.MSELoss()}

edges = rows(kind="edge")
above = rows(kind="growth", ratio=lambda ratio: ratio > 1.0)


def distance(column: str) -> Value:
    """Largest relative distance between the rate found by bisection and the one predicted in `column`."""
    return (edges["bisected"] / edges[column]).change().max().with_error(edges.max("precision"))


class StabilityEdge(Experiment):
    """The stability edge of a linear model: gradient descent converges below 2/λ and diverges above.

    A linear model with a squared loss is trained by gradient descent; bisection finds the largest learning rate at
    which the loss still falls. It is compared with 2/λ, λ the largest Hessian eigenvalue, and with the same edge
    written through the tangent kernel K = XXᵀ: 2/λ(K) for ½ Σ r² and n/λ(K) for the mean of r².
    """

    id = "checks/stability-edge"
    where = "Zhu 2024, chapter 3, equations (3.7) and (3.8): r(t+1) = (I − ηK) r(t)"
    sizes = sizes(
        steps=100,
        bisections=16,
        tiny={"samples": 40, "features": 6, "seeds": 2},
        laptop={"samples": 200, "features": 20, "seeds": 10},
        paper={"samples": 2000, "features": 100, "seeds": 20},
    )
    claims = {
        "the largest stable learning rate is 2/λ of the Hessian (largest relative distance)": at_most(
            1e-3, distance("hessian_edge"), says="2/λ", where="Zhu 2024, below (3.8)"
        ),
        "the same edge from the tangent kernel: 2/λ(K), and n/λ(K) for a mean loss (largest relative distance)": at_most(
            1e-3, distance("kernel_edge"), says="2/λ(K)", where="Zhu 2024, below (3.8)"
        ),
        "above the edge the loss grows by (1 − ηλ)² per step (largest distance)": at_most(
            1e-2, abs(above["growth"] - above["predicted"]).max(), says="(1 − ηλ)²", where="Zhu 2024, (3.7)", read_from="theory"
        ),
    }

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        return grid(p, "samples", "features", "steps", "bisections", seed=range(p.seeds), loss=LOSSES)

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        x, y = _data(job)
        problem = Problem(_model(x, y), LOSSES[job["loss"]], (x, y))
        edge = 2.0 / float(top_eigenpairs(hessian(problem), 1, tol=1e-8).values[0])
        kernel_edge = critical_rate(float(torch.linalg.eigvalsh(x @ x.T)[-1]), job["loss"], len(x))
        lowest, highest = 0.5 * edge, 2.0 * edge
        for _ in range(job["bisections"]):
            rate = 0.5 * (lowest + highest)
            lowest, highest = (rate, highest) if _growth(job, rate, x, y) < 1.0 else (lowest, rate)
        shared = {"loss": job["loss"], "seed": job["seed"]}
        bisected = 0.5 * (lowest + highest)
        found = {"bisected": bisected, "hessian_edge": edge, "kernel_edge": kernel_edge}
        yield {"kind": "edge", **shared, **found, "precision": (highest - lowest) / bisected}
        for ratio in (0.9, 0.95, 0.98, 1.02, 1.05, 1.1):
            growth = _growth(job, ratio * edge, x, y)
            yield {"kind": "growth", **shared, "ratio": ratio, "growth": growth, "predicted": (1.0 - 2.0 * ratio) ** 2}

    def draw(self, rows: list[Row]) -> Any:
        growth, labels = select(rows, kind="growth"), ("learning rate / (2/λ)", "growth of the loss per step")
        grows = curves(growth, "ratio", "growth", by="loss", xlabel=labels[0], ylabel=labels[1])
        look: dict[str, Any] = {"by": "loss", "log": "xy", "identity": True, "xlabel": "2/λ", "ylabel": "bisected"}
        found = scatter(edges.of(rows), "hessian_edge", "bisected", **look)
        return draw_panels(grows.line(x=1.0, label="edge 2/λ").line(y=1.0), found)


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
    model = nn.Linear(len(gram), 1, bias=False)
    model.weight = nn.Parameter((torch.linalg.solve(gram, x.T @ y) + sharpest + 1e-3 * others).T)
    return model


def _growth(job: Mapping[str, Any], rate: float, x: Tensor, y: Tensor) -> float:
    """Growth of the loss per step over the second half of a run."""
    model = _model(x, y)
    trace = train(model, LOSSES[job["loss"]], (x, y), torch.optim.SGD(model.parameters(), lr=rate), steps=job["steps"])
    half = trace.steps // 2
    return float((trace.loss[-1] / trace.loss[half]) ** (1.0 / (trace.steps - 1 - half)))
