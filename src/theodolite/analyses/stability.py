"""`theodolite stability`: what a stability study says, as findings and as a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from statistics import median
from typing import Any

from theodolite import plots
from theodolite.analyses.page import Findings, labels, write_analysis
from theodolite.analyses.path import SOURCE as PATH_SOURCE
from theodolite.measures.stability import StabilityResult
from theodolite.measures.stability.power_law import BOUND_RATE, MARKED, SIZES, PowerFit, signed
from theodolite.plots.stability import LABELS as QUANTITIES
from theodolite.report import Section
from theodolite.results import Finding, Row

SOURCE = "Karp (2024), thesis, chapter 2: empirical uniform stability of stochastic gradient descent."
BOUND_SOURCE = "Karp (2024), thesis, Eq. 2.1: the gap is bounded by max{β, 1/√m} up to logarithms, β the uniform stability."

#: Every label with the severities it comes in.
LABELS = labels(
    good="falls with data | explains | same basin | repeatable",
    note=(
        "sensitivity | no law | generalisation gap | does not explain | unclear | distance | other basins | basins not told | "
        "trials"
    ),
    warning="diverged pairs | hardly falls | not checked",
    critical="all pairs diverged",
)

_found = Findings(SOURCE, LABELS)
Columns = Mapping[str, tuple[str, Callable[[list[float]], float]]]  # of a table: by the title, what is reduced and how
_STOPPED = {
    "updates": "a fixed number of updates, the same for all sizes",
    "epochs": "a fixed number of epochs: larger sets take more updates",
    "train_loss": "when the mean batch loss over an epoch has reached the target",
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
    sections = [*_path_sections(result), _checks_section(result)]
    if any(math.isfinite(row["stab"]) for row in result.table):
        makers = [_stability_section, _gap_section, _distance_section]
        first = {row["step"] for row in result.table if row["m"] == result.sizes[0]}
        makers += [_growth_section] if len(first) > 1 else []
        makers += [_trials_section] if len(result.trials) > 1 else []
        sections = [*(make(result) for make in makers), *sections]
    found, everything = stability_findings(result, places), {**(facts or {}), **_facts(result)}
    return write_analysis(result, out, name, "stability", sections, found, everything, SOURCE)


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
    which = "In every pair" if own == len(rows) else f"In {own} of {len(rows)} pairs"
    itself = f" {which} it is the example that came in that changes most." if own else ""
    sentence = (
        f"Exchanging one of {m} training examples changed the loss of a test example by up to {largest['stab']:.3g} ({example}), "
        f"and by {largest['stab_excl_z']:.3g} without the example that came in; the mean test loss is "
        f"{median(row['test_loss'] for row in rows):.3g}. In every pair 99 % of the test examples changed by less than "
        f"{largest['q99']:.2g}, half by less than {largest['q50']:.2g}.{itself} Measured on {len(rows)} pairs after "
        f"{worst['step']} updates."
    )
    quantity = f"largest change of a test loss, m = {m}"
    return _found("stability", "sensitivity", sentence, quantity=quantity, value=worst["stab"], headline=True)


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
    head = "How sensitivity changes with the number of examples is not known"
    if fit.reason or used < SIZES:
        why = fit.reason or f"a rate is read from {SIZES} sizes or more, and there are {used}"
        return _found("stability", "no law", f"{head}: {why}.")
    beside = "" if others.reason else f" (without the example that came in m^{others.exponent()})"
    law = (
        f"from {fit.ms[0]:g} to {fit.ms[-1]:g} examples the largest change of a test loss goes like m^{fit.exponent()}{beside}, "
        f"so twice the data multiply it by {2**fit.b:.2g}"
    )
    more: dict[str, Any] = {"quantity": "exponent of the largest change in m", **_interval(fit)}
    if fit.b_high < 0:
        return _found("stability", "falls with data", f"A single example matters less in more data: {law}.", **more)
    if fit.b_low > BOUND_RATE:
        how = "do not make" if fit.b_low > -MARKED else "hardly make"
        advice = "If single records must not matter, lower the learning rate or the number of updates, or regularise."
        text = f"More data {how} a single example matter less: {law}."
        return _found("stability", "hardly falls", text, advice=advice, **more)
    why = "the interval holds zero" if math.isfinite(fit.b_low) else "there is no interval without two pairs per size"
    advice = "More pairs or a wider range of sizes would show it."
    return _found("stability", "no law", f"{head}: {law}, but {why}.", advice=advice, **more)


def _gap(result: StabilityResult) -> Finding:
    m, fit = result.sizes[-1], _fit(result, "gap_loss")
    gaps, wrong = (_finite(last_rows(result, m), name) for name in ("gap_loss", "gap_01"))
    sentence = f"There is no finite generalisation gap at {m} examples."
    if gaps:
        shares = f" and {100 * median(wrong):.2g} percentage points of wrong answers" if wrong else ""
        law = f"goes like m^{fit.exponent()}" if not fit.reason else f"follows no power law ({fit.reason})"
        sentence = (
            f"The generalisation gap at {m} examples, test minus training loss, is {median(gaps):.3g}{shares} in the median of "
            f"the pairs and at most {max(gaps):.3g}; the largest {law}."
        )
    return _found("gap", "generalisation gap", sentence, quantity="exponent of the largest gap in m", **_interval(fit))


def _verdict(result: StabilityResult) -> Finding:
    found = result.explanation
    numbers = {"value": found.delta_b, "error": (found.delta_high - found.delta_low) / 2}
    measured: dict[str, Any] = {name: number if math.isfinite(number) else None for name, number in numbers.items()}
    measured["quantity"] = "Δb, exponent of stability minus that of the gap"
    return _found("gap", found.verdict, found.sentence(), source=BOUND_SOURCE, headline=True, **measured)


def _distance(result: StabilityResult) -> Finding:
    m = result.sizes[-1]
    fit, moved = _fit(result, "dist"), _finite(last_rows(result, m), "ndist")
    far = f"moved the parameters by up to {100 * max(moved):.3g} % of their norm" if moved else "left no finite parameters"
    law = f"The largest distance goes like m^{fit.exponent()}" if not fit.reason else f"It follows no power law: {fit.reason}"
    convex = "; a convex loss at a fixed number of steps would give −1" if not fit.reason else ""
    text = f"Exchanging one of {m} examples {far}. {law}{convex}."
    return _found("distance", "distance", text, quantity="exponent of the largest distance in m", **_interval(fit))


def _basins(result: StabilityResult) -> list[Finding]:
    """Whether the two models of a pair lie in one basin."""
    if not result.paths:
        return []
    clear = [path for path in result.paths.values() if path.conclusive or not path.connected]
    apart = [name for name, path in result.paths.items() if not path.connected]
    barriers = [path.barrier_train for path in clear if path.barrier_train is not None]
    height = f" Train accuracy falls by {100 * max(max(barriers), 0.0):.2g} percentage points at most." if barriers else ""
    if not clear:
        sentence = "No pair shows whether its models share a basin: none is better than always giving the most frequent answer."
        return [_found("path", "basins not told", sentence)]
    if not apart:
        looked = "the pair" if len(clear) == 1 else f"all {len(clear)} pairs"
        text = f"The two models of a pair lie in one basin, in {looked} looked at: averaging them is safe.{height}"
        return [_found("path", "same basin", text, quantity="pairs with a barrier", value=0.0)]
    text = (
        f"A barrier lies between the two models in {len(apart)} of {len(clear)} pairs: one example decided in which basin "
        f"training ended.{height}"
    )
    return [_found("path", "other basins", text, quantity="pairs with a barrier", value=float(len(apart)))]


def _diverged(result: StabilityResult) -> list[Finding]:
    rows = [row for trial in result.trials for row in last_rows(result, trial=trial)]
    lost = [row for row in rows if row["diverged"]]
    if not lost:
        return []
    count = {"quantity": "diverged pairs", "value": float(len(lost)), "advice": "Lower the learning rate."}
    if len(lost) == len(rows):
        text = f"All {len(rows)} pairs diverged, so nothing could be compared."
        return [_found("stability", "all pairs diverged", text, **count)]
    where = ", ".join(f"{sum(row['m'] == m for row in lost)} at m = {m}" for m in sorted({row["m"] for row in lost}))
    text = f"{len(lost)} of {len(rows)} pairs diverged ({where}); they have no part in the numbers."
    return [_found("stability", "diverged pairs", text, **count)]


def _trials(result: StabilityResult) -> list[Finding]:
    """How far seeds of start and order agree; each has laws of its own."""
    if len(result.trials) < 2:
        return []
    each = [result.explains(trial=trial) for trial in result.trials]
    slopes = [found.b_stab for found in each if math.isfinite(found.b_stab)]
    verdicts = {verdict: sum(found.verdict == verdict for found in each) for verdict in dict.fromkeys(f.verdict for f in each)}
    shown = ", ".join(f'"{verdict}" in {count}' for verdict, count in verdicts.items())
    spread = f"the exponent of stability lies between {signed(min(slopes))} and {signed(max(slopes))}; " if slopes else ""
    text = f"Over {len(each)} seeds of start and order {spread}the verdict is {shown}. All other findings are of the first."
    width = (max(slopes) - min(slopes)) / 2 if slopes else None
    middle = sum(slopes) / len(slopes) if slopes else None
    return [_found("trials", "trials", text, quantity="mean exponent of stability over trials", value=middle, error=width)]


def _checks(result: StabilityResult) -> list[Finding]:
    """What the null swap showed."""
    left_out = [check for check in result.checks if "left out" in check]
    if left_out:
        text = f"{len(left_out)} of {len(result.checks)} measurements began without a null swap: rounding may be a part of them."
        return [_found("repeatable", "not checked", text)]
    text = (
        "Without an exchange nothing changes: pairs trained on equal data stayed bitwise equal, tried before each of the "
        f"{len(result.checks)} measurements. The numbers are no chaos of rounding."
    )
    return [_found("repeatable", "repeatable", text)]


def _facts(result: StabilityResult) -> dict[str, str]:
    settings = result.settings
    found = {
        "sizes": ", ".join(map(str, result.sizes)),
        "pairs per size": str(settings["pairs"]),
        "seed-trials": str(len(result.trials)),
        "batch size": str(settings["batch_size"]),
        "ended by": _STOPPED[settings["stop"]],
        "training pool": f"{settings['pool']} examples",
        "compared on": f"{settings['eval_size']} test examples",
        "time": f"{result.cost.seconds:.3g} s",
    }
    return found | ({"remarks": "; ".join(result.notes)} if result.notes else {})


def _panels(result: StabilityResult, quantities: Sequence[str], prefix: str) -> str:
    shown = [name for name in quantities if any(math.isfinite(row[name]) for row in result.table)]
    return plots.to_svg(plots.stability_panels(result.rows(), shown), prefix=prefix)


def _reduced(pairs: Sequence[Row], columns: Columns) -> Row:
    """Columns over the pairs that have a finite number there, None without any."""
    finite = {title: _finite(pairs, name) for title, (name, _) in columns.items()}
    return {title: reduce(finite[title]) if finite[title] else None for title, (_, reduce) in columns.items()}


def _sizes_table(result: StabilityResult, columns: Columns) -> list[Row]:
    """One row per trial and size."""
    rows: list[Row] = []
    for trial in result.trials:
        for m in result.sizes:
            pairs = last_rows(result, m, trial)
            if not pairs:
                continue
            place: Row = {"trial": trial} if len(result.trials) > 1 else {}
            place |= {"m": m, "updates": pairs[0]["step"], "pairs": sum(not row["diverged"] for row in pairs)}
            rows.append(place | _reduced(pairs, columns))
    return rows


def _stability_section(result: StabilityResult) -> Section:
    return Section(
        name="stability",
        title="One example",
        question="How much does a single training example matter, and does it matter less in more data?",
        svg=_panels(result, ("stab", "stab_excl_z"), "stability"),
        rows=_sizes_table(
            result,
            {
                "largest change": ("stab", max),
                "median": ("stab", median),
                "largest without z": ("stab_excl_z", max),
                "99 % below": ("q99", max),
                "test loss": ("test_loss", median),
            },
        ),
        how=(
            "Two models start from the same weights and see the same order of places; at one place the second has another "
            "example, z, drawn from the test data. Stability of a pair is the largest difference of their losses over the test "
            "examples. The law is fitted to the largest value of each size, by least squares; its interval comes from resampling "
            "pairs and is rather too short for maxima."
        ),
        cost=f"{result.cost.seconds:.3g} s for the whole study, {result.cost.route}",
    )


def _gap_section(result: StabilityResult) -> Section:
    kept = ("b", "b_low", "b_high", "b_loglog", "r2", "sizes", "pairs")
    return Section(
        name="gap",
        title="The generalisation gap",
        question="Does stability explain how the gap between test and training loss falls with more data?",
        svg=_panels(result, ("gap_loss", "gap_01"), "gap"),
        rows=[
            {"quantity": QUANTITIES.get(row["quantity"], row["quantity"]), **{key: row[key] for key in kept}}
            for row in result.explanation.rows()
            if math.isfinite(row["b"])
        ],
        how=(
            "The gap is the mean loss on the test examples minus that on the training set, of the model without the exchange. "
            "Stability explains the gap's fall if it falls at a similar rate: Δb, the difference of the exponents, is compared "
            "with 0.05 and with 30 % of the gap's exponent. b is the exponent fitted to the maxima, b loglog the slope of their "
            "logarithms."
        ),
        source=BOUND_SOURCE,
    )


def _distance_section(result: StabilityResult) -> Section:
    return Section(
        name="distance",
        title="Distance of the parameters",
        question="How far apart do the two models of a pair end?",
        svg=_panels(result, ("dist", "ndist"), "distance"),
        rows=_sizes_table(
            result,
            {
                "largest distance": ("dist", max),
                "median": ("dist", median),
                "largest over the norm": ("ndist", max),
                "norm": ("norm_S", median),
            },
        ),
        how=(
            "Euclidean distance of all trained parameters, without running statistics; normalised by the mean of the two norms. "
            "For a convex loss and a small enough rate it grows by at most 2 η L / B in each batch that holds the exchanged "
            "place, and such batches are the rarer the more examples there are."
        ),
    )


def _growth_section(result: StabilityResult) -> Section:
    columns: Columns = {"largest change": ("stab", max), "largest distance": ("dist", max), "test loss": ("test_loss", median)}
    rows: list[Row] = []
    for m in result.sizes:
        for step in sorted({row["step"] for row in result.table if row["m"] == m}):
            pairs = [row for row in result.select(trial=result.trials[0], m=m, step=step) if math.isfinite(row["stab"])]
            if pairs:
                rows.append({"m": m, "updates": step, **_reduced(pairs, columns)})
    axes = plots.curves(
        rows,
        "updates",
        "largest change",
        by="m",
        ylabel="stability, largest of the pairs",
        title="Sensitivity in the course of training",
    )
    return Section(
        name="growth",
        title="In the course of training",
        question="When does one example begin to matter?",
        svg=plots.to_svg(axes, prefix="growth"),
        rows=rows,
        how="The same numbers at every checkpoint; the largest of the pairs of the first seed-trial.",
    )


def _trials_section(result: StabilityResult) -> Section:
    each = [result.explains(trial=trial) for trial in result.trials]
    return Section(
        name="trials",
        title="Other seeds",
        question="Do other seeds of start and order give the same laws?",
        rows=[
            {"trial": one.trial, "b gap": one.b_gap, "b stability": one.b_stab, "Δb": one.delta_b, "from": one.delta_low,
             "to": one.delta_high, "b distance": one.b_dist, "verdict": one.verdict}
            for one in each
        ],
        how="The bound must hold for each draw of the algorithm's own randomness, so each seed has laws of its own.",
    )  # fmt: skip


def _path_sections(result: StabilityResult) -> list[Section]:
    """A picture per size; the finding stands with the largest."""
    by_size: dict[int, dict[str, Any]] = {}
    for name, path in result.paths.items():
        size = name.split(", m ")[1].split(",")[0]  # a name is "trial 0, m 800, pair 3"
        by_size.setdefault(int(size), {})[name] = path
    sections: list[Section] = []
    for m, paths in sorted(by_size.items(), reverse=True):
        rows = [{**row, "pair": name} for name, path in paths.items() for row in path.rows()]
        first = not sections
        sections.append(
            Section(
                name="path" if first else f"path-{m}",
                title=f"Between the two models, {m} examples",
                question="Do the two models of a pair lie in one basin?",
                svg=plots.to_svg(plots.linear_path_panels(rows, ends=("S", "S′")), prefix=f"path-{m}"),
                rows=[{"pair": name, **path.summary()} for name, path in paths.items()],
                how=(
                    "Weights alpha · A(S) + (1 − alpha) · A(S′) at 76 values of alpha; S′ is the set with the exchanged example. "
                    "The barrier is how far accuracy falls between the ends below the weaker one; up to 2 percentage points "
                    "count as one basin."
                ),
                source=PATH_SOURCE,
            )
        )
    return sections


def _checks_section(result: StabilityResult) -> Section:
    return Section(
        name="repeatable",
        title="The null swap",
        question="Does anything change without an exchange?",
        rows=[{"measurement": check.partition(": ")[0], "what was seen": check.partition(": ")[2]} for check in result.checks],
        how=(
            "Before each measurement all pairs are trained on two equal sets for a tenth of the run. Weights and outputs must "
            "stay bitwise equal, otherwise the run stops: what is measured would be rounding."
        ),
    )
