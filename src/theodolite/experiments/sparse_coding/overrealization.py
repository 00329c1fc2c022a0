"""Figure 2.1: more learned atoms than true ones."""

from __future__ import annotations

from dataclasses import replace

from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.sparse_coding.planted import OBJECTIVES, Setting
from theodolite.experiments.sparse_coding.recovery_figures import (
    DEPARTS,
    PANELS,
    Params,
    RecoveryFigure,
    Table,
    gap_at,
    gap_in,
    gap_of,
    least,
    mean_of,
    places,
    rise_at,
    smallest,
    steps_of,
    table_claims,
    value_claim,
)
from theodolite.results import Row

WHERE = "Figure 2.1"
SECTION = "000, section 2.4.1"
#: By p'/p.
TABLE: Table = {
    ("a", "reconstruction"): {1: 0.468, 2: 0.449, 3: 0.465, 4: 0.510, 5: 0.533},
    ("a", "masked"): {1: 0.433, 2: 0.376, 3: 0.381, 4: 0.379, 5: 0.384},
    ("b", "reconstruction"): {1: 0.126, 2: 0.156, 3: 0.202, 4: 0.270, 5: 0.330},
    ("b", "masked"): {1: 0.153, 2: 0.149, 3: 0.153, 4: 0.158, 5: 0.158},
}
INITIAL: dict[float, float] = {1: 0.5135, 2: 0.4426, 3: 0.4095, 4: 0.389, 5: 0.3757}
#: Every learned atom has a sample of its own: p' = n.
FULL = 5

TINY = Setting(dim=50, atoms=100, sparsity=3, samples=500, batch=100, epochs=100)


def over_realized(setting: Setting, *ratios: int) -> tuple[tuple[float, Setting], ...]:
    """A setting with p' that many times p."""
    return tuple((ratio, replace(setting, learned=ratio * setting.atoms)) for ratio in ratios)


def spread(rows: list[Row], objective: str) -> float:
    """Largest less smallest error of a curve of panel (b)."""
    errors = [mean_of(rows, panel="b", objective=objective, place=place) for place in places(rows)]
    return -least([-error for error in errors]) - least(errors)


def first_improvement(rows: list[Row]) -> float:
    """By how much both curves of (a) fall from p' = p to p' = 2p, the smaller."""
    return least(
        [mean_of(rows, panel="a", objective=o, place=1) - mean_of(rows, panel="a", objective=o, place=2) for o in OBJECTIVES]
    )


def _claims() -> tuple[Claim, ...]:
    values = [value_claim(WHERE, TABLE, panel, objective, FULL, "at p' = n") for panel in PANELS for objective in OBJECTIVES]
    apart = [
        Claim(
            f"({panel}) masking ends below the baseline at p' = n (difference)",
            gap_in(panel, FULL),
            rule="at least",
            expected=0.05,
            reported=Reported(
                round(TABLE[panel, "reconstruction"][FULL] - TABLE[panel, "masked"][FULL], 3), f"000, {WHERE}", "plot"
            ),
        )
        for panel in PANELS
    ]
    below = [
        Claim(
            f"({panel}) masking is better from p' = 2p on (smallest difference)",
            smallest(gap_of(panel), lambda row: row["place"] >= 2),
            rule="at least",
            expected=0.0,
            reported=Reported("yes", SECTION),
        )
        for panel in PANELS
    ]
    widening = [
        Claim(
            f"({panel}) the gap widens with p' (smallest change from one p' to the next)",
            steps_of(panel, gap_at),
            rule="at least",
            expected=0.0,
            reported=Reported("yes", SECTION),
            since="laptop",
        )
        for panel in PANELS
    ]
    rising = [
        Claim(
            f"({panel}) the baseline ends above its own start for every p' > p (smallest rise)",
            smallest(rise_at(panel, "reconstruction"), lambda row: row["place"] > 1),
            rule="at least",
            expected=0.0,
            reported=Reported("yes", SECTION),
            since="laptop",
        )
        for panel in PANELS
    ]
    return (
        *values,
        *apart,
        Claim(
            "(b) at p' = p, where nothing is over-realized, the baseline is better (masking less baseline)",
            lambda rows: -gap_at(rows, "b", 1),
            rule="at least",
            expected=0.0,
            reported=Reported(0.027, f"000, {WHERE}", "plot"),
            since="laptop",
        ),
        *below,
        *widening,
        *rising,
        Claim(
            "(a) at p' = n the baseline ends above its start (rise)",
            lambda rows: rise_at("a", "reconstruction")(rows, FULL),
            rule="at least",
            expected=0.08,
            reported=Reported(0.157, f"000, {WHERE}", "plot"),
            since="laptop",
        ),
        Claim(
            "(a) masking improves on its start for every p' < n (smallest improvement)",
            smallest(lambda rows, place: -rise_at("a", "masked")(rows, place), lambda row: row["learned"] < row["samples"]),
            rule="at least",
            expected=0.0,
            reported=Reported("yes", SECTION),
        ),
        Claim(
            "(a) both improve from p' = p to p' = 2p (smaller improvement)",
            first_improvement,
            rule="at least",
            expected=0.0,
            reported=Reported("yes", SECTION),
        ),
        Claim(
            "(b) masking hardly depends on p' (largest less smallest error)",
            lambda rows: spread(rows, "masked"),
            rule="at most",
            expected=0.02,
            reported=Reported(0.009, f"000, {WHERE}", "plot"),
        ),
        Claim(
            "(b) masking varies less than half as much over p' as the baseline (ratio of the ranges)",
            lambda rows: spread(rows, "masked") / spread(rows, "reconstruction"),
            rule="at most",
            expected=0.5,
            reported=Reported(0.044, f"000, {WHERE}", "plot"),
        ),
        *table_claims(WHERE, TABLE, INITIAL),
    )


class Figure21(RecoveryFigure):
    """More learned atoms than true ones: the baseline gets worse than its start, masking does not.

    Recovery error of 200 planted atoms in 100 dimensions after 500 passes over 1000 noisy signals, by the number p' of learned
    atoms. Panel (a) starts at noisy samples, (b) at the true atoms and samples.
    """

    id = "sparse-coding/figure-2.1"
    source = "000, section 2.4.1, Figure 2.1"
    item = "wu-2023 Figure 2.1"
    axis = ("learned", "learned atoms p'")
    reported = TABLE
    sizes = {
        "tiny": Params(over_realized(TINY, 1, 2, 5), seeds=2, fleet=True),
        "laptop": Params(over_realized(Setting(), 1, 2, 5), seeds=2),
        "paper": Params(over_realized(Setting(), 1, 2, 3, 4, 5), seeds=5),
    }
    departs = (
        f"{DEPARTS} At tiny size there are 100 atoms in 50 dimensions, 3 per signal, 500 signals in batches of 100, and "
        "100 passes instead of 500."
    )
    claims = _claims()
