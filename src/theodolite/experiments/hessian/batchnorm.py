"""Batch norm takes the mean out of a layer's input, and with it the structure of the layer's Hessian."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from theodolite.experiments import Experiment, at_least, at_most, between, rows
from theodolite.experiments.hessian import paper
from theodolite.experiments.hessian.networks import Layer, NetworkStudy, Setup, as_printed, cases, numbered
from theodolite.experiments.lab.panels import curves, draw_panels
from theodolite.experiments.query import Query, Value, select
from theodolite.linalg import Eigenpairs, overlap_curve, top_eigenpairs
from theodolite.measures.hessian import autocorrelation, correspondence, kronecker_overlap
from theodolite.operators import KroneckerFactors, kronecker_factors, layer_hessians
from theodolite.problem import Problem
from theodolite.results import Row

with_norm, without = rows(norm=True), rows(norm=False)


def at(query: Query, kind: str, column: str) -> Value:
    """The mean of a curve where its index is that in a column of its rows."""
    return query(kind=kind).where(lambda row: row["index"] == row[column]).mean("value")


def aligned(query: Query) -> Value:
    """The share of the first m eigenvectors of which more than half lies along v₁."""
    return query(kind="correspondence").where(lambda row: row["index"] <= row["outputs"])["value"].share(lambda v: v > 0.5)


def alike(rows: list[Row]) -> float:
    """Cosine between the rows of v₁ in the correspondence of the true and of the approximate Hessian."""
    true, product = (
        torch.tensor([row["value"] for row in select(rows, kind=kind)], dtype=torch.float64)
        for kind in ("correspondence", "product correspondence")
    )
    return float(true @ product / (true.norm() * product.norm()))


def peak_place(rows: list[Row]) -> float:
    """Where the mean of curves is largest, in units of m."""
    means = {k: fmean(row["value"] for row in rows if row["index"] == k) for k in sorted({row["index"] for row in rows})}
    return float(max(means, key=lambda k: means[k]) / rows[0]["outputs"])


def _with_and_without(setup: Setup, models: int, outer: str = "fc1") -> list[dict[str, Any]]:
    """`outer` is fed by the data, `inner` by a hidden layer."""
    looked_at: dict[str, Any] = {"models": [["default", models]], "outer": outer, "inner": "fc2", "leading": 9}
    return cases(*setup.networks(f"{setup.network}-BN"), norm=True, **looked_at) + cases(setup, norm=False, **looked_at)


class Figure27(NetworkStudy, Experiment):
    """Batch norm: spectrum of E[xxᵀ], correspondence, overlap between models, and how good the Kronecker form is.

    Several models of one network with and without batch norm. Without it E[xxᵀ] of a hidden layer has one large
    eigenvalue and the sharp directions all share it; with it there are several, few eigenvectors lie along the first,
    the overlap between models has no peak at the layer's width, and the Kronecker form explains less.
    """

    item = ("wu-zhu-2020 Figure 27", "wu-zhu-2020 Figure 28", "wu-zhu-2020 Figure 29")
    where = "appendix F.4; Wu 2023, section C.7.3"
    sizes = {
        "tiny": _with_and_without(Setup("F-40^2", samples=500), 3),
        "laptop": _with_and_without(Setup("F-40^2", epochs=200, until=0.02), 5),
        "paper": _with_and_without(as_printed("CIFAR10 LeNet5"), 5, outer="conv1"),
    }
    claims = {
        # λ₁/λ₂ below 2, the threshold of Table 8
        "with batch norm E[xxᵀ] has several large eigenvalues (second over first)": at_least(
            0.5, at(with_norm, "spectrum", "second"), **paper("a few large eigenvalues", "Figure 27a", "plot")
        ),
        "with batch norm few eigenvectors lie along v₁ (their share is at most half of that without)": at_most(
            0.5, aligned(with_norm) / aligned(without), **paper("only very few", "Figure 27b")
        ),
        "the Kronecker form still gives the correspondence with v₁ (cosine of the true and the approximate row)": at_least(
            0.5,
            with_norm.measure(alike),
            **paper("a reasonable approximation", "Figures 27b and 27c"),
            fails={"tiny": "0.41: few eigenvectors lie along v₁, and those of the product that do have other ranks"},
        ),
        "but worse than without batch norm (difference of the cosines)": at_most(
            0.0, with_norm.measure(alike) - without.measure(alike), **paper("worse than the cases without", "appendix F.4")
        ),
        "the overlap between models at the layer's width is at least halved by batch norm (without over with)": at_least(
            2.0,
            at(without, "overlap", "outputs") / at(with_norm, "overlap", "outputs"),
            **paper("the peak disappears", "Figure 28"),
        ),
        "the layer fed by the data has no norm before it and keeps its overlap (over that of the hidden layer, at m)": at_least(
            2.0,
            at(with_norm, "outer overlap", "outputs") / at(with_norm, "overlap", "outputs"),
            **paper("BN is not applied to the input", "appendix F.4"),
        ),
        "the layer fed by the data keeps its peak near m (place of the largest overlap over m)": between(
            0.8,
            1.3,
            with_norm(kind="outer overlap").measure(peak_place),
            **paper("the peak still exists in conv1", "appendix F.4"),
            fails={"tiny": "on digits the overlap of a first layer keeps rising behind m, with batch norm or without"},
        ),
        "the Kronecker form explains the leading eigenspace less with batch norm (overlap with less without)": at_most(
            0.0,
            at(with_norm, "explained", "leading") - at(without, "explained", "leading"),
            **paper("worse than without", "Figure 29"),
        ),
        # chance is 9 of 1600 dimensions, 0.006
        "and yet far better than chance: overlap with the leading eigenspace, with batch norm": at_least(
            0.1, at(with_norm, "explained", "leading"), **paper("highly nontrivial", "Figure 29")
        ),
    }

    def run(self, job: Mapping[str, Any], *weights: list[Row]) -> Iterator[Row]:
        outer, inner = job["outer"], job["inner"]
        found = [_layers(problem, (outer, inner)) for problem in self.problems(job, weights)]
        for seed, layers in enumerate(found):
            for kind, curve in _explained(*layers[inner]).items():
                yield from _curve(job, kind, str(seed), curve, layers[inner])
        for name, kind in ((outer, "outer overlap"), (inner, "overlap")):
            for (i, a), (j, b) in combinations(enumerate(layers[name] for layers in found), 2):
                yield from _curve(job, kind, f"{i} and {j}", overlap_curve(a.pairs.vectors, b.pairs.vectors), a)

    def draw(self, rows: list[Row]) -> Any:
        named = [{**row, "network": "with batch norm" if row["norm"] else "without"} for row in rows]
        shown = []
        for kind, xlabel, ylabel, log in PANELS:
            part = [row for row in named if row["kind"] == kind and (kind != "spectrum" or row["index"] <= 20)]
            part = _so_far(part) if kind.endswith("correspondence") else part
            panel = curves(part, "index", "value", xlabel=xlabel, ylabel=ylabel, log=log)
            shown.append(panel.line(x=part[0]["outputs"], label="m") if kind.endswith("overlap") else panel)
        return draw_panels(*shown, size=(3.7, 3.0), by="network", markers=False)


def _so_far(rows: list[Row]) -> list[Row]:
    """Each curve's mean up to every index: the shares of a product are zeros and ones, and jump."""
    sums: dict[tuple[Any, Any], float] = {}
    smooth = []
    for row in rows:
        key = (row["network"], row["model"])
        sums[key] = sums.get(key, 0.0) + row["value"]
        smooth.append({**row, "value": sums[key] / row["index"]})
    return smooth


PANELS = (
    ("spectrum", "eigenvalue of E[xxᵀ], hidden layer", "over the largest", "y"),
    ("correspondence", "first eigenvectors of the Hessian", "mean share along v₁", ""),
    ("product correspondence", "first eigenvectors of the product", "mean share along v₁", ""),
    ("outer overlap", "dimension (fed by the data)", "overlap of two models", ""),
    ("overlap", "dimension (hidden layer)", "overlap of two models", ""),
    ("explained", "dimension (hidden layer)", "overlap, true and product", ""),
)


def _layers(problem: Problem, names: tuple[str, ...]) -> dict[str, Layer]:
    """The layers, with half as many eigenpairs again as they have outputs."""
    factors: Any = kronecker_factors(problem, names, sharing="expand")
    blocks = layer_hessians(problem, names)
    counts = {name: 3 * len(factors[name].output) // 2 for name in names}
    return {name: Layer(factors[name], top_eigenpairs(blocks[name], k, progress=False)) for name, k in counts.items()}


def _explained(factors: KroneckerFactors, pairs: Eigenpairs) -> dict[str, Tensor]:
    """Curves of one model's hidden layer."""
    gamma = autocorrelation(factors).values
    return {
        "spectrum": gamma / gamma[0],
        "correspondence": correspondence(pairs.vectors, factors).inputs[0],
        "product correspondence": correspondence(factors.top_eigenpairs(len(pairs.values)).vectors, factors).inputs[0],
        "explained": kronecker_overlap(pairs.vectors, factors),
    }


def _curve(job: Mapping[str, Any], kind: str, model: str, values: Tensor, layer: Layer) -> Iterator[Row]:
    shared = {
        "kind": kind,
        "norm": job["norm"],
        "model": model,
        "outputs": layer.shape[0],
        "leading": job["leading"],
        "second": 2,
    }
    return numbered(shared, "index", value=values)
