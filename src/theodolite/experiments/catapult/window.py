"""The window of catapults does not shrink with the width, and within it the weights travel further the wider the network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from theodolite.experiments.catapult.starts import draw
from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.figure import Experiment
from theodolite.measures.quadratic_models import displacement, largest_rate, one_example
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TARGET = 1.0
#: A run has converged when its loss has fallen by this factor.
CONVERGED = 1e-6


@dataclass(frozen=True)
class Params:
    widths: tuple[int, ...] = (1000, 10_000, 100_000)
    draws: int = 20
    together: int = 3  # starts that must all converge for a rate to count
    steps: int = 4000
    ratios: tuple[float, ...] = (1.0, 1.5, 2.2, 2.5, 3.0)
    edge: tuple[float, ...] = (3.6, 3.7, 3.8, 3.9, 3.95, 4.05, 4.2)


def edges(pick: Callable[[list[float]], float]) -> Callable[[list[Row]], float]:
    """Smallest or largest ηλ₀ of the upper end of the window over the widths from 1000 on."""
    return lambda rows: float(pick([row["edge"] for row in rows if row["kind"] == "window" and row["m"] >= 1000]))


def travel(ratios: tuple[float, ...]) -> Callable[[list[Row]], float]:
    """The power of m that the way of the weights follows, mean over rates."""

    def measure(rows: list[Row]) -> float:
        from theodolite.plots import power_law

        found = [[row for row in rows if row["kind"] == "travel" and row["ratio"] == ratio] for ratio in ratios]
        return fmean(power_law([row["m"] for row in part], [row["distance"] for row in part]).exponent for part in found)

    return measure


def converging(m: int, ratio: float) -> Callable[[list[Row]], float]:
    """The share of starts that converge at a width and a rate."""
    return lambda rows: float(
        next(row["share"] for row in rows if row["kind"] == "edge" and row["m"] == m and row["ratio"] == ratio)
    )


class Window(Experiment):
    """The catapult window [2/λ, 4/λ] at every width: the transition to linearity is not continuous in the learning rate.

    For quadratic models of two-layer networks on one example, the largest rate at which three starts converge is bisected
    with the exact recursion, in units of 1/λ₀, and the distance travelled by the weights is computed from it. F17.
    """

    id = "catapult/window"
    source = "003, section 3.1 (discontinuity) and Theorem 3.3.1"
    sizes = {
        "tiny": Params(),
        "laptop": Params(widths=(100, 1000, 10_000, 100_000), draws=100),
        "paper": Params(widths=(100, 1000, 10_000, 100_000, 1_000_000), draws=100, together=10),
    }
    claims = (
        Claim(
            "F17: the upper end of the window, ηλ₀, smallest over the widths",
            edges(min),
            rule="at least",
            expected=3.90,
            reported=Reported("4 − Θ(log m/√m)", "003, Theorem 3.3.1"),
        ),
        Claim(
            "F17: the same, largest",
            edges(max),
            rule="at most",
            expected=4.05,
            reported=Reported("4", "003, Theorems 3.3.1 and B.7.1"),
        ),
        Claim(
            "F17: within the window the weights travel by m^(1/2) (exponent)",
            travel((2.2, 2.5, 3.0)),
            rule="within",
            expected=0.5,
            tolerance=0.1,
            reported=Reported("outside any ball of fixed radius", "003, Figure 3.2", read_from="theory"),
        ),
        Claim(
            "F17: below it they travel as far at every width (exponent)",
            travel((1.0, 1.5)),
            rule="within",
            expected=0.0,
            tolerance=0.1,
            reported=Reported("inside a ball of fixed radius", "003, Figure 3.2", read_from="theory"),
        ),
        Claim(
            "at m = 1000 and ηλ₀ = 3.95 the starts converge (share)",
            converging(1000, 3.95),
            rule="at least",
            expected=0.95,
            reported=Reported("catapult", "003, Theorem 3.3.1"),
        ),
        Claim(
            "at m = 1000 and ηλ₀ = 4.05 none does (share)",
            converging(1000, 4.05),
            rule="equal",
            expected=0.0,
            reported=Reported("divergence", "003, Theorem B.7.1"),
        ),
    )

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        for m in p.widths:
            yield {
                "m": m,
                "draws": p.draws,
                "together": p.together,
                "steps": p.steps,
                "ratios": list(p.ratios),
                "edge": list(p.edge),
                "seed": 0,
            }

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        m, few = job["m"], job["together"]
        start = draw(m, job["draws"], job["seed"])

        def share(ratio: float, draws: int) -> float:
            kernel = start.kernel[:draws]
            orbit = one_example(start.output[:draws], kernel, TARGET, 1 / m, ratio / kernel, job["steps"], until=1e-14)
            return float((orbit.loss[-1] <= CONVERGED * orbit.loss[0]).double().mean())

        # At 100 units the edge is soft, and starts converge together only well below it.
        found = largest_rate(lambda ratio: share(ratio, few) == 1.0, 2.05, 16.0, tol=1e-3)
        yield {"kind": "window", "m": m, "edge": found, "seed": job["seed"]}
        for ratio in job["edge"]:
            yield {"kind": "edge", "m": m, "ratio": ratio, "share": share(ratio, job["draws"]), "seed": job["seed"]}
        for ratio in job["ratios"]:
            orbit = one_example(start.output, start.kernel, TARGET, 1 / m, ratio / start.kernel, job["steps"], until=1e-14)
            way = displacement(orbit, 1 / m)[-1]
            yield {"kind": "travel", "m": m, "ratio": ratio, "distance": median(way.tolist()), "seed": job["seed"]}

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        figure, (left, middle, right) = plots.panels(3)
        window = [row for row in rows if row["kind"] == "window"]
        plots.curves(window, "m", "edge", log="x", xlabel="width m", ylabel="largest ηλ₀ that converges", ax=left)
        left.set_ylim(0, 4.5)
        plots.reference(left, y=4.0, label="4")
        plots.reference(left, y=2.0, label="2: critical")
        edge = [{**row, "width": f"m = {row['m']:,}"} for row in rows if row["kind"] == "edge"]
        plots.curves(edge, "ratio", "share", by="width", labels="legend", xlabel="ηλ₀", ylabel="share that converges", ax=middle)
        plots.reference(middle, x=4.0)
        travel_rows = [{**row, "rate": f"ηλ₀ = {row['ratio']:g}"} for row in rows if row["kind"] == "travel"]
        plots.log_log(travel_rows, "m", "distance", by="rate", xlabel="width m", ylabel="‖w(end) − w(0)‖, median", ax=right)
        return figure
