"""The tangent kernel in training above the critical rate: the rate by it, its top eigenvector, and what it has learnt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import truediv
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.experiments import Experiment, Figure, Study, at_least, at_most, measured, rows, sizes
from theodolite.experiments.catapult.sweeps import NAMES, network, panel, panel_title
from theodolite.experiments.lab import zhu
from theodolite.experiments.lab.datasets import two_classes
from theodolite.experiments.lab.panels import Panel, curves, draw_columns, draw_panels, log_log, melted, split, titled
from theodolite.experiments.query import Column, Value, select
from theodolite.experiments.study import grid
from theodolite.measures.dynamics import critical_learning_rate
from theodolite.measures.kernel import quadratize
from theodolite.measures.quadratic_models import descend, gated_kernel, gates, top_direction
from theodolite.operators import tangent_kernel
from theodolite.problem import Problem
from theodolite.results import Row

# The critical rate by the kernel and by the Hessian

#: |ratio − 1| at each width, mean over the starts, narrowest first.
distances = rows.by("width").each(rows.change("ratio").mean())
NEARLY = zhu("λ_max(H) ≈ λ_max(K) for wide networks", "section 3.2, after Definition 3.2.2")


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
            1.0, distances.steps(truediv).min(), **NEARLY
        ),
    }

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        return grid(p, "n", "side", "source", width=p.widths, seed=range(p.seeds))

    def run(self, job: Mapping[str, Any]) -> Row:
        points = two_classes("cifar10", job["n"], job["n"], side=job["side"], source=job["source"], seed=job["seed"])
        model = network(panel("cifar10"), points.shape, job["width"], job["seed"]).double()
        problem = Problem(model, nn.MSELoss(), (points.x.double(), points.y.double()))
        kernel, hessian = (critical_learning_rate(problem, by=by, tol=1e-7, progress=False).value for by in ("kernel", "hessian"))
        found = {"by_kernel": kernel, "by_hessian": hessian, "ratio": kernel / hessian}
        return {"width": job["width"], "seed": job["seed"], "data": points.origin, **found}

    def draw(self, rows: list[Row]) -> Any:
        shown = [{**row, "distance": abs(row["ratio"] - 1)} for row in rows]
        label = "|η_crit(kernel) / η_crit(Hessian) − 1|"
        return draw_panels(log_log(shown, "width", "distance", guides=(-0.5,), ylabel=label), size=(5.0, 3.8))


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
        return grid(p, "width", "n", "n_test", "side", "steps", "source", data=DATA, seed=range(p.seeds))

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
        shown = [{**row, "model": NAMES[row["model"]]} for row in rows]
        panels = [
            curves(select(mine, when="end"), "ratio", column, ylabel=label, title=f"after training on {mine[0]['data']}").line(
                y=fmean(row[column] for row in select(mine, when="start")), label="before training"
            )
            for mine in split(shown, "set").values()
            for column, label in (("error", "test error of regression with the kernel"), ("centred", "alignment"))
        ]
        return draw_panels(*panels, columns=2, size=(4.6, 3.4), by="model", labels="legend", xlabel="η / η_crit")


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


# Along the top eigenvector

PANELS = (panel("cifar10"), panel("svhn"), panel("cifar10", "cnn"), panel("svhn", "cnn"))
#: The loss is large where it is above this share of its peak; below the other share of it p₁ plays no part, nor does ρ_f.
LARGE, CARRIED = 0.3, 1e-3
JOB = (*PANELS[0], "width", "n", "side", "steps", "source", "ratio")
QUANTITIES = {"ρ_f": "rho_f", "ρ_K": "rho_K"}


class TopEigenvector(Study):
    """Descent of networks or of their quadratic models, with what leaves linear dynamics at every step."""

    quadratic: bool
    sizes = sizes(
        ratio=1.5,
        seeds=3,
        tiny={"width": 256, "channels": 32, "n": 24, "side": 8, "steps": 40, "source": "stand-in", "seeds": 1},
        laptop={"width": 512, "channels": 64, "n": 64, "side": 8, "steps": 100, "source": "either"},
        paper={"width": 2048, "channels": 1024, "n": 128, "side": 32, "steps": 200, "source": "files"},
    )

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for setting in PANELS:
            width = p.channels if setting.architecture == "cnn" else p.width
            yield from grid({**p, **setting, "width": width}, *JOB, seed=range(p.seeds))

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        points = two_classes(job["data"], job["n"], job["n"], side=job["side"], source=job["source"], seed=job["seed"])
        net = network(job, points.shape, job["width"], job["seed"]).double()
        model = quadratize(net) if self.quadratic else net
        shared = {"panel": panel_title(job), "data": points.origin, "seed": job["seed"]}
        for row in descend_along_top(model, points.x.double(), points.y.double()[:, 0], job["ratio"], job["steps"]):
            yield {**shared, **row}


def descend_along_top(model: nn.Module, x: Tensor, y: Tensor, ratio: float, steps: int) -> Iterator[Row]:
    """Gradient descent on ½ Σ r² at `ratio` times 2/λ₁(K₀): a row for each step, with what leaves linear dynamics.

    Inputs (n, ...), targets (n); the model has one output. The last row has no ρ: it has no next step.
    """
    weights = [p for p in model.parameters() if p.requires_grad]
    kernel, residual, gradient = _look(model, x, y, weights)
    rate = ratio * 2 / float(torch.linalg.eigvalsh(kernel)[-1])
    for step in range(steps + 1):
        loss = 0.5 * float(residual.square().sum())
        if step == steps:
            p = torch.linalg.eigh(kernel).eigenvectors[:, -1]
            yield {"step": step, "loss": loss, "along": 0.5 * float((p @ residual) ** 2), "rho_f": None, "rho_K": None}
            return
        with torch.no_grad():
            for w, g in zip(weights, gradient, strict=True):
                w.sub_(rate * g)
        next_kernel, next_residual, gradient = _look(model, x, y, weights)
        found = top_direction(kernel, next_kernel, residual, next_residual, rate)
        bends = {"rho_f": float(found.rho_f), "rho_K": float(found.rho_K)}
        yield {"step": step, "loss": loss, "along": float(found.share) * loss, **bends}
        kernel, residual = next_kernel, next_residual


def _look(model: nn.Module, x: Tensor, y: Tensor, weights: list[nn.Parameter]) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Kernel (n, n), residual (n) and gradient of ½ Σ r² at the current weights."""
    residual = model(x)[:, 0] - y
    gradient = torch.autograd.grad(0.5 * residual.square().sum(), weights)
    return tangent_kernel(model, x), residual.detach(), gradient


# What is claimed


runs = rows.by("panel", "seed")
first_loss = rows["loss"].first()


def while_large(column: str) -> Value:
    """The smallest value at steps where the loss is large, over the runs."""

    def smallest(run: list[Row]) -> float:
        large = LARGE * max(row["loss"] for row in run)
        return min(float(row[column]) for row in run if row[column] is not None and row["loss"] > large)

    return runs.each(smallest).min()


#: The part of the loss along the top eigenvector at the peak, the smallest of the runs.
share_at_peak = runs.each(rows.peak("loss", "along") / rows.max("loss")).min()


def carried(row: Row) -> bool:
    """Whether there is a next step and p₁ has a part in this one."""
    return row["rho_K"] is not None and row["along"] > CARRIED * row["loss"]


def follows_loss(column: str) -> Value:
    """Correlation with the loss over the steps in which p₁ has a part, the smallest of the runs."""

    def correlation(run: list[Row]) -> float:
        pairs = torch.tensor([[row[column], row["loss"]] for row in run if carried(row)])
        return float(torch.corrcoef(pairs.T)[0, 1])

    return runs.each(correlation).min()


class TopEigenvectorFigure(Figure):
    """Loss, its part along the top eigenvector, and what bends the dynamics."""

    where = "appendix B.14"
    departs = (
        "The rate is not stated; ours is 1.5 times 2/λ₁(K₀), for the loss ½ Σ r². Below paper size images have 8 × 8 pixels; "
        "where the files are not there, generated images stand in."
    )
    claims = (
        {
            f"{name} is positive while the loss is above 0.3 of its peak (smallest value)": at_least(
                0.0, while_large(column), **zhu("remains positive when the loss is large", "appendix B.14")
            )
            for name, column in QUANTITIES.items()
        },
        {
            "the loss along the top eigenvector is nearly all of the loss at its peak (smallest share)": at_least(
                0.9, share_at_peak, **zhu("almost captures the spike", "appendix B.14")
            ),
            "the loss rises first (peak over first loss, smallest)": at_least(
                1.05, runs.each(rows.max("loss") / first_loss).min(), says="a spike", read_from="plot"
            ),
            "and ends below its start (last over first loss, largest)": at_most(
                1.0, runs.each(rows["loss"].last() / first_loss).max(), says="falls", read_from="plot"
            ),
        },
        *(
            {f"{name} scales with the loss (correlation, smallest)": measured(follows_loss(column))}
            for name, column in QUANTITIES.items()
        ),
    )

    def draw(self, rows: list[Row]) -> Any:
        def column(title: str, mine: list[Row]) -> Iterator[Panel]:
            parts = melted(mine, {"loss": "all", "along": "along p₁"}, "loss", "part")
            yield curves(parts, "step", "loss", by="part", log="y", ylabel="loss ½ Σ r²", title=titled(title, mine))
            known = [row for row in mine if carried(row)]
            for label, name in QUANTITIES.items():
                yield curves(known, "step", name, ylabel=label).line(y=0.0)

        first = split(select(rows, seed=min(row["seed"] for row in rows)), "panel")
        return draw_columns(*map(column, first, first.values()), size=(3.9, 2.8), markers=False, labels="legend")


class FigureB2(TopEigenvectorFigure):
    """Quadratic models along the top eigenvector of the kernel: what bends the dynamics is positive while the loss is large.

    With p₁ the top eigenvector, ρ_f is what the residual's factor 1 − ηλ₁ along p₁ gains in a step and ρ_K what the kernel
    loses along p₁. Both pull an overshooting run back; both are zero for a linear model. They are drawn while at least a
    thousandth of the loss lies along p₁.
    """

    study, item = TopEigenvector(quadratic=True), "zhu-2024 Figure B.2"


class FigureB3(TopEigenvectorFigure):
    """Networks along the top eigenvector of the kernel: the picture of their quadratic models again.

    As Figure B.2, with the networks themselves.
    """

    study, item = TopEigenvector(quadratic=False), "zhu-2024 Figure B.3"
