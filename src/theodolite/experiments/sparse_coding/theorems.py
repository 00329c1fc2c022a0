"""The theorems on why masking helps, checked without training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from theodolite.experiments.figure import Experiment
from theodolite.experiments.query import chosen
from theodolite.experiments.sparse_coding.theorems_claims import CLAIMS
from theodolite.experiments.sparse_coding.theorems_parts import PARTS
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIGMAS = (0.05, 0.1, 0.2)
SCALES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


@dataclass(frozen=True)
class Params:
    """Draws of each theorem."""

    matrices: int
    signals: int
    needed: int
    noisy: int
    consistent: int
    dictionaries: int
    ranked: int
    masks: int
    dims: tuple[int, ...]


class Theorems(Experiment):
    """Why masking helps, without training: the two losses rank the same two dictionaries oppositely.

    Mixtures of two true atoms fit noise better than the true atoms (Theorem 2.3.2), unless the loss is taken where the code
    has not looked (Theorem 2.3.6); with the lemmas behind both: T1 restricted isometry, T2 to T4 overfitting, T5 to T7 the
    masked loss, T8 both, T9 the threshold of matching pursuit, T10 the largest of squared Gaussians.
    """

    id = "sparse-coding/theorems"
    source = "000, section 2.3, Theorems 2.3.2 and 2.3.6, appendix A.1"
    sizes = {
        "tiny": Params(200, 1500, 800, 6000, 4000, 3, 500, 2, (10, 20, 40)),
        "laptop": Params(200, 8000, 2000, 10_000, 4000, 6, 2000, 4, (10, 20, 40, 80)),
        "paper": Params(200, 20_000, 4000, 20_000, 4000, 6, 8000, 10, (10, 20, 40, 80, 160)),
    }
    departs = (
        "Mixtures are directions in the plane of two atoms, one parameter each, where the source covers a ball. The ridge of the "
        "Bayes predictor is σ²/σ_z², not 1/σ_z² (A.15), and the chance of a small coefficient is added to that of failure (A.23)."
    )
    claims = CLAIMS

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        yield {"part": "T1", "count": p.matrices, "seed": 0}
        for sigma in SIGMAS:
            yield {"part": "T2-T3", "sigma": sigma, "n": p.signals, "angles": [8, 16, 32, 64], "radii": [0.0, 1.0], "seed": 0}
        for dim in p.dims:
            yield {"part": "T4", "atoms": 20, "dim": dim, "n": p.needed, "seed": 0}
        yield {"part": "T5-T6", "n": p.noisy, "seed": 0}
        for scale in SCALES:
            for seed in range(p.dictionaries):
                yield {"part": "T7", "scale": scale, "n": p.consistent, "seed": seed}
        for sigma in SIGMAS:
            yield {"part": "T8", "sigma": sigma, "n": p.ranked, "masks": p.masks, "seed": 0}
        for eta in (0.0, 0.5, 1.0):
            yield {"part": "T9", "eta": eta, "n": 1000, "seed": 0}
        for n in (10, 100, 1000):
            yield {"part": "T10", "n": n, "draws": 2000, "seed": 0}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        for row in PARTS[job["part"]](job):
            yield {"part": job["part"], **row}

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        figure, axes = plots.panels(6, size=(4.7, 3.4))
        drawings = (_rankings, _gains, _needed, _cross_terms, _consistency, _largest)
        for ax, draw in zip(axes, drawings, strict=True):
            draw(ax, rows)
        return figure


def _rankings(ax: Axes, rows: list[Row]) -> None:
    from theodolite import plots

    table = [{**row, "ratio": row["mixtures"] / row["true"]} for row in chosen(rows, part="T8")]
    names: dict[str, Any] = {
        "xlabel": "noise σ",
        "ylabel": "loss of mixtures / of true atoms",
        "title": "T8: two losses, two rankings",
    }
    plots.curves(table, "sigma", "ratio", by="loss", log="xy", labels="legend", ax=ax, **names)
    plots.reference(ax, y=1.0)


def _gains(ax: Axes, rows: list[Row]) -> None:
    from theodolite import plots

    mine = chosen(rows, part="T2-T3", radius=1.0)
    sigmas, angles = (sorted({row[name] for row in mine}) for name in ("sigma", "angles"))
    found = {(row["sigma"], row["angles"]): row for row in mine}
    values = [[found[sigma, angle]["gain"] for angle in angles] for sigma in sigmas]
    named: dict[str, Any] = {
        "row_names": [f"σ = {sigma:g}" for sigma in sigmas],
        "column_names": angles,
        "xlabel": "directions per pair of atoms",
    }
    plots.matrix(values, **named, annotate=True, label="gain / σ²", title="T3: what mixtures gain in loss", ax=ax)


def _needed(ax: Axes, rows: list[Row]) -> None:
    from theodolite import plots

    names: dict[str, Any] = {"xlabel": "dimension d", "ylabel": "mixtures needed / p²d", "title": "T4: for half of the gain"}
    plots.curves(chosen(rows, part="T4"), "dim", "share", log="xy", ax=ax, **names)


def _cross_terms(ax: Axes, rows: list[Row]) -> None:
    from theodolite import plots

    mine = chosen(rows, part="T5-T6")
    values = [[row["hidden_cross"], row["cross"], row["above_bayes"]] for row in mine]
    columns = ["hidden noise", "noise, usual", "above Bayes"]
    title = "T5, T6: cross terms and excess, in s.e."
    plots.matrix(
        values,
        row_names=[row["dictionary"] for row in mine],
        column_names=columns,
        annotate=True,
        title=title,
        number=".1f",
        ax=ax,
    )


def _consistency(ax: Axes, rows: list[Row]) -> None:
    from theodolite import plots

    columns = {"excess": "risk above Bayes", "bayes": "Bayes risk", "wrong": "P(support wrong)"}
    table = [
        {"scale": r["scale"], "what": name, "value": r[column]}
        for column, name in columns.items()
        for r in chosen(rows, part="T7")
    ]
    names: dict[str, Any] = {"xlabel": "size of the coefficients σ_z", "ylabel": "", "title": "T7: the true atoms become optimal"}
    plots.curves(table, "scale", "value", by="what", log="xy", labels="legend", ax=ax, **names)


def _largest(ax: Axes, rows: list[Row]) -> None:
    from theodolite import plots

    columns = {"independent": "independent", "equal": "all equal", "bound": "bound"}
    table = [
        {"n": r["n"], "what": name, "value": r[column]} for column, name in columns.items() for r in chosen(rows, part="T10")
    ]
    names: dict[str, Any] = {"xlabel": "variables n", "ylabel": "mean of the largest", "title": "T10: squared Gaussians"}
    plots.curves(table, "n", "value", by="what", log="x", labels="legend", ax=ax, **names)


def _long(rows: list[Row], x: str, columns: Mapping[str, str]) -> list[Row]:
    """A row for each column, with its name."""
    return [{x: row[x], "what": name, "value": row[column]} for column, name in columns.items() for row in rows]
