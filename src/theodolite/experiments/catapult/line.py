"""Several examples on a line: quadratic model (Figure 3.3) and network (Figure B.1) at learning rates around two thresholds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from theodolite.data.generators import mixture_1d
from theodolite.experiments import Figure, Study, at_least, at_most, between, equal, measured, rows, sizes
from theodolite.experiments.claims import Claims
from theodolite.experiments.lab import zhu
from theodolite.experiments.lab.panels import curves, draw_panels, labelled, melted
from theodolite.experiments.query import select
from theodolite.experiments.study import grid
from theodolite.measures.dynamics import classify_run
from theodolite.measures.quadratic_models import (
    Descent,
    SignClasses,
    class_eigenvalues,
    critical_rate,
    descend,
    half_sum_rate,
    sign_classes,
)
from theodolite.models import ntk_fcn
from theodolite.results import Row

#: Learning rates in units of the first threshold n/λ₁(0); "between" is the middle of both thresholds.
RATES = (0.8, 0.98, "between", 1.1, 1.3, 1.6, 1.9, 2.1)


class Line(Study):
    """Gradient descent at all rates of `RATES`, by the quadratic model (`frozen` gates) or by the network."""

    frozen: bool
    #: Seeds of starts whose thresholds are at least 3 % apart, so that there is a between: of the first starts, 0 and 1 have
    #: thresholds 0.5 % and 3.1 % apart; the source's are 5 % apart.
    sizes = sizes(
        width=5000,
        points=128,
        steps=500,
        direct_steps=30,
        tiny={"seeds": (3,), "steps": 250, "direct_steps": 12},
        laptop={"seeds": (1, 2, 3)},
        paper={"seeds": (1, 2, 3, 4, 6), "steps": 2000},
    )

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        yield from grid(p, "width", "points", "steps", part=["runs"], seed=p.seeds)
        yield from grid(p.but(steps=p.direct_steps), "width", "points", "steps", part=["direct"], seed=p.seeds[:1])

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        u, v, x, y = start(job)
        classes = sign_classes(x, y)
        if job["part"] == "direct":
            yield _direct(u, v, x, y, classes, job, self.frozen)
            return
        found = descend_line(u, v, classes, job, self.frozen)
        start_values = found.kernel[0, 0].diagonal()
        order = start_values.argsort(descending=True)
        n = job["points"]
        edges = [critical_rate(float(start_values[i]), "mean", n) for i in order]
        yield {"kind": "threshold", "first": edges[0], "second": edges[1], "gap": edges[1] / edges[0] - 1, "seed": job["seed"]}
        twin = found if self.frozen else descend_line(u, v, classes, job, True)
        for run, at in enumerate(RATES):
            rate = float(found.rate[run]) * n / 2
            eigenvalues = found.kernel[:, run].diagonal(dim1=-2, dim2=-1)[:, order]
            loss = (found.loss[:, run] + classes.floor) * 2 / n
            shared = {"at": str(at), "rate": rate, "seed": job["seed"]}
            yield {
                "kind": "run",
                **shared,
                **_ratios(eigenvalues),
                "twin_1": _ratios(twin.kernel[:, run].diagonal(dim1=-2, dim2=-1)[:, order])["ratio_1"],
                "peak": float(loss.nan_to_num(nan=torch.inf).max()),
                "word": classify_run(loss.tolist(), kernel=eigenvalues[:, 0].tolist()),
            }
            for step in _shown(len(loss)):
                first, second = eigenvalues[step].tolist()
                yield {"kind": "step", **shared, "step": step, "loss": float(loss[step]), "lambda_1": first, "lambda_2": second}


def start(job: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights (m, 1) and (m) of a network with signs in its last layer; points and labels."""
    net: Any = ntk_fcn(1, job["width"], 2, init="ntk_sign", seed=job["seed"]).double()
    x, y = mixture_1d(job["points"], seed=job["seed"], dtype=torch.float64)
    return net.fc1.weight.detach(), net.fc2.weight.detach()[0], x, y


def descend_line(u: Tensor, v: Tensor, classes: SignClasses, job: Mapping[str, Any], frozen: bool) -> Descent:
    """Descent on the two effective examples at all rates of `RATES`: exact for both models."""
    first = class_eigenvalues(u, v, u, classes).sort(descending=True).values
    edges = 2 / first
    rates = torch.stack([edges.mean() if at == "between" else float(at) * edges[0] for at in RATES])
    return descend(u, v, classes.inputs, classes.targets, rates, job["steps"], frozen=frozen)


def _direct(u: Tensor, v: Tensor, x: Tensor, y: Tensor, classes: SignClasses, job: Mapping[str, Any], frozen: bool) -> Row:
    """Descent on all points at 1.3 times the first threshold, against the two effective examples."""
    rate = 1.3 * critical_rate(float(class_eigenvalues(u, v, u, classes).max()), "mean", len(x))
    rate = half_sum_rate(rate, "mean", len(x))
    whole = descend(u, v, x, y, rate, job["steps"], frozen=frozen)
    pair = descend(u, v, classes.inputs, classes.targets, rate, job["steps"], frozen=frozen)
    gap = (whole.loss / (pair.loss + classes.floor) - 1).abs().max()
    kernel_gap = (whole.kernel_norm / pair.kernel_norm - 1).abs().max()
    return {"kind": "direct", "gap": float(torch.maximum(gap, kernel_gap)), "seed": job["seed"]}


def _ratios(eigenvalues: Tensor) -> dict[str, float]:
    end = (eigenvalues[-1] / eigenvalues[0]).tolist()
    return {"ratio_1": end[0], "ratio_2": end[1]}


def _shown(length: int) -> list[int]:
    """Every step at first, then fewer."""
    return [*range(min(60, length)), *range(60, length, 10)]


# What is claimed


#: A rate is asked for so that runs without numbers convince nobody.
runs = rows(kind="run", rate=lambda rate: rate > 0)
below, middle, above = runs(at=["0.8", "0.98"]), runs(at="between"), runs(at=["1.3", "1.6", "1.9"])
#: Up to 1.3 times the threshold: λ₁(end)/λ₁(0) and that of the quadratic model.
near = runs(at=["0.8", "0.98", "between", "1.1", "1.3"])
distance = abs(near["ratio_1"] - near["twin_1"])

THRESHOLDS = {
    text: between(0.33, 0.46, rows(kind="threshold")[which].mean_and_range(), reported=reported)
    for text, which, reported in (
        ("first threshold n/λ₁(0) for the mean of squares, mean over the starts", "first", 0.37),
        ("second threshold n/λ₂(0), mean over the starts", "second", 0.39),
    )
}
EXACT = at_most(
    1e-8,
    "two effective examples stand for all points (largest relative distance of loss and kernel)",
    rows(kind="direct").max("gap"),
    **zhu("equality", "Proposition B.11.1", "theory"),
)


def around_thresholds(constant: dict[str, str], second: dict[str, str]) -> Claims:
    """What both models do below and between the thresholds; sizes at which the first and the last of it fail."""
    return {
        "below the first threshold the kernel is nearly constant (largest change of λ₁, at 0.8 and 0.98)": at_most(
            0.01, below.change("ratio_1").max(), says="nearly constant", fails=constant
        ),
        "between the thresholds λ₁ falls (smallest share lost)": at_least(0.005, 1 - middle.max("ratio_1"), says="λ₁ decreases"),
        "between the thresholds λ₂ does not (largest change)": at_most(
            0.003, middle.change("ratio_2").max(), says="only λ₁ decreases", fails=second
        ),
    }


class LineFigure(Figure):
    """Losses, both eigenvalues, and where they end, against the rate."""

    def draw(self, rows: list[Row]) -> Any:
        first = select(rows, seed=min(row["seed"] for row in rows))
        runs, [edges] = select(first, kind="run"), select(first, kind="threshold")
        kept = [row["at"] for row in runs if row["word"] != "divergent"]
        steps = labelled(select(first, kind="step", at=kept, step=lambda step: step <= 150), η="{rate:.3f}")
        falls = [{**row, "rate": row["rate"] / edges["first"]} for row in runs]
        falls = melted(falls, {"ratio_1": "λ₁", "ratio_2": "λ₂"}, "ratio", "eigenvalue")
        in_time = partial(curves, steps, "step", by="η", markers=False)
        loss = in_time("loss", labels="legend", log="y", ylabel="training loss").legend(title="η", fontsize=7, ncols=2)
        ends = curves(falls, "rate", "ratio", by="eigenvalue", xlabel="η / (n/λ₁(0))", ylabel="at the end / at the start")
        return draw_panels(
            loss,
            in_time("lambda_1", labels="none", ylabel="λ₁(t)").set(ylim=(0, None)),
            in_time("lambda_2", labels="none", ylabel="λ₂(t)").set(ylim=(0, None)),
            ends.set(ylim=(0, 1.25)).line(x=1.0, label="n/λ₁").line(x=edges["second"] / edges["first"], label="n/λ₂"),
            size=(4.4, 3.1),
        )


class Figure33(LineFigure):
    """Quadratic models on points of a line: below two thresholds the kernel stays, above each of them an eigenvalue falls.

    128 points from N(±2, 1) with labels ±1, the quadratic model of a two-layer ReLU network of width 5000, gradient descent.
    The tangent kernel has two eigenvalues, one for each sign of the inputs. Points of one sign act exactly as one example, so
    descent runs on two effective examples; a run on all points confirms it.
    """

    study, item, where = Line(frozen=True), "zhu-2024 Figure 3.3", "section 3.3 and appendix B.14"
    departs = (
        "The printed critical values 2/λ₁ = 0.37 and 2/λ₂ = 0.39 are n/λ: they belong to the mean of squares, not to the ½ sum "
        "of chapter 3, with which they would be 0.006. Rates of the curves are not stated; ours are multiples of n/λ₁."
    )
    claims = (
        THRESHOLDS,
        around_thresholds({}, {}),
        {
            "above both, from 1.3 on, λ₁ falls (smallest share lost)": at_least(0.1, 1 - above.max("ratio_1"), says="decreases"),
            "above both, from 1.3 on, λ₂ falls (smallest share lost)": at_least(0.1, 1 - above.max("ratio_2"), says="decreases"),
            "from 1.1 to 1.9 all runs catapult (share)": equal(
                1.0, runs(at=["1.1", "1.3", "1.6", "1.9"]).share(word="catapult"), says="catapult"
            ),
            "at 2.1 times the first threshold the model diverges (share)": equal(
                1.0, runs(at="2.1").share(word="divergent"), **zhu("divergence above 4/λ₁", "appendix B.11")
            ),
        },
        EXACT,
    )


#: The network leaves its quadratic model from 1.25 times the threshold on; its gates move a little before.
GATES_MOVE = "the gates of the network move a little below the threshold, and it leaves its quadratic model from 1.25 times it on"


class FigureB1(LineFigure):
    """Networks on points of a line: the eigenvalues of the kernel behave as those of the quadratic model.

    The setting of Figure 3.3 with the two-layer ReLU network itself, whose gates move.
    """

    study, item, where = Line(frozen=False), "zhu-2024 Figure B.1", "appendix B.14"
    departs = "Rates are those of the mean of squares, as in Figure 3.3; those of the curves are not stated."
    claims = (
        THRESHOLDS,
        # Bounds as for the quadratic model; five starts: 0.012 below the threshold, up to 0.015 between.
        around_thresholds({"tiny": GATES_MOVE}, {"tiny": GATES_MOVE}),
        {
            "at 1.3 both fall (smaller share lost)": at_least(
                0.1, 1 - runs(at="1.3").column(lambda row: max(row["ratio_1"], row["ratio_2"])).max(), says="both decrease"
            ),
            "up to 1.3 times the threshold λ₁ ends where the quadratic model's does (largest relative distance)": at_most(
                0.2, (distance / near["twin_1"]).max(), says="almost the same", fails={"tiny": GATES_MOVE}
            ),
            "the same distance over the λ₁ at which both begin": measured(distance.max()),
            "at 1.9 times the first threshold the network still catapults (share)": measured(
                runs(at="1.9").share(word="catapult")
            ),
            "at 2.1 times, where the quadratic model diverges, it does too (share)": measured(
                runs(at="2.1").share(word="divergent")
            ),
        },
        EXACT,
    )
