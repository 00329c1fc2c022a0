"""The tangent kernel around the critical rate: the rate by it, its eigenvalues, its top eigenvector, and what it has learnt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from operator import truediv
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.data.generators import mixture_1d
from theodolite.experiments import Experiment, Figure, Study, at_least, at_most, between, equal, measured, rows, sizes
from theodolite.experiments.catapult.sweeps import NAMES, network, panel, panel_title
from theodolite.experiments.claims import Claim
from theodolite.experiments.lab import zhu
from theodolite.experiments.lab.datasets import two_classes
from theodolite.experiments.lab.panels import Panel, curves, draw_columns, draw_panels, labelled, log_log, melted, split, titled
from theodolite.experiments.query import Column, Value, select
from theodolite.experiments.study import grid
from theodolite.measures.dynamics import classify_run, critical_learning_rate
from theodolite.measures.kernel import quadratize
from theodolite.measures.quadratic_models import class_eigenvalues, descend, gated_kernel, gates, sign_classes, top_direction
from theodolite.models import ntk_fcn
from theodolite.operators import tangent_kernel
from theodolite.problem import Problem
from theodolite.results import Row

# The critical rate by the kernel and by the Hessian

#: |ratio − 1|, mean over the starts: the smallest factor from one width to the next, narrowest first.
smallest_fall = rows.by("width").each(rows.change("ratio").mean()).steps(truediv).min()
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
        "their distance falls from each width to the next (smallest factor)": at_least(1.0, smallest_fall, **NEARLY),
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


# Its two eigenvalues on a line: quadratic model and network at learning rates around two thresholds

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
        net: Any = ntk_fcn(1, job["width"], 2, init="ntk_sign", seed=job["seed"]).double()
        u, v = net.fc1.weight.detach(), net.fc2.weight.detach()[0]
        x, y = mixture_1d(job["points"], seed=job["seed"], dtype=torch.float64)
        classes, n = sign_classes(x, y), len(x)
        values, order = class_eigenvalues(u, v, u, classes).sort(descending=True)
        edges = 2 / values
        # Descent on the two effective examples, exact for both models.
        of_pair = partial(descend, u, v, classes.inputs, classes.targets, steps=job["steps"])
        if job["part"] == "direct":
            rate = 1.3 * edges[0]
            whole, pair = descend(u, v, x, y, rate, job["steps"], frozen=self.frozen), of_pair(rate, frozen=self.frozen)
            gap = (whole.loss / (pair.loss + classes.floor) - 1).abs().max()
            kernel_gap = (whole.kernel_norm / pair.kernel_norm - 1).abs().max()
            yield {"kind": "direct", "gap": float(torch.maximum(gap, kernel_gap)), "seed": job["seed"]}
            return
        first, second = (edges * n / 2).tolist()
        yield {"kind": "threshold", "first": first, "second": second, "gap": second / first - 1, "seed": job["seed"]}
        rates = torch.stack([edges.mean() if at == "between" else float(at) * edges[0] for at in RATES])
        found = of_pair(rates, frozen=self.frozen)
        twin = found if self.frozen else of_pair(rates, frozen=True)
        for run, at in enumerate(RATES):
            eigenvalues, of_twin = (each.kernel[:, run].diagonal(dim1=-2, dim2=-1)[:, order] for each in (found, twin))
            ratio_1, ratio_2 = (eigenvalues[-1] / eigenvalues[0]).tolist()
            loss = (found.loss[:, run] + classes.floor) * 2 / n
            shared = {"at": str(at), "rate": float(rates[run]) * n / 2, "seed": job["seed"]}
            ends = {"ratio_1": ratio_1, "ratio_2": ratio_2, "twin_1": float(of_twin[-1, 0] / of_twin[0, 0])}
            word = classify_run(loss.tolist(), kernel=eigenvalues[:, 0].tolist())
            yield {"kind": "run", **shared, **ends, "peak": float(loss.nan_to_num(nan=torch.inf).max()), "word": word}
            for step in (*range(min(60, len(loss))), *range(60, len(loss), 10)):
                lambda_1, lambda_2 = eigenvalues[step].tolist()
                losses = {"step": step, "loss": float(loss[step]), "lambda_1": lambda_1, "lambda_2": lambda_2}
                yield {"kind": "step", **shared, **losses}


#: A rate is asked for so that runs without numbers convince nobody.
line = rows(kind="run", rate=lambda rate: rate > 0)
below, middle, above = line(at=["0.8", "0.98"]), line(at="between"), line(at=["1.3", "1.6", "1.9"])
#: Up to 1.3 times the threshold: λ₁(end)/λ₁(0) and that of the quadratic model.
near = line(at=["0.8", "0.98", "between", "1.1", "1.3"])
distance = abs(near["ratio_1"] - near["twin_1"])

THRESHOLDS = {
    text: between(0.33, 0.46, rows(kind="threshold")[which].mean_and_range(), reported=reported)
    for text, which, reported in (
        ("first threshold n/λ₁(0) for the mean of squares, mean over the starts", "first", 0.37),
        ("second threshold n/λ₂(0), mean over the starts", "second", 0.39),
    )
}
EXACT = {
    "two effective examples stand for all points (largest relative distance of loss and kernel)": at_most(
        1e-8, rows(kind="direct").max("gap"), **zhu("equality", "Proposition B.11.1", "theory")
    )
}


def around_thresholds(**fails: str) -> dict[str, Claim]:
    """What both models do below and between the thresholds; sizes at which the first and the last of it fail."""
    return {
        "below the first threshold the kernel is nearly constant (largest change of λ₁, at 0.8 and 0.98)": at_most(
            0.01, below.change("ratio_1").max(), says="nearly constant", fails=fails
        ),
        "between the thresholds λ₁ falls (smallest share lost)": at_least(0.005, 1 - middle.max("ratio_1"), says="λ₁ decreases"),
        "between the thresholds λ₂ does not (largest change)": at_most(
            0.003, middle.change("ratio_2").max(), says="only λ₁ decreases", fails=fails
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
    claims = {
        **THRESHOLDS,
        **around_thresholds(),
        "above both, from 1.3 on, λ₁ falls (smallest share lost)": at_least(0.1, 1 - above.max("ratio_1"), says="decreases"),
        "above both, from 1.3 on, λ₂ falls (smallest share lost)": at_least(0.1, 1 - above.max("ratio_2"), says="decreases"),
        "from 1.1 to 1.9 all runs catapult (share)": equal(
            1.0, line(at=["1.1", "1.3", "1.6", "1.9"]).share(word="catapult"), says="catapult"
        ),
        "at 2.1 times the first threshold the model diverges (share)": equal(
            1.0, line(at="2.1").share(word="divergent"), **zhu("divergence above 4/λ₁", "appendix B.11")
        ),
        **EXACT,
    }


#: The network leaves its quadratic model from 1.25 times the threshold on; its gates move a little before.
GATES_MOVE = "the gates of the network move a little below the threshold, and it leaves its quadratic model from 1.25 times it on"


class FigureB1(LineFigure):
    """Networks on points of a line: the eigenvalues of the kernel behave as those of the quadratic model.

    The setting of Figure 3.3 with the two-layer ReLU network itself, whose gates move.
    """

    study, item, where = Line(frozen=False), "zhu-2024 Figure B.1", "appendix B.14"
    departs = "Rates are those of the mean of squares, as in Figure 3.3; those of the curves are not stated."
    claims = {
        **THRESHOLDS,
        # Bounds as for the quadratic model; five starts: 0.012 below the threshold, up to 0.015 between.
        **around_thresholds(tiny=GATES_MOVE),
        "at 1.3 both fall (smaller share lost)": at_least(
            0.1, 1 - line(at="1.3").column(lambda row: max(row["ratio_1"], row["ratio_2"])).max(), says="both decrease"
        ),
        "up to 1.3 times the threshold λ₁ ends where the quadratic model's does (largest relative distance)": at_most(
            0.2, (distance / near["twin_1"]).max(), says="almost the same", fails={"tiny": GATES_MOVE}
        ),
        "the same distance over the λ₁ at which both begin": measured(distance.max()),
        "at 1.9 times the first threshold the network still catapults (share)": measured(line(at="1.9").share(word="catapult")),
        "at 2.1 times, where the quadratic model diverges, it does too (share)": measured(line(at="2.1").share(word="divergent")),
        **EXACT,
    }


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


COMPARED = (
    ("alignment", "alignment with the labels"),
    ("centred", "alignment with the labels, mean taken out,"),
    ("error", "test error of kernel regression"),
)
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
    claims = {
        "at 0.8 of the critical rate f_quad keeps its kernel (largest change of λ₁)": at_most(
            0.05, change("lambda_1", "quadratic", 0.8).change().max(), says="nearly constant", since="laptop", **DECREASES
        ),
        "at 1.5 its λ₁ falls (largest share that is left)": at_most(
            0.99, change("lambda_1", "quadratic").max(), says="decreases", **DECREASES
        ),
        **{
            f"{NAMES[model]}, trained at {ratio:g}: {text} after over before, mean": measured(change(column, model, ratio).mean())
            for model, ratio, column, text in (
                *(("quadratic", 1.5, *each) for each in COMPARED),
                *(("network", 1.5, *each) for each in COMPARED),
                ("quadratic", 0.8, *COMPARED[-1]),
            )
        },
    }
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
    """Descent of networks or of their quadratic models on ½ Σ r² at `ratio` times 2/λ₁(K₀).

    A row for each step says what leaves linear dynamics in it; the last has no ρ, as there is no next step.
    """

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
        x, y = points.x.double(), points.y.double()[:, 0]
        weights = [p for p in model.parameters() if p.requires_grad]

        def look() -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
            """Kernel (n, n), residual (n) and gradient of ½ Σ r² at the current weights."""
            residual = model(x)[:, 0] - y
            gradient = torch.autograd.grad(0.5 * residual.square().sum(), weights)
            return tangent_kernel(model, x), residual.detach(), gradient

        kernel, residual, gradient = look()
        rate = job["ratio"] * 2 / float(torch.linalg.eigvalsh(kernel)[-1])
        shared = {"panel": panel_title(job), "data": points.origin, "seed": job["seed"]}
        for step in range(job["steps"] + 1):
            with torch.no_grad():
                for w, g in zip(weights, gradient, strict=True):
                    w.sub_(rate * g)
            next_kernel, next_residual, gradient = look()
            found = top_direction(kernel, next_kernel, residual, next_residual, rate)
            loss, last = 0.5 * float(residual.square().sum()), step == job["steps"]
            bends = {name: None if last else float(getattr(found, name)) for name in QUANTITIES.values()}
            yield {**shared, "step": step, "loss": loss, "along": float(found.share) * loss, **bends}
            kernel, residual = next_kernel, next_residual


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
    claims = {
        **{
            f"{name} is positive while the loss is above 0.3 of its peak (smallest value)": at_least(
                0.0, while_large(column), **zhu("remains positive when the loss is large", "appendix B.14")
            )
            for name, column in QUANTITIES.items()
        },
        "the loss along the top eigenvector is nearly all of the loss at its peak (smallest share)": at_least(
            0.9, share_at_peak, **zhu("almost captures the spike", "appendix B.14")
        ),
        "the loss rises first (peak over first loss, smallest)": at_least(
            1.05, runs.each(rows.max("loss") / first_loss).min(), says="a spike", read_from="plot"
        ),
        "and ends below its start (last over first loss, largest)": at_most(
            1.0, runs.each(rows["loss"].last() / first_loss).max(), says="falls", read_from="plot"
        ),
        **{
            f"{name} scales with the loss (correlation, smallest)": measured(follows_loss(column))
            for name, column in QUANTITIES.items()
        },
    }

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
