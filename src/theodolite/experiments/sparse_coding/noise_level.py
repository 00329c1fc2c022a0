"""Figure 2.3: how strong the noise is."""

from __future__ import annotations

import math
from dataclasses import replace

from theodolite.experiments.claims import Claim, Measure, Reported
from theodolite.experiments.sparse_coding.overrealization import FULL, TINY
from theodolite.experiments.sparse_coding.planted import OBJECTIVES, Setting
from theodolite.experiments.sparse_coding.recovery_figures import (
    DEPARTS,
    PANELS,
    Params,
    RecoveryFigure,
    Table,
    gap_at,
    least,
    mean_of,
    steps_of,
    table_claims,
    value_claim,
)
from theodolite.results import Row

WHERE = "Figure 2.3"
SECTION = "000, section 2.4.3"
#: By the place of the standard deviation between 1/d and 1/√d.
TABLE: Table = {
    ("a", "reconstruction"): {0: 0.007, 0.25: 0.136, 0.5: 0.304, 0.75: 0.439, 1: 0.535},
    ("a", "masked"): {0: 0.005, 0.25: 0.061, 0.5: 0.166, 0.75: 0.275, 1: 0.383},
    ("b", "reconstruction"): {0: 0.003, 0.25: 0.055, 0.5: 0.176, 0.75: 0.273, 1: 0.335},
    ("b", "masked"): {0: 0.004, 0.25: 0.037, 0.5: 0.082, 0.75: 0.122, 1: 0.158},
}
INITIAL: dict[float, float] = {0: 0.1488, 0.25: 0.1843, 0.5: 0.2421, 0.75: 0.3086, 1: 0.3712}


def noisy(setting: Setting, *places: float) -> tuple[tuple[float, Setting], ...]:
    """Standard deviations between 1/d and 1/√d; the last is the setting's own."""
    low, high = 1 / setting.dim, 1 / math.sqrt(setting.dim)
    return tuple((at, setting if at == 1 else replace(setting, noise=low + at * (high - low))) for at in places)


def worst(panel: str, place: float) -> Measure:
    """The larger of both errors."""
    return lambda rows: -least([-mean_of(rows, panel=panel, objective=o, place=place) for o in OBJECTIVES])


def ratio(panel: str, place: float) -> Measure:
    """Masking's error over the baseline's."""

    def measure(rows: list[Row]) -> float:
        base, masked = (mean_of(rows, panel=panel, objective=objective, place=place) for objective in OBJECTIVES)
        return masked / base

    return measure


def _claims() -> tuple[Claim, ...]:
    opening = [
        Claim(
            f"({panel}) the gap opens with the noise (smallest change from one level to the next)",
            steps_of(panel, gap_at),
            rule="at least",
            expected=0.0,
            reported=Reported("yes", SECTION),
        )
        for panel in PANELS
    ]
    middle = [
        Claim(
            f"({panel}) halfway up, masking's error over the baseline's",
            ratio(panel, 0.5),
            rule="at most",
            expected=0.65,
            reported=Reported(value, f"000, {WHERE}", "plot"),
            since="laptop",
        )
        for panel, value in (("a", 0.546), ("b", 0.466))
    ]
    return (
        Claim(
            "(a) at the lowest noise both find the truth from noisy samples (larger error)",
            worst("a", 0),
            rule="at most",
            expected=0.03,
            reported=Reported(0.007, f"000, {WHERE}", "plot"),
            since="laptop",
        ),
        Claim(
            "(a) at the lowest noise they do not differ (baseline less masking)",
            lambda rows: gap_at(rows, "a", 0),
            expected=0.0,
            tolerance=0.01,
            reported=Reported(0.002, f"000, {WHERE}", "plot"),
            since="laptop",
        ),
        *middle,
        *opening,
        *(value_claim(WHERE, TABLE, panel, o, 0.5, "halfway up") for panel in PANELS for o in OBJECTIVES),
        *table_claims(WHERE, TABLE, INITIAL),
    )


class Figure23(RecoveryFigure):
    """Without noise the objectives agree; the gap opens with the noise.

    As many learned atoms as signals, the standard deviation of the noise between 1/d and 1/√d, where it is as strong as the
    signal. Panel (a) starts at noisy samples, (b) at the true atoms and samples.
    """

    id = "sparse-coding/figure-2.3"
    source = "000, section 2.4.3, Figure 2.3"
    item = "wu-2023 Figure 2.3"
    axis = ("noise", "standard deviation of the noise")
    reported = TABLE
    sizes = {
        "tiny": Params(noisy(replace(TINY, learned=FULL * TINY.atoms), 0, 0.5, 1), seeds=1, fleet=True),
        "laptop": Params(noisy(Setting(), 0, 0.5, 1), seeds=2),
        "paper": Params(noisy(Setting(), 0, 0.25, 0.5, 0.75, 1), seeds=5),
    }
    departs = (
        f"{DEPARTS} The text says that the variance grows linearly; it is the standard deviation. At tiny size there are "
        "100 atoms in 50 dimensions, 3 per signal, 500 signals in batches of 100, 100 passes "
        "instead of 500, and one seed."
    )
    claims = _claims()
