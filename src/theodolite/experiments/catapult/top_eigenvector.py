"""Training above the critical rate, seen along the top eigenvector of the tangent kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from theodolite.experiments.catapult.sweeping import Panel, network, with_origin
from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.figure import Experiment
from theodolite.experiments.lab.datasets import Source, two_classes
from theodolite.measures.kernel import quadratize
from theodolite.measures.quadratic_models.models import top_direction
from theodolite.operators import tangent_kernel
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = (Panel("cifar10"), Panel("svhn"), Panel("cifar10", "cnn"), Panel("svhn", "cnn"))
#: The loss is large where it is above this share of its peak; below the other share of it p₁ plays no part, nor does ρ_f.
LARGE, CARRIED = 0.3, 1e-3
QUANTITIES = (("ρ_f", "rho_f"), ("ρ_K", "rho_K"))


@dataclass(frozen=True)
class Params:
    width: int
    channels: int
    n: int
    side: int
    steps: int
    source: Source
    ratio: float = 1.5
    seeds: int = 1


SIZES = {
    "tiny": Params(width=256, channels=32, n=24, side=8, steps=40, source="stand-in"),
    "laptop": Params(width=512, channels=64, n=64, side=8, steps=100, source="either", seeds=3),
    "paper": Params(width=2048, channels=1024, n=128, side=32, steps=200, source="files", seeds=3),
}


def by_run(rows: list[Row]) -> list[list[Row]]:
    """The steps of each panel and seed."""
    keys = dict.fromkeys((row["panel"], row["seed"]) for row in rows)
    return [[row for row in rows if (row["panel"], row["seed"]) == key] for key in keys]


def smallest_while_large(column: str) -> Callable[[list[Row]], float]:
    """The smallest value at steps where the loss is large, over the runs."""

    def measure(rows: list[Row]) -> float:
        return min(
            float(row[column])
            for run in by_run(rows)
            for row in run
            if row[column] is not None and row["loss"] > LARGE * max(r["loss"] for r in run)
        )

    return measure


def share_at_peak(rows: list[Row]) -> float:
    """The part of the loss along the top eigenvector at the peak, the smallest of the runs."""
    peaks = [max(run, key=lambda row: row["loss"]) for run in by_run(rows)]
    return min(float(row["along"] / row["loss"]) for row in peaks)


def rise(rows: list[Row]) -> float:
    """Peak over first loss, the smallest of the runs."""
    return min(float(max(row["loss"] for row in run) / run[0]["loss"]) for run in by_run(rows))


def settles(rows: list[Row]) -> float:
    """Last over first loss, the largest of the runs."""
    return max(float(run[-1]["loss"] / run[0]["loss"]) for run in by_run(rows))


def carried(row: Row) -> bool:
    """Whether there is a next step and p₁ has a part in this one."""
    return row["rho_K"] is not None and row["along"] > CARRIED * row["loss"]


def follows_loss(column: str) -> Callable[[list[Row]], float]:
    """Correlation with the loss over the steps in which p₁ has a part, the smallest of the runs."""

    def measure(rows: list[Row]) -> float:
        found = []
        for run in by_run(rows):
            pairs = torch.tensor([[row[column], row["loss"]] for row in run if carried(row)])
            found.append(float(torch.corrcoef(pairs.T)[0, 1]))
        return min(found)

    return measure


def _claims(where: str) -> tuple[Claim, ...]:
    positive = Reported("remains positive when the loss is large", "003, appendix B.14")
    return (
        *(
            Claim(
                f"{name} is positive while the loss is above 0.3 of its peak (smallest value)",
                smallest_while_large(column),
                rule="at least",
                expected=0.0,
                reported=positive,
            )
            for name, column in QUANTITIES
        ),
        Claim(
            "the loss along the top eigenvector is nearly all of the loss at its peak (smallest share)",
            share_at_peak,
            rule="at least",
            expected=0.9,
            reported=Reported("almost captures the spike", "003, appendix B.14"),
        ),
        Claim(
            "the loss rises first (peak over first loss, smallest)",
            rise,
            rule="at least",
            expected=1.05,
            reported=Reported("a spike", where, read_from="plot"),
        ),
        Claim(
            "and ends below its start (last over first loss, largest)",
            settles,
            rule="at most",
            expected=1.0,
            reported=Reported("falls", where, read_from="plot"),
        ),
        *(Claim(f"{name} scales with the loss (correlation, smallest)", follows_loss(column)) for name, column in QUANTITIES),
    )


class _TopEigenvector(Experiment):
    """What both figures share."""

    quadratic: ClassVar[bool]
    sizes = SIZES
    departs = (
        "The rate is not stated; ours is 1.5 times 2/λ₁(K₀), for the loss ½ Σ r². Below paper size images have 8 × 8 pixels; "
        "where the files are not there, generated images stand in."
    )

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        for number, panel in enumerate(PANELS):
            for seed in range(p.seeds):
                width = p.channels if panel.architecture == "cnn" else p.width
                shared = {"n": p.n, "side": p.side, "steps": p.steps, "source": p.source, "ratio": p.ratio}
                yield {"panel": number, "width": width, **shared, "seed": seed}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        panel = PANELS[job["panel"]]
        points = two_classes(panel.data, job["n"], job["n"], side=job["side"], source=job["source"], seed=job["seed"])
        net = network(panel, points.shape, job["width"], job["seed"]).double()
        model = quadratize(net) if self.quadratic else net
        shared = {"panel": panel.title, "data": points.origin, "seed": job["seed"]}
        for row in descend_along_top(model, points.x.double(), points.y.double()[:, 0], job["ratio"], job["steps"]):
            yield {**shared, **row}

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        first = [row for row in rows if row["seed"] == min(r["seed"] for r in rows)]
        titles = list(dict.fromkeys(row["panel"] for row in first))
        figure, axes = plots.panels(3 * len(titles), columns=len(titles), size=(3.9, 2.8))
        for column, title in enumerate(titles):
            mine = [row for row in first if row["panel"] == title]
            parts = [
                {"step": row["step"], "loss": row[name], "part": label}
                for name, label in (("loss", "all"), ("along", "along p₁"))
                for row in mine
            ]
            look: dict[str, Any] = {"markers": False, "labels": "legend"}
            top, *others = (axes[column + line * len(titles)] for line in range(3))
            named = with_origin(title, mine[0]["data"])
            plots.curves(parts, "step", "loss", by="part", log="y", ylabel="loss ½ Σ r²", title=named, ax=top, **look)
            for ax, (label, name) in zip(others, QUANTITIES, strict=True):
                known = [row for row in mine if carried(row)]
                plots.curves(known, "step", name, ylabel=label, ax=ax, **look)
                plots.reference(ax, y=0.0)
        return figure


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


class FigureB2(_TopEigenvector):
    """Quadratic models along the top eigenvector of the kernel: what bends the dynamics is positive while the loss is large.

    With p₁ the top eigenvector, ρ_f is what the residual's factor 1 − ηλ₁ along p₁ gains in a step and ρ_K what the kernel
    loses along p₁. Both pull an overshooting run back; both are zero for a linear model. They are drawn while at least a
    thousandth of the loss lies along p₁.
    """

    id = "catapult/figure-B.2"
    source = "003, appendix B.14, Figure B.2"
    item = "zhu-2024 Figure B.2"
    quadratic = True
    claims = _claims("003, Figure B.2")


class FigureB3(_TopEigenvector):
    """Networks along the top eigenvector of the kernel: the picture of their quadratic models again.

    As Figure B.2, with the networks themselves.
    """

    id = "catapult/figure-B.3"
    source = "003, appendix B.14, Figure B.3"
    item = "zhu-2024 Figure B.3"
    quadratic = False
    claims = _claims("003, Figure B.3")
