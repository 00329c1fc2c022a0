"""The page of a stability study: findings first, then laws, paths and tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

from theodolite.instruments.linear_path import SOURCE as PATH_SOURCE
from theodolite.instruments.stability import BOUND_SOURCE, SOURCE, last_rows
from theodolite.measures.stability import StabilityResult
from theodolite.results import Finding, Row

if TYPE_CHECKING:
    from theodolite.report import Section, SurveyPage

Reduce = Callable[[list[float]], float]

_STOPPED = {
    "updates": "a fixed number of updates, the same for all sizes",
    "epochs": "a fixed number of epochs: larger sets take more updates",
    "train_loss": "when the mean batch loss over an epoch has reached the target",
}


def stability_page(result: StabilityResult, findings: Sequence[Finding], name: str, facts: Mapping[str, str]) -> SurveyPage:
    """All that the page shows; every text is escaped by the template."""
    from theodolite.report import SurveyPage

    by_section: dict[str, list[Finding]] = {}
    for finding in findings:
        by_section.setdefault(finding.instrument, []).append(finding)
    alive = any(math.isfinite(row["stab"]) for row in result.table)
    makers = [_stability_section, _gap_section, _distance_section, *([_growth_section] if _steps(result) else []), *([_trials_section] if len(result.trials) > 1 else [])]
    sections = [make(result, by_section) for make in makers] if alive else []
    return SurveyPage(
        title=name,
        findings=findings,
        sections=[*sections, *_path_sections(result, by_section), _checks_section(result, by_section)],
        kind="stability",
        part="section",
        facts={**facts, **_facts(result)},
        provenance={key: str(value) for key, value in asdict(result.provenance).items()} | {"seed": str(result.seed)},
    )


def _facts(result: StabilityResult) -> dict[str, str]:
    told = result.settings
    found = {
        "sizes": ", ".join(map(str, result.sizes)),
        "pairs per size": str(told["pairs"]),
        "seed-trials": str(len(result.trials)),
        "batch size": str(told["batch_size"]),
        "ended by": _STOPPED[told["stop"]],
        "training pool": f"{told['pool']} examples",
        "compared on": f"{told['eval_size']} test examples",
        "time": f"{result.cost.seconds:.3g} s",
    }
    return found | ({"remarks": "; ".join(result.notes)} if result.notes else {})


def _panels(result: StabilityResult, quantities: Sequence[str], prefix: str) -> str:
    from theodolite import plots
    from theodolite.plots.stability import stability_panels

    shown = [name for name in quantities if any(math.isfinite(row[name]) for row in result.table)]
    return plots.to_svg(stability_panels(result.rows(), shown), prefix=prefix)


def _sizes_table(result: StabilityResult, columns: Mapping[str, tuple[str, Reduce]]) -> list[Row]:
    """One row per trial and size; `columns` says by its title what is reduced and how."""
    rows: list[Row] = []
    for trial in result.trials:
        for m in result.sizes:
            pairs = last_rows(result, m, trial)
            if not pairs:
                continue
            place: Row = {"trial": trial} if len(result.trials) > 1 else {}
            place |= {"m": m, "updates": pairs[0]["step"], "pairs": sum(not row["diverged"] for row in pairs)}
            for title, (name, reduce) in columns.items():
                finite = [row[name] for row in pairs if math.isfinite(row[name])]
                place[title] = reduce(finite) if finite else None
            rows.append(place)
    return rows


def _stability_section(result: StabilityResult, found: Mapping[str, list[Finding]]) -> Section:
    from theodolite.report import Section

    return Section(
        name="stability",
        title="One example",
        question="How much does a single training example matter, and does it matter less in more data?",
        findings=found.get("stability", []),
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
        source=SOURCE,
    )


def _gap_section(result: StabilityResult, found: Mapping[str, list[Finding]]) -> Section:
    from theodolite.plots.stability import LABELS
    from theodolite.report import Section

    kept = ("b", "b_low", "b_high", "b_loglog", "r2", "sizes", "pairs")
    return Section(
        name="gap",
        title="The generalisation gap",
        question="Does stability explain how the gap between test and training loss falls with more data?",
        findings=found.get("gap", []),
        svg=_panels(result, ("gap_loss", "gap_01"), "gap"),
        rows=[
            {"quantity": LABELS.get(row["quantity"], row["quantity"]), **{key: row[key] for key in kept}}
            for row in result.explanation.rows()
            if math.isfinite(row["b"])
        ],
        how=(
            "The gap is the mean loss on the test examples less that on the training set, of the model without the exchange. "
            "Stability explains the gap's fall if it falls at a similar rate: Δb, the difference of the exponents, is compared "
            "with 0.05 and with 30 % of the gap's exponent. b is the exponent fitted to the maxima, b loglog the slope of their "
            "logarithms."
        ),
        source=BOUND_SOURCE,
    )


def _distance_section(result: StabilityResult, found: Mapping[str, list[Finding]]) -> Section:
    from theodolite.report import Section

    return Section(
        name="distance",
        title="Distance of the parameters",
        question="How far apart do the two models of a pair end?",
        findings=found.get("distance", []),
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
        source=SOURCE,
    )


def _steps(result: StabilityResult) -> list[int]:
    """The checkpoints, where there is more than the end of the runs."""
    first = [row for row in result.table if row["m"] == result.sizes[0]]
    steps = sorted({row["step"] for row in first})
    return steps if len(steps) > 1 else []


def _growth_section(result: StabilityResult, found: Mapping[str, list[Finding]]) -> Section:
    from theodolite import plots
    from theodolite.report import Section

    rows: list[Row] = []
    trial = result.trials[0]
    for m in result.sizes:
        for step in sorted({row["step"] for row in result.table if row["m"] == m}):
            pairs = [row for row in result.select(trial=trial, m=m, step=step) if math.isfinite(row["stab"])]
            if pairs:
                change, distance = (max(row[name] for row in pairs) for name in ("stab", "dist"))
                middle = median(row["test_loss"] for row in pairs)
                rows.append(
                    {"m": m, "updates": step, "largest change": change, "largest distance": distance, "test loss": middle}
                )
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
        findings=found.get("growth", []),
        svg=plots.to_svg(axes, prefix="growth"),
        rows=rows,
        how="The same numbers at every checkpoint; the largest of the pairs of the first seed-trial.",
        source=SOURCE,
    )


def _trials_section(result: StabilityResult, found: Mapping[str, list[Finding]]) -> Section:
    from theodolite.report import Section

    each = [result.explains(trial=trial) for trial in result.trials]
    return Section(
        name="trials",
        title="Other seeds",
        question="Do other seeds of start and order give the same laws?",
        findings=found.get("trials", []),
        rows=[
            {"trial": one.trial, "b gap": one.b_gap, "b stability": one.b_stab, "Δb": one.delta_b, "from": one.delta_low,
             "to": one.delta_high, "b distance": one.b_dist, "verdict": one.verdict}
            for one in each
        ],
        how="The bound must hold for each draw of the algorithm's own randomness, so each seed has laws of its own.",
        source=SOURCE,
    )  # fmt: skip


def _path_sections(result: StabilityResult, found: Mapping[str, list[Finding]]) -> list[Section]:
    """A picture per size; the finding stands with the largest."""
    from theodolite import plots
    from theodolite.plots.linear_path import linear_path_panels
    from theodolite.report import Section

    by_size: dict[int, dict[str, Any]] = {}
    for name, path in result.paths.items():
        by_size.setdefault(_size_of(name), {})[name] = path
    sections: list[Section] = []
    for m, paths in sorted(by_size.items(), reverse=True):
        rows = [{**row, "pair": name} for name, path in paths.items() for row in path.rows()]
        first = not sections
        sections.append(
            Section(
                name="path" if first else f"path-{m}",
                title=f"Between the two models, {m} examples",
                question="Do the two models of a pair lie in one basin?",
                findings=found.get("path", []) if first else [],
                svg=plots.to_svg(linear_path_panels(rows, ends=("S", "S′")), prefix=f"path-{m}"),
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


def _size_of(name: str) -> int:
    """The size in a path's name, "trial 0, m 800, pair 3"."""
    return int(next(part for part in name.split(", ") if part.startswith("m ")).removeprefix("m "))


def _checks_section(result: StabilityResult, found: Mapping[str, list[Finding]]) -> Section:
    from theodolite.report import Section

    return Section(
        name="repeatable",
        title="The null swap",
        question="Does anything change without an exchange?",
        findings=found.get("repeatable", []),
        rows=[{"measurement": check.partition(": ")[0], "what was seen": check.partition(": ")[2]} for check in result.checks],
        how=(
            "Before each measurement all pairs are trained on two equal sets for a tenth of the run. Weights and outputs must "
            "stay bitwise equal, otherwise the run stops: what is measured would be rounding."
        ),
        source=SOURCE,
    )
