"""PL* from the tangent kernel: the inequality, the ball, the speed of gradient descent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from theodolite.experiments.figure import Experiment
from theodolite.experiments.linearity.architectures import INPUTS, gaussian_inputs
from theodolite.experiments.linearity.descent import descend
from theodolite.experiments.linearity.ensembles import Ensemble, added, hessian_norms, norms
from theodolite.experiments.linearity.polyak_claims import CLAIMS
from theodolite.models.dag import DagNetwork, fcn_graph
from theodolite.models.initialisation import seeded
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Params:
    draws: int
    ball_widths: tuple[int, ...]
    ball_seeds: int
    widths: tuple[int, ...]
    seeds: int
    depths: tuple[int, ...]
    networks: int
    samples: int = 10
    steps: int = 3000
    deep: tuple[int, ...] = (1024,)  # widths of three-layer networks that are trained


class PolyakLojasiewicz(Experiment):
    """The PL* condition and gradient descent: what the tangent kernel promises, and what happens.

    The inequality ‖∇L‖² ≥ 2λ_min(K)L at random weights and data, with equality along the bottom eigenvector; the smallest
    eigenvalue and the Jacobian on a ball against their bounds; gradient descent at rate 1/λ_max against the prediction of
    the frozen kernel; the lower bound on the gradient of ReLU networks; and networks with tanh on the output, which are
    not linear and converge all the same.
    """

    id = "linearity/pl"
    source = "003, section 2.4: (2.16), Proposition 2.4.4 and the remarks after it"
    sizes = {
        "tiny": Params(
            draws=100, ball_widths=(32, 128), ball_seeds=3, widths=(128, 1024), seeds=1, depths=(2, 3, 4), networks=8,
            deep=(256,),
        ),
        "laptop": Params(
            draws=100, ball_widths=(32, 128, 512), ball_seeds=5, widths=(128, 256, 512, 1024), seeds=3, depths=(2, 3, 4),
            networks=16,
        ),
        "paper": Params(
            draws=1000, ball_widths=(32, 128, 512, 2048), ball_seeds=10, widths=(128, 256, 512, 1024, 2048), seeds=5,
            depths=(2, 3, 4), networks=32,
        ),
    }  # fmt: skip
    claims = CLAIMS
    departs = (
        "Proposition 2.4.4 is proved for the mean of ‖∇f‖² and stated for the mean of ‖∇f‖, which does not follow; the squared "
        "form is tested. The source gives no constant for the radius R = O(1/μ), and none is assumed."
    )

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        yield {"part": "inequality", "draws": p.draws, "m": 16, "samples": 6, "seed": 0}
        for m in p.ball_widths:
            yield {"part": "ball", "m": m, "samples": p.samples, "seeds": p.ball_seeds, "seed": 0}
        descents = [(1, "identity", m) for m in p.widths] + [(2, "identity", m) for m in p.deep] + [(1, "tanh", p.widths[0])]
        for hidden, output, m in descents:
            sizes = {"m": m, "samples": p.samples, "seeds": p.seeds, "steps": p.steps}
            yield {"part": "descent", "hidden": hidden, "output": output, **sizes, "seed": 0}
        for depth in p.depths:
            yield {"part": "gradient", "depth": depth, "m": 512, "networks": p.networks, "samples": 25, "seed": 0}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        parts: dict[str, Callable[[Mapping[str, Any]], Iterator[Row]]] = {
            "inequality": _inequality,
            "ball": _ball,
            "descent": _descent,
            "gradient": _gradient,
        }
        for row in parts[job["part"]](job):
            yield {"part": job["part"], **row}

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        widths = {row["m"] for row in rows if row["part"] == "path" and row["hidden"] == 1}
        ends = (min(widths), max(widths))
        steps = [
            {"step": row["step"], "loss": row[column], "which": f"m = {row['m']}, {name}"}
            for row in rows
            if row["part"] == "path" and row["m"] in ends and (row["hidden"], row["output"], row["seed"]) == (1, "identity", 0)
            for column, name in (("loss", "network"), ("predicted", "frozen kernel"))
        ]
        balls = [row for row in rows if row["part"] == "ball"]
        figure, (left, right) = plots.panels(2, size=(5.2, 4.2))
        plots.curves(
            steps, "step", "loss", by="which", log="y", labels="legend", xlabel="step", ylabel="loss / loss at the start", ax=left
        )
        drifts = [
            {"m": row["m"], "change": row[column], "which": name}
            for row in balls
            for column, name in (
                ("change", "|Δλ_min|"),
                ("kernel_change", "‖ΔK‖"),
                ("jacobian_bound", "R √n max‖H‖, bounds ‖ΔJ‖"),
            )
        ]
        plots.log_log(
            drifts, "m", "change", by="which", guides=(-0.5,), xlabel="width m", ylabel="change at distance 1", ax=right
        )
        return figure  # fmt: skip


def _networks(m: int, seeds: range, *, hidden: int = 2, output: str = "identity") -> Ensemble:
    graph = fcn_graph(INPUTS, [m] * hidden)
    return Ensemble([DagNetwork(graph, output_activation=output, seed=seed) for seed in seeds])


def _labels(seeds: range, samples: int) -> Tensor:
    y = torch.ones(samples, dtype=torch.float64)
    y[1::2] = -1.0
    return y.expand(len(seeds), samples)


def _inequality(job: Mapping[str, Any]) -> Iterator[Row]:
    """T11: slack of the inequality over random weights, inputs and targets, and its gap along the bottom eigenvector."""
    seeds = range(job["seed"], job["seed"] + job["draws"])
    networks = _networks(job["m"], seeds)
    x = gaussian_inputs(seeds, job["samples"], INPUTS)
    generator = torch.Generator().manual_seed(3)
    y = torch.randn(len(seeds), job["samples"], generator=generator, dtype=torch.float64)
    kernel = networks.kernel(networks.weights, x)
    values, vectors = torch.linalg.eigh(kernel)
    outputs = networks(networks.weights, x)[..., 0]
    for name, target in (("random", y), ("bottom", outputs - vectors[..., 0])):
        leaves = [w.clone().requires_grad_() for w in networks.weights]
        loss = 0.5 * (networks(leaves, x)[..., 0] - target).square().sum(1)
        squared = norms(list(torch.autograd.grad(loss.sum(), leaves))).square()
        slack = (squared - 2 * values[:, 0] * loss.detach()) / squared
        for seed in seeds:
            yield {"residual": name, "seed": seed, "slack": float(slack[seed - seeds[0]])}


def _ball(job: Mapping[str, Any]) -> Iterator[Row]:
    """T12: changes of the smallest eigenvalue, the kernel and the Jacobian at distance 1, with their bounds."""
    seeds = range(job["seed"], job["seed"] + job["seeds"])
    networks = _networks(job["m"], seeds)
    x = gaussian_inputs(seeds, job["samples"], INPUTS)
    step = networks.direction(torch.Generator().manual_seed(11))
    there = added(networks.weights, step)
    kernels = [networks.kernel(w, x) for w in (networks.weights, there)]
    values = [torch.linalg.eigvalsh(k) for k in kernels]
    kernel_change = torch.linalg.eigvalsh(kernels[1] - kernels[0]).abs().amax(1)
    change = torch.zeros(len(seeds), dtype=torch.float64)
    sharpest = torch.zeros_like(change)
    for i in range(job["samples"]):
        one = x[:, i : i + 1]
        change += norms(_difference(networks, one, there)).square()
        for part in (0.0, 0.5, 1.0):
            weights = added(networks.weights, [part * s for s in step])
            found, _ = hessian_norms(lambda w, one=one: networks(w, one)[:, 0, 0], weights, steps=16)  # type: ignore[misc]
            sharpest = torch.maximum(sharpest, found)
    for i, seed in enumerate(seeds):
        yield {
            "m": job["m"],
            "seed": seed,
            "lambda_min": float(values[0][i, 0]),
            "change": float((values[1][i, 0] - values[0][i, 0]).abs()),
            "kernel_change": float(kernel_change[i]),
            "jacobian_change": float(change[i].sqrt()),
            "jacobian_bound": math.sqrt(job["samples"]) * float(sharpest[i]),
        }


def _difference(networks: Ensemble, x: Tensor, there: list[Tensor]) -> list[Tensor]:
    """Gradients of the output for one sample there less those here."""
    found = []
    for weights in (networks.weights, there):
        leaves = [w.detach().clone().requires_grad_() for w in weights]
        found.append(torch.autograd.grad(networks(leaves, x).sum(), leaves))
    return [b - a for a, b in zip(*found, strict=True)]


def _descent(job: Mapping[str, Any]) -> Iterator[Row]:
    """T14: losses of gradient descent beside those of the frozen kernel, and how far the weights go."""
    seeds = range(job["seed"], job["seed"] + job["seeds"])
    networks = _networks(job["m"], seeds, hidden=job["hidden"], output=job["output"])
    x = gaussian_inputs(seeds, job["samples"], INPUTS)
    y = _labels(seeds, job["samples"]) * (1.0 if job["output"] == "identity" else 0.8)  # within the reach of tanh
    # Behind an output activation the kernel moves by a constant factor; a quarter of the rate leaves room for it.
    rate = None if job["output"] == "identity" else 0.25 / torch.linalg.eigvalsh(networks.kernel(networks.weights, x))[:, -1]
    run = descend(networks, x, y, steps=job["steps"], until=1e-6, every=50, rate=rate)
    values, vectors = torch.linalg.eigh(run.kernel)
    modes = (vectors.mT @ run.residuals[..., None])[..., 0]
    factors = 1.0 - run.rates[:, None] * values
    losses = torch.stack(run.losses)
    predicted = torch.stack([0.5 * (modes * factors**t).square().sum(1) for t in range(len(run.losses))])
    slowest = factors.abs().amax(1).square()
    for i, seed in enumerate(seeds):
        shared = {"m": job["m"], "hidden": job["hidden"], "output": job["output"], "seed": seed}
        mine, theory = losses[:, i] / losses[0, i], predicted[:, i] / losses[0, i]
        early = mine >= 1e-3  # until it has fallen by a thousand
        yield {
            **shared,
            "gap": float((mine[early] / theory[early] - 1).abs().max()),
            "contraction": float((losses[1:, i] / losses[:-1, i]).max()),
            "slowest": float(slowest[i]),
            "final": float(mine[-1]),
            "moved": float(run.moved[i]),
            "lambda_min": float(run.lambda_min[i]),
            "steps": len(mine) - 1,
        }
        for step in range(0, len(mine), max(1, len(mine) // 40)):
            yield {**shared, "part": "path", "step": step, "loss": float(mine[step]), "predicted": float(theory[step])}


def _gradient(job: Mapping[str, Any]) -> Iterator[Row]:
    """T13: mean squared gradient norm of ReLU networks, in all and of the last layer."""
    seeds = range(job["seed"], job["seed"] + job["networks"])
    m, depth = job["m"], job["depth"]
    graph = fcn_graph(INPUTS, [m] * (depth - 1))
    whole, last = [], []
    network = DagNetwork(graph, activation="relu")
    for seed in seeds:  # one by one: several networks of four layers of 512 fit no cache, and nothing is gained
        with seeded(seed), torch.no_grad():
            network.reset_parameters()
        networks = Ensemble([network])
        generator = torch.Generator().manual_seed(500 + seed)
        x = torch.randn(1, job["samples"], INPUTS, generator=generator, dtype=torch.float64)
        whole.append(float(networks.kernel(networks.weights, x)[0].diagonal().mean()))
        last.append(float(networks.forward(networks.weights, x)[1][-2].square().sum(2).mean() / m))
    yield {"depth": depth, "m": m, "seed": job["seed"], "squared": fmean(whole), "last": fmean(last)}
