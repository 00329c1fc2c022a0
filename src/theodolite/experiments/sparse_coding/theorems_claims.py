"""The theorems on masking as claims."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from theodolite.experiments.claims import Claim, Measure, Reported
from theodolite.experiments.query import Measured, chosen
from theodolite.experiments.sparse_coding.recovery_figures import least
from theodolite.results import Row


def lowest(part: str, reading: Callable[[Row], float], **where: Any) -> Measure:
    """The smallest reading of a part's rows."""
    return lambda rows: least([reading(row) for row in chosen(rows, part=part, **where)])


def highest(part: str, reading: Callable[[Row], float], **where: Any) -> Measure:
    """The largest reading of a part's rows."""
    return lambda rows: -least([-reading(row) for row in chosen(rows, part=part, **where)])


def consistency(rows: list[Row], column: str) -> dict[float, float]:
    """A column of T7 by σ_z, in mean over the dictionaries."""
    mine = chosen(rows, part="T7")
    scales = sorted({row["scale"] for row in mine})
    return {scale: fmean(row[column] for row in mine if row["scale"] == scale) for scale in scales}


def log_slope(column: str, least_scale: float) -> Measure:
    """The power of σ_z that a column of T7 follows from some scale on."""

    def measure(rows: list[Row]) -> float:
        found = {scale: value for scale, value in consistency(rows, column).items() if scale >= least_scale}
        return float(np.polyfit(np.log(list(found)), np.log(list(found.values())), 1)[0])

    return measure


def excess_share(rows: list[Row]) -> Measured:
    """Risk above Bayes over the Bayes risk at the largest σ_z, with its standard error."""
    last = max(row["scale"] for row in chosen(rows, part="T7"))
    mine = chosen(rows, part="T7", scale=last)
    bayes = fmean(row["bayes"] for row in mine)
    error = math.sqrt(sum(row["excess_error"] ** 2 for row in mine)) / len(mine)
    return Measured(fmean(row["excess"] for row in mine) / bayes, error / bayes)


def gap_variation(rows: list[Row]) -> float:
    """How much the gap over kσ² varies over σ."""
    gaps = [row["gap"] for row in chosen(rows, part="T2-T3")]
    return float(np.ptp(gaps) / np.mean(gaps))


def refinement(rows: list[Row]) -> float:
    """The smallest change of the gain when the angles double, with no atom taken out."""
    changes = []
    for sigma in sorted({row["sigma"] for row in chosen(rows, part="T2-T3")}):
        mine = sorted(chosen(rows, part="T2-T3", sigma=sigma, radius=0.0), key=lambda row: row["angles"])
        changes += [later["gain"] - earlier["gain"] for earlier, later in pairwise(mine)]
    return least(changes)


def growth_in_dimension(rows: list[Row]) -> float:
    """Mixtures over p²d: the largest dimension's over the smallest's."""
    mine = sorted(chosen(rows, part="T4"), key=lambda row: row["dim"])
    return float(mine[-1]["share"] / mine[0]["share"])


def relative(row: Row) -> float:
    """By how much the mixtures' loss exceeds the true dictionary's, as a share of it."""
    return float(row["mixtures"] / row["true"] - 1)


def _theory(value: Any, where: str) -> Reported:
    return Reported(value, f"000, {where}", read_from="theory")


FIT = {"angles": 64, "radius": 1.0}

CLAIMS = (
    Claim(
        "T8: by reconstruction the mixtures beat the true dictionary (their loss over its own, less 1; largest)",
        highest("T8", relative, loss="reconstruction"),
        rule="at most",
        expected=-0.2,
        reported=_theory("lower", "Theorem 2.3.2"),
    ),
    Claim(
        "T8: by the masked loss the true dictionary beats the mixtures (their loss over its own, less 1; smallest)",
        lowest("T8", relative, loss="masked, normalized"),
        rule="at least",
        expected=0.15,
        reported=_theory("higher", "Theorem 2.3.6"),
    ),
    Claim(
        "T8: so it does when atoms are selected by raw inner products (smallest)",
        lowest("T8", relative, loss="masked, raw"),
        rule="at least",
        expected=0.15,
        reported=_theory("higher", "Theorem 2.3.6"),
    ),
    Claim(
        "T1: restricted isometry constants over (s − 1) times the coherence (largest)",
        highest("T1", lambda row: row["ratio"]),
        rule="at most",
        expected=1.0,
        tolerance=1e-9,
        reported=_theory(1.0, "section 2.2"),
    ),
    Claim(
        "T2: a second atom per signal lowers the loss in proportion to σ² ((L(A,1) − L(A,2))/σ², smallest)",
        lowest("T2-T3", lambda row: row["gap"]),
        rule="between",
        expected=(4.0, 7.0),
        reported=_theory("of the order of kσ²", "(A.7)"),
    ),
    Claim(
        "T2: the same at every σ (variation over σ as a share of the mean)",
        gap_variation,
        rule="at most",
        expected=0.03,
        reported=_theory(0.0, "(A.7)"),
    ),
    Claim(
        "T3: mixtures of two atoms gain nearly as much (share of T2's gap with 64 angles, smallest)",
        lowest("T2-T3", lambda row: row["share"], **FIT),
        rule="between",
        expected=(0.8, 1.0),
        reported=_theory("a constant share", "Theorem 2.3.2"),
    ),
    Claim(
        "T3: and no more than the second atom (largest share)",
        highest("T2-T3", lambda row: row["share"]),
        rule="at most",
        expected=1.0,
        reported=_theory("at most 1", "Theorem 2.3.2"),
    ),
    Claim(
        "T3: although they stay away from all true atoms (d_R/σ² with radius σ, smallest)",
        lowest("T2-T3", lambda row: row["distance"], **FIT),
        rule="at least",
        expected=1.0,
        reported=_theory("of the order of 1", "Theorem 2.3.2"),
    ),
    Claim(
        "T3: finer mixtures gain more (smallest change of the gain over σ² when the angles double)",
        refinement,
        rule="at least",
        expected=0.0,
        reported=_theory("growing", "Theorem 2.3.2"),
    ),
    Claim(
        "T4: mixtures needed for half of the gain grow no faster than p²d (their ratio at the largest d over the smallest)",
        growth_in_dimension,
        rule="at most",
        expected=1.0,
        reported=_theory("of the order of p²d", "Corollary 2.3.4"),
    ),
    Claim(
        "T5: errors on hidden coordinates do not know their noise (|cross term| in standard errors, largest)",
        highest("T5-T6", lambda row: abs(row["hidden_cross"])),
        rule="at most",
        expected=4.0,
        reported=_theory(0.0, "(A.11)"),
    ),
    Claim(
        "T5: errors of the usual decoder do (cross term in standard errors, smallest)",
        lowest("T5-T6", lambda row: row["cross"]),
        rule="at least",
        expected=10.0,
        reported=_theory("positive", "section 2.3"),
    ),
    Claim(
        "T5: the masked loss is a risk plus the noise of the hidden coordinates (|difference| in standard errors, largest)",
        highest("T5-T6", lambda row: abs(row["off_floor"])),
        rule="at most",
        expected=4.0,
        reported=_theory(0.0, "(A.11)"),
    ),
    Claim(
        "T6: no dictionary beats the Bayes risk (masked loss less noise less Bayes risk, in standard errors, smallest)",
        lowest("T5-T6", lambda row: row["above_bayes"]),
        rule="at least",
        expected=-3.0,
        reported=_theory("at least 0", "(A.16), ridge σ²/σ_z²"),
    ),
    Claim(
        "T7: wrong supports become rare like 1/σ_z (power, from σ_z = 8 on)",
        log_slope("wrong", 8),
        expected=-1.0,
        tolerance=0.15,
        reported=_theory(-1.0, "(A.23), corrected"),
    ),
    Claim(
        "T7: the true dictionary's risk above Bayes falls like 1/σ_z (power, from σ_z = 4 on)",
        log_slope("excess", 4),
        expected=-1.0,
        tolerance=0.25,
        reported=_theory("to 0", "Theorem 2.3.6"),
    ),
    Claim(
        "T7: risk above Bayes at the largest σ_z, as a share of the Bayes risk",
        excess_share,
        rule="at most",
        expected=0.1,
        reported=_theory("to 0", "Theorem 2.3.6"),
    ),
    Claim(
        "T7: least squares approaches Bayes like 1/σ_z² (power of exact risks, from σ_z = 4 on)",
        log_slope("least_squares_excess", 4),
        expected=-2.0,
        tolerance=0.05,
        reported=_theory(-2.0, "(A.15), corrected"),
    ),
    Claim(
        "T9: coefficients at the threshold are found at least as often as the bound says (frequency less bound, smallest)",
        lowest("T9", lambda row: row["frequency"] - row["bound"] + 3 * row["error"]),
        rule="at least",
        expected=0.0,
        reported=_theory("at least 0", "Theorem A.1.1"),
    ),
    Claim(
        "T10: the mean of the largest squared Gaussian over its bound (largest)",
        highest("T10", lambda row: max(row["independent"], row["equal"]) / row["bound"]),
        rule="at most",
        expected=1.0,
        reported=_theory("at most 1", "Lemma A.1.2"),
    ),
)
