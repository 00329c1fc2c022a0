"""The overlap of sharp subspaces layer by layer: convolutions, the last layer, and layers without a peak at m."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.hessian.measuring import farthest, peak, select
from theodolite.experiments.hessian.overlap import (
    CIFAR,
    DIGITS,
    MINI,
    SOURCE,
    SOURCE_100,
    SOURCE_MNIST,
    Case,
    OverlapExperiment,
    Params,
    case_rows,
    cases,
    networks_of,
    unevenness,
)
from theodolite.experiments.hessian.overlap_law import synthetic_rows
from theodolite.results import Row

CONVOLUTIONS = tuple(f"conv{i}" for i in range(1, 9))
RESIDUAL = tuple(f"conv{i}" for i in range(1, 18))


def convolution_peaks(rows: list[Row]) -> float:
    """Share of the convolutions behind the first whose overlap peaks within 3/8 of the number of channels."""
    found = [case for case in cases(rows) if case[1].startswith("conv") and case[1] != "conv1"]
    tops = [peak(select(case_rows(rows, case), kind="overlap")) for case in found]
    near = [abs(top["k"] / top["outputs"] - 1.0) <= 0.375 for top in tops]  # 8 ± 3 channels
    return float(sum(near) / len(near))


def classifier_drop(rows: list[Row]) -> float:
    """Overlap of the last layer at 1.5 c over that at c − 1, the largest of all networks."""
    drops = []
    for case in cases(rows):
        curve = {row["k"]: row for row in select(case_rows(rows, case), kind="overlap")}
        m = next(iter(curve.values()))["outputs"]
        if case[1].startswith("fc"):
            drops.append(curve[max(curve)]["overlap"] / curve[m - 1]["overlap"])
    return float(max(drops))


class Figure10(OverlapExperiment):
    """Convolutional layers share their sharp subspace too, with a peak at the number of channels.

    The overlap of the top k eigenvectors of the convolutions of models trained apart; the classifier behind them stays level
    and drops behind the number of classes.
    """

    id = "hessian/figure-10"
    source = "002, appendix E.2.2, Figures 10 and 11: VGG11 on CIFAR10 and CIFAR100, ResNet18 on CIFAR100"
    item = ("wu-zhu-2020 Figure 10", "wu-zhu-2020 Figure 11")
    sizes = {
        "tiny": Params((Case(MINI, ("conv1", "conv2", "fc3"), seeds=3),)),
        "laptop": Params((Case(replace(MINI, epochs=100, until=0.02, samples=1437), ("conv1", "conv2", "fc3"), seeds=5),)),
        "paper": Params(
            (
                *(Case(s, (*CONVOLUTIONS, "fc1"), 5) for s in networks_of(SOURCE, "VGG11-W32", "VGG11-W200")),
                *(Case(s, (*CONVOLUTIONS, "fc1"), 5) for s in networks_of(SOURCE_100, "VGG11-W48", "VGG11-W80")),
                *(
                    Case(s, (*RESIDUAL, "fc1"), 5)
                    for s in networks_of(SOURCE_100, "ResNet18-W48", "ResNet18-W64", "ResNet18-W80")
                ),
            )
        ),
    }
    claims = (
        Claim(
            "the overlap of most convolutions behind the first peaks at the number of channels (share within 3/8 of it)",
            convolution_peaks,
            rule="at least",
            expected=0.5,
            reported=Reported("for most of the convolutional layers, around the number of output channels", "002, E.2.2"),
        ),
        Claim(
            "the overlap of the classifier drops behind the number c of classes (at 1.5 c over at c − 1)",
            classifier_drop,
            rule="at most",
            expected=1.0,
            reported=Reported("drops after exceeding the dimension of final output", "002, E.2.2"),
        ),
    )


@dataclass(frozen=True)
class FailureParams:
    cases: tuple[Case, ...]
    pairs: int  # of synthetic models with a heavy tail


def early_peak(rows: list[Row]) -> float:
    """Where the overlap of the layer with an early peak is largest among the first half of m dimensions."""
    curve = _early(rows)
    return float(peak(curve, upto=0.5 * curve[0]["outputs"])["k"])


def decline_after(rows: list[Row]) -> float:
    """Overlap at twice the place of the early peak over the peak."""
    curve = _early(rows)
    top = peak(curve, upto=0.5 * curve[0]["outputs"])
    return float(next(row["overlap"] for row in curve if row["k"] == 2 * top["k"]) / top["overlap"])


def lower_than_others(rows: list[Row]) -> float:
    """Overlap at c − 1 of the layer with the early peak, over the smallest of the other layers of its network."""
    early = _early(rows)[0]
    nine = [row for row in select(rows, kind="overlap", network=early["network"]) if row["k"] == 9]
    own = next(row["overlap"] for row in nine if row["layer"] == early["layer"])
    return float(own / min(row["overlap"] for row in nine if row["layer"] != early["layer"]))


def delayed_peak(rows: list[Row]) -> float:
    """Place of the peak over m where it is delayed, the smallest."""
    late = [case for case in cases(rows) if case[0].startswith("heavy") or case[1] in ("conv2", "conv7")]
    tops = [peak(select(case_rows(rows, case), kind="overlap")) for case in late]
    return float(min(top["k"] / top["outputs"] for top in tops))


def _early(rows: list[Row]) -> list[Row]:
    """The curve of fc2 of a fully connected network."""
    return [row for row in rows if row["kind"] == "overlap" and row["layer"] == "fc2" and row["network"].startswith("F-")]


class Figure12(OverlapExperiment):
    """Layers whose sharp subspaces share little, or share most behind the output dimension.

    An early and low peak: the overlap grows for about c − 1 dimensions and falls. A delayed peak: it grows beyond m and stays.
    The delayed one needs an output Hessian with a heavy tail; small networks on digits have none, so that below the
    source's own size pairs of Kronecker products with τ_i = 1/i stand in for it.
    """

    id = "hessian/figure-12"
    source = "002, appendix E.2.3, Figures 12 and 13: fc2 of F-200^2, conv5 and conv2 of VGG11-W200, conv7 of ResNet18-W48"
    item = ("wu-zhu-2020 Figure 12", "wu-zhu-2020 Figure 13")
    sizes = {
        "tiny": FailureParams((Case(DIGITS, ("fc1", "fc2", "fc3"), seeds=3),), pairs=10),
        "laptop": FailureParams((Case(DIGITS, ("fc1", "fc2", "fc3"), seeds=6),), pairs=40),
        "paper": FailureParams(
            (
                Case(SOURCE_MNIST, ("fc1", "fc2", "fc3"), 5),
                Case(replace(SOURCE, network="VGG11-W200"), ("conv2", "conv5"), 5),
                Case(replace(SOURCE_100, network="ResNet18-W48"), ("conv7",), 5),
            ),
            pairs=0,
        ),
    }
    claims = (
        Claim(
            "fc2 has a small peak at c − 1 (place of the largest overlap among the first m/2 dimensions)",
            early_peak,
            rule="within",
            expected=9,
            tolerance=2,
            reported=Reported("a small peak at very small dimensions; around 10 for fc2 of F-200^2", "002, E.2.3 and F.3.3"),
        ),
        Claim(
            "the overlap declines behind the early peak (at twice its place, over the peak)",
            decline_after,
            rule="at most",
            expected=1.0,
            reported=Reported("a sharp decrease after dimension 9", "002, F.3.3"),
        ),
        Claim(
            "the overlap there is lower than in the other layers (at c − 1, over the smallest of the others)",
            lower_than_others,
            rule="at most",
            expected=1.0,
            reported=Reported("significantly lower than the other layers", "002, E.2.3"),
        ),
        Claim(
            "with a heavy tail the peak lies beyond m (place of the peak over m)",
            delayed_peak,
            rule="at least",
            expected=1.3,
            reported=Reported("the peak dimension is larger than the output dimension", "002, E.2.3"),
        ),
    )

    def jobs(self, p: FailureParams) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        yield from super().jobs(Params(p.cases))
        if p.pairs:
            yield {"spectrum": "heavy tail", "outputs": 60, "pairs": p.pairs, "seed": 0}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        return synthetic_rows(job) if "spectrum" in job else super().run(job)


def last_levels(rows: list[Row]) -> float:
    """Mean overlap for k up to c − 1 over (v₁·v₁')², of all networks the one farthest from 1."""
    ratios = []
    for case in cases(rows):
        mine = case_rows(rows, case)
        layer = select(mine, kind="layer")[0]
        curve = [row["overlap"] for row in select(mine, kind="overlap") if row["k"] < layer["outputs"]]
        ratios.append(sum(curve) / len(curve) / layer["squared_dot"])
    return farthest(ratios)


def last_unevenness(rows: list[Row]) -> float:
    """Largest over smallest overlap for k up to c − 1, the largest of all networks."""
    return max(unevenness(case_rows(rows, case), case[1], _classes(rows, case) - 1) for case in cases(rows))


def _classes(rows: list[Row], case: tuple[str, str]) -> int:
    return int(select(case_rows(rows, case), kind="layer")[0]["outputs"])


class Figure23(OverlapExperiment):
    """The last layer shares its sharp subspace from the first direction on.

    The outputs of the last layer are the classes, which no permutation of units can exchange; so the overlap is level, about
    (v₁·v₁')² with v₁ the leading input direction of each model, up to the number of classes, and then falls.
    """

    id = "hessian/figure-23"
    source = "002, appendix F.3.2, Figure 23: the last layers of F-200^2, LeNet5, VGG11-W200 and ResNet18-W64"
    item = "wu-zhu-2020 Figure 23"
    sizes = {
        "tiny": Params((Case(DIGITS, ("fc3",), 5),)),
        "laptop": Params((Case(DIGITS, ("fc3",), 6), Case(MINI, ("fc3",), 5), Case(CIFAR, ("fc3",), 2))),
        "paper": Params(
            (
                Case(SOURCE_MNIST, ("fc3",), 5),
                Case(SOURCE, ("fc3",), 5),
                Case(replace(SOURCE, network="VGG11-W200"), ("fc1",), 5),
                Case(replace(SOURCE_100, network="ResNet18-W64"), ("fc1",), 5),
            )
        ),
    }
    claims = (
        Claim(
            "the overlap is level up to c − 1 (largest over smallest, the worst network)",
            last_unevenness,
            rule="at most",
            expected=2.0,
            reported=Reported("will stay high before dimension m", "002, F.3.2"),
        ),
        Claim(
            "its level is (v₁·v₁')² (mean overlap up to c − 1 over that, the network farthest from 1)",
            last_levels,
            rule="between",
            expected=(0.5, 2.0),
            reported=Reported("approximately (t₁·t₂)² for all dimensions k <= m", "002, F.3.2"),
        ),
        Claim(
            "it falls behind the number c of classes (at 1.5 c over at c − 1, the largest)",
            classifier_drop,
            rule="at most",
            expected=1.0,
            reported=Reported("drops after exceeding the dimension of final output", "002, E.2.2"),
        ),
    )
