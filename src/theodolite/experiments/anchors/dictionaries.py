"""Figures 3.2, B.1 and B.2: how the atoms of an output layer lie."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from theodolite.experiments.anchors.language_models import FOLDERS, LOCAL, SMOLLM, STORIES, Probed
from theodolite.experiments.anchors.probes import (
    ALL_MODELS,
    FOUR,
    FOUR_MODELS,
    ProbeExperiment,
    as_measured,
    histogram_rows,
    of_model,
    value_of,
)
from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.query import chosen
from theodolite.measures.anchors import AtomGeometry, atom_geometry
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Beside every dictionary one of Gaussian atoms of the same shape, whose directions are uniform.
CONTROL = "Gaussian atoms"


def geometry_of(found: Probed) -> AtomGeometry:
    assert found.probe.geometry is not None
    return found.probe.geometry


def spectrum_rows(found: Probed) -> Iterator[Row]:
    """Singular values over the largest, and the ranks; `uniform_rank` is the stable rank of atoms uniform on a sphere."""
    geometry = geometry_of(found)
    n, d = geometry.atoms, geometry.dim
    uniform = d / (1 + math.sqrt(d / n)) ** 2
    ranks = {"stable_rank": geometry.stable_rank, "effective_rank": geometry.effective_rank, "uniform_rank": uniform}
    yield {"kind": "ranks", "atoms": n, "dim": d, **ranks, "rank_share": geometry.stable_rank / uniform}
    first = float(geometry.singular_values[0])
    for row in geometry.rows():
        yield {"kind": "value", **row, "relative": row["singular_value"] / first, "place": row["rank"] / d}


def norm_rows(found: Probed) -> Iterator[Row]:
    """Norms of the atoms."""
    norms = geometry_of(found).norms
    yield {
        "kind": "norms",
        "least": float(norms.min()),
        "median": float(norms.median()),
        "largest": float(norms.max()),
        "spread": float(norms.max() / norms.median()),
    }
    bars = torch.histogram(norms, 60)
    yield from histogram_rows("bar", bars.hist, bars.bin_edges, of="atoms")


def cosine_rows(found: Probed) -> Iterator[Row]:
    """Cosines of random pairs of atoms, and of as many Gaussian ones."""
    own = geometry_of(found)
    control = atom_geometry(torch.randn(own.atoms, own.dim, generator=torch.Generator().manual_seed(0)), pairs=own.pairs)
    for of, geometry in (("atoms", own), (CONTROL, control)):
        mark = {"of": of, "pairs": geometry.pairs, "dim": geometry.dim}
        size = abs(geometry.cosine_mean) * math.sqrt(geometry.dim * geometry.pairs)
        yield {"kind": "cosines", **mark, "mean": geometry.cosine_mean, "std": geometry.cosine_std, "scaled": size}
        yield from histogram_rows("bar", geometry.cosine_counts, geometry.cosine_edges, of=of)


def _ranks(rows: list[Row]) -> str:
    row = chosen(rows, kind="ranks")[0]
    return f"stable rank {row['stable_rank']:.3g}, effective rank {row['effective_rank']:.3g} of {row['dim']} dimensions"


class Figure32(ProbeExperiment):
    """The dictionaries are close to low rank: their atoms are not uniform on a sphere.

    Singular values of the output layer over the largest. Uniform atoms would have them all nearly equal.
    """

    id = "anchor/figure-3.2"
    source = "000, section 3.4, Figure 3.2"
    item = "wu-2023 Figure 3.2"
    sizes = FOUR_MODELS
    show = spectrum_rows
    claims = (
        Claim(
            "local GPT: the dictionary is close to low rank (stable rank over that of atoms uniform on a sphere)",
            value_of(LOCAL, "rank_share", "ranks"),
            rule="at most",
            expected=0.5,
            reported=Reported("close to low rank", "000, section 3.4"),
        ),
        *(Claim(f"{name}: ranks", as_measured(name, _ranks)) for name in (STORIES, SMOLLM)),
        *(
            Claim(
                f"{model}: stable rank over that of atoms uniform on a sphere",
                value_of(model, "rank_share", "ranks"),
                rule="at most",
                expected=0.5,
                reported=Reported("close to low rank", "000, section 3.4"),
                since="paper",
            )
            for model in FOUR
        ),
    )

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        figure, axes = plots.panels(1, letters=False, size=(5.2, 3.6))
        plots.curves(
            [row for row in rows if row["kind"] == "value"],
            "place",
            "relative",
            by="model",
            log="y",
            labels="legend",
            markers=False,
            xlabel="rank over dimension",
            ylabel="singular value over the largest",
            ax=axes[0],
        )
        return figure


class _Histograms(ProbeExperiment):
    """One panel per model."""

    xlabel = ""

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        models = list(dict.fromkeys(row["model"] for row in rows if row["kind"] == "bar"))
        figure, axes = plots.panels(len(models), size=(4.0, 2.9))
        for ax, model in zip(axes, models, strict=True):
            bars = of_model(rows, model, "bar")
            several = len({row["of"] for row in bars}) > 1
            plots.counted_histogram(bars, by="of" if several else None, xlabel=self.xlabel, title=model, ax=ax)
        return figure


def _norms(rows: list[Row]) -> str:
    row = chosen(rows, kind="norms")[0]
    return f"from {row['least']:.3g} to {row['largest']:.3g}, median {row['median']:.3g}"


class FigureB1(_Histograms):
    """Atoms have bounded norms."""

    id = "anchor/figure-B.1"
    source = "000, section B.2, Figure B.1"
    item = "wu-2023 Figure B.1"
    sizes = ALL_MODELS
    show = norm_rows
    xlabel = "norm of an atom"
    claims = (
        Claim(
            "local GPT: the largest norm over the median",
            value_of(LOCAL, "spread", "norms"),
            rule="at most",
            expected=5.0,
            reported=Reported("norms are bounded", "000, section B.2"),
        ),
        *(Claim(f"{name}: norms", as_measured(name, _norms)) for name in (STORIES, SMOLLM)),
        *(
            Claim(
                f"{model}: the largest norm over the median",
                value_of(model, "spread", "norms"),
                rule="at most",
                expected=5.0,
                reported=Reported("norms are bounded", "000, section B.2"),
                since="paper",
            )
            for model in FOLDERS
        ),
    )


def _cosines(rows: list[Row]) -> str:
    row = chosen(rows, kind="cosines", of="atoms")[0]
    return f"{row['mean']:.3g} ± {row['std']:.2g}"


class FigureB2(_Histograms):
    """Two random atoms point the same way: the dictionary lies in a cone.

    Cosine similarity of 100,000 random pairs, beside that of Gaussian atoms of the same number and dimension.
    """

    id = "anchor/figure-B.2"
    source = "000, section B.2, Figure B.2"
    item = "wu-2023 Figure B.2"
    sizes = ALL_MODELS
    show = cosine_rows
    xlabel = "cosine of two atoms"
    claims = (
        Claim(
            "local GPT: mean cosine of two atoms",
            value_of(LOCAL, "mean", "cosines", of="atoms"),
            rule="at least",
            expected=0.0,
            reported=Reported("strongly biased to positive values", "000, section B.2"),
        ),
        Claim(
            "Gaussian atoms: mean cosine times the root of dimension and pairs (size)",
            value_of(LOCAL, "scaled", "cosines", of=CONTROL),
            rule="at most",
            expected=4.0,
            reported=Reported(0.0, "000, section 3.4", read_from="theory"),
        ),
        *(Claim(f"{name}: cosine of two atoms", as_measured(name, _cosines)) for name in (STORIES, SMOLLM)),
        *(
            Claim(
                f"{model}: mean cosine of two atoms",
                value_of(model, "mean", "cosines", of="atoms"),
                rule="at least",
                expected=0.1,
                reported=Reported("strongly biased to positive values", "000, section B.2"),
                since="paper",
            )
            for model in FOLDERS
        ),
    )
