"""Is the input of a layer nearly one direction? Line by line of the tables, and what batch norm makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from theodolite.experiments import Claim, Experiment, Figure, at_least, at_most, between, relative, rows, within
from theodolite.experiments.hessian import paper
from theodolite.experiments.hessian.layers import Layer, layer_of_each, numbered
from theodolite.experiments.hessian.networks import NetworkStudy, Setup, as_printed, cases, network_of
from theodolite.experiments.lab.panels import curves, draw_panels
from theodolite.experiments.query import Column, Query, Value, select, values_of
from theodolite.linalg import Eigenpairs, overlap_curve
from theodolite.measures.hessian import autocorrelation, correspondence, kronecker_overlap
from theodolite.operators import KroneckerFactors, kronecker_factors
from theodolite.problem import Problem
from theodolite.results import Row

#: Samples taken at a time: the patches of a convolution are many.
CHUNK = 500


class LayerInputs(NetworkStudy):
    """A row for each layer of a trained network: (v₁·μ̂)², λ₁/λ₂ and its bound."""

    def run(self, job: Mapping[str, Any], weights: list[Row]) -> Iterator[Row]:
        setup = Setup(**job["setup"])
        model, (x, y) = network_of(setup, job["seed"], weights)
        batches = [(x[i : i + CHUNK], y[i : i + CHUNK]) for i in range(0, len(x), CHUNK)]
        problem = Problem(model, nn.CrossEntropyLoss(), batches)
        names = list(problem.layers)
        for name, factors in kronecker_factors(problem, names, sharing="expand").items():
            found = autocorrelation(factors)
            yield {
                "line": setup.line,
                "data": setup.data,
                "network": setup.network,
                "normalised": setup.network.endswith("-BN"),
                "seed": job["seed"],
                "layer": name,
                "part": "conv" if "conv" in name else "fc",
                "first": name == names[0],
                "squared_dot": found.squared_dot,
                "ratio": found.ratio,
                "bound": found.bound,
            }


#: Networks on digits, the small stand-ins; the last is trained half as long.
DENSE, SMALL_LENET, QUICK_LENET = (Setup("F-40^2"), Setup("LeNet-mini", flat=False), Setup("LeNet-mini", flat=False, until=0.1))


def mnist(network: str, epochs: int = 15) -> Setup:
    """A fully connected network on all of MNIST, its layers looked at on 10000 images."""
    return Setup(network, data="mnist", epochs=epochs, until=0.01, batch=128, samples=10000)


def cifar(network: str, epochs: int) -> Setup:
    """A network on what there is of CIFAR-10, its layers looked at on 2000 images."""
    flat = network.startswith("F-")
    return Setup(network, data="cifar10", epochs=epochs, until=0.05, batch=128, samples=2000, flat=flat)


# The tables as printed


class Line(NamedTuple):
    """Layers counted, then mean, smallest and largest of (v₁·μ̂)² and of λ₁/λ₂."""

    layers: int
    dot: float
    dot_min: float
    dot_max: float
    ratio: float
    ratio_min: float
    ratio_max: float


#: Fully connected layers but the first. The source prints CIFAR10 VGG11-W64 twice; the second is marked here.
TABLE_6: dict[str, Line] = {
    "MNIST F-200^2": Line(2, 1.000, 1.000, 1.000, 12.29, 9.65, 16.16),
    "MNIST F-600^2": Line(2, 0.999, 0.999, 0.999, 12.00, 11.42, 13.00),
    "MNIST F-600^4": Line(4, 1.000, 0.999, 1.000, 17.81, 7.33, 28.00),
    "MNIST F-600^8": Line(8, 0.991, 0.965, 1.000, 6.63, 2.28, 11.15),
    "CIFAR10 F-600^2": Line(2, 0.999, 0.998, 1.000, 9.24, 4.74, 13.74),
    "CIFAR10 F-1500^3": Line(3, 0.999, 0.997, 1.000, 13.27, 6.10, 18.41),
    "CIFAR10 LeNet5": Line(3, 0.998, 0.997, 0.999, 7.21, 5.88, 9.02),
    "CIFAR10 LeNet5-(fc1-80)": Line(3, 0.998, 0.996, 0.999, 7.80, 6.77, 11.01),
    "CIFAR10 LeNet5-(fc1-100)": Line(3, 0.997, 0.995, 0.999, 7.42, 6.20, 9.10),
    "CIFAR10 LeNet5-(fc1-150)": Line(3, 0.998, 0.992, 0.999, 7.35, 5.34, 9.62),
    "CIFAR10 VGG11-W32": Line(1, 0.990, 0.988, 0.993, 6.02, 5.57, 6.51),
    "CIFAR10 VGG11-W64": Line(1, 0.996, 0.993, 0.999, 5.87, 5.32, 6.26),
    "CIFAR10 VGG11-W64 (second)": Line(1, 0.995, 0.993, 0.996, 6.24, 5.97, 6.70),
    "CIFAR100 VGG11-W48": Line(1, 0.999, 0.999, 0.999, 17.861, 15.456, 20.491),
    "CIFAR100 VGG11-W64": Line(1, 0.999, 0.999, 1.000, 19.185, 18.358, 20.410),
    "CIFAR100 VGG11-W80": Line(1, 0.999, 0.999, 1.000, 19.455, 18.120, 21.450),
    "CIFAR100 ResNet18-W48": Line(1, 1.000, 1.000, 1.000, 28.23, 27.37, 29.27),
    "CIFAR100 ResNet18-W64": Line(1, 1.000, 1.000, 1.000, 27.07, 25.72, 29.50),
    "CIFAR100 ResNet18-W80": Line(1, 1.000, 1.000, 1.000, 28.23, 25.98, 30.03),
}

#: Convolutions but the first.
TABLE_7: dict[str, Line] = {
    "CIFAR10 LeNet5": Line(1, 0.999, 0.998, 0.999, 15.87, 11.15, 27.20),
    "CIFAR10 LeNet5-(fc1-80)": Line(1, 0.998, 0.998, 0.999, 12.36, 9.53, 13.36),
    "CIFAR10 LeNet5-(fc1-100)": Line(1, 0.999, 0.999, 0.999, 19.49, 16.69, 21.92),
    "CIFAR10 LeNet5-(fc1-150)": Line(1, 0.999, 0.998, 0.999, 12.86, 7.65, 16.34),
    "CIFAR10 VGG11-W32": Line(7, 0.995, 0.991, 0.999, 5.31, 2.39, 9.09),
    "CIFAR10 VGG11-W64": Line(7, 0.997, 0.993, 1.000, 5.76, 2.50, 9.98),
    "CIFAR10 VGG11-W64 (second)": Line(7, 0.998, 0.995, 1.000, 5.81, 2.53, 10.62),
    "CIFAR100 VGG11-W48": Line(7, 0.996, 0.991, 0.999, 5.72, 2.46, 9.90),
    "CIFAR100 VGG11-W64": Line(7, 0.995, 0.991, 0.999, 5.66, 2.50, 10.79),
    "CIFAR100 VGG11-W80": Line(7, 0.994, 0.988, 0.998, 5.18, 2.50, 8.45),
    "CIFAR100 ResNet18-W48": Line(19, 0.981, 0.917, 0.998, 3.79, 1.89, 7.56),
    "CIFAR100 ResNet18-W64": Line(19, 0.985, 0.910, 0.998, 3.96, 1.81, 7.53),
    "CIFAR100 ResNet18-W80": Line(19, 0.987, 0.954, 0.997, 4.16, 2.11, 7.04),
}

#: Fully connected layers but the first, of networks with batch norm.
TABLE_8: dict[str, Line] = {
    "MNIST F-200^2-BN": Line(2, 0.062, 0.001, 0.260, 1.16, 1.04, 1.30),
    "MNIST F-600^2-BN": Line(2, 0.026, 0.000, 0.063, 1.13, 1.02, 1.26),
    "MNIST F-600^4-BN": Line(4, 0.027, 0.000, 0.146, 1.11, 1.03, 1.19),
    "CIFAR10 LeNet5-BN": Line(3, 0.210, 0.001, 0.803, 1.54, 1.20, 1.89),
}


# What is measured


#: Layers but the first.
fc, conv = rows(part="fc", first=False), rows(part="conv", first=False)
deep = rows(network=lambda network: network.startswith(("VGG", "ResNet")))


def line_by_line(table: Mapping[str, Line], part: str, *, dot: str, ratio: str) -> dict[str, Claim]:
    """Our mean of each line against the printed one, which go from ... to ... as `dot` and `ratio` say."""
    lines = rows(part=part, line=list(table))

    def worst(column: str, field: str, distance: Callable[[float, float], float]) -> Value:
        def of_line(rows: list[Row]) -> float:
            return distance(fmean(row[column] for row in rows), getattr(table[rows[0]["line"]], field))

        return lines.if_any(lines.by("line").each(of_line).max())

    gap, factor = worst("squared_dot", "dot", lambda a, b: abs(a - b)), worst("ratio", "ratio", lambda a, b: max(a / b, b / a))
    return {
        "line by line: largest distance of the mean squared dot product from the printed one": at_most(
            0.01, gap, says=dot, since="laptop"
        ),
        "line by line: largest factor between the mean λ₁/λ₂ and the printed one": at_most(
            2.0, factor, says=ratio, since="laptop"
        ),
    }


def bounded(query: Query) -> dict[str, Claim]:
    """That λ₁/λ₂ keeps to its lower bound."""
    margin, reported = (query["ratio"] / query["bound"]).min(), paper("usually; always above it less 1", "appendix E.1, (52)")
    return {"λ₁/λ₂ never lies below ‖μ‖²/‖Σ‖ (smallest ratio of the two)": at_least(1.0 - 1e-9, margin, **reported)}


def overall(value: Value) -> Value:
    """A value of the networks of Table 6, or of the small ones where only they are."""
    return Value(lambda rows: value(select(rows, line=list(TABLE_6)) or rows))


# How it is drawn


class LineTable(Figure):
    """Both quantities by line of the table: ours layer by layer, the source's mean and range beside them."""

    table: Mapping[str, Line]
    drawn = rows

    def draw(self, rows: list[Row]) -> Any:
        from theodolite import plots

        rows, table = self.drawn.of(rows), self.table
        names = values_of(rows, "line")
        figure, axes = plots.panels(2, size=(2.6 + 0.55 * min(len(names), 10), 3.6))
        for ax, name, label, field in (
            (axes[0], "squared_dot", "squared dot product (v₁·μ̂)²", "dot"),
            (axes[1], "ratio", "spectral ratio λ₁/λ₂", "ratio"),
        ):
            ours = [{"place": names.index(r["line"]) - 0.15, name: r[name], "from": f"here, {r['layer']}"} for r in rows]
            plots.scatter(ours, "place", name, by="from", log="y" if name == "ratio" else "", xlabel="", ylabel=label, ax=ax)
            for place, line in enumerate(names):
                if line in table:
                    mean, low, high = (getattr(table[line], f"{field}{end}") for end in ("", "_min", "_max"))
                    ax.errorbar(place + 0.2, mean, [[mean - low], [high - mean]], fmt="_", color="#444444", capsize=3, ms=9)
            if any(line in table for line in names):
                ax.errorbar([], [], [], fmt="_", color="#444444", label="source: mean, range")
            low, high = ax.get_ylim()  # a few points that agree must not look scattered
            ax.set_ylim((low / 1.2, high * 1.2) if name == "ratio" else (min(low, 0.985), max(high, 1.001)))
            if ax is axes[1]:  # one legend, to the right of the figure: inside it would hide points
                ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
            elif (legend := ax.get_legend()) is not None:
                legend.remove()
            ax.set_xticks(range(len(names)), names, rotation=35, ha="right")
            ax.set_xlim(-0.6, len(names) - 0.4)
        return figure


class Table6(LineTable):
    """The mean rules the input of fully connected layers: squared dot products and spectral ratios.

    Of every layer but the first: the squared dot product of the mean input with the leading eigenvector of E[xxᵀ], and
    the ratio of its two largest eigenvalues. Near 1 and large: E[xxᵀ] is nearly of rank one, and the top eigenvectors of
    the layer's Hessian are products with that one direction.
    """

    item, where = "wu-zhu-2020 Table 6", "section 4.3 and appendix E.1; Wu 2023, section C.6.1"
    view, table = fc, TABLE_6
    study = LayerInputs.of(
        tiny=cases(DENSE, QUICK_LENET, seeds=2),
        laptop=cases(
            *(DENSE, SMALL_LENET, mnist("F-200^2"), mnist("F-600^2", 8), cifar("F-600^2", 25), cifar("LeNet5", 40)), seeds=2
        ),
        paper=cases(DENSE, SMALL_LENET, *(line for line in TABLE_6 if "second" not in line), seeds=5),
    )
    claims = {
        "digits: the leading eigenvector of E[xxᵀ] is the mean (smallest squared dot product)": at_least(
            0.98, fc(data="digits").min("squared_dot"), **paper(0.964, "section 4.3, smallest of all networks")
        ),
        "digits: one eigenvalue of E[xxᵀ] stands out (smallest λ₁/λ₂)": at_least(
            2.5, fc(data="digits").min("ratio"), **paper(2.28, "section 4.3, smallest of all networks")
        ),
        "mean squared dot product over all layers and networks": within(
            0.01, None, overall(fc.mean("squared_dot")), **paper(0.997, "section 4.3")
        ),
        "smallest squared dot product of all layers and networks": at_least(
            0.964, overall(fc.min("squared_dot")), **paper(0.964, "section 4.3")
        ),
        "smallest λ₁/λ₂ of all layers and networks": at_least(
            2.28, overall(fc.min("ratio")), **paper(2.28, "section 4.3, where it is called ‖μμᵀ‖/‖Σ‖")
        ),
        "mean λ₁/λ₂ over all layers and networks": relative(
            0.2, None, overall(fc.mean("ratio")), **paper(12.08, "section 4.3"), since="paper"
        ),
        **line_by_line(TABLE_6, "fc", dot="0.990 to 1.000", ratio="5.87 to 28.23"),
        **bounded(fc),
    }
    departs = (
        "The bound is the sharper ‖μ‖²/‖Σ‖, which always holds: the mean is a test vector for λ₁ and λ₂ ≤ ‖Σ‖ by "
        "interlacing. One line of the table is printed under the name of another (VGG11-W64 twice) and is left out."
    )


class Table7(LineTable):
    """The mean rules the input of convolutions too: squared dot products and spectral ratios.

    As Table 6 with patches for inputs: E[XXᵀ] is summed over the patches of an image, and the leading left singular
    vector of E[X] takes the place of the mean.
    """

    item, where = "wu-zhu-2020 Table 7", "appendix E.1; Wu 2023, section C.6.1"
    view, drawn, table = rows(first=False), conv, TABLE_7
    study = LayerInputs.of(
        tiny=cases(QUICK_LENET, seeds=2),
        laptop=cases(SMALL_LENET, cifar("LeNet5", 40), cifar("LeNet5-(fc1-80)", 40), seeds=2),
        paper=cases(SMALL_LENET, *(line for line in TABLE_7 if "second" not in line), seeds=5),
    )
    claims = {
        "digits: the leading eigenvector of E[XXᵀ] is the mean patch (smallest squared dot product)": at_least(
            0.98, conv(data="digits").min("squared_dot"), **paper(0.910, "Table 7, smallest of all networks")
        ),
        "digits: one eigenvalue of E[XXᵀ] stands out (smallest λ₁/λ₂)": at_least(
            2.5, conv(data="digits").min("ratio"), **paper(1.81, "Table 7, smallest of all networks")
        ),
        **line_by_line(TABLE_7, "conv", dot="0.981 to 0.999", ratio="3.79 to 19.49"),
        "the gap of convolutions is smaller than that of linear layers in VGG11 and ResNet18 (ratio of the means)": at_most(
            1.0,
            deep.if_any(conv.mean("ratio") / fc.mean("ratio")),
            **paper("generally smaller", "appendix E.1"),
            since="paper",
        ),
        **bounded(conv),
    }
    departs = "One line of the table is printed under the name of another (VGG11-W64 twice) and is left out."


DENSE_BN, SMALL_LENET_BN = DENSE.but(network="F-40^2-BN"), SMALL_LENET.but(network="LeNet-mini-BN")
#: Fully connected layers but the first, with batch norm in the network and without.
dense = rows(part="fc", normalised=True, network=lambda network: network.startswith("F-"))
lenets = fc(normalised=True, network=lambda network: network.startswith("LeNet"))
plain = fc(normalised=False)
lenet5 = rows(network="LeNet5-BN")
pooled, *others = (lenet5(layer=name).mean("squared_dot") for name in ("fc1", "fc2", "fc3"))

NOT_CENTRED = "the norm before fc1 of LeNet-mini-BN centres each channel, not each place: 0.302, and 2.6 for one seed of three"


class Table8(LineTable):
    """With batch norm the mean no longer rules: squared dot products and spectral ratios.

    As Table 6, for networks with a batch norm (no scale, no shift, statistics frozen) after each ReLU, beside the same
    networks without. The first layer has no norm before it and keeps its structure. A norm of a convolution centres each
    channel over all its places together: the means of single places remain, so fc1 of a LeNet keeps a mean.
    """

    item, where = "wu-zhu-2020 Table 8", "appendix F.4; Wu 2023, section C.7.3"
    view, drawn, table = rows(part="fc"), fc, {**TABLE_6, **TABLE_8}
    study = LayerInputs.of(
        tiny=cases(DENSE_BN, DENSE, SMALL_LENET_BN.but(epochs=10), seeds=3),
        laptop=cases(
            *(DENSE_BN, DENSE, SMALL_LENET_BN, mnist("F-200^2-BN", 10), mnist("F-200^2", 10), mnist("F-600^2-BN", 4)),
            cifar("LeNet5-BN", 20),
            seeds=2,
        ),
        paper=cases(*(line.removesuffix(norm) for norm in ("", "-BN") for line in TABLE_8), seeds=3),
    )
    claims = {
        "with batch norm the leading eigenvector is not the mean (mean squared dot product, fully connected networks)": at_most(
            0.3, dense(first=False).mean("squared_dot"), says="0.026 to 0.062"
        ),
        "with batch norm no eigenvalue stands out (largest λ₁/λ₂, fully connected networks)": at_most(
            2.0, dense(first=False).max("ratio"), **paper(1.30, "Table 8, largest")
        ),
        "LeNets: with batch norm the leading eigenvector is not the mean (mean squared dot product)": at_most(
            0.3, lenets.mean("squared_dot"), **paper(0.210, "Table 8, LeNet5-BN"), fails={"tiny": NOT_CENTRED}
        ),
        "LeNets: with batch norm no eigenvalue stands out (largest λ₁/λ₂)": at_most(
            2.0, lenets.max("ratio"), **paper(1.89, "Table 8, largest of LeNet5-BN"), fails={"tiny": NOT_CENTRED}
        ),
        "without batch norm it is the mean (smallest squared dot product)": at_least(
            0.98, plain.min("squared_dot"), **paper(0.997, "Table 6, smallest of these networks")
        ),
        "without batch norm one eigenvalue stands out (smallest λ₁/λ₂)": at_least(
            2.5, plain.min("ratio"), **paper(5.88, "Table 6, smallest of these networks")
        ),
        "the first layer has no norm before it and keeps its gap (its λ₁/λ₂ over the largest of the others)": at_least(
            1.0,
            dense(first=True).min("ratio") / dense(first=False).max("ratio"),
            **paper("except for the first layer", "appendix F.4"),
        ),
        "LeNet5-BN: the pooling after the norm brings the mean back in fc1 (squared dot product above fc2 and fc3)": at_least(
            0.1,
            lenet5.if_any(pooled - Column.of(*others).max()),
            **paper(0.803, "Table 8, largest of LeNet5-BN; that it is fc1 is our reading"),
            since="laptop",
        ),
    }


# Batch norm takes the mean out of a layer's input, and with it the structure of the layer's Hessian


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
        problems = self.problems(job, weights)
        outer, inner = (layer_of_each(problems, job[name], tol=1e-3) for name in ("outer", "inner"))
        for seed, layer in enumerate(inner):
            for kind, curve in _explained(*layer).items():
                yield from _curve(job, kind, str(seed), curve, layer)
        for layers, kind in ((outer, "outer overlap"), (inner, "overlap")):
            for (i, a), (j, b) in combinations(enumerate(layers), 2):
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
