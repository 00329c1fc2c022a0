"""The tangent kernel at the start and after training: the critical rate by it, and what it has learnt."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.experiments import Experiment, at_least, at_most, measured, rows, sizes
from theodolite.experiments.catapult.sweeps import NAMES, network, panel
from theodolite.experiments.lab.datasets import two_classes
from theodolite.experiments.query import Column, select, values_of
from theodolite.measures.dynamics import critical_learning_rate
from theodolite.measures.quadratic_models import descend, gated_kernel
from theodolite.measures.quadratic_models.models import gates
from theodolite.problem import Problem
from theodolite.results import Row

# The critical rate by the kernel and by the Hessian

#: |ratio − 1| at each width, mean over the starts, narrowest first.
distances = rows.by("width").each(rows.change("ratio").mean())
NEARLY = {"says": "λ_max(H) ≈ λ_max(K) for wide networks", "where": "Zhu 2024, section 3.2, after Definition 3.2.2"}


class CriticalRate(Experiment):
    """The critical learning rate by the kernel and by the Hessian, against the width.

    2/λ_max of the Hessian of the loss at the start, and the same with the tangent kernel in its place, for a two-layer ReLU
    network on 20 images of two classes. The Hessian is JᵀJ + Σ rᵢHᵢ, and the second part falls with the width.
    """

    id, where = "catapult/critical-rate", "Zhu 2024, section 3.2, Definition 3.2.2"
    sizes = sizes(
        seeds=5,
        n=20,
        side=8,
        tiny={"widths": (128, 512, 2048), "seeds": 3, "source": "stand-in"},
        laptop={"widths": (32, 128, 512, 2048, 8192), "source": "either"},
        paper={"widths": (128, 512, 2048, 8192, 32768), "side": 32, "source": "files"},
    )
    claims = {
        "at width 2048 the two rates agree (|ratio − 1|, mean over the starts)": at_most(
            0.1, rows(width=2048).change("ratio").mean(), **NEARLY
        ),
        "their distance falls from each width to the next (smallest factor)": at_least(
            1.0, distances.reduce(lambda found: min(before / after for before, after in itertools.pairwise(found))), **NEARLY
        ),
    }

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for width in p.widths:
            for seed in range(p.seeds):
                yield {"width": width, "n": p.n, "side": p.side, "source": p.source, "seed": seed}

    def run(self, job: Mapping[str, Any]) -> Row:
        points = two_classes("cifar10", job["n"], job["n"], side=job["side"], source=job["source"], seed=job["seed"])
        model = network(panel("cifar10"), points.shape, job["width"], job["seed"]).double()
        problem = Problem(model, nn.MSELoss(), (points.x.double(), points.y.double()))
        kernel, hessian = (critical_learning_rate(problem, by=by, tol=1e-7, progress=False).value for by in ("kernel", "hessian"))
        found = {"by_kernel": kernel, "by_hessian": hessian, "ratio": kernel / hessian}
        return {"width": job["width"], "seed": job["seed"], "data": points.origin, **found}

    def draw(self, rows: list[Row]) -> Any:
        from theodolite import plots

        shown = [{**row, "distance": abs(row["ratio"] - 1)} for row in rows]
        figure, (ax,) = plots.panels(1, letters=False, size=(5.0, 3.8))
        plots.log_log(shown, "width", "distance", guides=(-0.5,), ylabel="|η_crit(kernel) / η_crit(Hessian) − 1|", ax=ax)
        return figure


# The kernel after training

DATA = ("mnist", "cifar10")
#: A subcritical rate and two at which training catapults.
RATIOS = (0.8, 1.2, 1.5)
#: Added to the diagonal of the kernel, over its mean: regression all but interpolates.
RIDGE = 1e-6


def change(column: str, model: str, ratio: float = 1.5) -> Column:
    """A column after training over before, of every run at a rate."""
    runs = rows(model=model, ratio=ratio)
    return runs(when="end")[column] / runs(when="start")[column]


DECREASES = {"where": "Zhu 2024, section 3.3", "read_from": "theory"}


class AfterKernel(Experiment):
    """The tangent kernel before and after training, as a kernel for the same task.

    The source leaves open whether the kernel of a trained quadratic model is better than the one it began with. Two-layer
    ReLU networks and their quadratic models are trained below and above the critical rate; compared are the kernels' alignment
    with the labels, yᵀKy/(n‖K‖), with and without the mean taken out, and the test error of kernel regression with each.
    Alignment with the average gradient outer product is not measured here.
    """

    id, where = "catapult/after-kernel", "Zhu 2024, section 3.5 (open questions)"
    sizes = sizes(
        side=8,
        seeds=5,
        tiny={"width": 128, "n": 32, "n_test": 150, "steps": 150, "seeds": 3, "source": "stand-in"},
        laptop={"width": 1024, "n": 64, "n_test": 1000, "steps": 1000, "source": "either"},
        paper={"width": 5000, "n": 128, "n_test": 2000, "steps": 2000, "source": "files", "side": 32},
    )
    claims = (
        {
            "at 0.8 of the critical rate f_quad keeps its kernel (largest change of λ₁)": at_most(
                0.05, change("lambda_1", "quadratic", 0.8).change().max(), says="nearly constant", since="laptop", **DECREASES
            ),
            "at 1.5 its λ₁ falls (largest share that is left)": at_most(
                0.99, change("lambda_1", "quadratic").max(), says="decreases", **DECREASES
            ),
        },
        *(
            {f"{NAMES[model]}, trained at 1.5: {text} after over before, mean": measured(change(column, model).mean())}
            for model in ("quadratic", "network")
            for column, text in (
                ("alignment", "alignment with the labels"),
                ("centred", "alignment with the labels, mean taken out,"),
                ("error", "test error of kernel regression"),
            )
        ),
        {
            "f_quad, trained at 0.8: test error of kernel regression after over before, mean": measured(
                change("error", "quadratic", 0.8).mean()
            ),
        },
    )
    departs = "An open question of the source, so nothing is reported to compare with, but for how λ₁ moves."

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        shared = {name: p[name] for name in ("width", "n", "n_test", "side", "steps", "source")}
        for name in DATA:
            for seed in range(p.seeds):
                yield {"data": name, **shared, "seed": seed}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        points = two_classes(job["data"], job["n"], job["n_test"], side=job["side"], source=job["source"], seed=job["seed"])
        net: Any = network(panel(job["data"]), points.shape, job["width"], job["seed"]).double()
        u, v = net.fc1.weight.detach(), net.fc2.weight.detach()[0]
        x = torch.cat([points.x, points.x_test]).flatten(1).double()
        y, n = torch.cat([points.y, points.y_test])[:, 0].double(), job["n"]
        first = gated_kernel(u, v, gates(u, x), x)
        rates = torch.tensor(RATIOS).double() * 2 / torch.linalg.eigvalsh(first[:n, :n])[-1]
        for model in ("quadratic", "network"):
            found = descend(u, v, x[:n], y[:n], rates, job["steps"], frozen=model == "quadratic", until=1e-6)
            for i, ratio in enumerate(RATIOS):
                gate = gates(u if model == "quadratic" else found.u[i], x)
                last = gated_kernel(found.u[i], found.v[i], gate, x)
                shared = {"model": model, "ratio": ratio, "set": job["data"], "data": points.origin, "seed": job["seed"]}
                loss = {"start": float(found.loss[0, i]), "end": float(found.loss[-1, i])}
                for when, kernel in (("start", first), ("end", last)):
                    yield {**shared, "when": when, "loss": loss[when], **as_a_kernel(kernel, y, n)}

    def draw(self, rows: list[Row]) -> Any:
        from theodolite import plots

        sets = values_of(rows, "set")
        figure, axes = plots.panels(2 * len(sets), columns=2, size=(4.6, 3.4))
        for line, name in enumerate(sets):
            mine = [{**row, "model": NAMES[row["model"]]} for row in select(rows, set=name, when="end")]
            labels = {"error": "test error of regression with the kernel", "centred": "alignment"}
            for ax, (column, label) in zip(axes[2 * line :], labels.items(), strict=False):
                plots.curves(mine, "ratio", column, by="model", labels="legend", xlabel="η / η_crit", ylabel=label, ax=ax)
                ax.set_title(f"after training on {mine[0]['data']}", loc="left")
                before = fmean(row[column] for row in select(rows, set=name, when="start"))
                plots.reference(ax, y=before, label="before training")
        return figure


def as_a_kernel(kernel: Tensor, y: Tensor, n: int) -> dict[str, float]:
    """How a kernel (N, N) suits labels (N) of which the first n are for training: λ₁, alignments, and the test error.

    >>> y = torch.tensor([1.0, -1.0, 1.0, -1.0]).double()
    >>> found = as_a_kernel(y[:, None] * y + torch.eye(4).double() * 1e-9, y, 2)
    >>> round(found["alignment"], 6), round(found["error"], 6)
    (1.0, 0.0)
    """
    inner, labels = kernel[:n, :n], y[:n]
    means = inner - inner.mean(0) - inner.mean(1, keepdim=True) + inner.mean()
    ridge = RIDGE * inner.diagonal().mean() * torch.eye(n, dtype=kernel.dtype)
    predicted = kernel[n:, :n] @ torch.linalg.solve(inner + ridge, labels)
    return {
        "lambda_1": float(torch.linalg.eigvalsh(inner)[-1]),
        "alignment": float(labels @ inner @ labels / (n * inner.norm())),
        "centred": float(labels @ means @ labels / (n * means.norm())),
        "error": float((predicted - y[n:]).square().mean()),
        "accuracy": float((predicted.sign() == y[n:]).double().mean()),
    }
