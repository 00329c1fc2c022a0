"""Spectra, correspondence and overlaps of a network with batch norm, beside the same without."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.figure import Experiment
from theodolite.experiments.hessian.networks import Setup, problem_of
from theodolite.linalg import Eigenpairs, overlap_curve, top_eigenpairs
from theodolite.measures.hessian import autocorrelation, correspondence, kronecker_overlap
from theodolite.operators import KroneckerFactors, kronecker_factors, layer_hessians
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Params:
    setups: tuple[Setup, ...]  # each is taken with and without batch norm
    models: int
    outer: str = "fc1"  # fed by the data
    inner: str = "fc2"  # fed by a hidden layer
    leading: int = 9


def at(kind: str, k: str, *, norm: bool) -> Callable[[list[Row]], float]:
    """The mean of a curve where its index is that in column `k` of its rows."""

    def measure(rows: list[Row]) -> float:
        chosen = [row["value"] for row in rows if row["kind"] == kind and row["norm"] == norm and row["index"] == row[k]]
        return fmean(chosen) if chosen else math.nan

    return measure


def quotient(kind: str, k: str) -> Callable[[list[Row]], float]:
    """The same curve without batch norm over that with it."""
    return lambda rows: at(kind, k, norm=False)(rows) / at(kind, k, norm=True)(rows)


def aligned(*, norm: bool, kind: str = "correspondence") -> Callable[[list[Row]], float]:
    """The share of the first m eigenvectors of which more than half lies along v₁."""

    def measure(rows: list[Row]) -> float:
        values = [row["value"] for row in rows if row["kind"] == kind and row["norm"] == norm and row["index"] <= row["outputs"]]
        return fmean(float(v > 0.5) for v in values) if values and not any(map(math.isnan, values)) else math.nan

    return measure


def alike(rows: list[Row], *, norm: bool = True) -> float:
    """Cosine between the rows of v₁ in the correspondence of the true and of the approximate Hessian."""
    true, product = (
        torch.tensor([row["value"] for row in rows if row["kind"] == kind and row["norm"] == norm], dtype=torch.float64)
        for kind in ("correspondence", "product correspondence")
    )
    return float(true @ product / (true.norm() * product.norm()))


def outer_over_inner(rows: list[Row]) -> float:
    """With batch norm: overlap between models at m in the layer fed by the data, over that in the hidden layer."""
    return at("outer overlap", "outputs", norm=True)(rows) / at("overlap", "outputs", norm=True)(rows)


def peak_place(rows: list[Row]) -> float:
    """With batch norm: where the overlap between models is largest in the layer fed by the data, in units of m."""
    pairs = [row for row in rows if row["kind"] == "outer overlap" and row["norm"]]
    means = {k: fmean(row["value"] for row in pairs if row["index"] == k) for k in sorted({row["index"] for row in pairs})}
    highest = max(means, key=lambda k: means[k])
    return float(highest / pairs[0]["outputs"])


class Figure27(Experiment):
    """Batch norm: spectrum of E[xxᵀ], correspondence, overlap between models, and how good the Kronecker form is.

    Several models of one network with and without batch norm. Without it E[xxᵀ] of a hidden layer has one large
    eigenvalue and the sharp directions all share it; with it there are several, few eigenvectors lie along the first,
    the overlap between models has no peak at the layer's width, and the Kronecker form explains less.
    """

    id = "hessian/figure-27"
    source = "002, appendix F.4, Figures 27 to 29; 000, section C.7.3"
    item = ("wu-zhu-2020 Figure 27", "wu-zhu-2020 Figure 28", "wu-zhu-2020 Figure 29")
    sizes = {
        "tiny": Params(setups=(Setup("F-40^2", samples=500),), models=3),
        "laptop": Params(setups=(Setup("F-40^2", epochs=200, until=0.02),), models=5),
        "paper": Params(
            setups=(Setup("LeNet5", data="cifar10", epochs=1000, until=0.0, rate=0.01, batch=128, samples=50000, flat=False),),
            models=5,
            outer="conv1",
        ),
    }
    claims = (
        Claim(
            "with batch norm E[xxᵀ] has several large eigenvalues (second over first)",
            at("spectrum", "second", norm=True),
            rule="at least",
            expected=0.5,  # λ₁/λ₂ below 2, the threshold of Table 8
            reported=Reported("a few large eigenvalues", "Figure 27a", read_from="plot"),
        ),
        Claim(
            "with batch norm few eigenvectors lie along v₁ (their share is at most half of that without)",
            lambda rows: aligned(norm=True)(rows) / aligned(norm=False)(rows),
            rule="at most",
            expected=0.5,
            reported=Reported("only very few", "Figure 27b"),
        ),
        Claim(
            "the Kronecker form still gives the correspondence with v₁ (cosine of the true and the approximate row)",
            alike,
            rule="at least",
            expected=0.5,
            reported=Reported("a reasonable approximation", "Figures 27b and 27c"),
        ),
        Claim(
            "but worse than without batch norm (difference of the cosines)",
            lambda rows: alike(rows) - alike(rows, norm=False),
            rule="at most",
            expected=0.0,
            reported=Reported("worse than the cases without", "appendix F.4"),
        ),
        Claim(
            "the overlap between models at the layer's width is at least halved by batch norm (without over with)",
            quotient("overlap", "outputs"),
            rule="at least",
            expected=2.0,
            reported=Reported("the peak disappears", "Figure 28"),
        ),
        Claim(
            "the layer fed by the data has no norm before it and keeps its overlap (over that of the hidden layer, at m)",
            outer_over_inner,
            rule="at least",
            expected=2.0,
            reported=Reported("BN is not applied to the input", "appendix F.4"),
        ),
        Claim(
            "the layer fed by the data keeps its peak near m (place of the largest overlap over m)",
            peak_place,
            rule="between",
            expected=(0.8, 1.3),
            reported=Reported("the peak still exists in conv1", "appendix F.4"),
        ),
        Claim(
            "the Kronecker form explains the leading eigenspace less with batch norm (overlap with less without)",
            lambda rows: at("explained", "leading", norm=True)(rows) - at("explained", "leading", norm=False)(rows),
            rule="at most",
            expected=0.0,
            reported=Reported("worse than without", "Figure 29"),
        ),
        Claim(
            "and yet far better than chance: overlap with the leading eigenspace, with batch norm",
            at("explained", "leading", norm=True),
            rule="at least",
            expected=0.1,  # chance is 9 of 1600 dimensions, 0.006
            reported=Reported("highly nontrivial", "Figure 29"),
        ),
    )

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        for setup in p.setups:
            for norm in (True, False):
                network = f"{setup.network}-BN" if norm else setup.network
                places = {"outer": p.outer, "inner": p.inner, "leading": p.leading}
                yield {**asdict(setup), "network": network, "norm": norm, "models": p.models, **places, "seed": 0}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        setup = Setup(**{key: job[key] for key in asdict(Setup(""))})
        seeds = range(job["seed"], job["seed"] + job["models"])
        found = [_model(setup, seed, (job["outer"], job["inner"])) for seed in seeds]
        for seed, (pairs, factors) in zip(seeds, found, strict=True):
            yield from _explained(job, seed, pairs[job["inner"]], factors[job["inner"]])
        for layer, kind in ((job["outer"], "outer overlap"), (job["inner"], "overlap")):
            m = len(found[0][1][layer].output)
            for (i, (a, _)), (j, (b, _)) in itertools.combinations(enumerate(found), 2):
                curve = overlap_curve(a[layer].vectors, b[layer].vectors)
                yield from _curve(job, kind, f"{i} and {j}", curve, m)

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        named = [{**row, "network": "with batch norm" if row["norm"] else "without"} for row in rows]
        figure, axes = plots.panels(6, size=(3.7, 3.0))
        for ax, (kind, xlabel, ylabel, log) in zip(axes, PANELS, strict=True):
            part = [row for row in named if row["kind"] == kind and (kind != "spectrum" or row["index"] <= 20)]
            part = _so_far(part) if kind.endswith("correspondence") else part
            plots.curves(part, "index", "value", by="network", xlabel=xlabel, ylabel=ylabel, log=log, markers=False, ax=ax)
            if kind.endswith("overlap"):
                plots.reference(ax, x=part[0]["outputs"], label="m")
        return figure


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


def _model(setup: Setup, seed: int, layers: tuple[str, ...]) -> tuple[dict[str, Eigenpairs], dict[str, KroneckerFactors]]:
    """Eigenpairs of the layers' blocks, half as many again as the layer has outputs, and the factors."""
    problem = problem_of(setup, seed)
    factors: Any = kronecker_factors(problem, layers)
    blocks = layer_hessians(problem, layers)
    pairs = {
        name: top_eigenpairs(blocks[name], min(3 * len(factors[name].output) // 2, blocks[name].shape[0]), progress=False)
        for name in layers
    }
    return pairs, {name: factors[name] for name in layers}


def _explained(job: Mapping[str, Any], seed: int, pairs: Eigenpairs, factors: KroneckerFactors) -> Iterator[Row]:
    """Curves of one model's hidden layer."""
    m, k = len(factors.output), len(pairs.values)
    gamma = autocorrelation(factors).values
    curves: dict[str, Tensor] = {
        "spectrum": gamma / gamma[0],
        "correspondence": correspondence(pairs.vectors, factors).inputs[0],
        "product correspondence": correspondence(factors.top_eigenpairs(k).vectors, factors).inputs[0],
        "explained": kronecker_overlap(pairs.vectors, factors),
    }
    for kind, curve in curves.items():
        yield from _curve(job, kind, str(seed), curve, m)


def _curve(job: Mapping[str, Any], kind: str, model: str, values: Tensor, m: int) -> Iterator[Row]:
    shared = {"kind": kind, "norm": job["norm"], "model": model, "outputs": m, "leading": job["leading"], "second": 2}
    for index, value in enumerate(values.tolist(), start=1):
        yield {**shared, "index": index, "value": value}
