"""What a stability study says, as findings: how much one example matters, how that falls, and what it explains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from statistics import median
from typing import Any

from theodolite.measures.stability import StabilityResult
from theodolite.measures.stability.explanation import BOUND_RATE, MARKED, SIZES
from theodolite.measures.stability.power_law import PowerFit, signed
from theodolite.results import Finding, Row, Severity

SOURCE = "Karp (2024), thesis, chapter 2: empirical uniform stability of stochastic gradient descent."
BOUND_SOURCE = "Karp (2024), thesis, Eq. 2.1: the gap is bounded by max{β, 1/√m} up to logarithms, β the uniform stability."

#: Every label with the severities it comes in.
LABELS: dict[str, tuple[Severity, ...]] = {
    "sensitivity": (Severity.NOTE,),
    "diverged pairs": (Severity.WARNING,),
    "all pairs diverged": (Severity.CRITICAL,),
    "falls with data": (Severity.GOOD,),
    "hardly falls": (Severity.WARNING,),
    "no law": (Severity.NOTE,),
    "generalisation gap": (Severity.NOTE,),
    "explains": (Severity.GOOD,),
    "does not explain": (Severity.NOTE,),
    "unclear": (Severity.NOTE,),
    "distance": (Severity.NOTE,),
    "same basin": (Severity.GOOD,),
    "other basins": (Severity.NOTE,),
    "basins not told": (Severity.NOTE,),
    "trials": (Severity.NOTE,),
    "repeatable": (Severity.GOOD,),
    "not checked": (Severity.WARNING,),
}


def stability_findings(result: StabilityResult, places: Sequence[int] | None = None) -> list[Finding]:
    """The findings of a study, of its first seed-trial where there are several.

    `places` are the numbers that the examples of the test pool have elsewhere, where they were held out of a larger set.
    """
    lost = _diverged(result)
    if last_rows(result) and all(row["diverged"] for row in last_rows(result)):
        return [*lost, *_checks(result)]
    return [
        *lost,
        _sensitivity(result, places),
        _law(result),
        _gap(result),
        _verdict(result),
        _distance(result),
        *_basins(result),
        *_trials(result),
        *_checks(result),
    ]


def last_rows(result: StabilityResult, m: int | None = None, trial: int | None = None) -> list[Row]:
    """Rows at the last checkpoint of each size, of one size and of one trial (the first) where named."""
    trial = result.trials[0] if trial is None else trial
    rows = [row for row in result.table if row["trial"] == trial and (m is None or row["m"] == m)]
    last = {size: max(row["step"] for row in rows if row["m"] == size) for size in {row["m"] for row in rows}}
    return [row for row in rows if row["step"] == last[row["m"]]]


def write_stability(
    result: StabilityResult,
    out: str | PathLike[str],
    *,
    name: str = "stability",
    facts: Mapping[str, str] | None = None,
    places: Sequence[int] | None = None,
) -> tuple[Path, list[Finding]]:
    """Write a study as a self-contained page; the page's place and its findings, the weightiest first."""
    from theodolite.instruments.stability_page import stability_page
    from theodolite.report import write_survey
    from theodolite.results import worst_first

    findings = stability_findings(result, places)
    return write_survey(stability_page(result, findings, name, facts or {}), out), worst_first(findings)


def _found(section: str, severity: Severity, label: str, sentence: str, **fields: Any) -> Finding:
    return Finding(instrument=section, severity=severity, sentence=sentence, **{"label": label, "source": SOURCE, **fields})


def _finite(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows if math.isfinite(row[name])]


def _sensitivity(result: StabilityResult, places: Sequence[int] | None) -> Finding:
    """The largest change of a test example's loss, at the largest size that has finite pairs."""
    m = max(row["m"] for row in last_rows(result) if math.isfinite(row["stab"]))
    rows = [row for row in last_rows(result, m) if math.isfinite(row["stab"])]
    worst = max(rows, key=lambda row: row["stab"])
    largest = {name: max(row[name] for row in rows) for name in ("stab", "stab_excl_z", "q99", "q50")}
    example = f"test example {worst['worst']}" + ("" if places is None else f", number {places[worst['worst']]} of the data")
    own = sum(row["worst"] == row["z"] for row in rows)
    itself = f" {_pairs(own, len(rows))} it is the example that came in that changes most." if own else ""
    sentence = (
        f"Exchanging one of {m} training examples changed the loss of a test example by up to {largest['stab']:.3g} ({example}), "
        f"and by {largest['stab_excl_z']:.3g} without the example that came in; the mean test loss is "
        f"{median(row['test_loss'] for row in rows):.3g}. In every pair 99 % of the test examples changed by less than "
        f"{largest['q99']:.2g}, half by less than {largest['q50']:.2g}.{itself} Measured on {len(rows)} pairs after "
        f"{worst['step']} updates."
    )
    return _found(
        "stability", Severity.NOTE, "sensitivity", sentence,
        quantity=f"largest change of a test loss, m = {m}", value=worst["stab"], headline=True,
    )  # fmt: skip


def _pairs(count: int, of: int) -> str:
    return "In every pair" if count == of else f"In {count} of {of} pairs"


def _interval(fit: PowerFit) -> dict[str, Any]:
    """Value and error of an exponent: half its interval."""
    return {"value": fit.b, "error": (fit.b_high - fit.b_low) / 2 if math.isfinite(fit.b_low) else None}


def _fit(result: StabilityResult, quantity: str) -> PowerFit:
    """The law of the first trial; those of the explanation are there already."""
    return result.explanation.fits.get(quantity) or result.fit(quantity)


def _law(result: StabilityResult) -> Finding:
    """Whether one example matters less in more data."""
    fit, others = _fit(result, "stab"), _fit(result, "stab_excl_z")
    used = len(fit.ms) - fit.left_out
    head = "How sensitivity changes with the number of examples is not told"
    if fit.reason or used < SIZES:
        why = fit.reason or f"a rate is read from {SIZES} sizes or more, and there are {used}"
        return _found("stability", Severity.NOTE, "no law", f"{head}: {why}.")
    beside = "" if others.reason else f" (without the example that came in m^{others.exponent()})"
    law = (
        f"from {fit.ms[0]:g} to {fit.ms[-1]:g} examples the largest change of a test loss goes like m^{fit.exponent()}{beside}, "
        f"so twice the data multiply it by {2**fit.b:.2g}"
    )
    more: dict[str, Any] = {"quantity": "exponent of the largest change in m", **_interval(fit)}
    if fit.b_high < 0:
        return _found(
            "stability", Severity.GOOD, "falls with data", f"A single example matters less in more data: {law}.", **more
        )
    if fit.b_low > BOUND_RATE:
        how = "do not make" if fit.b_low > -MARKED else "hardly make"
        return _found(
            "stability", Severity.WARNING, "hardly falls", f"More data {how} a single example matter less: {law}.",
            advice="If single records must not matter, lower the learning rate or the number of updates, or regularise.", **more,
        )  # fmt: skip
    why = "the interval holds zero" if math.isfinite(fit.b_low) else "there is no interval without two pairs per size"
    return _found(
        "stability", Severity.NOTE, "no law", f"{head}: {law}, but {why}.",
        advice="More pairs or a wider range of sizes would tell.", **more,
    )  # fmt: skip


def _gap(result: StabilityResult) -> Finding:
    m = result.sizes[-1]
    rows = last_rows(result, m)
    gaps, fit = _finite(rows, "gap_loss"), _fit(result, "gap_loss")
    wrong = _finite(rows, "gap_01")
    shares = f" and {100 * median(wrong):.2g} percentage points of wrong answers" if wrong else ""
    largest = f"{max(gaps):.3g}" if gaps else "not known"
    law = f"goes like m^{fit.exponent()}" if not fit.reason else f"follows no power law ({fit.reason})"
    sentence = (
        f"The generalisation gap at {m} examples, test less training loss, is {median(gaps):.3g}{shares} in the median of the "
        f"pairs and at most {largest}; the largest {law}."
        if gaps
        else f"There is no finite generalisation gap at {m} examples."
    )
    return _found(
        "gap", Severity.NOTE, "generalisation gap", sentence, quantity="exponent of the largest gap in m", **_interval(fit)
    )


def _verdict(result: StabilityResult) -> Finding:
    found = result.explanation
    width = (found.delta_high - found.delta_low) / 2
    return _found(
        "gap",
        Severity.GOOD if found.verdict == "explains" else Severity.NOTE,
        found.verdict,
        found.sentence(),
        quantity="Δb, exponent of stability less that of the gap",
        value=found.delta_b if math.isfinite(found.delta_b) else None,
        error=width if math.isfinite(width) else None,
        source=BOUND_SOURCE,
        headline=True,
    )


def _distance(result: StabilityResult) -> Finding:
    m = result.sizes[-1]
    fit, moved = _fit(result, "dist"), _finite(last_rows(result, m), "ndist")
    far = f"moved the parameters by up to {100 * max(moved):.3g} % of their norm" if moved else "left no finite parameters"
    law = f"The largest distance goes like m^{fit.exponent()}" if not fit.reason else f"It follows no power law: {fit.reason}"
    convex = "; a convex loss at a fixed number of steps would give −1" if not fit.reason else ""
    return _found(
        "distance", Severity.NOTE, "distance", f"Exchanging one of {m} examples {far}. {law}{convex}.",
        quantity="exponent of the largest distance in m", **_interval(fit),
    )  # fmt: skip


def _basins(result: StabilityResult) -> list[Finding]:
    """Whether the two models of a pair lie in one basin."""
    if not result.paths:
        return []
    told = [path for path in result.paths.values() if path.conclusive or not path.connected]
    apart = [name for name, path in result.paths.items() if not path.connected]
    barriers = [path.barrier_train for path in told if path.barrier_train is not None]
    height = f" Train accuracy falls by {100 * max(max(barriers), 0.0):.2g} percentage points at most." if barriers else ""
    if not told:
        sentence = "No pair tells whether its models share a basin: none is better than always giving the most frequent answer."
        return [_found("path", Severity.NOTE, "basins not told", sentence)]
    if not apart:
        looked = "the pair" if len(told) == 1 else f"all {len(told)} pairs"
        text = f"The two models of a pair lie in one basin, in {looked} looked at: averaging them is safe.{height}"
        return [_found("path", Severity.GOOD, "same basin", text, quantity="pairs with a barrier", value=0.0)]
    text = (
        f"A barrier lies between the two models in {len(apart)} of {len(told)} pairs: one example decided in which basin "
        f"training ended.{height}"
    )
    return [_found("path", Severity.NOTE, "other basins", text, quantity="pairs with a barrier", value=float(len(apart)))]


def _diverged(result: StabilityResult) -> list[Finding]:
    rows = [row for trial in result.trials for row in last_rows(result, trial=trial)]
    lost = [row for row in rows if row["diverged"]]
    if not lost:
        return []
    advice = "Lower the learning rate."
    count = {"quantity": "diverged pairs", "value": float(len(lost)), "advice": advice}
    if len(lost) == len(rows):
        text = f"All {len(rows)} pairs diverged, so nothing could be compared."
        return [_found("stability", Severity.CRITICAL, "all pairs diverged", text, **count)]
    where = ", ".join(f"{sum(row['m'] == m for row in lost)} at m = {m}" for m in sorted({row["m"] for row in lost}))
    text = f"{len(lost)} of {len(rows)} pairs diverged ({where}); they have no part in the numbers."
    return [_found("stability", Severity.WARNING, "diverged pairs", text, **count)]


def _trials(result: StabilityResult) -> list[Finding]:
    """How far seeds of start and order agree; each has laws of its own."""
    if len(result.trials) < 2:
        return []
    each = [result.explains(trial=trial) for trial in result.trials]
    slopes = [found.b_stab for found in each if math.isfinite(found.b_stab)]
    verdicts = {verdict: sum(found.verdict == verdict for found in each) for verdict in dict.fromkeys(f.verdict for f in each)}
    told = ", ".join(f'"{verdict}" in {count}' for verdict, count in verdicts.items())
    spread = f"the exponent of stability lies between {signed(min(slopes))} and {signed(max(slopes))}; " if slopes else ""
    text = f"Over {len(each)} seeds of start and order {spread}the verdict is {told}. All other findings are of the first."
    width = (max(slopes) - min(slopes)) / 2 if slopes else None
    middle = sum(slopes) / len(slopes) if slopes else None
    return [
        _found(
            "trials", Severity.NOTE, "trials", text, quantity="mean exponent of stability over trials", value=middle, error=width
        )
    ]


def _checks(result: StabilityResult) -> list[Finding]:
    """What the null swap showed."""
    left_out = [check for check in result.checks if "left out" in check]
    if left_out:
        text = f"{len(left_out)} of {len(result.checks)} measurements began without a null swap: rounding may be a part of them."
        return [_found("repeatable", Severity.WARNING, "not checked", text)]
    text = (
        "Without an exchange nothing changes: pairs trained on equal data stayed bitwise equal, tried before each of the "
        f"{len(result.checks)} measurements. The numbers are no chaos of rounding."
    )
    return [_found("repeatable", Severity.GOOD, "repeatable", text)]
