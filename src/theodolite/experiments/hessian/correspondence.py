"""Eigenvectors of a layer's Hessian against those of its two factors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.figure import Experiment
from theodolite.experiments.hessian.measuring import as_job, layer_factors, layer_pairs, select, setup_of
from theodolite.experiments.hessian.networks import Setup
from theodolite.experiments.hessian.overlap import CIFAR, DIGITS, MINI, SOURCE, case_rows
from theodolite.experiments.hessian.overlap_law import draw_correspondence
from theodolite.measures.hessian import correspondence
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Eigenvectors that the claims look at: c − 1.
LEADING = 9


@dataclass(frozen=True)
class Case:
    setup: Setup
    layers: tuple[str, ...]


@dataclass(frozen=True)
class Params:
    cases: tuple[Case, ...]
    seeds: int
    corner: int = 20


def correspondence_rows(job: Mapping[str, Any], layer: str) -> Iterator[Row]:
    """Corners of the correspondence matrices of the true and the approximate Hessian, and the layer in one row."""
    model, corner = (setup_of(job), job["seed"]), job["corner"]
    factors = layer_factors(model, layer)
    m, n = factors.output.shape[0], factors.input.shape[0]
    k = min(corner, m * n)
    shared = {"network": model[0].network, "layer": layer, "seed": job["seed"]}
    true = correspondence(layer_pairs(model, layer, k).vectors, factors)
    approximate = correspondence(factors.top_eigenpairs(k).vectors, factors)
    leading = min(LEADING, m, n)
    yield {
        "kind": "layer",
        **shared,
        "outputs": m,
        "leading_share": float(true.inputs[0, :leading].mean()),
        "diagonal": float((true.outputs.diagonal()[:leading] > 0.5).double().mean()),
        "input_distance": float((true.inputs - approximate.inputs)[:, :leading].square().sum(0).sqrt().mean()),
        "output_distance": float((true.outputs - approximate.outputs)[:, :leading].square().sum(0).sqrt().mean()),
    }
    tables = (("true", true), ("approximate", approximate))
    # Figures show the first model only.
    for name, table in tables if job["seed"] == 0 else ():
        for factor, values in (("E[xxᵀ]", table.inputs), ("E[M]", table.outputs)):
            for i, line in enumerate(values[:corner].tolist()):
                for j, value in enumerate(line):
                    yield {
                        "kind": "entry",
                        **shared,
                        "matrix": name,
                        "factor": factor,
                        "i": i + 1,
                        "j": j + 1,
                        "value": value,
                    }


def smallest(column: str, *layers: str) -> Any:
    """The smallest mean over the seeds of a column, over the networks and layers."""

    def measure(rows: list[Row]) -> float:
        return min(_means(rows, column, layers))

    return measure


def largest(column: str, *layers: str) -> Any:
    """The largest mean over the seeds of a column, over the networks and layers."""

    def measure(rows: list[Row]) -> float:
        return max(_means(rows, column, layers))

    return measure


def _means(rows: list[Row], column: str, layers: tuple[str, ...]) -> list[float]:
    found = [row for row in rows if row["kind"] == "layer" and (not layers or row["layer"] in layers)]
    groups: dict[tuple[str, str], list[float]] = {}
    for row in found:
        groups.setdefault((row["network"], row["layer"]), []).append(row[column])
    return [sum(values) / len(values) for values in groups.values()]


class CorrespondenceExperiment(Experiment):
    """Parent of both: one job per network and seed."""

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        for case in p.cases:
            for seed in range(p.seeds):
                yield {"setup": as_job(case.setup), "layers": list(case.layers), "corner": p.corner, "seed": seed}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        for layer in job["layers"]:
            yield from correspondence_rows(job, layer)


class Figure3(CorrespondenceExperiment):
    """The top eigenvectors of a layer are products of eigenvectors of its factors.

    Entry (i, j) is the share of the layer's j-th eigenvector in the i-th eigenvector of E[xxᵀ] or of E[M]. The first row is
    near 1 against E[xxᵀ] and the diagonal against E[M]: h_i ≈ u_i ⊗ v₁, for the true Hessian as for the approximation.
    """

    id = "hessian/figure-3"
    source = "002, section 4.2, Figure 3, and appendix E.3, Figure 14: fc1 of LeNet5 (m = 120)"
    item = ("wu-zhu-2020 Figure 3", "wu-zhu-2020 Figure 14")
    sizes = {
        "tiny": Params((Case(DIGITS, ("fc2",)), Case(MINI, ("fc1",))), seeds=2),
        "laptop": Params((Case(CIFAR, ("fc1",)),), seeds=2),
        "paper": Params((Case(SOURCE, ("fc1",)),), seeds=5, corner=120),
    }
    claims = (
        Claim(
            "the first nine eigenvectors lie along v₁ (mean of Corr(v₁, h_i), smallest of the layers)",
            smallest("leading_share"),
            rule="at least",
            expected=0.8,
            reported=Reported("the top m eigenvectors are all highly correlated with v₁", "002, section 4.2"),
        ),
        Claim(
            "and each along its own u_i (share of the first nine with Corr(u_i, h_i) > 0.5, smallest of the layers)",
            smallest("diagonal"),
            rule="at least",
            expected=0.5,
            reported=Reported("a near diagonal pattern", "002, section 4.2"),
        ),
        Claim(
            "true and approximate Hessian have similar patterns with E[xxᵀ] (mean distance of the first nine columns)",
            largest("input_distance"),
        ),
    )

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        networks = list(dict.fromkeys((row["network"], row["layer"]) for row in rows))
        figure, axes = plots.panels(
            4 * len(networks), columns=4, size=(3.6, 3.1), title=" and ".join(f"{b} of {a}" for a, b in networks)
        )
        place = iter(axes)
        for network, layer in networks:
            for name in ("true", "approximate"):
                for factor, vector in (("E[xxᵀ]", "v_i"), ("E[M]", "u_i")):
                    entries = select(case_rows(rows, (network, layer)), kind="entry", matrix=name, factor=factor)
                    draw_correspondence(entries, f"{name}: {layer} with {factor}", vector, next(place))
        return figure


class Figure15(CorrespondenceExperiment):
    """Correspondence in other layers: along v₁ everywhere, but no diagonal in convolutions.

    For a convolution the output Hessian is itself an approximation (the mean over positions), so that its eigenvectors do
    not line up with those of the layer; the leading input direction does.
    """

    id = "hessian/figure-15"
    source = "002, appendix E.3, Figures 15 to 17: LeNet5; 000, Figures C.12 to C.14: conv1 to conv3 of VGG11"
    item = (
        "wu-zhu-2020 Figure 15",
        "wu-zhu-2020 Figure 16",
        "wu-zhu-2020 Figure 17",
        "wu-2023 Figure C.12",
        "wu-2023 Figure C.13",
        "wu-2023 Figure C.14",
    )
    sizes = {
        "tiny": Params((Case(MINI, ("fc2", "conv1", "conv2")),), seeds=2),
        "laptop": Params((Case(CIFAR, ("fc2", "conv1", "conv2")),), seeds=2, corner=30),
        "paper": Params(
            (
                Case(SOURCE, ("fc2", "conv1", "conv2")),
                Case(replace(SOURCE, network="VGG11"), ("conv1", "conv2", "conv3")),
            ),
            seeds=1,
            corner=50,
        ),
    }
    claims = (
        *(
            Claim(
                f"the top eigenvectors of {' and '.join(layers)} lie along v₁ (mean of Corr(v₁, h_i), smallest)",
                smallest("leading_share", *layers),
                rule="at least",
                expected=0.5,
                reported=Reported("all layers show a strong correlation with the first eigenvector of E[xxᵀ]", "002, E.3"),
            )
            for layers in (("conv1",), ("conv2", "conv3"))
        ),
        Claim(
            "convolutions show no diagonal with E[M] (share of Corr(u_i, h_i) > 0.5, largest of the layers)",
            largest("diagonal", "conv1", "conv2"),
            rule="at most",
            expected=0.5,
            reported=Reported("does not exhibit the diagonal pattern", "000, appendix C.6.3"),
        ),
        Claim(
            "fc2 lies along v₁ for its first c − 1 eigenvectors (mean of Corr(v₁, h_i))",
            smallest("leading_share", "fc2"),
            rule="at least",
            expected=0.5,
            reported=Reported("the strong correlation stops at dimension 9", "000, appendix C.6.3"),
        ),
    )

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        networks = list(dict.fromkeys((row["network"], row["layer"]) for row in rows))
        figure, axes = plots.panels(2 * len(networks), columns=2, size=(4.4, 3.3))
        place = iter(axes)
        for network, layer in networks:
            for factor, vector in (("E[xxᵀ]", "v_i"), ("E[M]", "u_i")):
                entries = select(case_rows(rows, (network, layer)), kind="entry", matrix="true", factor=factor)
                draw_correspondence(entries, f"{layer} of {network} with {factor}", vector, next(place))
        return figure
