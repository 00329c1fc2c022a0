"""Neurons with few inputs: how many a network bears before it stops becoming linear."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.figure import Experiment
from theodolite.experiments.linearity.architectures import ARCHITECTURES
from theodolite.experiments.linearity.scaling import hessian_rows
from theodolite.experiments.linearity.scaling_claims import medians, slope
from theodolite.measures.linearity import dag_width
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FAMILIES = ("three layers", "two bottlenecks", "narrow first", "m, 2, m", "m, 2, m restored")
_A6 = "003, section A.6"


@dataclass(frozen=True)
class Params:
    widths: tuple[int, ...]
    seeds: int


def reports_agree(rows: list[Row]) -> bool:
    """Whether the in-degree report calls exactly those wirings safe that shrink, at the largest width."""
    m = max(row["m"] for row in rows)
    safe = {row["family"]: row["safe"] for row in rows if row["m"] == m}
    return safe == {name: name not in ("narrow first", "m, 2, m") for name in FAMILIES}


class Figure23(Experiment):
    """Bottleneck neurons: a few leave transition to linearity intact, a narrow layer destroys it, more edges restore it.

    Hessian norm of the output against the width for five wirings: plain, two neurons of the second layer with in-degree
    1, a first hidden layer of two neurons, and a middle layer of two neurons between wide ones without and with trainable
    edges that lead around it. The in-degree report must tell the same from the graph alone.
    """

    id = "linearity/figure-2.3"
    item = "zhu-2024 Figure 2.3"
    source = "003, Figure 2.3 and section A.6"
    sizes = {
        "tiny": Params(widths=(16, 36, 80), seeds=10),
        "laptop": Params(widths=(16, 32, 64, 128, 256), seeds=10),
        "paper": Params(widths=(16, 32, 64, 128, 256, 512, 1024), seeds=20),
    }
    claims = (
        Claim(
            "two neurons of in-degree 1: ‖H‖ shrinks with the width (slope)",
            slope("two bottlenecks"),
            rule="at most",
            expected=-0.3,
            reported=Reported("transitions to linearity", "003, Figure 2.3"),
        ),
        Claim(
            "a narrow layer: it does not (slope)",
            slope("narrow first"),
            rule="between",
            expected=(-0.15, 0.15),
            reported=Reported("does not", _A6),
        ),
        Claim(
            "a narrow layer between wide ones: it does not (slope)",
            slope("m, 2, m"),
            rule="between",
            expected=(-0.15, 0.15),
            reported=Reported("does not", _A6),
        ),
        Claim(
            "trainable edges around the narrow layer restore it (slope)",
            slope("m, 2, m restored"),
            rule="at most",
            expected=-0.3,
            reported=Reported("transitions to linearity", _A6),
        ),
        Claim(
            "the in-degree report tells safe wirings from those at risk, at the largest width",
            reports_agree,
            rule="equal",
            expected=True,
        ),
    )

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        for name in FAMILIES:
            for m in p.widths:
                yield {"family": name, "m": m, "distance": 0.0, "seeds": p.seeds, "steps": 24, "seed": 0}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        graph = ARCHITECTURES[job["family"]].graph
        assert graph is not None
        report = dag_width(graph(job["m"], job["seed"]))
        found = {"width": report.width, "bottlenecks": int(report.bottleneck.sum()), "safe": report.linear}
        for row in hessian_rows(job):
            yield {**row, **found}

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        figure, (ax,) = plots.panels(1, size=(6.4, 4.4), letters=False)
        plots.log_log(
            medians(rows),
            "m",
            "norm",
            by="family",
            order=FAMILIES,
            guides=(-0.5,),
            xlabel="width m",
            ylabel="‖H‖ of the output, median over seeds",
            ax=ax,
        )
        return figure
