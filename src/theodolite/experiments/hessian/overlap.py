"""The overlap of the sharp subspaces of models that were trained apart: the study, and where the overlap peaks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import Any

import torch
from torch import Tensor

from theodolite.experiments import Figure, at_least, at_most, between, measured, rows
from theodolite.experiments.hessian import paper
from theodolite.experiments.hessian.networks import (
    ALTERNATIVES,
    CIFAR,
    DIGITS,
    MNIST,
    RAW_CIFAR,
    Layer,
    NetworkStudy,
    Setup,
    cases,
    if_any,
    layer_factors,
    layer_pairs,
    numbered,
)
from theodolite.experiments.lab.panels import Panel, draw_panels
from theodolite.experiments.query import Column, Query, select, values_of
from theodolite.experiments.study import Computation
from theodolite.linalg import overlap_curve
from theodolite.measures.hessian import autocorrelation, predicted_overlap, rank_one_count
from theodolite.measures.hessian.structure import matricised
from theodolite.operators import KroneckerFactors
from theodolite.operators.kronecker import factors_of
from theodolite.problem import Problem
from theodolite.results import Row

PANEL = (4.4, 3.3)
#: Overlap is looked at up to so many outputs of the layer: far enough to see a peak at m and the decline behind it.
REACH = 1.5


def layer_of_each(problems: Sequence[Problem], layer: str, reach: float = REACH) -> list[Layer]:
    """The same layer of several models, with `reach` times as many eigenpairs as it has outputs."""
    factors = [layer_factors(problem, layer) for problem in problems]
    k = round(reach * len(factors[0].output))
    return [Layer(f, layer_pairs(problem, [layer], k)[layer]) for f, problem in zip(factors, problems, strict=True)]


def overlap_rows(layers: Sequence[Layer], **shared: Any) -> Iterator[Row]:
    """The overlap of the top k eigenvectors, k = 1, 2, ..., over all pairs of the models.

    One row per k: the mean and the standard deviation over the pairs, the mean of what the factors predict, and chance. Then one
    row of the layer: m, K*, γ₁/γ₂ (medians over the models), and (v₁·v₁')², the mean over the pairs.
    """
    factors = [layer.factors for layer in layers]
    (m, n), k = layers[0].shape, len(layers[0].pairs.values)
    curves = torch.stack([overlap_curve(a.pairs.vectors, b.pairs.vectors) for a, b in combinations(layers, 2)])
    predicted = torch.stack([predicted_overlap(a, b, k) for a, b in combinations(factors, 2)]).mean(0)
    yield from _curve_rows(curves, predicted, m, n, shared)
    leading = [torch.linalg.eigh(f.input)[1][:, -1] for f in factors]
    yield {
        "kind": "layer",
        **shared,
        "outputs": m,
        "pairs": len(curves),
        "rank_one_count": median(rank_one_count(f) for f in factors),
        "ratio": median(autocorrelation(f).ratio for f in factors),
        "squared_dot": float(sum(float(a @ b) ** 2 for a, b in combinations(leading, 2)) / len(curves)),
    }


def _curve_rows(curves: Tensor, predicted: Tensor, m: int, n: int, shared: Mapping[str, Any]) -> Iterator[Row]:
    """Curves (pairs, k) as rows, one per k."""
    spread = curves.std(0) if len(curves) > 1 else torch.full_like(predicted, math.nan)
    chance = torch.arange(1, len(predicted) + 1, dtype=torch.float64) / (m * n)
    columns = {"overlap": curves.mean(0), "spread": spread, "predicted": predicted, "chance": chance}
    return numbered({"kind": "overlap", **shared, "outputs": m}, "k", **columns)


class Overlap(NetworkStudy):
    """One layer of models that were trained apart, compared in all pairs; or the same of made-up layers."""

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for job in super().jobs(p):
            layers = job.pop("layers", None)
            yield from [{**job, "layer": layer} for layer in layers] if layers else [job]

    def needs(self, job: Mapping[str, Any]) -> list[Computation]:
        return [] if "spectrum" in job else super().needs(job)

    def run(self, job: Mapping[str, Any], *weights: list[Row]) -> Iterator[Row]:
        if "spectrum" in job:
            yield from _made_up_rows(job)
            return
        name, problems, setup = job["layer"], self.problems(job, weights), Setup(**job["setup"])
        layers = layer_of_each(problems, name, job["reach"])
        shared = {"network": setup.title, "layer": name}
        yield from overlap_rows(layers, **shared)
        values = torch.linalg.eigvalsh(layers[0].factors.output).flip(0)
        yield from numbered({"kind": "spectrum", "network": f"{name} of {setup.network}"}, value=values / values[0])
        first = layer_pairs(problems[0], [name], 4)[name].vectors
        for i, singular in enumerate(torch.linalg.svdvals(matricised(first, *layers[0].shape)), start=1):
            ends = {"first": float(singular[0]), "second": float(singular[1])}
            yield from numbered({"kind": "singular", **shared, "eigenvector": f"h{i}", **ends}, "index", value=singular[:10])


def apart(*setups: Setup | str, layers: Sequence[str], models: int | Sequence[int], reach: float = REACH) -> list[dict[str, Any]]:
    """Cases of networks of which several models are compared: so many of the default training, or of each alternative."""
    counts = [models] if isinstance(models, int) else models
    return cases(
        *setups, layers=list(layers), models=[list(pair) for pair in zip(ALTERNATIVES, counts, strict=False)], reach=reach
    )


# Made-up layers


#: Spectra of the output Hessian of m units, the largest eigenvalue 1.
SPECTRA = {
    "flat": lambda m: torch.linspace(1.0, 0.5, m),
    "nine outliers": lambda m: torch.cat([torch.linspace(1.0, 0.5, 9), 0.01 * 0.98 ** torch.arange(9, m)]),
    "heavy tail": lambda m: 1.0 / torch.arange(1, m + 1),
}


def made_up(*spectra: str, outputs: int, pairs: int) -> list[dict[str, Any]]:
    """Cases of pairs of made-up layers with a spectrum of `SPECTRA`."""
    return [{"spectrum": spectrum, "outputs": outputs, "pairs": pairs, "seeds": 1} for spectrum in spectra]


def _made_up_rows(job: Mapping[str, Any]) -> Iterator[Row]:
    """The predicted overlap of pairs of made-up layers, their row and their spectrum."""
    m, generator = job["outputs"], torch.Generator().manual_seed(job["seed"])
    k = round(10 / 3 * m)
    curves, counts = [], []
    for _ in range(job["pairs"]):
        a, b = (_made_up_factors(job["spectrum"], m, generator) for _ in range(2))
        curves.append(predicted_overlap(a, b, k))
        counts += [rank_one_count(a), rank_one_count(b)]
    table = torch.stack(curves)
    shared = {"network": job["spectrum"], "layer": "made up"}
    yield from _curve_rows(table, table.mean(0), m, m, shared)
    yield {"kind": "layer", **shared, "outputs": m, "pairs": job["pairs"], "rank_one_count": median(counts)}
    values = SPECTRA[job["spectrum"]](m)
    yield from numbered({"kind": "spectrum", "network": job["spectrum"]}, value=values / values[0])


def _made_up_factors(spectrum: str, m: int, generator: torch.Generator) -> KroneckerFactors:
    """Factors of a made-up layer of m inputs and m outputs: random eigenvectors, but for a leading input that is positive.

    The input's eigenvalues are 1, 0.1, 0.09, 0.081, ...: nearly one direction, as behind a ReLU.
    """
    u = torch.linalg.qr(torch.randn(m, m, generator=generator, dtype=torch.float64)).Q
    start = torch.randn(m, m, generator=generator, dtype=torch.float64)
    start[:, 0] = start[:, 0].abs()
    v = torch.linalg.qr(start).Q
    tau = SPECTRA[spectrum](m).double()
    gamma = torch.cat([torch.ones(1), 0.1 * 0.9 ** torch.arange(m - 1)]).double()
    return factors_of((u * tau) @ u.T, (v * gamma) @ v.T, v[:, 0])


# What is measured


curves = rows(kind="overlap")


def place(rows: Sequence[Row]) -> float:
    """Place of a curve's peak over m."""
    top = max(rows, key=lambda row: row["overlap"])
    return float(top["k"] / top["outputs"])


def early_place(rows: Sequence[Row]) -> float:
    """Where a curve is largest among the first m/2 dimensions."""
    early = [row for row in rows if not row["k"] > 0.5 * row["outputs"]]
    return float(max(early, key=lambda row: row["overlap"])["k"])


def relative_overlap(rows: Sequence[Row], k: float, base: float) -> float:
    """A curve at k over the same at another place."""
    curve = {row["k"]: row["overlap"] for row in rows}
    return float(curve[k] / curve[base])


def places(query: Query) -> Column:
    """Places of the peaks over m, network by network and layer by layer."""
    return query.by("network", "layer").each(place)


def farthest(ratios: Sequence[float]) -> float:
    """The ratio farthest from 1, up or down; NaN if one of them is."""
    if any(not ratio > 0 for ratio in ratios):
        return math.nan
    return max(ratios, key=lambda ratio: max(ratio, 1.0 / ratio))


at_outputs = curves.where(lambda row: row["k"] == row["outputs"])
above_chance = (at_outputs["overlap"] / at_outputs["chance"]).min()
last_layer = curves(layer="fc3", k=range(1, 10))
leading_singular = rows(kind="singular", index=1)


# How it is drawn


class OverlapFigure(Figure):
    """One panel per layer."""

    view = rows(kind=["overlap", "layer"])

    def draw(self, rows: list[Row]) -> Any:
        from theodolite import plots

        shown = layer_panels(rows, lambda place, layer: place == 0 or layer == "made up")
        figure, axes = plots.panels(len(shown), size=PANEL)
        for panel, ax in zip(shown, axes, strict=True):
            panel.draw(ax)
        return figure


def layer_panels(rows: list[Row], named: Callable[[int, str], bool]) -> list[Panel]:
    """A panel for each layer; `named` says of its place and layer whether it has a legend."""
    return [
        overlap_panel(
            select(rows, network=network, layer=layer),
            f"Made up: {network}" if layer == "made up" else f"{layer} of {network}",
            names=named(place, layer),
        )
        for place, (network, layer) in enumerate(values_of(curves.of(rows), "network", "layer"))
    ]


def overlap_panel(rows: list[Row], title: str, *, names: bool = True) -> Panel:
    """One layer's curve with its spread over the pairs, the one that the factors predict, chance, and m."""
    curve = curves.of(rows)
    lines = [{**row, "curve": "mean ± deviation of pairs", "value": row["overlap"]} for row in curve]
    if any(row["predicted"] != row["overlap"] for row in curve):
        lines += [{**row, "curve": "from the factors", "value": row["predicted"], "spread": 0.0} for row in curve]
    lines += [{**row, "curve": "random subspaces", "value": row["chance"], "spread": 0.0} for row in curve]
    error = "spread" if all(row["spread"] == row["spread"] for row in lines) else None
    look: dict[str, Any] = {"markers": False, "labels": "legend" if names else "none", "title": title}
    panel = Panel("curves", lines, "k", "value", by="curve", error=error, xlabel="dimension k", ylabel="overlap", **look)
    m = curve[0]["outputs"]
    return panel.line(x=m, label=f"m = {m}") if m <= len(curve) else panel


# The peak at the number of outputs


#: Why small networks show no peak at m.
NO_PEAK = "networks on digits of this size have 6 to 8 sharp output directions, not m: their factors predict no peak at m either"
PEAKS_AT_OUTPUTS = paper("the overlap peaks at the dimension of the layer's output", "section 1.1")


class Figure1(OverlapFigure):
    """Models trained apart share their sharp subspace, and its directions are of rank one.

    First the overlap of the top k eigenvectors of a layer's Hessian, averaged over pairs of models trained from different
    seeds: the source sees it grow up to the number m of the layer's outputs and fall behind it; beside it what the Kronecker
    factors of the models predict. Last the singular values of the first four eigenvectors as matrices.

    A first layer has the peak only where its inputs have a strong mean, as pixels that are not centred: γ₁/γ₂ is 30 for raw
    CIFAR-10, 2 when it is standardised, 5 for standardised MNIST. On digits and MNIST the overlap keeps rising behind m, as
    the factors predict. On raw CIFAR-10 it peaks somewhat below m, near the number of units that are active at all: at 0.8
    to 0.9 of m with the source's rate of 0.01 after 40 epochs or more, at 0.6 to 0.8 with fewer epochs or five times the rate.
    """

    item = "wu-zhu-2020 Figure 1"
    where = "section 1.1: fc1 of LeNet5 (m = 120) and conv11 of ResNet18-W64 (m = 64)"
    view = rows(kind=["overlap", "layer", "singular"])
    study = Overlap.of(
        tiny=apart(DIGITS, layers=["fc1"], models=3),
        laptop=apart(CIFAR, layers=["fc1"], models=3) + apart(MNIST, RAW_CIFAR, layers=["fc1"], models=2),
        paper=[
            *apart("CIFAR10 LeNet5", "MNIST F-200^2", layers=["fc1"], models=5),
            *apart(RAW_CIFAR.but(epochs=1000, batch=128, samples=1000), layers=["fc1"], models=5),
            *apart("CIFAR100 ResNet18-W64", layers=["conv11"], models=5),
        ],
    )
    claims = {
        "the overlap peaks at the number m of outputs (place of the peak over m)": between(
            0.8, 1.3, places(curves).reduce(farthest), **PEAKS_AT_OUTPUTS, fails={"tiny": NO_PEAK}
        ),
        **{
            f"{network}, fc1: the overlap peaks at m (place of the peak over m)": between(
                0.8, 1.3, if_any(curves(network=network, layer="fc1"), place), **PEAKS_AT_OUTPUTS, since="laptop"
            )
            for network in ("LeNet5", MNIST.title, RAW_CIFAR.title)
        },
        "the first four eigenvectors are nearly of rank one (first singular value over the second, smallest)": at_least(
            3.0, (leading_singular["first"] / leading_singular["second"]).min(), **paper("approximately rank 1", "section 1.1")
        ),
        "the overlap at m, in units of that of random subspaces": measured(above_chance),
    }

    def draw(self, rows: list[Row]) -> Any:
        first = curves.of(rows)[0]
        values = select(rows, kind="singular", network=first["network"], layer=first["layer"])
        look: dict[str, Any] = {"xlabel": "rank of the singular value", "ylabel": "singular value"}
        look["title"] = f"Eigenvectors of {first['layer']} as matrices"
        singular = Panel("curves", values, "index", "value", by="eigenvector", markers=True, **look)
        return draw_panels(*layer_panels(rows, lambda place, _: place == 0), singular, size=PANEL)


class Figure5(OverlapFigure):
    """The overlap of models trained apart peaks at the layer's output dimension, whatever that is.

    The same layer in networks of several widths, and for each width the overlap of the top k eigenvectors averaged over all
    pairs of models: the peak is to move with the width. On digits the factors predict no peak at m (see Figure 1).
    """

    item = "wu-zhu-2020 Figure 5"
    where = "section 5.1: four widths of LeNet5, three of ResNet18 and VGG11; which layers is not said"
    study = Overlap.of(
        tiny=apart(*DIGITS.networks("F-20-40", "F-40^2"), layers=["fc1"], models=3),
        laptop=apart(*CIFAR.networks("LeNet5-(fc1-80)", "LeNet5-(fc1-150)"), layers=["fc1"], models=2),
        paper=[
            *apart(
                *(f"CIFAR10 LeNet5{width}" for width in ("-(fc1-80)", "-(fc1-100)", "", "-(fc1-150)")),
                layers=["fc1"],
                models=5,
            ),
            *apart(*(f"CIFAR100 ResNet18-W{width}" for width in (48, 64, 80)), layers=["conv11"], models=5),
            *apart(*(f"CIFAR100 VGG11-W{width}" for width in (48, 64, 80)), layers=["conv8"], models=5),
        ],
    )
    claims = {
        "the overlap peaks near m at every width (place of the peak over m, the one farthest from 1)": between(
            0.75,
            1.25,
            places(curves).reduce(farthest),
            **paper("peaks near m, the dimension of the layer's output", "section 5.1"),
            fails={"tiny": NO_PEAK},
        ),
        "the overlap at m, in units of that of random subspaces (smallest)": measured(above_chance),
    }


class Figure9(OverlapFigure):
    """The overlap of sharp subspaces does not depend on how the models were trained.

    Models of three trainings (the default, a small learning rate, momentum with weight decay), compared in all pairs. The
    peak stays at the output dimension, and the last layer does not start from zero: its outputs are the classes, which
    cannot be permuted. On digits the factors predict no peak at m for fc1 (see Figure 1).
    """

    item, where = "wu-zhu-2020 Figure 9", "appendix E.2.1: LeNet5 on CIFAR10, 6 + 5 + 5 models"
    study = Overlap.of(
        tiny=apart(DIGITS.but(epochs=15), layers=["fc1", "fc3"], models=(1, 1, 1)),
        laptop=apart(DIGITS, layers=["fc1", "fc2", "fc3"], models=(3, 3, 3)),
        paper=apart("CIFAR10 LeNet5", layers=["conv1", "conv2", "fc1", "fc2", "fc3"], models=(6, 5, 5)),
    )
    departs = "The small learning rate is a fifth of the default and its epochs are five times as many; the source's is a tenth."
    claims = {
        "the overlap of fc1 peaks near m (place of the peak over m)": between(
            0.8,
            1.3,
            places(curves(layer="fc1")).reduce(farthest),
            **paper("the position of the peak roughly agrees with m", "appendix E.2.1"),
            fails={"tiny": NO_PEAK},
        ),
        "the overlap of the last layer, fc3, is flat up to c − 1 (largest over smallest)": at_most(
            2.0,
            last_layer.max("overlap") / last_layer.min("overlap"),
            **paper("no linear growth starting from 0 as in other layers", "appendix E.2.1"),
        ),
    }
