"""Figure 2.2: dimension, atoms and sparsity grow together, the number of signals does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from theodolite.experiments.claims import Claim, Measure, Reported
from theodolite.experiments.sparse_coding.overrealization import TINY
from theodolite.experiments.sparse_coding.planted import OBJECTIVES, Setting
from theodolite.experiments.sparse_coding.recovery_figures import (
    DEPARTS,
    PANELS,
    Params,
    RecoveryFigure,
    Table,
    gap_at,
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
from theodolite.measures.dictionary.learning import Objective
from theodolite.results import Row

WHERE = "Figure 2.2"
SECTION = "000, section 2.4.2"
#: By the dimension over the smallest one.
TABLE: Table = {
    ("a", "reconstruction"): {1: 0.443, 1.5: 0.582, 2: 0.697, 2.5: 0.741},
    ("a", "masked"): {1: 0.386, 1.5: 0.509, 2: 0.613, 2.5: 0.663},
    ("b", "reconstruction"): {1: 0.158, 1.5: 0.266, 2: 0.400, 2.5: 0.460},
    ("b", "masked"): {1: 0.149, 1.5: 0.204, 2: 0.256, 2.5: 0.290},
}
INITIAL: dict[float, float] = {1: 0.4418, 1.5: 0.4847, 2: 0.5301, 2.5: 0.5541}


def scaled(*dims: int) -> tuple[tuple[float, Setting], ...]:
    """d dimensions, 2d true and 4d learned atoms, ⌊d/20⌋ per signal."""
    return tuple((d / dims[0], Setting(dim=d, atoms=2 * d, learned=4 * d, sparsity=d // 20)) for d in dims)


def small() -> tuple[tuple[float, Setting], ...]:
    """25 and 50 dimensions with 2 and 3 atoms per signal."""
    return tuple((d / 25, replace(TINY, dim=d, atoms=2 * d, learned=4 * d, sparsity=k)) for d, k in ((25, 2), (50, 3)))


def error_of(objective: str) -> Callable[[list[Row], str, float], float]:
    return lambda rows, panel, place: mean_of(rows, panel=panel, objective=objective, place=place)


def degrading(panel: str) -> Measure:
    """The smallest rise of either curve from one dimension to the next."""
    return lambda rows: least([steps_of(panel, error_of(objective))(rows) for objective in OBJECTIVES])


def widened(panel: str) -> Measure:
    """The gap at the largest dimension less that at the smallest."""
    return lambda rows: gap_at(rows, panel, places(rows)[-1]) - gap_at(rows, panel, places(rows)[0])


def _claims() -> tuple[Claim, ...]:
    better = [
        Claim(
            f"({panel}) masking is better at every size (smallest difference)",
            smallest(gap_of(panel)),
            rule="at least",
            expected=0.0,
            reported=Reported("yes", SECTION),
        )
        for panel in PANELS
    ]
    wider = [
        Claim(
            f"({panel}) the gap widens (at the largest dimension less at the smallest)",
            widened(panel),
            rule="at least",
            expected=0.0,
            reported=Reported(value, f"000, {WHERE}", "plot"),
        )
        for panel, value in (("a", 0.021), ("b", 0.161))
    ]
    worse = [
        Claim(
            f"({panel}) both get worse with the dimension (smallest rise)",
            degrading(panel),
            rule="at least",
            expected=0.0,
            reported=Reported("yes", SECTION),
        )
        for panel in PANELS
    ]
    names: tuple[tuple[Objective, str, float], ...] = (("reconstruction", "the baseline", 0.097), ("masked", "masking", 0.024))
    starved = [
        Claim(
            f"(a) {name} ends above its start at all but the smallest dimension: 1000 signals are too few (smallest rise)",
            smallest(rise_at("a", objective), lambda row: row["place"] > 1),
            rule="at least",
            expected=0.0,
            reported=Reported(value, f"000, {WHERE}, not said in the text", "plot"),
            since="laptop",
        )
        for objective, name, value in names
    ]
    first = [value_claim(WHERE, TABLE, panel, o, 1, "at the smallest dimension") for panel in PANELS for o in OBJECTIVES]
    return *first, *better, *wider, *worse, *starved, *table_claims(WHERE, TABLE, INITIAL)


class Figure22(RecoveryFigure):
    """All parameters grow, the signals stay 1000: masking stays ahead.

    d dimensions, 2d true and 4d learned atoms, ⌊d/20⌋ atoms per signal, noise as strong as the signal. Panel (a) starts at noisy
    samples, (b) at the true atoms and samples.
    """

    id = "sparse-coding/figure-2.2"
    source = "000, section 2.4.2, Figure 2.2"
    item = "wu-2023 Figure 2.2"
    axis = ("dim", "dimension d (p = 2d, p' = 4d)")
    reported = TABLE
    sizes = {
        "tiny": Params(small(), seeds=2, fleet=True),
        "laptop": Params(scaled(100, 200), seeds=2),
        "paper": Params(scaled(100, 150, 200, 250), seeds=5),
    }
    departs = (
        f"{DEPARTS} At tiny size the dimension is 25 and 50 with 2 and 3 atoms per signal, there are 500 signals in batches of "
        "100, and 100 passes instead of 500."
    )
    claims = _claims()
