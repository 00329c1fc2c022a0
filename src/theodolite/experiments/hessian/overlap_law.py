"""Where the overlap peaks, explained by the spectra of the two factors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.figure import Experiment
from theodolite.experiments.hessian.measuring import as_job, layer_factors, layer_pairs, overlap_rows, peak, select, setup_of
from theodolite.experiments.hessian.networks import Setup
from theodolite.experiments.hessian.overlap import (
    DIGITS,
    MNIST,
    PANEL,
    SOURCE,
    SOURCE_MNIST,
    case_rows,
    cases,
    draw_overlap,
    title_of,
)
from theodolite.measures.hessian import correspondence, predicted_overlap, rank_one_count
from theodolite.operators import KroneckerFactors
from theodolite.operators.kronecker import factors_of
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Spectra of the output Hessian of m units, the largest eigenvalue 1.
SPECTRA = {
    "flat": lambda m: torch.linspace(1.0, 0.5, m),
    "nine outliers": lambda m: torch.cat([torch.linspace(1.0, 0.5, 9), 0.01 * 0.98 ** torch.arange(9, m)]),
    "heavy tail": lambda m: 1.0 / torch.arange(1, m + 1),
}


def synthetic_factors(spectrum: str, m: int, generator: torch.Generator) -> KroneckerFactors:
    """Factors of a made-up layer of m inputs and m outputs: random eigenvectors, but for a leading input that is positive.

    The input's eigenvalues are 1, 0.1, 0.09, 0.081, ...: nearly one direction, as behind a ReLU.
    """
    u = torch.linalg.qr(_normal(m, m, generator)).Q
    start = _normal(m, m, generator)
    start[:, 0] = start[:, 0].abs()
    v = torch.linalg.qr(start).Q
    tau = SPECTRA[spectrum](m).double()
    gamma = torch.cat([torch.ones(1), 0.1 * 0.9 ** torch.arange(m - 1)]).double()
    return factors_of((u * tau) @ u.T, (v * gamma) @ v.T, v[:, 0])


def _normal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def synthetic_rows(job: Mapping[str, Any]) -> Iterator[Row]:
    """The predicted overlap of pairs of made-up layers, one row per k."""
    m, generator = job["outputs"], torch.Generator().manual_seed(job["seed"])
    k = round(10 / 3 * m)
    curves, counts = [], []
    for _ in range(job["pairs"]):
        a, b = (synthetic_factors(job["spectrum"], m, generator) for _ in range(2))
        curves.append(predicted_overlap(a, b, k))
        counts += [rank_one_count(a), rank_one_count(b)]
    table = torch.stack(curves)
    for i in range(k):
        yield {
            "kind": "overlap",
            "network": job["spectrum"],
            "layer": "made up",
            "k": i + 1,
            "overlap": float(table[:, i].mean()),
            "spread": float(table[:, i].std()),
            "predicted": float(table[:, i].mean()),
            "chance": (i + 1) / m**2,
            "outputs": m,
        }
    yield {
        "kind": "layer",
        "network": job["spectrum"],
        "layer": "made up",
        "outputs": m,
        "pairs": job["pairs"],
        "rank_one_count": median(counts),
    }


@dataclass(frozen=True)
class EarlyParams:
    setup: Setup
    layer: str
    seeds: int
    corner: int = 20


def predicted_place(rows: list[Row]) -> float:
    """Distance between the place of the early peak and K*, the number of directions u_i ⊗ v₁ that the factors predict."""
    curve = select(rows, kind="overlap")
    return float(abs(peak(curve, upto=0.5 * curve[0]["outputs"])["k"] - select(rows, kind="layer")[0]["rank_one_count"]))


def fall(rows: list[Row]) -> float:
    """Overlap at twice K* over that at K*."""
    count = round(select(rows, kind="layer")[0]["rank_one_count"])
    curve = {row["k"]: row["overlap"] for row in select(rows, kind="overlap")}
    return float(curve[2 * count] / curve[count])


def leading_share(rows: list[Row]) -> float:
    """Mean of Corr(v₁, h_j) over the first nine eigenvectors of the true Hessian."""
    first = [row["value"] for row in select(rows, kind="correspondence", matrix="true", i=1) if row["j"] <= 9]
    return float(sum(first) / len(first))


def trend_at_outputs(rows: list[Row]) -> float:
    """The overlap at nine dimensions, carried on in proportion to m."""
    nine = next(row for row in select(rows, kind="overlap") if row["k"] == 9)
    return float(nine["overlap"] * nine["outputs"] / 9)


class Figure24(Experiment):
    """Why the overlap of some layers peaks early: the factors say where.

    If the second eigenvalue of the input's auto-correlation is not small enough, only K* leading eigenvectors are of the form
    u_i ⊗ v₁ (K* counts τ_i γ₁ > τ₁ γ₂); the overlap grows up to there and falls behind it. Shown are the overlap, the spectra of
    both factors, and how the top eigenvectors correspond to those of E[xxᵀ], for the Hessian and its approximation.
    """

    id = "hessian/figure-24"
    source = "002, appendix F.3.3, Figure 24: fc2 of F-200^2 on MNIST"
    item = "wu-zhu-2020 Figure 24"
    sizes = {
        "tiny": EarlyParams(DIGITS, "fc2", seeds=3),
        "laptop": EarlyParams(MNIST, "fc2", seeds=3),
        "paper": EarlyParams(SOURCE_MNIST, "fc2", seeds=5),
    }
    claims = (
        Claim(
            "the early peak lies at K* (distance, among the first m/2 dimensions)",
            predicted_place,
            rule="at most",
            expected=2,
            reported=Reported("grows linearly below dimension 10, sharp decrease after 9", "002, F.3.3"),
        ),
        Claim(
            "behind K* the overlap falls (at 2 K* over at K*)",
            fall,
            rule="at most",
            expected=1.0,
            reported=Reported("a sharp decrease of overlap after dimension 9", "002, F.3.3"),
        ),
        Claim(
            "the first nine eigenvectors lie along v₁ (mean of Corr(v₁, h_j))",
            leading_share,
            rule="at least",
            expected=0.8,
            reported=Reported("h_i ≈ r_i ⊗ E[x] for i <= 9", "002, F.3.3"),
        ),
        Claim(
            "the growth up to nine dimensions, carried on to m, would reach an overlap of about a quarter",
            trend_at_outputs,
            rule="within",
            expected=0.25,
            tolerance=0.1,
            reported=Reported(0.25, "002, F.3.3 (0.012 at 9 of 200 dimensions)"),
        ),
    )

    def jobs(self, p: EarlyParams) -> Iterator[dict[str, Any]]:
        yield {"setup": as_job(p.setup), "layer": p.layer, "seeds": p.seeds, "corner": p.corner, "seed": 0}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        setup, layer, corner = setup_of(job), job["layer"], job["corner"]
        models = [(setup, job["seed"] + i) for i in range(job["seeds"])]
        # Up to m/2 shows the early peak and its fall; the whole curve is that of Figure 12.
        yield from overlap_rows(models, layer, reach=0.5, network=setup.network)
        factors = layer_factors(models[0], layer)
        for name, factor in (("output Hessian", factors.output), ("input auto-correlation", factors.input)):
            values = torch.linalg.eigvalsh(factor).flip(0)[:corner]
            for i, value in enumerate((values / values[0]).tolist()):
                yield {"kind": "spectrum", "factor": name, "i": i + 1, "value": value}
        true = layer_pairs(models[0], layer, corner).vectors
        for name, vectors in (("true", true), ("approximate", factors.top_eigenpairs(corner).vectors)):
            table = correspondence(vectors, factors).inputs[:corner]
            for i, line in enumerate(table.tolist()):
                for j, value in enumerate(line):
                    yield {"kind": "correspondence", "matrix": name, "i": i + 1, "j": j + 1, "value": value}

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        figure, axes = plots.panels(4, columns=2, size=PANEL)
        curve = select(rows, kind="overlap")
        draw_overlap(curve, f"{curve[0]['layer']} of {curve[0]['network']}, m = {curve[0]['outputs']}", axes[0])
        count = select(rows, kind="layer")[0]["rank_one_count"]
        plots.reference(axes[0], x=count, label=f"K* = {count:g}")
        plots.eigenvalues(
            select(rows, kind="spectrum"),
            value="value",
            index="i",
            by="factor",
            log=True,
            xlabel="rank",
            ylabel="eigenvalue over the largest",
            title="Spectra of the factors",
            ax=axes[1],
        )
        for ax, name in zip(axes[2:], ("true", "approximate"), strict=True):
            draw_correspondence(select(rows, kind="correspondence", matrix=name), f"{name} Hessian with E[xxᵀ]", "v_i", ax)
        return figure


def _count_from_one(axis: Any, count: int) -> None:
    """Ticks 1, 5, 10, ... or all of a short axis: eigenvectors are counted from 1."""
    every = 1 if count <= 10 else 5 if count <= 60 else 20
    shown = [i for i in range(1, count + 1) if i == 1 or i % every == 0]
    axis.set_ticks([i - 1 for i in shown], [str(i) for i in shown])


def draw_correspondence(rows: list[Row], title: str, ylabel: str, ax: Any) -> None:
    """A corner of a correspondence matrix, first row at the top."""
    from theodolite import plots

    height, width = max(row["i"] for row in rows), max(row["j"] for row in rows)
    table = [[0.0] * width for _ in range(height)]
    for row in rows:
        table[row["i"] - 1][row["j"] - 1] = min(row["value"], 1.0)  # rounding
    plots.matrix(
        table,
        limits=(0.0, 1.0),
        center=None,
        annotate=False,
        label="correspondence",
        xlabel="eigenvector h_j",
        ylabel=f"eigenvector {ylabel}",
        title=title,
        ax=ax,
    )
    _count_from_one(ax.xaxis, width)
    _count_from_one(ax.yaxis, height)


@dataclass(frozen=True)
class RegimeParams:
    outputs: int
    pairs: int  # of made-up models; 0 means none
    setup: Setup | None = None
    layers: tuple[str, ...] = ()
    seeds: int = 0


def flat_peak(rows: list[Row]) -> float:
    """Place of the peak over m with a flat spectrum."""
    top = peak(select(rows, kind="overlap", network="flat"))
    return float(top["k"] / top["outputs"])


def early_place(rows: list[Row]) -> float:
    """Place of the largest overlap among the first m/2 dimensions, nine outliers (conv5 at the source's size)."""
    curve = _regime(rows, "nine outliers", "conv5")
    return float(peak(curve, upto=0.5 * curve[0]["outputs"])["k"])


def late_over_early(rows: list[Row]) -> float:
    """Overlap at m over that at nine dimensions, nine outliers."""
    found = _regime(rows, "nine outliers", "conv5")
    curve = {row["k"]: row["overlap"] for row in found}
    return float(curve[found[0]["outputs"]] / curve[9])


def delayed_place(rows: list[Row]) -> float:
    """Place of the peak over m with a heavy tail (conv2 at the source's size)."""
    top = peak(_regime(rows, "heavy tail", "conv2"))
    return float(top["k"] / top["outputs"])


def _regime(rows: list[Row], spectrum: str, layer: str) -> list[Row]:
    curves = select(rows, kind="overlap")
    return select(curves, network=spectrum) or select(curves, layer=layer)


class Figure25(Experiment):
    """Three shapes of the overlap curve, from the spectrum of the output Hessian alone.

    With a flat spectrum the overlap peaks at m; with nine outliers it peaks at nine and falls; with a heavy tail it grows
    beyond m. In small sizes the layers are made up: random eigenvectors of E[M], a positive leading input direction and the
    law of the overlap of two Kronecker products; the source's size measures conv5 and conv2 of VGG11-W200.
    """

    id = "hessian/figure-25"
    source = "002, appendix F.3.3, Figures 25 and 26: conv5 and conv2 of VGG11-W200 on CIFAR10"
    item = ("wu-zhu-2020 Figure 25", "wu-zhu-2020 Figure 26")
    sizes = {
        "tiny": RegimeParams(outputs=60, pairs=20),
        "laptop": RegimeParams(outputs=120, pairs=40),
        "paper": RegimeParams(
            outputs=200,
            pairs=20,
            setup=Setup(**{**as_job(SOURCE), "network": "VGG11-W200"}),
            layers=("conv2", "conv5"),
            seeds=5,
        ),
    }
    claims = (
        Claim(
            "a flat spectrum of the output Hessian puts the peak at m (place over m)",
            flat_peak,
            rule="within",
            expected=1.0,
            tolerance=0.034,  # 2 of 60 dimensions
            reported=Reported("peak at m", "002, Theorem F.1", read_from="theory"),
        ),
        Claim(
            "nine outliers put it at nine (place among the first m/2 dimensions)",
            early_place,
            rule="within",
            expected=9,
            tolerance=1,
            reported=Reported("a low peak at very small dimensions", "002, E.2.3 and F.3.3"),
        ),
        Claim(
            "behind it little is shared (overlap at m over that at nine)",
            late_over_early,
            rule="at most",
            expected=1.0,
            reported=Reported("a sharp decrease after dimension 9", "002, F.3.3"),
        ),
        Claim(
            "a heavy tail delays the peak (place over m)",
            delayed_place,
            rule="at least",
            expected=1.3,
            reported=Reported("a delayed and flattened peak, later than the output dimension", "002, F.3.3"),
        ),
    )

    def jobs(self, p: RegimeParams) -> Iterator[dict[str, Any]]:
        for spectrum in SPECTRA:
            if p.setup is None or spectrum == "flat":
                yield {"spectrum": spectrum, "outputs": p.outputs, "pairs": p.pairs, "seed": 0}
        if p.setup is not None:
            for layer in p.layers:
                yield {"setup": as_job(p.setup), "layer": layer, "seeds": p.seeds, "seed": 0}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        if "spectrum" in job:
            yield from synthetic_rows(job)
            for i, value in enumerate(SPECTRA[job["spectrum"]](job["outputs"]).tolist()):
                yield {"kind": "spectrum", "network": job["spectrum"], "i": i + 1, "value": value}
            return
        setup = setup_of(job)
        models = [(setup, job["seed"] + i) for i in range(job["seeds"])]
        yield from overlap_rows(models, job["layer"], reach=2.0, network=setup.network)
        values = torch.linalg.eigvalsh(layer_factors(models[0], job["layer"]).output).flip(0)
        for i, value in enumerate((values / values[0]).tolist()):
            yield {"kind": "spectrum", "network": f"{job['layer']} of {setup.network}", "i": i + 1, "value": value}

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        found = cases(rows)
        figure, axes = plots.panels(len(found) + 1, columns=2, size=PANEL)
        plots.curves(
            select(rows, kind="spectrum"),
            "i",
            "value",
            by="network",
            log="y",
            markers=False,
            labels="legend",
            xlabel="rank",
            ylabel="eigenvalue over the largest",
            title="Spectrum of the output Hessian",
            ax=axes[0],
        )
        for ax, case in zip(axes[1:], found, strict=True):
            draw_overlap(case_rows(rows, case), title_of(case), ax, names=ax is axes[min(2, len(found))])
        return figure
