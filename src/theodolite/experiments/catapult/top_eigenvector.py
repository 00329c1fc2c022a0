"""Training above the critical rate, seen along the top eigenvector of the tangent kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.experiments import Figure, Reported, Study, at_least, at_most, measured, rows, sizes
from theodolite.experiments.catapult.sweeps import network, panel, panel_title, with_origin
from theodolite.experiments.lab.datasets import two_classes
from theodolite.experiments.query import Value, select, values_of
from theodolite.measures.kernel import quadratize
from theodolite.measures.quadratic_models.models import top_direction
from theodolite.operators import tangent_kernel
from theodolite.results import Row

PANELS = (panel("cifar10"), panel("svhn"), panel("cifar10", "cnn"), panel("svhn", "cnn"))
#: The loss is large where it is above this share of its peak; below the other share of it p₁ plays no part, nor does ρ_f.
LARGE, CARRIED = 0.3, 1e-3
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
        shared = {name: p[name] for name in ("n", "side", "steps", "source", "ratio")}
        for setting in PANELS:
            for seed in range(p.seeds):
                yield {**setting, "width": p.channels if setting.architecture == "cnn" else p.width, **shared, "seed": seed}

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
        yield {
            "step": step,
            "loss": loss,
            "along": float(found.share) * loss,
            "rho_f": float(found.rho_f),
            "rho_K": float(found.rho_K),
        }
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
        *(
            {
                f"{name} is positive while the loss is above 0.3 of its peak (smallest value)": at_least(
                    0.0,
                    while_large(column),
                    reported=Reported("remains positive when the loss is large", "Zhu 2024, appendix B.14"),
                )
            }
            for name, column in QUANTITIES.items()
        ),
        {
            "the loss along the top eigenvector is nearly all of the loss at its peak (smallest share)": at_least(
                0.9, share_at_peak, reported=Reported("almost captures the spike", "Zhu 2024, appendix B.14")
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
        from theodolite import plots

        first = select(rows, seed=min(row["seed"] for row in rows))
        titles = values_of(first, "panel")
        figure, axes = plots.panels(3 * len(titles), columns=len(titles), size=(3.9, 2.8))
        for column, title in enumerate(titles):
            mine = select(first, panel=title)
            parts = [
                {"step": row["step"], "loss": row[name], "part": label}
                for name, label in (("loss", "all"), ("along", "along p₁"))
                for row in mine
            ]
            look: dict[str, Any] = {"markers": False, "labels": "legend"}
            top, *others = (axes[column + line * len(titles)] for line in range(3))
            named = with_origin(title, mine[0]["data"])
            plots.curves(parts, "step", "loss", by="part", log="y", ylabel="loss ½ Σ r²", title=named, ax=top, **look)
            known = [row for row in mine if carried(row)]
            for ax, (label, name) in zip(others, QUANTITIES.items(), strict=True):
                plots.curves(known, "step", name, ylabel=label, ax=ax, **look)
                plots.reference(ax, y=0.0)
        return figure


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
