"""Slopes of Hessian norms against width, and what the theorems say about them."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import linear_regression, median

from theodolite.experiments.claims import Claim, Reported
from theodolite.results import Row

Measure = Callable[[list[Row]], float]
_T1 = "003, Theorem 2.3.6"


def medians(rows: list[Row], value: str = "norm") -> list[Row]:
    """The median over the seeds for each family, width and distance."""
    groups: dict[tuple[str, int, float], list[float]] = {}
    for row in rows:
        groups.setdefault((row["family"], row["m"], row["distance"]), []).append(row[value])
    return [{"family": f, "m": m, "distance": d, value: median(found)} for (f, m, d), found in groups.items()]


def log_slope(points: list[tuple[float, float]]) -> float:
    """Least-squares slope in log-log.

    >>> round(log_slope([(1.0, 4.0), (4.0, 2.0), (16.0, 1.0)]), 9)
    -0.5
    """
    return linear_regression([math.log(x) for x, _ in points], [math.log(y) for _, y in points]).slope


def slope(family: str, distance: float = 0.0, value: str = "norm") -> Measure:
    """The power of m that a family's median follows."""

    def measure(rows: list[Row]) -> float:
        found = medians([r for r in rows if r["family"] == family and r["distance"] == distance], value)
        return log_slope([(row["m"], row[value]) for row in found])

    return measure


def largest(family: str) -> Measure:
    """The largest value of a family over widths, seeds and distances."""
    return lambda rows: max(row["norm"] for row in rows if row["family"] == family)


def at_widest(family: str) -> Measure:
    """The median at the largest width m, brought to m = 512 by the law 1/√m."""

    def measure(rows: list[Row]) -> float:
        found = medians([r for r in rows if r["family"] == family and r["distance"] == 0.0])
        widest = max(found, key=lambda row: row["m"])
        return float(widest["norm"]) * math.sqrt(widest["m"] / 512)

    return measure


def ratio_at_widest(rows: list[Row]) -> float:
    """Norm with a narrow first layer over that of the plain network, at the largest width."""
    found = medians([r for r in rows if r["distance"] == 0.0])
    m = max(row["m"] for row in found)
    value = {row["family"]: row["norm"] for row in found if row["m"] == m}
    return float(value["narrow first"] / value["three layers"])


def tensor_share(rows: list[Row]) -> float:
    """The largest ratio of the tensor norm to d_L times the largest norm of one output."""
    return max(float(row["tensor_norm"] / (3 * row["norm"])) for row in rows if row["family"] == "three outputs")


def bounded(rows: list[Row]) -> float:
    """How much ‖H‖√m / log m grows from the narrowest to the widest three-layer network."""
    found = medians([r for r in rows if r["family"] == "three layers" and r["distance"] == 0.0])
    scaled = [row["norm"] * math.sqrt(row["m"]) / math.log(row["m"]) for row in sorted(found, key=lambda r: r["m"])]
    return float(scaled[-1] / scaled[0])


def _decays(text: str, family: str, expected: float, where: str, since: str = "tiny") -> Claim:
    reported = Reported("−1/2 up to logs", where)
    return Claim(text, slope(family), rule="at most", expected=expected, reported=reported, since=since)


CLAIMS = (
    Claim(
        "T1: three layers: slope of ‖H‖ against the width at the initialisation",
        slope("three layers"),
        rule="between",
        expected=(-0.65, -0.33),
        reported=Reported("−1/2 up to logs", _T1),
    ),
    Claim(
        "T1: its value at m = 512 (at the largest width, times √(m/512))",
        at_widest("three layers"),
        rule="between",
        expected=(0.08, 0.16),
    ),
    Claim(
        "T1: ‖H‖√m / log m stays bounded (widest over narrowest)",
        bounded,
        rule="at most",
        expected=1.25,
        reported=Reported("bounded up to logs", _T1),
    ),
    Claim(
        "T1: the same slope at a random point at distance 1",
        slope("three layers", 1.0),
        rule="between",
        expected=(-0.65, -0.30),  # calibrated: −0.446 from 16 to 512, ten seeds
        reported=Reported("−1/2 up to logs", _T1),
    ),
    Claim(
        "T1: the smallest in-degree rules: hidden layers m and m²",
        slope("m, m²"),
        rule="between",
        expected=(-0.65, -0.20),
        reported=Reported("−1/2 in the smallest in-degree", _T1),
    ),
    _decays("T1 and T8: two layers, output linear", "two layers", -0.3, _T1),
    _decays("T1: densely connected", "dense", -0.25, _T1),
    # With ten inputs read by every layer in-degrees hardly grow below m = 100: −0.14 from 16 to 100, −0.30 from 16 to 512.
    _decays("T1: half of the edges dropped", "dropped edges", -0.25, _T1, since="laptop"),
    _decays("T3: pre-activation of a neuron in the second layer", "hidden pre-activation", -0.25, "003, Theorem 2.3.8"),
    Claim(
        "T3: the Hessian of a first-layer pre-activation is zero (largest norm)",
        largest("first pre-activation"),
        rule="at most",
        expected=1e-12,
        reported=Reported(0, "003, Remark 2.3.9"),
    ),
    _decays("T4: three outputs, the largest of them", "three outputs", -0.25, "003, Corollary A.3.1"),
    Claim(
        "T4: the norm of the third-order tensor over its bound d_L max‖H_k‖ (largest; triangle inequality: a check of the code)",
        tensor_share,
        rule="at most",
        expected=1.0,
        reported=Reported("at most 1", "003, section A.3, before Corollary A.3.1"),
    ),
    _decays("T5: with skip connections", "skip", -0.25, "003, Theorem A.4.1"),
    _decays("T6: convolutional, weights shared", "convolution", -0.25, "003, Theorem A.5.1"),
    _decays("T7: two neurons of in-degree 1", "two bottlenecks", -0.3, "003, section A.6"),
    Claim(
        "T7: a narrow first layer keeps ‖H‖ from shrinking (slope)",
        slope("narrow first"),
        rule="between",
        expected=(-0.15, 0.15),
        reported=Reported("no decay", "003, section A.6"),
    ),
    Claim(
        "T7: a narrow second layer too (slope)",
        slope("narrow second"),
        rule="between",
        expected=(-0.15, 0.15),
        reported=Reported("no decay", "003, section A.6"),
    ),
    Claim(
        "T7: ‖H‖ with a narrow first layer over that of the plain network, at the largest width",
        ratio_at_widest,
        rule="at least",
        expected=4.0,
        since="laptop",
    ),
    _decays("T10: narrow first layer: the blocks above it shrink", "narrow first, upper blocks", -0.25, "003, Lemma A.2.2"),
    Claim(
        "T10: the block of the output layer is zero (largest norm)",
        largest("output block"),
        rule="at most",
        expected=1e-12,
        reported=Reported(0, "003, (2.13)", read_from="theory"),
    ),
    Claim(
        "T8: an activation on the output keeps ‖H‖ from shrinking (slope)",
        slope("tanh output"),
        rule="at least",
        expected=-0.2,
        reported=Reported("no decay", "003, section 2.3"),
    ),
    Claim("half of the neurons of in-degree 1 with different sources (slope)", slope("half bottlenecks")),
)  # fmt: skip
