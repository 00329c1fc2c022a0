"""The theorems on neural quadratic models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from theodolite.experiments.catapult import theorems_parts as parts
from theodolite.experiments.catapult.theorems_claims import CLAIMS
from theodolite.experiments.figure import Experiment
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS: dict[str, Callable[[Mapping[str, Any]], Iterator[Row]]] = {
    "linear": parts.linear,
    "exact": parts.exact,
    "regimes": parts.regimes,
    "drift": parts.drift,
    "equilibria": parts.equilibria,
    "scale": parts.scale,
    "line": parts.line,
    "rank": parts.rank,
    "pure": parts.pure,
    "decrease": parts.decrease,
}


@dataclass(frozen=True)
class Params:
    widths: tuple[int, ...] = (1000, 10_000, 100_000)
    ratios: tuple[float, ...] = (0.5, 1.0, 1.8, 2.2, 2.5, 3.0, 3.5, 3.9, 4.2)
    draws: int = 20
    drift_widths: tuple[int, ...] = (100, 1000, 10_000)
    drift_draws: int = 60
    scale_draws: int = 1000
    steps: int = 500
    exact_steps: int = 60


class Theorems(Experiment):
    """Theorems on neural quadratic models: three regimes, a peak that grows with the width, a kernel that ends below 2/η.

    The quadratic model of a two-layer ReLU network is the network with the gates of its start; on one example its gradient
    descent is a map of two numbers, output and kernel, and on points of a line two such maps. F1 to F15: the linear model,
    the exact recursion, drift below the critical rate, catapult between 2/λ and 4/λ, equilibria, divergence, several examples
    on a line, the scale of the first kernel, pure quadratics, and when the kernel falls.
    """

    id = "catapult/theorems"
    source = "003, sections 3.2 and 3.3, appendix B.3 to B.13"
    sizes = {
        "tiny": Params(),
        "laptop": Params(drift_widths=(100, 1000, 10_000, 100_000), drift_draws=100, scale_draws=2000, draws=50, exact_steps=200),
        "paper": Params(
            widths=(1000, 10_000, 100_000, 1_000_000),
            drift_widths=(100, 1000, 10_000, 100_000, 1_000_000),
            drift_draws=100,
            scale_draws=2000,
            draws=100,
            exact_steps=200,
        ),
    }
    claims = CLAIMS
    departs = (
        "(3.12) is used without its division by g − y. Proposition B.5.2 needs u > 16C²/(m(4−v)²), not 4C/(m(4−v)²); B.13 has γ "
        "where γ² belongs and leaves out one η; M of Proposition B.11.2 is the larger sum of squares. On a line the two sign "
        "classes are treated as two exact problems of one example, which avoids the slips of B.11 and B.12."
    )

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        for part in ("equilibria", "decrease", "rank"):
            yield {"part": part, "seed": 0}
        yield {"part": "linear", "steps": 400, "seed": 0}
        yield {"part": "exact", "m": 1000, "steps": p.exact_steps, "seed": 0}
        for m in p.widths:
            yield {"part": "regimes", "m": m, "draws": p.draws, "ratios": list(p.ratios), "steps": p.steps, "seed": 0}
        for m in p.drift_widths:
            yield {"part": "drift", "m": m, "draws": p.drift_draws, "steps": 200, "seed": 0}
        for m in (10, 50, 200):
            yield {"part": "scale", "m": m, "draws": p.scale_draws, "seed": 0}
        yield {"part": "line", "m": 10_000, "draws": min(p.draws, 20), "steps": p.steps, "seed": 0}
        yield {"part": "pure", "m": 10_000, "draws": min(p.draws, 20), "steps": p.steps, "seed": 0}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        for row in PARTS[job["part"]](job):
            yield {"part": job["part"], "seed": job["seed"], **row}

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        regimes = [{**row, "width": f"m = {row['m']:,}"} for row in rows if row["part"] == "regimes"]
        settled = [row for row in regimes if row["peak"] is not None]
        risen = [{**row, "delta": row["ratio"] - 2} for row in settled if row["ratio"] > 2]
        figure, axes = plots.panels(4, columns=2, size=(4.4, 3.2))
        shared: dict[str, Any] = {"by": "width", "band": "quantiles", "labels": "legend"}
        plots.curves(risen, "ratio", "peak", **shared, log="y", xlabel="ηλ₀", ylabel="peak loss / m", ax=axes[0])
        plots.curves(settled, "ratio", "end", **shared, xlabel="ηλ₀", ylabel="ηλ at the end", ax=axes[1])
        axes[1].legend(loc="lower left")
        plots.reference(axes[1], y=2.0, label="2: critical")
        plots.reference(axes[1], x=2.0)
        drift = [{**row, "start": f"ηλ₀ = {row['ratio']:g}"} for row in rows if row["part"] == "drift"]
        plots.log_log(drift, "m", "moved", by="start", xlabel="width m", ylabel="largest change of λ, median", ax=axes[2])
        done = [row for row in settled if row["steps"] is not None]
        plots.curves(done, "ratio", "steps", **shared, log="y", xlabel="ηλ₀", ylabel="steps to a loss of 1e-12", ax=axes[3])
        return figure
