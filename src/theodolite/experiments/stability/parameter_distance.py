"""Figures A.11 to A.13: distance, norm and normalised distance of the parameters, three configurations and three seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.stability.configurations import DEEP
from theodolite.experiments.stability.laws import chosen, gain, over_trials
from theodolite.experiments.stability.pair_figures import TRIALS, Cell, PairFigure, grid, named
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: An exponent below this would be a fall, for the distance and for what is left after normalising.
FALLS = -0.3


class ParametersFigure(PairFigure):
    """One quantity: a line of panels for each configuration, a column for each seed-trial."""

    trials = TRIALS

    def draw(self, rows: list[Row]) -> Figure:
        def cell(name: str, trial: int) -> Cell:
            return Cell(
                chosen(rows, configuration=name, trial=trial), self.quantities[0], f"{named(name, rows)}, trial {trial + 1}"
            )

        return grid([[cell(name, trial) for trial in self.trials] for name in self.configurations])


class FigureA11(ParametersFigure):
    """Distance of the parameters of a pair against m, three seeds."""

    id = "stability/figure-A.11"
    source = "004, appendix A.3, Figure A.11"
    item = "karp-2024 Figure A.11"
    quantities = ("dist",)
    claims = tuple(
        Claim(
            f"{name}: the distance hardly falls (exponent, smallest of the seed-trials)",
            over_trials(min, "dist", configuration=name),
            rule="at least",
            expected=FALLS,
            reported=Reported("does not fall fast enough, and rises in places", "004, section 2.4.1 and Figure A.11"),
            since="laptop",
        )
        for name in DEEP
    )


class FigureA12(ParametersFigure):
    """Norm of the parameters against m, three seeds."""

    id = "stability/figure-A.12"
    source = "004, appendix A.3, Figure A.12"
    item = "karp-2024 Figure A.12"
    quantities = ("norm_S",)
    claims = tuple(
        Claim(
            f"{name}: the norm grows with m (exponent, smallest of the seed-trials)",
            over_trials(min, "norm_S", configuration=name),
            rule="at least",
            expected=0.0,
            reported=Reported("norms grow with m", "004, Figures A.12 and A.13"),
            since="laptop",  # after 160 updates the norm is that of the start
        )
        for name in DEEP
    )


def _normalised_claims(name: str) -> tuple[Claim, ...]:
    return (
        Claim(
            f"{name}: normalising takes growth with m away (exponent of D less that of the normalised D, median of seed-trials)",
            gain("dist", "ndist", configuration=name),
            rule="at least",
            expected=0.0,
            reported=Reported("largely mitigates the growth", "004, Figure A.13"),
            since="laptop",
        ),
        Claim(
            f"{name}: the normalised distance hardly falls (exponent, smallest of the seed-trials)",
            over_trials(min, "ndist", configuration=name),
            rule="at least",
            expected=FALLS,
            reported=Reported("no significant decrease", "004, Figure A.13"),
            since="laptop",
        ),
        Claim(
            f"{name}: the normalised distance lies between 0 and 2 (largest of all pairs)",
            lambda rows: max(row["ndist"] for row in rows if row["configuration"] == name),
            rule="between",
            expected=(0.0, 2.0),
            reported=Reported((0.0, 2.0), "004, Figure A.13: D over the mean of the norms", read_from="theory"),
        ),
    )


class FigureA13(ParametersFigure):
    """Distance over the mean norm of the two solutions against m, three seeds."""

    id = "stability/figure-A.13"
    source = "004, appendix A.3, Figure A.13"
    item = "karp-2024 Figure A.13"
    quantities = ("ndist",)
    claims = tuple(claim for name in DEEP for claim in _normalised_claims(name))
