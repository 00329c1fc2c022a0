"""The kernel after training: what a quadratic model has learnt beyond the kernel it started with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from theodolite.experiments.catapult.sweeping import NAMES, Panel, network
from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.figure import Experiment
from theodolite.experiments.lab.datasets import Source, two_classes
from theodolite.measures.quadratic_models import descend, gated_kernel
from theodolite.measures.quadratic_models.models import gates
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DATA = ("mnist", "cifar10")
#: A subcritical rate and two at which training catapults.
RATIOS = (0.8, 1.2, 1.5)
#: Added to the diagonal of the kernel, over its mean: regression all but interpolates.
RIDGE = 1e-6


@dataclass(frozen=True)
class Params:
    width: int
    n: int
    n_test: int
    side: int
    steps: int
    seeds: int
    source: Source


def at(rows: list[Row], when: str, model: str, catapult: bool) -> list[Row]:
    """Rows of a model before or after training, at the rate of 1.5 or of 0.8."""
    ratio = 1.5 if catapult else 0.8
    return [row for row in rows if (row["when"], row["model"], row["ratio"]) == (when, model, ratio)]


def change(column: str, model: str, *, catapult: bool = True, data: str | None = None) -> Callable[[list[Row]], float]:
    """A column after training over before, mean over seeds and (unless one is named) data sets."""

    def measure(rows: list[Row]) -> float:
        pairs = zip(at(rows, "start", model, catapult), at(rows, "end", model, catapult), strict=True)
        return fmean(end[column] / start[column] for start, end in pairs if data in (None, start["set"]))

    return measure


def drift(rows: list[Row]) -> float:
    """Largest relative change of λ₁ of f_quad at 0.8 of the critical rate."""
    pairs = zip(at(rows, "start", "quadratic", False), at(rows, "end", "quadratic", False), strict=True)
    return max(abs(float(end["lambda_1"] / start["lambda_1"]) - 1) for start, end in pairs)


def largest_left(rows: list[Row]) -> float:
    """Largest share of λ₁ of f_quad that is left after training at 1.5 times the critical rate."""
    pairs = zip(at(rows, "start", "quadratic", True), at(rows, "end", "quadratic", True), strict=True)
    return max(float(end["lambda_1"] / start["lambda_1"]) for start, end in pairs)


class AfterKernel(Experiment):
    """The tangent kernel before and after training, as a kernel for the same task.

    The source leaves open whether the kernel of a trained quadratic model is better than the one it began with. Two-layer
    ReLU networks and their quadratic models are trained below and above the critical rate; compared are the kernels' alignment
    with the labels, yᵀKy/(n‖K‖), with and without the mean taken out, and the test error of kernel regression with each.
    Alignment with the average gradient outer product is not measured here.
    """

    id = "catapult/after-kernel"
    source = "003, section 3.5 (open questions)"
    sizes = {
        "tiny": Params(width=128, n=32, n_test=150, side=8, steps=150, seeds=3, source="stand-in"),
        "laptop": Params(width=1024, n=64, n_test=1000, side=8, steps=1000, seeds=5, source="either"),
        "paper": Params(width=5000, n=128, n_test=2000, side=32, steps=2000, seeds=5, source="files"),
    }
    claims = (
        Claim(
            "at 0.8 of the critical rate f_quad keeps its kernel (largest change of λ₁)",
            drift,
            rule="at most",
            expected=0.05,
            reported=Reported("nearly constant", "003, section 3.3", read_from="theory"),
            since="laptop",
        ),
        Claim(
            "at 1.5 its λ₁ falls (largest share that is left)",
            largest_left,
            rule="at most",
            expected=0.99,
            reported=Reported("decreases", "003, section 3.3", read_from="theory"),
        ),
        *(
            Claim(f"{NAMES[model]}, trained at 1.5: {text} after over before, mean", change(column, model))
            for model in ("quadratic", "network")
            for column, text in (
                ("alignment", "alignment with the labels"),
                ("centred", "alignment with the labels, mean taken out,"),
                ("error", "test error of kernel regression"),
            )
        ),
        Claim(
            "f_quad, trained at 0.8: test error of kernel regression after over before, mean",
            change("error", "quadratic", catapult=False),
        ),
    )
    departs = "An open question of the source, so nothing is reported to compare with, but for how λ₁ moves."

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        shared = {"width": p.width, "n": p.n, "n_test": p.n_test, "side": p.side, "steps": p.steps, "source": p.source}
        for name in DATA:
            for seed in range(p.seeds):
                yield {"data": name, **shared, "seed": seed}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        points = two_classes(job["data"], job["n"], job["n_test"], side=job["side"], source=job["source"], seed=job["seed"])
        net: Any = network(Panel(job["data"]), points.shape, job["width"], job["seed"]).double()
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

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        sets = list(dict.fromkeys(row["set"] for row in rows))
        figure, axes = plots.panels(2 * len(sets), columns=2, size=(4.6, 3.4))
        for line, name in enumerate(sets):
            mine = [{**row, "model": NAMES[row["model"]]} for row in rows if row["set"] == name and row["when"] == "end"]
            first = [row for row in rows if row["set"] == name and row["when"] == "start"]
            for ax, column, label in zip(
                axes[2 * line :], ("error", "centred"), ("test error of regression with the kernel", "alignment"), strict=False
            ):
                plots.curves(mine, "ratio", column, by="model", labels="legend", xlabel="η / η_crit", ylabel=label, ax=ax)
                ax.set_title(f"after training on {mine[0]['data']}", loc="left")
                plots.reference(ax, y=fmean(row[column] for row in first), label="before training")
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
