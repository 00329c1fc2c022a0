"""Figure A.1: in which range of m one power law holds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.stability.laws import Measure, chosen, law
from theodolite.experiments.stability.pair_figures import DEEP_STUDY, DEPARTS, Cell, PairFigure, Params, grid, named
from theodolite.measures.stability import SlopeWindows, slope_windows
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TIMES = ("T/2", "3T/2")
#: Slopes may vary by this share of their mean in a window.
ROUGHLY = 0.2


def windows(rows: list[Row], time: str) -> SlopeWindows:
    """Local slopes of the largest gaps."""
    fit = law(rows, "gap_loss", time=time)
    return slope_windows(fit.ms, fit.g, spread=ROUGHLY)


def spread(time: str) -> Measure:
    """How much the local slopes vary over the whole range, as a share of their mean."""

    def measure(rows: list[Row]) -> float:
        slopes = np.array(windows(rows, time).slopes)
        slopes = slopes[np.isfinite(slopes)]  # others touch a gap that is not positive
        return float(np.ptp(slopes) / abs(slopes.mean()))

    return measure


def sizes_in_window(time: str) -> Measure:
    """Sizes in the widest window of roughly constant slope."""
    return lambda rows: 1 + sum(row["in_widest"] for row in windows(rows, time).rows())


def _claims(time: str) -> tuple[Claim, ...]:
    return (
        Claim(
            f"{time}: regions of m with different slopes (spread of the local slopes of the gap over their mean)",
            spread(time),
            rule="at least",
            expected=ROUGHLY,
            reported=Reported("different regions of decrease", "004, Figure A.1"),
        ),
        Claim(
            f"{time}: a window of at least three sizes in which the slope is roughly constant (sizes in the widest)",
            sizes_in_window(time),
            rule="at least",
            expected=3,
            reported=Reported("8 sizes, 15,000 to 50,000", "004, appendix A.1"),
            since="laptop",
        ),
    )


class FigureA1(PairFigure):
    """The range of m: one power law fits the gap imperfectly over a wide one.

    The gap of configuration 1a after half the updates and after half as many again, on linear axes above and logarithmic ones
    below, where the widest window of roughly constant slope is shaded.
    """

    id = "stability/figure-A.1"
    source = "004, appendix A.1, Figure A.1"
    item = "karp-2024 Figure A.1"
    configurations = ("1a",)
    times = TIMES
    quantities = ("gap_loss",)
    sizes = {
        "tiny": Params((replace(DEEP_STUDY["tiny"], sizes=(25, 50, 100, 200, 400, 800)),)),
        "laptop": Params((replace(DEEP_STUDY["laptop"], sizes=(125, 250, 500, 1000, 2000, 4000, 8000, 16_000)),)),
        "paper": Params(
            (replace(DEEP_STUDY["paper"], sizes=(1000, 2000, 4000, 8000, *DEEP_STUDY["paper"].sizes), pairs=20, further=20),)
        ),
    }
    departs = f"{DEPARTS} The source does not list its sizes below 15,000."
    claims = tuple(claim for time in TIMES for claim in _claims(time))

    def draw(self, rows: list[Row]) -> Figure:
        def cell(time: str, log: bool) -> Cell:
            return Cell(chosen(rows, time=time), "gap_loss", f"{named('1a', rows)} at {time}", log, window=log)

        return grid([[cell(time, log) for time in TIMES] for log in (False, True)])
