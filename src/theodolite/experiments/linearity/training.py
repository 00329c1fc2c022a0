"""Gradient descent: the wider the network, the less its tangent kernel moves, and what the kernel promises (PL*)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from theodolite.data import load
from theodolite.data.generators import two_class_images
from theodolite.experiments import Experiment, Reported, at_least, at_most, between, equal, rows, sizes
from theodolite.experiments.lab.datasets import load_or
from theodolite.experiments.lab.panels import curves, draw_panels, labelled, log_log, melted
from theodolite.experiments.linearity import ensembles
from theodolite.experiments.linearity.ensembles import (
    INPUTS,
    Ensemble,
    fully_connected,
    gaussian_inputs,
    gradients,
    job_seeds,
    seed_rows,
)
from theodolite.experiments.query import Value, select
from theodolite.experiments.study import InParts, grid
from theodolite.models.dag import DagNetwork, densenet_graph, fcn_graph, with_drops
from theodolite.models.initialisation import seeded
from theodolite.results import Row


@dataclass(frozen=True, eq=False)
class Descent:
    """A run: the losses (T + 1, S), the rates (S,), the kernels at the start (S, n, n), the largest drift, the way gone (S,).

    `lambda_min` is the smallest eigenvalue of the kernels looked at on the way, (S,); `residuals` those at the start. Drift, way
    and `lambda_min` of a network are taken up to the step `ended` (S,) at which its own loss was low enough.
    """

    losses: Tensor
    rates: Tensor
    kernel: Tensor
    drift: Tensor
    moved: Tensor
    lambda_min: Tensor
    residuals: Tensor
    ended: Tensor


def descend(
    networks: Ensemble, x: Tensor, y: Tensor, *, steps: int, until: float, every: int, rate: Tensor | None = None
) -> Descent:
    """Descend until every loss is `until` times its start; by default at the rate 1/λ_max(K₀) of each network.

    The kernel is looked at every so many steps and where a network is done. That one keeps descending with the others, but
    nothing more is taken of it than its losses.
    """
    weights = networks.weights
    kernel = networks.kernel(weights, x)
    values = torch.linalg.eigvalsh(kernel)
    size = values[:, -1]
    rates = 1.0 / size if rate is None else rate
    drift, smallest, moved = torch.zeros_like(size), values[:, 0], torch.zeros_like(size)
    live, ended = torch.ones_like(size, dtype=torch.bool), torch.zeros_like(size, dtype=torch.long)
    losses: list[Tensor] = []
    for step in range(steps + 1):
        leaves = weights.detach().requires_grad_()
        loss = 0.5 * (networks(leaves, x)[..., 0] - y).square().sum(1)
        losses.append(loss.detach())
        low = live & ((losses[-1] <= until * losses[0]) | (step == steps))
        if step and (step % every == 0 or bool(low.any())):
            now = networks.kernel(weights, x)
            further = torch.maximum(drift, torch.linalg.eigvalsh(now - kernel).abs().amax(1) / size)
            drift = torch.where(live, further, drift)
            smallest = torch.where(live, torch.minimum(smallest, torch.linalg.eigvalsh(now)[:, 0]), smallest)
        if bool(low.any()):
            moved = torch.where(low, (weights - networks.weights).norm(dim=1), moved)
            ended = torch.where(low, step, ended)
            live = live & ~low
        if not bool(live.any()):
            break
        weights = weights - rates[:, None] * torch.autograd.grad(loss.sum(), leaves)[0]
    residuals = networks(networks.weights, x)[..., 0] - y
    return Descent(torch.stack(losses), rates, kernel, drift, moved, smallest, residuals, ended)


def labels(seeds: range, samples: int) -> Tensor:
    """Labels ±1 in turn, (S, samples)."""
    return (1.0 - 2.0 * (torch.arange(samples).double() % 2)).expand(len(seeds), samples)


# The drift of the kernel

#: The pair of classes: the chapter does not say which; the next one uses airplanes and birds.
CLASSES = ("airplane", "bird")


def spearman(activation: str) -> Value:
    """Rank correlation of width and mean drift."""

    def with_place(values: list[float]) -> float:
        from scipy.stats import spearmanr

        return float(spearmanr(range(len(values)), values).statistic)

    return rows(activation=activation).by("m").each(rows.mean("drift")).reduce(with_place)


def drift_slope(activation: str) -> Value:
    """The power of the hidden width that the mean drift follows."""
    return rows(activation=activation).power("m", "drift")


class Figure22(Experiment):
    """Change of the tangent kernel in training against the width.

    A three-layer network with dense connections, each edge removed with probability 1/2, is trained by gradient descent
    at rate 1/λ_max(K₀) on ten points of two classes until the loss is a ten-thousandth of its start. Shown is the largest
    ‖K_t − K₀‖/‖K₀‖ of a run up to there, against the hidden width and against the smallest in-degree.
    """

    item, where = "zhu-2024 Figure 2.2", "section 2.3"
    sizes = sizes(
        data="cifar10",
        features=8,
        samples=10,
        seeds=5,
        every=5,
        drop=0.5,
        tiny={"data": "gaussian", "widths": (8, 32, 128), "steps": 600, "every": 20},
        laptop={"widths": (8, 16, 32, 64, 128, 256, 512), "steps": 4000},
        paper={"features": 3072, "widths": tuple(2**k for k in range(1, 13)), "steps": 20000},
    )
    claims = (
        *(
            {
                f"{activation}: the drift falls with the width (Spearman correlation)": at_most(
                    -0.9, spearman(activation), says="falls throughout", read_from="plot"
                ),
                f"{activation}: slope of the drift against the hidden width": between(  # calibrated: tanh −0.69, ReLU −0.63
                    -1.2, -0.35, drift_slope(activation), says="follows 1/√m"
                ),
            }
            for activation in ("tanh", "relu")
        ),
        {
            "the loss converges at every width (runs that did not reach 1e-4 of their start)": equal(
                0,
                rows["final"].count(lambda final: not final <= 1e-4),
                says="converges for all widths",
                where="Zhu 2024, section 2.3",
            )
        },
    )
    departs = (
        "The input is concatenated into every layer, so with 3072 inputs every in-degree is about 1536 at least and the width "
        "of Definition 2.2.7 does not vary; below paper size images are reduced to 8 principal components, and both widths are "
        "plotted. 1/√m bounds the Hessian; a smooth network may drift like 1/m, so a steeper slope is no contradiction. "
        "Classes, labels (±1), scale (‖x‖² = d), rate and activation are not stated in the source."
    )

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        shared = ("data", "features", "samples", "seeds", "steps", "every", "drop")
        return grid(p, *shared, activation=("tanh", "relu"), m=p.widths, seed=[0])

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        seeds = job_seeds(job)
        x, y, origin = points(job["data"], job["samples"], job["features"], seeds)
        dense = densenet_graph(x.shape[2], [job["m"]] * 2)
        networks = Ensemble.of(lambda seed: with_drops(dense, job["drop"], seed=seed), seeds, activation=job["activation"])
        run = descend(networks, x, y, steps=job["steps"], until=1e-4, every=job["every"])
        shared = {"activation": job["activation"], "m": job["m"], "data": origin}
        final = run.losses[run.ended, range(len(seeds))] / run.losses[0]
        measured = {"drift": run.drift, "final": final, "moved": run.moved, "steps": run.ended}
        return seed_rows(shared, seeds, width=networks.widths, **measured)

    def draw(self, rows: list[Row]) -> Any:
        return draw_panels(
            log_log(rows, "m", "drift", xlabel="hidden width"),
            log_log(rows, "width", "drift", xlabel="smallest in-degree behind the first layer"),
            size=(4.6, 3.8),
            by="activation",
            guides=(-0.5,),
            ylabel="largest ‖K_t − K₀‖ / ‖K₀‖",
        )


def points(data: str, samples: int, features: int, seeds: range) -> tuple[Tensor, Tensor, str]:
    """Inputs (S, n, d) with ‖x‖² = d, labels ±1 (S, n), and where they come from.

    Each seed has other samples. Where the files of the images are not there, smooth generated images stand in.
    """
    if data == "gaussian":
        return gaussian_inputs(seeds, samples, features), labels(seeds, samples), data
    pair, origin = load_or(_cifar, _generated)
    pool = torch.stack([part.double().flatten(1) for part in pair], dim=1).flatten(0, 1)  # classes in turn
    if features < pool.shape[1]:
        centred = pool - pool.mean(0)
        pool = centred @ torch.linalg.svd(centred, full_matrices=False).Vh[:features].T
    x = torch.stack([pool[samples * s : samples * (s + 1)] for s in seeds])
    return x * x.shape[2] ** 0.5 / x.norm(dim=2, keepdim=True), labels(seeds, samples), origin


def _cifar() -> tuple[list[Tensor], str]:
    images = load("cifar10")
    return [images.x_train[images.y_train == images.classes.index(name)][:500] for name in CLASSES], "cifar10"


def _generated() -> tuple[list[Tensor], str]:
    drawn = two_class_images(1000, 16, 3, dtype=torch.float64)
    return [drawn.x[drawn.y > 0], drawn.x[drawn.y < 0]], "generated images"


# PL*: the inequality, the ball, the speed of gradient descent


def _inequality(job: Mapping[str, Any]) -> Iterator[Row]:
    """T11: slack of the inequality over random weights, inputs and targets, and its gap along the bottom eigenvector."""
    seeds = job_seeds(job, "draws")
    networks, x = fully_connected(job["m"], seeds), gaussian_inputs(seeds, job["samples"])
    values, vectors = torch.linalg.eigh(networks.kernel(networks.weights, x))
    bottom = networks(networks.weights, x)[..., 0] - vectors[..., 0]
    for name, target in (("random", ensembles.normals(3)(*bottom.shape)), ("bottom", bottom)):

        def loss(weights: Tensor, target: Tensor = target) -> Tensor:
            return 0.5 * (networks(weights, x)[..., 0] - target).square().sum(1)

        squared = gradients(loss, networks.weights).square().sum(1)
        slack = (squared - 2 * values[:, 0] * loss(networks.weights)) / squared
        yield from seed_rows({"residual": name}, seeds, slack=slack)


def _ball(job: Mapping[str, Any]) -> Iterator[Row]:
    """T12: changes of the smallest eigenvalue, the kernel and the Jacobian at distance 1, with their bounds."""
    seeds = job_seeds(job)
    networks, x = fully_connected(job["m"], seeds), gaussian_inputs(seeds, job["samples"])
    here, halfway, there = (networks.at(distance, seed=11) for distance in (0.0, 0.5, 1.0))
    kernels = [networks.kernel(w, x) for w in (here, there)]
    before, after = (torch.linalg.eigvalsh(kernel)[:, 0] for kernel in kernels)
    change = torch.zeros(len(seeds), dtype=torch.float64)
    sharpest = torch.zeros_like(change)
    for one in x.split(1, dim=1):

        def output(weights: Tensor, one: Tensor = one) -> Tensor:
            return networks(weights, one)[:, 0, 0]

        change += (gradients(output, there) - gradients(output, here)).square().sum(1)
        for weights in (here, halfway, there):
            sharpest = torch.maximum(sharpest, ensembles.hessian_norms(output, weights, steps=16)[0])
    return seed_rows(
        {"m": job["m"]},
        seeds,
        lambda_min=before,
        change=(after - before).abs(),
        kernel_change=torch.linalg.eigvalsh(kernels[1] - kernels[0]).abs().amax(1),
        jacobian_change=change.sqrt(),
        jacobian_bound=math.sqrt(job["samples"]) * sharpest,
    )


def _descent(job: Mapping[str, Any]) -> Iterator[Row]:
    """T14: losses of gradient descent beside those of the frozen kernel, and how far the weights go."""
    seeds = job_seeds(job)
    networks = fully_connected(job["m"], seeds, hidden=job["hidden"], output=job["output"])
    x = gaussian_inputs(seeds, job["samples"])
    y = labels(seeds, job["samples"]) * (1.0 if job["output"] == "identity" else 0.8)  # within the reach of tanh
    # Behind an output activation the kernel moves by a constant factor; a quarter of the rate leaves room for it.
    rate = None if job["output"] == "identity" else 0.25 / torch.linalg.eigvalsh(networks.kernel(networks.weights, x))[:, -1]
    run = descend(networks, x, y, steps=job["steps"], until=1e-6, every=50, rate=rate)
    values, vectors = torch.linalg.eigh(run.kernel)
    modes = (vectors.mT @ run.residuals[..., None])[..., 0]
    factors = 1.0 - run.rates[:, None] * values
    losses = run.losses
    predicted = torch.stack([0.5 * (modes * factors**t).square().sum(1) for t in range(len(losses))])
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
    m, depth = job["m"], job["depth"]
    whole, last = [], []
    network = DagNetwork(fcn_graph(INPUTS, [m] * (depth - 1)), activation="relu")
    for seed in job_seeds(job, "networks"):  # one by one: several networks of four layers of 512 fit no cache
        with seeded(seed), torch.no_grad():
            network.reset_parameters()
        networks = Ensemble([network])
        x = ensembles.normals(500 + seed)(1, job["samples"], INPUTS)
        whole.append(float(networks.kernel(networks.weights, x)[0].diagonal().mean()))
        last.append(float(networks.forward(networks.weights, x)[1][-2].square().sum(2).mean() / m))
    yield {"depth": depth, "m": m, "seed": job["seed"], "squared": fmean(whole), "last": fmean(last)}


balls, relu_networks = rows(part="ball"), rows(part="gradient")
two_layers, three_layers = (rows(part="descent", output="identity", hidden=hidden) for hidden in (1, 2))
with_tanh = rows(part="descent", output="tanh", hidden=1)
#: The way gone by width, mean over the seeds.
ways = two_layers.by("m").each(rows.mean("moved"))
spread_of_ways = ways.max() / ways.min()
#: The largest distance from the frozen kernel over the seeds of the widest network that was trained.
widest_gap = two_layers.by("m").each(rows.max("gap")).last()
FROZEN = Reported.theory("½‖(I − ηK₀)ᵗ r₀‖²", "Zhu 2024, section 2.4")
#: Largest relative distance of the last layer's mean squared gradient from 2^−(L−1).
last_layer = relu_networks.column(lambda row: abs(row["last"] * 2 ** (row["depth"] - 1) - 1)).max()


class PolyakLojasiewicz(InParts, Experiment):
    """The PL* condition and gradient descent: what the tangent kernel promises, and what happens.

    The inequality ‖∇L‖² ≥ 2λ_min(K)L at random weights and data, with equality along the bottom eigenvector; the smallest
    eigenvalue and the Jacobian on a ball against their bounds; gradient descent at rate 1/λ_max against the prediction of
    the frozen kernel; the lower bound on the gradient of ReLU networks; and networks with tanh on the output, which are
    not linear and converge all the same.
    """

    id, where = "linearity/pl", "Zhu 2024, section 2.4: (2.16), Proposition 2.4.4 and the remarks after it"
    parts = {"inequality": _inequality, "ball": _ball, "descent": _descent, "gradient": _gradient}
    #: `deep` are the widths of three-layer networks that are trained.
    sizes = sizes(
        {
            "ball_widths": ((32, 128), (32, 128, 512), (32, 128, 512, 2048)),
            "ball_seeds": (3, 5, 10),
            "widths": ((128, 1024), (128, 256, 512, 1024), (128, 256, 512, 1024, 2048)),
            "seeds": (1, 3, 5),
            "networks": (8, 16, 32),
            "deep": ((256,), (1024,), (1024,)),
            "draws": (100, 100, 1000),
        },
        depths=(2, 3, 4),
        samples=10,
        steps=3000,
    )
    departs = (
        "Proposition 2.4.4 is proved for the mean of ‖∇f‖² and stated for the mean of ‖∇f‖, which does not follow; the squared "
        "form is tested. The source gives no constant for the radius R = O(1/μ), and none is assumed."
    )
    cites = "Zhu 2024, section 2.4"
    claims = (
        {
            "T11: ‖∇L‖² − 2λ_min L at random weights and data, over ‖∇L‖² (smallest)": at_least(
                -1e-9, rows(part="inequality", residual="random").min("slack"), says="at least 0", where="Zhu 2024, (2.16)"
            ),
            "T11: the same along the bottom eigenvector, where equality holds (largest)": at_most(
                1e-8,
                abs(rows(part="inequality", residual="bottom")["slack"]).max(),
                reported=Reported.theory(0, "Zhu 2024, (2.16)"),
            ),
            "T12: |Δλ_min| over ‖ΔK‖ at distance 1 (largest; Weyl's inequality: a check of the code)": at_most(
                1.0 + 1e-9, (balls["change"] / balls["kernel_change"]).max(), says="at most 1", read_from="theory"
            ),
            "T12: ‖ΔJ‖_F over R√n max‖H‖ (largest)": at_most(
                1.0, (balls["jacobian_change"] / balls["jacobian_bound"]).max(), says="at most 1", read_from="theory"
            ),
            "T12: the change of λ_min shrinks with the width (slope)": at_most(
                -0.3, balls.power("m", "change"), says="of the order of sup‖H‖"
            ),
            "T13: mean ‖∇f‖² of ReLU networks over its bound 2^−L (smallest over the depths)": at_least(
                1.0,
                relu_networks.column(lambda row: row["squared"] / 2.0 ** -row["depth"]).min(),
                says="at least 2^−L",
                where="Zhu 2024, Proposition 2.4.4",
            ),
            "T13: mean squared gradient of the last layer against 2^−(L−1) (largest relative distance)": at_most(
                0.1, last_layer, reported=Reported.theory("2^−(L−1)", "Zhu 2024, Proposition 2.4.4")
            ),
        },
        at_most(
            0.1,  # calibrated, m = 1024, seeds 0 to 2: 0.076, 0.020, 0.013
            "T14: two layers: loss of descent against the frozen kernel, until it has fallen by 1000 (largest relative distance)",
            widest_gap,
            reported=FROZEN,
        ),
        {
            "T14: the same for three layers, at the largest width trained": at_most(
                0.1, three_layers.by("m").each(rows.max("gap")).last(), reported=FROZEN, since="laptop"
            ),
            "T14: loss ratio of a step over (1 − ηλ_min)², widest network (largest)": at_most(
                1.05, two_layers.by("m").each((rows["contraction"] / rows["slowest"]).max()).last(), says="at most 1"
            ),
            "T14: the way gone does not grow with the width (longest over shortest)": at_most(
                2.0, spread_of_ways, says="bounded"
            ),
            "T8, second half: tanh on the output: λ_min of the kernel on the way (smallest)": at_least(
                1e-4, with_tanh.min("lambda_min"), says="PL* holds"
            ),
            "T8, second half: tanh on the output: the loss still falls to 1e-6 (largest final loss)": at_most(
                1e-6, with_tanh.max("final"), says="converges"
            ),
            "T8, second half: and geometrically: the largest loss ratio of a step": at_most(
                1.0 - 1e-4, with_tanh.max("contraction"), says="exponentially fast"
            ),
        },
    )

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        yield {"part": "inequality", "draws": p.draws, "m": 16, "samples": 6, "seed": 0}
        yield from grid(p, "samples", part=["ball"], m=p.ball_widths, seeds=[p.ball_seeds], seed=[0])
        descents = [(1, "identity", m) for m in p.widths] + [(2, "identity", m) for m in p.deep] + [(1, "tanh", p.widths[0])]
        for hidden, output, m in descents:
            kind = {"part": "descent", "hidden": hidden, "output": output, "m": m}
            yield {**kind, "samples": p.samples, "seeds": p.seeds, "steps": p.steps, "seed": 0}
        yield from grid(p, "networks", part=["gradient"], depth=p.depths, m=[512], samples=[25], seed=[0])

    def draw(self, rows: list[Row]) -> Any:
        paths = select(rows, part="path", hidden=1)
        both = {"loss": "network", "predicted": "frozen kernel"}
        runs = [select(paths, m=choose(row["m"] for row in paths), output="identity", seed=0) for choose in (min, max)]
        lines = labelled([row for run in runs for row in melted(run, both, "part of the start")], which="m = {m}, {of}")
        drifts = {"change": "|Δλ_min|", "kernel_change": "‖ΔK‖", "jacobian_bound": "R √n max‖H‖, bounds ‖ΔJ‖"}
        moves = melted(select(rows, part="ball"), drifts, "change", "which")
        return draw_panels(
            curves(lines, "step", "part of the start", log="y", labels="legend", ylabel="loss / loss at the start"),
            log_log(moves, "m", "change", guides=(-0.5,), xlabel="width m", ylabel="change at distance 1"),
            size=(5.2, 4.2),
            by="which",
        )
