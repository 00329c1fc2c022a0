"""Spectra of the output Hessian and of the layer: the gap at c − 1, and both factors along training."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.figure import Experiment
from theodolite.experiments.hessian.measuring import as_job, layer_factors, pairs_of, select, setup_of
from theodolite.experiments.hessian.networks import Setup, trained
from theodolite.experiments.hessian.overlap import DIGITS, MNIST, SOURCE, SOURCE_MNIST
from theodolite.measures.hessian import Autocorrelation, EigenTrajectory, autocorrelation, outlier_count, track_eigenpairs
from theodolite.operators import DenseOperator, kronecker_factors
from theodolite.problem import Problem
from theodolite.results import Row
from theodolite.training import train

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLASSES = 10
MATRICES = ("output Hessian", "layer Hessian")
STAGES = ("initialisation", "true labels", "random labels")


@dataclass(frozen=True)
class SpectrumParams:
    setup: Setup
    random: Setup  # a network too small for its random labels
    layer: str
    seeds: int


def correlation(rows: list[Row]) -> float:
    """Correlation of λ_i(H)/λ₁(H) and τ_i/τ₁ over i <= 9, the smallest of all models with true labels or untrained."""
    models = [row for row in rows if row["kind"] == "model" and row["stage"] != "random labels"]
    return float(min(row["correlation"] for row in models))


def outliers(stage: str, matrix: str) -> Any:
    """The number of eigenvalues before the widest gap, the median over the seeds."""

    def measure(rows: list[Row]) -> float:
        return float(median(row[f"{matrix} outliers"] for row in select(rows, kind="model", stage=stage)))

    return measure


def gap_share(rows: list[Row]) -> float:
    """The gap at c − 1 (log of the ratio) of the output Hessian with random labels, over that with true ones; medians."""
    gaps = {stage: median(row["output Hessian gap"] for row in select(rows, kind="model", stage=stage)) for stage in STAGES[1:]}
    return float(gaps["random labels"] / gaps["true labels"])


def _outlier_claim(stage: str, matrix: str) -> Claim:
    return Claim(
        f"{stage}: the {matrix} has c − 1 = 9 outliers (median over seeds)",
        outliers(stage, matrix),
        rule="equal",
        expected=9.0,
        reported=Reported("a gap around the number of classes", "002, section 4.4 and Figure 4"),
    )


class Figure4(Experiment):
    """The layer's Hessian has the spectrum of its output Hessian, with a gap at the number of classes.

    Eigenvalues of E[M] and of the layer's Hessian, each over its largest, at initialisation, at a minimum with the true
    labels, and at a minimum with random labels of a network too small to learn them, where the gap is gone. Which layer and
    network the source shows is not said; here it is the second hidden layer.
    """

    id = "hessian/figure-4"
    source = "002, section 4.4, Figure 4"
    item = "wu-zhu-2020 Figure 4"
    departs = "A width of 200 on digits too: with 40 units the outliers of the initialisation are not yet apart."
    sizes = {
        "tiny": SpectrumParams(replace(DIGITS, network="F-200^2"), Setup("F-20^2", labels="random", epochs=30), "fc2", 3),
        "laptop": SpectrumParams(MNIST, replace(MNIST, network="F-20^2", labels="random", epochs=5), "fc2", 3),
        "paper": SpectrumParams(SOURCE_MNIST, replace(SOURCE_MNIST, network="F-20^2", labels="random"), "fc2", 5),
    }
    claims = (
        Claim(
            "the first nine eigenvalues of both matrices have the same ratios (correlation, smallest without random labels)",
            correlation,
            rule="at least",
            expected=0.95,
            reported=Reported("the same relative ratios", "002, section 4.4"),
        ),
        *(_outlier_claim(stage, matrix) for stage in STAGES[:2] for matrix in MATRICES),
        Claim(
            "with random labels the gap at c − 1 of the output Hessian is less than half of that with true labels",
            gap_share,
            rule="at most",
            expected=0.5,
            reported=Reported("the gap does not appear at minimum for random labels", "002, section 4.4"),
        ),
    )

    def jobs(self, p: SpectrumParams) -> Iterator[dict[str, Any]]:
        for stage, setup in zip(STAGES, (p.setup.at_init(), p.setup, p.random), strict=True):
            for seed in range(p.seeds):
                yield {"stage": stage, "setup": as_job(setup), "layer": p.layer, "seed": seed}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        model = (setup_of(job), job["seed"])
        k = 3 * CLASSES  # as far as outliers are looked for
        tau = torch.linalg.eigvalsh(layer_factors(model, job["layer"]).output).flip(0)[:k]
        # Eigenvalues are exact to the square of the residuals.
        pairs = pairs_of(model, (job["layer"],), k, tol=3e-3)[job["layer"]]
        values = dict(zip(MATRICES, (tau, pairs.values), strict=True))
        shared = {"stage": job["stage"], "network": model[0].network, "layer": job["layer"], "seed": job["seed"]}
        top = torch.stack([v[: CLASSES - 1] / v[0] for v in values.values()])
        row: Row = {"kind": "model", **shared, "correlation": float(torch.corrcoef(top)[0, 1])}
        for name, v in values.items():
            row[f"{name} outliers"] = outlier_count(v, CLASSES)
            row[f"{name} gap"] = float((v[CLASSES - 2] / v[CLASSES - 1]).log())
        yield row
        for name, v in values.items():
            for i, value in enumerate((v / v[0]).tolist()):
                yield {"kind": "eigenvalue", **shared, "matrix": name, "i": i + 1, "value": value}

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        figure, axes = plots.panels(3, share_y=True)
        for ax, stage in zip(axes, STAGES, strict=True):
            mine = select(rows, kind="eigenvalue", stage=stage)
            plots.curves(
                mine,
                "i",
                "value",
                by="matrix",
                band="range",
                log="y",
                markers=True,
                labels="legend",
                xlabel="rank",
                ylabel="eigenvalue over the largest",
                title=f"{stage}: {mine[0]['layer']} of {mine[0]['network']}",
                ax=ax,
            )
            plots.reference(ax, x=CLASSES - 0.5, label="c − 1 = 9")
        return figure


@dataclass(frozen=True)
class TrajectoryParams:
    setup: Setup
    layer: str
    checkpoints: tuple[int, ...]  # epochs
    seeds: int


def smallest_ratio(rows: list[Row]) -> float:
    """γ₁/γ₂, the smallest of all checkpoints."""
    return float(min(row["ratio"] for row in rows if row["kind"] == "checkpoint"))


def gap_kept(rows: list[Row]) -> float:
    """Share of the checkpoints where the gap behind τ₉ is wider than the one behind τ₁₀."""
    gaps = [row["gap"] > row["next_gap"] for row in rows if row["kind"] == "checkpoint"]
    return float(sum(gaps) / len(gaps))


class Figure18(Experiment):
    """The two factors of a layer keep their shape along training: one large input direction, about c outputs.

    Top eigenvalues of E[xxᵀ] and of E[M] at checkpoints from the initialisation on, each over the largest of its checkpoint.
    """

    id = "hessian/figure-18"
    source = "002, appendix E.4, Figures 18 and 19: fc1 of LeNet5"
    item = ("wu-zhu-2020 Figure 18", "wu-zhu-2020 Figure 19")
    sizes = {
        "tiny": TrajectoryParams(DIGITS, "fc2", (0, 1, 2, 3, 4, 6, 8, 10, 13, 16, 20, 25), seeds=1),
        "laptop": TrajectoryParams(DIGITS, "fc2", (0, 1, 2, 3, 5, 8, 12, 18, 27, 40, 60, 90), seeds=5),
        "paper": TrajectoryParams(SOURCE, "fc1", (0, 1, 2, 5, 10, 20, 50, 100, 200, 400, 700, 1000), seeds=1),
    }
    claims = (
        Claim(
            "E[xxᵀ] has one dominant eigenvalue at every checkpoint (smallest γ₁/γ₂)",
            smallest_ratio,
            rule="at least",
            expected=2.5,
            reported=Reported("always approximately rank 1", "002, appendix E.4"),
        ),
        Claim(
            "E[M] has c − 1 = 9 large eigenvalues (share of checkpoints where τ₉/τ₁₀ > τ₁₀/τ₁₁)",
            gap_kept,
            rule="at least",
            expected=0.8,
            reported=Reported("always around c large eigenvalues", "002, appendix E.4"),
        ),
    )

    def jobs(self, p: TrajectoryParams) -> Iterator[dict[str, Any]]:
        for seed in range(p.seeds):
            yield {"setup": as_job(p.setup), "layer": p.layer, "checkpoints": list(p.checkpoints), "seed": seed}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        setup, seed = setup_of(job), job["seed"]
        start, (x, y) = trained(replace(setup.at_init(), samples=10**9), seed)
        problem = Problem(start, nn.CrossEntropyLoss(), (x[: setup.samples], y[: setup.samples]))
        states = _training(copy.deepcopy(start).float(), (x.float(), y), setup, job["checkpoints"], seed)
        seen: list[Autocorrelation] = []

        def both(problem: Problem) -> dict[str, DenseOperator]:
            factors = kronecker_factors(problem, [job["layer"]])[job["layer"]]
            seen.append(autocorrelation(factors))
            return {"input": DenseOperator(factors.input), "output": DenseOperator(factors.output)}

        found = track_eigenpairs(
            problem, states, 2 * CLASSES, labels=job["checkpoints"], matrix=both, tol=1e-8, seed=0, progress=False
        )
        for t, epoch in enumerate(job["checkpoints"]):
            yield from _checkpoint(found, t, seen[t], {"epoch": epoch, "seed": seed})

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        figure, axes = plots.panels(2)
        values = [{**row, "at": row["epoch"] + 1, "name": f"{row['i']}"} for row in select(rows, kind="eigenvalue")]
        titles = {"input": "Input auto-correlation E[xxᵀ]", "output": "Output Hessian E[M]"}
        for ax, (factor, title) in zip(axes, titles.items(), strict=True):
            plots.curves(
                [row for row in select(values, factor=factor) if row["i"] in (1, 2, 3, 5, 9, 10, 11)],
                "at",
                "value",
                by="name",
                log="xy",
                labels="direct",
                xlabel="epoch + 1",
                ylabel="eigenvalue over the largest",
                title=title,
                ax=ax,
            )
        return figure


def _training(
    model: nn.Module, data: tuple[Tensor, Tensor], setup: Setup, checkpoints: Sequence[int], seed: int
) -> Iterator[nn.Module]:
    """The model at each of these epochs, trained in between."""
    sgd = torch.optim.SGD(model.parameters(), lr=setup.rate)
    done = 0
    for epoch in checkpoints:
        if epoch > done:
            settings: dict[str, Any] = {"epochs": epoch - done, "batch_size": setup.batch, "seed": 1000 * seed + done}
            train(model, nn.CrossEntropyLoss(), data, sgd, **settings, progress=False)
            done = epoch
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
        for i, value in enumerate((spectrum / spectrum[0]).tolist()):
            yield {"kind": "eigenvalue", **shared, "factor": name, "i": i + 1, "value": value}
