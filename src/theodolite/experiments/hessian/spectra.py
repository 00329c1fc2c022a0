"""Spectra of the output Hessian and of the layer: the gap at c − 1, and both factors along training."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.experiments import Experiment, at_least, at_most, equal, rows
from theodolite.experiments.hessian import paper
from theodolite.experiments.hessian.networks import (
    DIGITS,
    MNIST,
    NetworkStudy,
    Setup,
    as_printed,
    cases,
    layer_factors,
    layers_of,
    network_of,
    numbered,
    train_on,
)
from theodolite.experiments.lab.panels import curves, draw_panels
from theodolite.experiments.query import select
from theodolite.experiments.study import Computation
from theodolite.measures.hessian import Autocorrelation, EigenTrajectory, autocorrelation, outlier_count, track_eigenpairs
from theodolite.operators import DenseOperator
from theodolite.problem import Problem
from theodolite.results import Row

CLASSES = 10
MATRICES = ("output Hessian", "layer Hessian")
STAGES = ("initialisation", "true labels", "random labels")

models = rows(kind="model")


def _stages(setup: Setup, random: Setup, seeds: int) -> list[dict[str, Any]]:
    """A network at its start and at a minimum, and one that is too small for its random labels."""
    setups = zip(STAGES, (setup.but(epochs=0), setup, random), strict=True)
    return [case for stage, found in setups for case in cases(found, seeds=seeds, stage=stage, layer="fc2")]


SAME_RATIOS = "the first nine eigenvalues of both matrices have the same ratios (correlation, smallest without random labels)"


class Figure4(NetworkStudy, Experiment):
    """The layer's Hessian has the spectrum of its output Hessian, with a gap at the number of classes.

    Eigenvalues of E[M] and of the layer's Hessian, each over its largest, at initialisation, at a minimum with the true
    labels, and at a minimum with random labels of a network too small to learn them, where the gap is gone. Which layer and
    network the source shows is not said; here it is the second hidden layer.
    """

    item, where = "wu-zhu-2020 Figure 4", "section 4.4"
    departs = "A width of 200 on digits too: with 40 units the outliers of the initialisation are not yet apart."
    sizes = {
        "tiny": _stages(DIGITS.but(network="F-200^2"), Setup("F-20^2", labels="random", epochs=30), 3),
        "laptop": _stages(MNIST, MNIST.but(network="F-20^2", labels="random", epochs=5), 3),
        "paper": _stages(as_printed("MNIST F-200^2"), as_printed("MNIST-R F-20^2"), 5),
    }
    claims = {
        SAME_RATIOS: at_least(
            0.95, models(stage=STAGES[:2]).min("correlation"), **paper("the same relative ratios", "section 4.4")
        ),
        **{
            f"{stage}: the {matrix} has c − 1 = 9 outliers (median over seeds)": equal(
                9.0,
                models(stage=stage).median(f"{matrix} outliers"),
                **paper("a gap around the number of classes", "section 4.4 and Figure 4"),
            )
            for stage in STAGES[:2]
            for matrix in MATRICES
        },
        "with random labels the gap at c − 1 of the output Hessian is less than half of that with true labels": at_most(
            0.5,
            models(stage="random labels").median("output Hessian gap") / models(stage="true labels").median("output Hessian gap"),
            **paper("the gap does not appear at minimum for random labels", "section 4.4"),
        ),
    }

    def run(self, job: Mapping[str, Any], *weights: list[Row]) -> Iterator[Row]:
        [problem], layer = self.problems(job, weights), job["layer"]
        k = 3 * CLASSES  # as far as outliers are looked for
        # Eigenvalues are exact to the square of the residuals.
        factors, pairs = layers_of(problem, [layer], k, tol=3e-3)[layer]
        values = dict(zip(MATRICES, (torch.linalg.eigvalsh(factors.output).flip(0)[:k], pairs.values), strict=True))
        shared = {"stage": job["stage"], "network": job["setup"]["network"], "layer": layer, "seed": job["seed"]}
        top = torch.stack([v[: CLASSES - 1] / v[0] for v in values.values()])
        row: Row = {"kind": "model", **shared, "correlation": float(torch.corrcoef(top)[0, 1])}
        for name, v in values.items():
            row[f"{name} outliers"] = outlier_count(v, CLASSES)
            row[f"{name} gap"] = float((v[CLASSES - 2] / v[CLASSES - 1]).log())
        yield row
        for name, v in values.items():
            yield from numbered({"kind": "eigenvalue", **shared, "matrix": name}, value=v / v[0])

    def draw(self, rows: list[Row]) -> Any:
        from theodolite import plots

        figure, axes = plots.panels(3, share_y=True)
        look: dict[str, Any] = {"by": "matrix", "band": "range", "log": "y", "markers": True, "labels": "legend"}
        look |= {"xlabel": "rank", "ylabel": "eigenvalue over the largest"}
        for ax, stage in zip(axes, STAGES, strict=True):
            mine = select(rows, kind="eigenvalue", stage=stage)
            plots.curves(mine, "i", "value", **look, title=f"{stage}: {mine[0]['layer']} of {mine[0]['network']}", ax=ax)
            plots.reference(ax, x=CLASSES - 0.5, label="c − 1 = 9")
        return figure


checkpoints = rows(kind="checkpoint")


class Figure18(NetworkStudy, Experiment):
    """The two factors of a layer keep their shape along training: one large input direction, about c outputs.

    Top eigenvalues of E[xxᵀ] and of E[M] at checkpoints from the initialisation on, each over the largest of its checkpoint.
    """

    item = ("wu-zhu-2020 Figure 18", "wu-zhu-2020 Figure 19")
    where = "appendix E.4: fc1 of LeNet5"
    sizes = {  # checkpoints are epochs
        "tiny": cases(DIGITS, layer="fc2", checkpoints=[0, 1, 2, 3, 4, 6, 8, 10, 13, 16, 20, 25]),
        "laptop": cases(DIGITS, seeds=5, layer="fc2", checkpoints=[0, 1, 2, 3, 5, 8, 12, 18, 27, 40, 60, 90]),
        "paper": cases("CIFAR10 LeNet5", layer="fc1", checkpoints=[0, 1, 2, 5, 10, 20, 50, 100, 200, 400, 700, 1000]),
    }
    claims = {
        "E[xxᵀ] has one dominant eigenvalue at every checkpoint (smallest γ₁/γ₂)": at_least(
            2.5, checkpoints.min("ratio"), **paper("always approximately rank 1", "appendix E.4")
        ),
        "E[M] has c − 1 = 9 large eigenvalues (share of checkpoints where τ₉/τ₁₀ > τ₁₀/τ₁₁)": at_least(
            0.8,
            checkpoints.column(lambda row: row["gap"] > row["next_gap"]).mean(),
            **paper("always around c large eigenvalues", "appendix E.4"),
        ),
    }

    def needs(self, job: Mapping[str, Any]) -> list[Computation]:
        return []  # it trains, from checkpoint to checkpoint

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        setup, seed, layer = Setup(**job["setup"]), job["seed"], job["layer"]
        start, (x, y) = network_of(setup.but(epochs=0, samples=10**9), seed)
        problem = Problem(start, nn.CrossEntropyLoss(), (x[: setup.samples], y[: setup.samples]))
        states = _training(copy.deepcopy(start).float(), (x.float(), y), setup, job["checkpoints"], seed)
        seen: list[Autocorrelation] = []

        def both(problem: Problem) -> dict[str, DenseOperator]:
            factors = layer_factors(problem, layer)
            seen.append(autocorrelation(factors))
            return {"input": DenseOperator(factors.input), "output": DenseOperator(factors.output)}

        found = track_eigenpairs(
            problem, states, 2 * CLASSES, labels=job["checkpoints"], matrix=both, tol=1e-8, seed=0, progress=False
        )
        for t, epoch in enumerate(job["checkpoints"]):
            yield from _checkpoint(found, t, seen[t], {"epoch": epoch, "seed": seed})

    def draw(self, rows: list[Row]) -> Any:
        shown = select(rows, kind="eigenvalue", i=[1, 2, 3, 5, 9, 10, 11])
        values = [{**row, "at": row["epoch"] + 1, "name": f"{row['i']}"} for row in shown]
        titles = {"input": "Input auto-correlation E[xxᵀ]", "output": "Output Hessian E[M]"}
        panels = [curves(select(values, factor=factor), "at", "value", title=title) for factor, title in titles.items()]
        look: dict[str, Any] = {"by": "name", "log": "xy", "labels": "direct", "xlabel": "epoch + 1"}
        return draw_panels(*panels, **look, ylabel="eigenvalue over the largest")


def _training(
    model: nn.Module, data: tuple[Tensor, Tensor], setup: Setup, checkpoints: Sequence[int], seed: int
) -> Iterator[nn.Module]:
    """The model at each of these epochs, trained in between."""
    sgd = torch.optim.SGD(model.parameters(), lr=setup.rate)
    for done, epoch in pairwise([0, *checkpoints]):
        if epoch > done:
            train_on(model, data, sgd, setup, range(done, epoch), seed)
        yield model


def _checkpoint(
    found: Mapping[str, EigenTrajectory], t: int, inputs: Autocorrelation, shared: Mapping[str, Any]
) -> Iterator[Row]:
    """Both spectra of a layer at one moment of training."""
    values = {name: track.values[t] for name, track in found.items()}
    tau = values["output"]
    yield {
        "kind": "checkpoint",
        **shared,
        "loss": found["output"].losses[t],
        "ratio": inputs.ratio,
        "squared_dot": inputs.squared_dot,
        "gap": float(tau[CLASSES - 2] / tau[CLASSES - 1]),
        "next_gap": float(tau[CLASSES - 1] / tau[CLASSES]),
    }
    for name, spectrum in values.items():
        yield from numbered({"kind": "eigenvalue", **shared, "factor": name}, value=spectrum / spectrum[0])
