"""The overlap of the sharp subspaces of models that were trained apart: where it peaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.figure import Experiment
from theodolite.experiments.hessian.measuring import (
    Model,
    as_job,
    farthest,
    layer_factors,
    layer_pairs,
    overlap_rows,
    peak,
    select,
    setup_of,
)
from theodolite.experiments.hessian.networks import ALTERNATIVES, Setup
from theodolite.measures.hessian.kronecker_structure import matricised
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL = (4.4, 3.3)
DIGITS = Setup("F-40^2")
MINI = Setup("LeNet-mini", samples=500, flat=False)
CIFAR = Setup("LeNet5", data="cifar10", epochs=15, rate=0.05, batch=64, samples=1000, flat=False)
MNIST = Setup("F-200^2", data="mnist", epochs=5, rate=0.05, batch=32, samples=2000)
#: Pixels that are not centred have a strong mean; at this rate most units of the first layer stay alive.
RAW_CIFAR = Setup("F-200^2", data="cifar10", epochs=80, until=0.0, rate=0.01, batch=32, samples=500, pixels="raw", span=True)
#: The source's training: 1000 epochs whatever the loss, curvature on all 50000 images.
SOURCE = Setup("LeNet5", data="cifar10", epochs=1000, until=0.0, rate=0.01, batch=128, samples=50000, flat=False)
SOURCE_100 = replace(SOURCE, data="cifar100")
SOURCE_MNIST = replace(SOURCE, network="F-200^2", data="mnist", samples=60000, flat=True)


@dataclass(frozen=True)
class Case:
    """A network, the layers of it that are looked at, and how many models of which training are compared."""

    setup: Setup
    layers: tuple[str, ...]
    seeds: int
    trainings: tuple[tuple[str, int], ...] = ()  # name and number of models; none means `seeds` of the default


@dataclass(frozen=True)
class Params:
    cases: tuple[Case, ...]


def networks_of(base: Setup, *networks: str) -> tuple[Setup, ...]:
    """The same training of other networks."""
    return tuple(replace(base, network=network) for network in networks)


class OverlapExperiment(Experiment):
    """Parent of those that compare models in pairs: one job per network, one panel per layer."""

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        for case in p.cases:
            yield {
                "setup": as_job(case.setup),
                "layers": list(case.layers),
                "models": [list(part) for part in case.trainings or (("default", case.seeds),)],
                "seed": 0,
            }

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        models = models_of(job)
        for layer in job["layers"]:
            yield from overlap_rows(models, layer, network=models[0][0].title)

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        found = cases(rows)
        figure, axes = plots.panels(len(found), size=PANEL)
        for ax, case in zip(axes, found, strict=True):
            draw_overlap(case_rows(rows, case), title_of(case), ax, names=ax is axes[0] or case[1] == "made up")
        return figure


def models_of(job: Mapping[str, Any]) -> list[Model]:
    """The models that a job compares."""
    setup = setup_of(job)
    return [(replace(setup, training=name), job["seed"] + i) for name, count in job["models"] for i in range(count)]


def cases(rows: list[Row]) -> list[tuple[str, str]]:
    """Network and layer of the overlap curves."""
    return list(dict.fromkeys((row["network"], row["layer"]) for row in rows if row["kind"] == "overlap"))


def case_rows(rows: list[Row], case: tuple[str, str]) -> list[Row]:
    return select(rows, network=case[0], layer=case[1])


def title_of(case: tuple[str, str]) -> str:
    """What a panel shows."""
    return f"Made up: {case[0]}" if case[1] == "made up" else f"{case[1]} of {case[0]}"


def peak_over_outputs(rows: list[Row], *layers: str) -> float:
    """Place of the peak over m; among several networks and layers, the one farthest from 1."""
    tops = [peak(select(case_rows(rows, case), kind="overlap")) for case in cases(rows) if not layers or case[1] in layers]
    return farthest([top["k"] / top["outputs"] for top in tops])


def peak_of(network: str, layer: str) -> Callable[[list[Row]], float]:
    """Place of the peak over m in one layer; NaN where the network was not trained at this size."""

    def measure(rows: list[Row]) -> float:
        mine = case_rows(rows, (network, layer))
        return peak_over_outputs(mine) if mine else float("nan")

    return measure


def above_chance(rows: list[Row]) -> float:
    """The smallest overlap at m over that of random subspaces."""
    at = [row for row in rows if row["kind"] == "overlap" and row["k"] == row["outputs"]]
    return float(min(row["overlap"] / row["chance"] for row in at))


def unevenness(rows: list[Row], layer: str, upto: int = 9) -> float:
    """Largest over smallest overlap for k up to c − 1: 1 for a flat curve."""
    curve = [row["overlap"] for row in select(rows, kind="overlap", layer=layer) if row["k"] <= upto]
    return float(max(curve) / min(curve))


def draw_overlap(rows: list[Row], title: str, ax: Axes, *, names: bool = True) -> None:
    """One layer's curve with its spread over the pairs, the one that the factors predict, chance, and m."""
    from theodolite import plots

    curve = select(rows, kind="overlap")
    lines = [{**row, "curve": "mean ± deviation of pairs", "value": row["overlap"]} for row in curve]
    if any(row["predicted"] != row["overlap"] for row in curve):
        lines += [{**row, "curve": "from the factors", "value": row["predicted"], "spread": 0.0} for row in curve]
    lines += [{**row, "curve": "random subspaces", "value": row["chance"], "spread": 0.0} for row in curve]
    plots.curves(
        lines,
        "k",
        "value",
        by="curve",
        error="spread" if all(row["spread"] == row["spread"] for row in lines) else None,
        markers=False,
        labels="legend" if names else "none",
        xlabel="dimension k",
        ylabel="overlap",
        title=title,
        ax=ax,
    )
    m = curve[0]["outputs"]
    if m <= len(curve):
        plots.reference(ax, x=m, label=f"m = {m}")


def first_singular_value(rows: list[Row]) -> float:
    """First singular value over the second, the smallest among the first four eigenvectors."""
    each = [row for row in rows if row["kind"] == "singular" and row["index"] == 1]
    return float(min(row["first"] / row["second"] for row in each))


class Figure1(OverlapExperiment):
    """Models trained apart share their sharp subspace, and its directions are of rank one.

    First the overlap of the top k eigenvectors of a layer's Hessian, averaged over pairs of models trained from different
    seeds: the source sees it grow up to the number m of the layer's outputs and fall behind it; beside it what the Kronecker
    factors of the models predict. Last the singular values of the first four eigenvectors as matrices.

    A first layer has the peak only where its inputs have a strong mean, as pixels that are not centred: γ₁/γ₂ is 30 for raw
    CIFAR-10, 2 when it is standardised, 5 for standardised MNIST. On digits and MNIST the overlap keeps rising behind m, as
    the factors predict. On raw CIFAR-10 it peaks somewhat below m, near the number of units that are active at all: at 0.8
    to 0.9 of m with the source's rate of 0.01 after 40 epochs or more, at 0.6 to 0.8 with fewer epochs or five times the rate.
    """

    id = "hessian/figure-1"
    source = "002, section 1.1, Figure 1: fc1 of LeNet5 (m = 120) and conv11 of ResNet18-W64 (m = 64)"
    item = "wu-zhu-2020 Figure 1"
    sizes = {
        "tiny": Params((Case(DIGITS, ("fc1",), seeds=3),)),
        "laptop": Params((Case(CIFAR, ("fc1",), seeds=3), Case(MNIST, ("fc1",), seeds=2), Case(RAW_CIFAR, ("fc1",), seeds=2))),
        "paper": Params(
            (
                Case(SOURCE, ("fc1",), 5),
                Case(SOURCE_MNIST, ("fc1",), 5),
                Case(replace(RAW_CIFAR, epochs=1000, batch=128, samples=1000), ("fc1",), 5),
                Case(replace(SOURCE_100, network="ResNet18-W64"), ("conv11",), 5),
            )
        ),
    }
    claims = (
        Claim(
            "the overlap peaks at the number m of outputs (place of the peak over m)",
            peak_over_outputs,
            rule="between",
            expected=(0.8, 1.3),
            reported=Reported("the overlap peaks at the dimension of the layer's output", "002, section 1.1"),
        ),
        *(
            Claim(
                f"{network}, fc1: the overlap peaks at m (place of the peak over m)",
                peak_of(network, "fc1"),
                rule="between",
                expected=(0.8, 1.3),
                reported=Reported("the overlap peaks at the dimension of the layer's output", "002, section 1.1"),
                since="laptop",
            )
            for network in ("LeNet5", MNIST.title, RAW_CIFAR.title)
        ),
        Claim(
            "the first four eigenvectors are nearly of rank one (first singular value over the second, smallest)",
            first_singular_value,
            rule="at least",
            expected=3.0,
            reported=Reported("approximately rank 1", "002, section 1.1"),
        ),
        Claim("the overlap at m, in units of that of random subspaces", above_chance),
    )

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        yield from super().run(job)
        model = models_of(job)[0]
        for layer in job["layers"]:
            factors = layer_factors(model, layer)
            m, n = factors.output.shape[0], factors.input.shape[0]
            singular = torch.linalg.svdvals(matricised(layer_pairs(model, layer, 4).vectors, m, n))
            for i, values in enumerate(singular.tolist()):
                for j, value in enumerate(values[:10]):
                    yield {
                        "kind": "singular",
                        "network": model[0].title,
                        "layer": layer,
                        "eigenvector": f"h{i + 1}",
                        "index": j + 1,
                        "value": value,
                        "first": values[0],
                        "second": values[1],
                    }

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        found = cases(rows)
        figure, axes = plots.panels(len(found) + 1, size=PANEL)
        for ax, case in zip(axes, found, strict=False):
            draw_overlap(case_rows(rows, case), title_of(case), ax, names=ax is axes[0])
        plots.curves(
            select(case_rows(rows, found[0]), kind="singular"),
            "index",
            "value",
            by="eigenvector",
            markers=True,
            xlabel="rank of the singular value",
            ylabel="singular value",
            title=f"Eigenvectors of {found[0][1]} as matrices",
            ax=axes[-1],
        )
        return figure


class Figure5(OverlapExperiment):
    """The overlap of models trained apart peaks at the layer's output dimension, whatever that is.

    The same layer in networks of several widths, and for each width the overlap of the top k eigenvectors averaged over all
    pairs of models: the peak is to move with the width. On digits the factors predict no peak at m (see Figure 1).
    """

    id = "hessian/figure-5"
    source = "002, section 5.1, Figure 5: four widths of LeNet5, three of ResNet18 and VGG11; which layers is not said"
    item = "wu-zhu-2020 Figure 5"
    sizes = {
        "tiny": Params(tuple(Case(s, ("fc1",), 3) for s in networks_of(DIGITS, "F-20-40", "F-40^2"))),
        "laptop": Params(tuple(Case(s, ("fc1",), 2) for s in networks_of(CIFAR, "LeNet5-(fc1-80)", "LeNet5-(fc1-150)"))),
        "paper": Params(
            (
                *(
                    Case(s, ("fc1",), 5)
                    for s in networks_of(SOURCE, "LeNet5-(fc1-80)", "LeNet5-(fc1-100)", "LeNet5", "LeNet5-(fc1-150)")
                ),
                *(Case(s, ("conv11",), 5) for s in networks_of(SOURCE_100, "ResNet18-W48", "ResNet18-W64", "ResNet18-W80")),
                *(Case(s, ("conv8",), 5) for s in networks_of(SOURCE_100, "VGG11-W48", "VGG11-W64", "VGG11-W80")),
            )
        ),
    }
    claims = (
        Claim(
            "the overlap peaks near m at every width (place of the peak over m, the one farthest from 1)",
            peak_over_outputs,
            rule="between",
            expected=(0.75, 1.25),
            reported=Reported("peaks near m, the dimension of the layer's output", "002, section 5.1"),
        ),
        Claim("the overlap at m, in units of that of random subspaces (smallest)", above_chance),
    )


def _trainings(*counts: int) -> tuple[tuple[str, int], ...]:
    return tuple(zip(ALTERNATIVES, counts, strict=True))


class Figure9(OverlapExperiment):
    """The overlap of sharp subspaces does not depend on how the models were trained.

    Models of three trainings (the default, a small learning rate, momentum with weight decay), compared in all pairs. The
    peak stays at the output dimension, and the last layer does not start from zero: its outputs are the classes, which
    cannot be permuted. On digits the factors predict no peak at m for fc1 (see Figure 1).
    """

    id = "hessian/figure-9"
    source = "002, appendix E.2.1, Figure 9: LeNet5 on CIFAR10, 6 + 5 + 5 models"
    item = "wu-zhu-2020 Figure 9"
    sizes = {
        "tiny": Params((Case(replace(DIGITS, epochs=15), ("fc1", "fc3"), 3, _trainings(1, 1, 1)),)),
        "laptop": Params((Case(DIGITS, ("fc1", "fc2", "fc3"), 9, _trainings(3, 3, 3)),)),
        "paper": Params((Case(SOURCE, ("conv1", "conv2", "fc1", "fc2", "fc3"), 16, _trainings(6, 5, 5)),)),
    }
    departs = "The small learning rate is a fifth of the default and its epochs are five times as many; the source's is a tenth."
    claims = (
        Claim(
            "the overlap of fc1 peaks near m (place of the peak over m)",
            lambda rows: peak_over_outputs(rows, "fc1"),
            rule="between",
            expected=(0.8, 1.3),
            reported=Reported("the position of the peak roughly agrees with m", "002, appendix E.2.1"),
        ),
        Claim(
            "the overlap of the last layer, fc3, is flat up to c − 1 (largest over smallest)",
            lambda rows: unevenness(rows, "fc3"),
            rule="at most",
            expected=2.0,
            reported=Reported("no linear growth starting from 0 as in other layers", "002, appendix E.2.1"),
        ),
    )
