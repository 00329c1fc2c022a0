"""The overlap of the sharp subspaces of models that were trained apart: where it peaks, layer by layer, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import Any

import torch
from torch import Tensor

from theodolite.experiments import Experiment, Figure, at_least, at_most, between, measured, rows, within
from theodolite.experiments.hessian import paper
from theodolite.experiments.hessian.kronecker_form import correspondence_panel
from theodolite.experiments.hessian.layers import REACH, Layer, entries, layer_of_each, layer_pairs, numbered
from theodolite.experiments.hessian.networks import ALTERNATIVES, CIFAR, DIGITS, MINI, MNIST, NetworkStudy, Setup, cases, farthest
from theodolite.experiments.lab.panels import Panel, draw_panels
from theodolite.experiments.query import Column, Query, select, values_of
from theodolite.experiments.study import Computation
from theodolite.linalg import overlap_curve
from theodolite.measures.hessian import autocorrelation, correspondence, predicted_overlap, rank_one_count
from theodolite.measures.hessian.structure import matricised
from theodolite.operators import KroneckerFactors
from theodolite.operators.kronecker import factors_of
from theodolite.results import Row

PANEL = (4.4, 3.3)
#: Pixels that are not centred have a strong mean; at this rate most units of the first layer stay alive.
RAW_CIFAR = Setup("F-200^2", data="cifar10", epochs=80, until=0.0, rate=0.01, batch=32, samples=500, pixels="raw", span=True)


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
                0.8, 1.3, curves(network=network, layer="fc1").if_any(place), **PEAKS_AT_OUTPUTS, since="laptop"
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


# Layer by layer: convolutions, layers without a peak at m, the last layer


CONVOLUTIONS = [f"conv{i}" for i in range(1, 9)]
RESIDUAL = [f"conv{i}" for i in range(1, 18)]
DROPS = paper("drops after exceeding the dimension of final output", "E.2.2")
SHARP_DECREASE = paper("a sharp decrease after dimension 9", "F.3.3")


convolutions = curves(layer=lambda layer: layer.startswith("conv") and layer != "conv1")
last_layers = curves(layer=lambda layer: layer.startswith("fc")).by("network", "layer")
#: Overlap at 1.5 c, the last of the curve, over that at c − 1.
classifier_drop = last_layers.each(lambda curve: relative_overlap(curve, curve[-1]["k"], curve[0]["outputs"] - 1)).max()


class Figure10(OverlapFigure):
    """Convolutional layers share their sharp subspace too, with a peak at the number of channels.

    The overlap of the top k eigenvectors of the convolutions of models trained apart; the classifier behind them stays level
    and drops behind the number of classes.
    """

    item = ("wu-zhu-2020 Figure 10", "wu-zhu-2020 Figure 11")
    where = "appendix E.2.2: VGG11 on CIFAR10 and CIFAR100, ResNet18 on CIFAR100"
    study = Overlap.of(
        tiny=apart(MINI, layers=["conv1", "conv2", "fc3"], models=3),
        laptop=apart(MINI.but(epochs=100, until=0.02, samples=1437), layers=["conv1", "conv2", "fc3"], models=5),
        paper=[
            *apart("CIFAR10 VGG11-W32", "CIFAR10 VGG11-W200", layers=[*CONVOLUTIONS, "fc1"], models=5),
            *apart("CIFAR100 VGG11-W48", "CIFAR100 VGG11-W80", layers=[*CONVOLUTIONS, "fc1"], models=5),
            *apart(*(f"CIFAR100 ResNet18-W{width}" for width in (48, 64, 80)), layers=[*RESIDUAL, "fc1"], models=5),
        ],
    )
    claims = {
        # 8 ± 3 channels
        "the overlap of most convolutions behind the first peaks at the number of channels (share within 3/8 of it)": at_least(
            0.5,
            places(convolutions).share(lambda p: abs(p - 1) <= 0.375),
            **paper("for most of the convolutional layers, around the number of output channels", "E.2.2"),
        ),
        "the overlap of the classifier drops behind the number c of classes (at 1.5 c over at c − 1)": at_most(
            1.0, classifier_drop, **DROPS
        ),
    }


#: The curves of a fully connected network, that of its fc2 and the others; and those with a delayed peak.
dense = curves(network=lambda network: network.startswith("F-"))
early_layer, other_layers = dense(layer="fc2"), dense(layer=lambda layer: layer != "fc2")
delayed = curves.where(lambda row: row["network"].startswith("heavy") or row["layer"] in ("conv2", "conv7"))


class Figure12(OverlapFigure):
    """Layers whose sharp subspaces share little, or share most behind the output dimension.

    An early and low peak: the overlap grows for about c − 1 dimensions and falls. A delayed peak: it grows beyond m and stays.
    The delayed one needs an output Hessian with a heavy tail; small networks on digits have none, so that below the
    source's own size pairs of Kronecker products with τ_i = 1/i stand in for it.
    """

    item = ("wu-zhu-2020 Figure 12", "wu-zhu-2020 Figure 13")
    where = "appendix E.2.3: fc2 of F-200^2, conv5 and conv2 of VGG11-W200, conv7 of ResNet18-W48"
    study = Overlap.of(
        tiny=apart(DIGITS, layers=["fc1", "fc2", "fc3"], models=3) + made_up("heavy tail", outputs=60, pairs=10),
        laptop=apart(DIGITS, layers=["fc1", "fc2", "fc3"], models=6) + made_up("heavy tail", outputs=60, pairs=40),
        paper=[
            *apart("MNIST F-200^2", layers=["fc1", "fc2", "fc3"], models=5),
            *apart("CIFAR10 VGG11-W200", layers=["conv2", "conv5"], models=5),
            *apart("CIFAR100 ResNet18-W48", layers=["conv7"], models=5),
        ],
    )
    claims = {
        "fc2 has a small peak at c − 1 (place of the largest overlap among the first m/2 dimensions)": within(
            2,
            9,
            early_layer.measure(early_place),
            **paper("a small peak at very small dimensions; around 10 for fc2 of F-200^2", "E.2.3 and F.3.3"),
        ),
        "the overlap declines behind the early peak (at twice its place, over the peak)": at_most(
            1.0,
            early_layer.measure(lambda curve: relative_overlap(curve, 2 * early_place(curve), early_place(curve))),
            **SHARP_DECREASE,
        ),
        "the overlap there is lower than in the other layers (at c − 1, over the smallest of the others)": at_most(
            1.0,
            early_layer(k=9).only("overlap") / other_layers(k=9).min("overlap"),
            **paper("significantly lower than the other layers", "E.2.3"),
        ),
        "with a heavy tail the peak lies beyond m (place of the peak over m)": at_least(
            1.3, places(delayed).min(), **paper("the peak dimension is larger than the output dimension", "E.2.3")
        ),
    }


def level(rows: list[Row]) -> float:
    """Mean overlap of a network's last layer for k up to c − 1, over (v₁·v₁')²."""
    layer = select(rows, kind="layer")[0]
    curve = [row["overlap"] for row in curves.of(rows) if row["k"] < layer["outputs"]]
    return float(sum(curve) / len(curve) / layer["squared_dot"])


below_classes = curves.where(lambda row: row["k"] < row["outputs"]).by("network", "layer")


class Figure23(OverlapFigure):
    """The last layer shares its sharp subspace from the first direction on.

    The outputs of the last layer are the classes, which no permutation of units can exchange; so the overlap is level, about
    (v₁·v₁')² with v₁ the leading input direction of each model, up to the number of classes, and then falls.
    """

    item = "wu-zhu-2020 Figure 23"
    where = "appendix F.3.2: the last layers of F-200^2, LeNet5, VGG11-W200 and ResNet18-W64"
    study = Overlap.of(
        tiny=apart(DIGITS, layers=["fc3"], models=5),
        laptop=[
            *apart(DIGITS, layers=["fc3"], models=6),
            *apart(MINI, layers=["fc3"], models=5),
            *apart(CIFAR, layers=["fc3"], models=2),
        ],
        paper=[
            *apart("MNIST F-200^2", "CIFAR10 LeNet5", layers=["fc3"], models=5),
            *apart("CIFAR10 VGG11-W200", "CIFAR100 ResNet18-W64", layers=["fc1"], models=5),
        ],
    )
    claims = {
        "the overlap is level up to c − 1 (largest over smallest, the worst network)": at_most(
            2.0,
            below_classes.each(rows.max("overlap") / rows.min("overlap")).max(),
            **paper("will stay high before dimension m", "F.3.2"),
        ),
        "its level is (v₁·v₁')² (mean overlap up to c − 1 over that, the network farthest from 1)": between(
            0.5,
            2.0,
            rows.by("network", "layer").each(level).reduce(farthest),
            **paper("approximately (t₁·t₂)² for all dimensions k <= m", "F.3.2"),
        ),
        "it falls behind the number c of classes (at 1.5 c over at c − 1, the largest)": at_most(1.0, classifier_drop, **DROPS),
    }


# Why: the spectra of the two factors


def from_predicted(rows: list[Row]) -> float:
    """Distance between the place of the early peak and K*, the number of directions u_i ⊗ v₁ that the factors predict."""
    return float(abs(early_place(curves.of(rows)) - select(rows, kind="layer")[0]["rank_one_count"]))


def fall(rows: list[Row]) -> float:
    """Overlap at twice K* over that at K*."""
    count = round(select(rows, kind="layer")[0]["rank_one_count"])
    return relative_overlap(curves.of(rows), 2 * count, count)


class Figure24(NetworkStudy, Experiment):
    """Why the overlap of some layers peaks early: the factors say where.

    If the second eigenvalue of the input's auto-correlation is not small enough, only K* leading eigenvectors are of the form
    u_i ⊗ v₁ (K* counts τ_i γ₁ > τ₁ γ₂); the overlap grows up to there and falls behind it. Shown are the overlap, the spectra of
    both factors, and how the top eigenvectors correspond to those of E[xxᵀ], for the Hessian and its approximation.
    """

    item, where = "wu-zhu-2020 Figure 24", "appendix F.3.3: fc2 of F-200^2 on MNIST"
    sizes = {
        "tiny": cases(DIGITS, layer="fc2", models=[["default", 3]], corner=20),
        "laptop": cases(MNIST, layer="fc2", models=[["default", 3]], corner=20),
        "paper": cases("MNIST F-200^2", layer="fc2", models=[["default", 5]], corner=20),
    }
    claims = {
        "the early peak lies at K* (distance, among the first m/2 dimensions)": at_most(
            2, from_predicted, **paper("grows linearly below dimension 10, sharp decrease after 9", "F.3.3")
        ),
        "behind K* the overlap falls (at 2 K* over at K*)": at_most(
            1.0, fall, **paper("a sharp decrease of overlap after dimension 9", "F.3.3")
        ),
        "the first nine eigenvectors lie along v₁ (mean of Corr(v₁, h_j))": at_least(
            0.8,
            rows(kind="correspondence", matrix="true", i=1, j=range(1, 10)).mean("value"),
            **paper("h_i ≈ r_i ⊗ E[x] for i <= 9", "F.3.3"),
        ),
        "the growth up to nine dimensions, carried on to m, would reach an overlap of about a quarter": within(
            0.1,
            0.25,
            curves(k=9).column(lambda row: row["overlap"] * row["outputs"] / 9).only(),
            **paper(0.25, "F.3.3 (0.012 at 9 of 200 dimensions)"),
        ),
    }

    def run(self, job: Mapping[str, Any], *weights: list[Row]) -> Iterator[Row]:
        layer, corner = job["layer"], job["corner"]
        # Up to m/2 shows the early peak and its fall; the whole curve is that of Figure 12.
        layers = layer_of_each(self.problems(job, weights), layer, reach=0.5)
        yield from overlap_rows(layers, network=job["setup"]["network"], layer=layer)
        factors, pairs = layers[0]
        for name, factor in (("output Hessian", factors.output), ("input auto-correlation", factors.input)):
            values = torch.linalg.eigvalsh(factor).flip(0)[:corner]
            yield from numbered({"kind": "spectrum", "factor": name}, value=values / values[0])
        approximate = factors.top_eigenpairs(corner).vectors
        for name, vectors in (("true", pairs.vectors[:, :corner]), ("approximate", approximate)):
            yield from entries({"kind": "correspondence", "matrix": name}, correspondence(vectors, factors).inputs[:corner])

    def draw(self, rows: list[Row]) -> Any:
        curve, count = curves.of(rows), select(rows, kind="layer")[0]["rank_one_count"]
        title = f"{curve[0]['layer']} of {curve[0]['network']}, m = {curve[0]['outputs']}"
        look: dict[str, Any] = {"value": "value", "index": "i", "by": "factor", "log": True, "xlabel": "rank"}
        look |= {"ylabel": "eigenvalue over the largest", "title": "Spectra of the factors"}
        return draw_panels(
            overlap_panel(curve, title).line(x=count, label=f"K* = {count:g}"),
            Panel("eigenvalues", select(rows, kind="spectrum"), **look),
            *(
                correspondence_panel(select(rows, kind="correspondence", matrix=name), f"{name} Hessian with E[xxᵀ]", "v_i")
                for name in ("true", "approximate")
            ),
            columns=2,
            size=PANEL,
        )


#: Nine outliers are those of conv5 at the source's size, the heavy tail is that of conv2.
outliers = curves.where(lambda row: row["network"] == "nine outliers" or row["layer"] == "conv5")
heavy_tail = curves.where(lambda row: row["network"] == "heavy tail" or row["layer"] == "conv2")


class Figure25(OverlapFigure):
    """Three shapes of the overlap curve, from the spectrum of the output Hessian alone.

    With a flat spectrum the overlap peaks at m; with nine outliers it peaks at nine and falls; with a heavy tail it grows
    beyond m. In small sizes the layers are made up: random eigenvectors of E[M], a positive leading input direction and the
    law of the overlap of two Kronecker products; the source's size measures conv5 and conv2 of VGG11-W200.
    """

    item = ("wu-zhu-2020 Figure 25", "wu-zhu-2020 Figure 26")
    where = "appendix F.3.3: conv5 and conv2 of VGG11-W200 on CIFAR10"
    view = rows(kind=["overlap", "layer", "spectrum"])
    study = Overlap.of(
        tiny=made_up(*SPECTRA, outputs=60, pairs=20),
        laptop=made_up(*SPECTRA, outputs=120, pairs=40),
        paper=made_up("flat", outputs=200, pairs=20)
        + apart("CIFAR10 VGG11-W200", layers=["conv2", "conv5"], models=5, reach=2.0),
    )
    claims = {
        # 2 of 60 dimensions
        "a flat spectrum of the output Hessian puts the peak at m (place over m)": within(
            0.034, 1.0, curves(network="flat").measure(place), **paper("peak at m", "Theorem F.1", "theory")
        ),
        "nine outliers put it at nine (place among the first m/2 dimensions)": within(
            1,
            9,
            outliers.measure(early_place),
            **paper("a low peak at very small dimensions", "E.2.3 and F.3.3"),
        ),
        "behind it little is shared (overlap at m over that at nine)": at_most(
            1.0, outliers.measure(lambda curve: relative_overlap(curve, curve[0]["outputs"], 9)), **SHARP_DECREASE
        ),
        "a heavy tail delays the peak (place over m)": at_least(
            1.3, heavy_tail.measure(place), **paper("a delayed and flattened peak, later than the output dimension", "F.3.3")
        ),
    }

    def draw(self, rows: list[Row]) -> Any:
        look: dict[str, Any] = {"by": "network", "log": "y", "markers": False, "labels": "legend", "xlabel": "rank"}
        look |= {"ylabel": "eigenvalue over the largest", "title": "Spectrum of the output Hessian"}
        spectrum = Panel("curves", select(rows, kind="spectrum"), "i", "value", **look)
        legend = min(1, len(values_of(curves.of(rows), "network", "layer")) - 1)
        return draw_panels(spectrum, *layer_panels(rows, lambda place, _: place == legend), columns=2, size=PANEL)
