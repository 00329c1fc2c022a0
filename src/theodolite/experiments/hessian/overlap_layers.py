"""The overlap layer by layer: convolutions, the last layer, layers without a peak at m, and how the factors explain them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from theodolite.experiments import Experiment, at_least, at_most, between, rows, within
from theodolite.experiments.hessian import paper
from theodolite.experiments.hessian.correspondence import correspondence_panel
from theodolite.experiments.hessian.networks import CIFAR, DIGITS, MINI, MNIST, NetworkStudy, cases, entries, numbered
from theodolite.experiments.hessian.overlap import (
    PANEL,
    SPECTRA,
    Overlap,
    OverlapFigure,
    apart,
    curves,
    early_place,
    farthest,
    layer_of_each,
    layer_panels,
    made_up,
    overlap_panel,
    overlap_rows,
    place,
    places,
    relative_overlap,
)
from theodolite.experiments.lab.panels import Panel, draw_panels
from theodolite.experiments.query import select, values_of
from theodolite.measures.hessian import correspondence
from theodolite.results import Row

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
