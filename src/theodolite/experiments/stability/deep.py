"""Figures 2.2 and 2.3: in deep networks stability and distance hardly fall while the gap does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.stability.configurations import DEEP, LOGISTIC
from theodolite.experiments.stability.laws import Measure, chosen, delta, exponent, kept, law, upper_end
from theodolite.experiments.stability.pair_figures import DEEP_STUDY, REGRESSION, Cell, PairFigure, Params, grid, named
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Exponents of the gap of the cross-entropy and of its stability.
REPORTED: dict[str, tuple[float, Any]] = {"1a": (-0.18, -0.09), "2a": (-0.48, "does not fall"), "2b": (-0.35, -0.17)}
_TEXT = "004, section 2.3.2"


def reported_delta(name: str) -> Reported:
    """Stability's exponent less the gap's, from the two of the text."""
    gap, stab = REPORTED[name]
    return Reported(round(stab - gap, 2) if isinstance(stab, float) else f"at least {-gap:g}", _TEXT)


def _main_claims(name: str) -> tuple[Claim, ...]:
    gap, stab = REPORTED[name]
    return (
        Claim(
            f"{name}: stability falls more slowly than the gap of the cross-entropy (Δb)",
            delta(configuration=name),
            rule="at least",
            expected=0.05,
            reported=reported_delta(name),
        ),
        Claim(
            f"{name}: stability hardly falls (exponent)",
            exponent("stab", configuration=name),
            rule="at least",
            expected=-0.4,
            reported=Reported(stab, _TEXT),
            since="laptop",
        ),
        Claim(
            f"{name}: stability at the largest m over that at the smallest",
            kept("stab", configuration=name),
            rule="at least",
            expected=0.5,
            reported=Reported(f"falls like m^{stab}" if isinstance(stab, float) else stab, _TEXT),
            since="laptop",
        ),
        Claim(
            f"{name}: the gap of the cross-entropy falls (upper end of the interval of its exponent)",
            upper_end("gap_loss", configuration=name),
            rule="at most",
            expected=0.0,
            reported=Reported(gap, _TEXT),
        ),
    )


class Figure22(PairFigure):
    """Deep networks: the gap falls with m, stability hardly does.

    A line for each configuration of Table 2.1: gaps of the 0-1 loss and of the cross-entropy, and stability, after T updates.
    """

    id = "stability/figure-2.2"
    source = "004, section 2.3.2, Figure 2.2"
    item = "karp-2024 Figure 2.2"
    claims = tuple(claim for name in DEEP for claim in _main_claims(name))


def contrast(name: str) -> Measure:
    """The exponent of the distance less that of logistic regression."""
    return lambda rows: law(rows, "dist", configuration=name).b - law(rows, "dist", configuration=LOGISTIC).b


def _distance_claims(name: str) -> tuple[Claim, ...]:
    return (
        Claim(
            f"{name}: the distance hardly falls (exponent)",
            exponent("dist", configuration=name),
            rule="at least",
            expected=-0.3,
            reported=Reported("does not fall fast enough, and rises in places", "004, section 2.4.1, Figure 2.3"),
            since="laptop",
        ),
        Claim(
            f"{name}: in logistic regression the distance falls faster (difference of the exponents)",
            contrast(name),
            rule="at least",
            expected=0.3,
            reported=Reported("−1.05 to −1.13 in logistic regression", "004, sections 2.3.1 and 2.4.1"),
        ),
    )


class Figure23(PairFigure):
    """Deep networks: the distance between the parameters of a pair hardly falls with m.

    The runs of Figure 2.2; those of logistic regression stand beside them.
    """

    id = "stability/figure-2.3"
    source = "004, section 2.4.1, Figure 2.3"
    item = "karp-2024 Figure 2.3"
    configurations = (*DEEP, LOGISTIC)
    sizes = {size: Params((study, REGRESSION[size])) for size, study in DEEP_STUDY.items()}
    claims = tuple(claim for name in DEEP for claim in _distance_claims(name))

    def draw(self, rows: list[Row]) -> Figure:
        return grid([[Cell(chosen(rows, configuration=name), "dist", named(name, rows)) for name in self.configurations]])
