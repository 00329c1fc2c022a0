"""`theodolite tune`: what a choice of step size says, as findings and as a page, and how many runs a budget pays for."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from theodolite import plots
from theodolite.analyses.page import Findings, labels, write_analysis
from theodolite.errors import TheodoliteError
from theodolite.measures.stepsize import StepSizeChoice, meta_gradient
from theodolite.measures.stepsize.search.searches import WALKED
from theodolite.measures.stepsize.search.tuning import FACTOR, FRESH, WORDS, values_text
from theodolite.report import Answer, Section
from theodolite.report.page import Note
from theodolite.results import Finding, Row
from theodolite.text import listed, number
from theodolite.training import Fleet

SOURCE = "Wang, Wu and others (2021), guarantees for tuning the step size; Wu (2023), chapter 5: by training or by held-out data."
#: Runs that are timed, and for how many steps.
TIMED, TIMED_STEPS = 16, 5

#: Samples that a choice is scored on.
SCORED = {"valid": "held-out data", "train": "the data trained on"}

#: Every label, with its severities.
LABELS = labels(
    good="setting chosen",
    note="searches disagree | meta-gradient not used | no held-out data | runs blow up",
    warning="tuning set overfits | range too narrow",
)
_found = Findings(SOURCE, LABELS)


def runs_within(
    seconds: float,
    train: Any,
    valid: Any = None,
    *,
    steps: int,
    batch_size: int | None,
    searches: int,
    seeds: int,
    walks: bool = False,
    **fleet: Any,
) -> int:
    """Training runs that each of several searches may take in so many seconds, by a few steps that are timed.

    Runs of a sweep go together, and with each its losses at the end are taken. `walks` where one of the searches follows a
    gradient, whose runs go one after the other: its own gradients are timed as well.
    """
    began = time.perf_counter()
    replicas = Fleet(seeds=TIMED, rate=0.0, **fleet)

    def taken(count: int) -> float:
        start = time.perf_counter()
        replicas.train(
            train, steps=count, batch_size=batch_size, test=valid, every=[0], evaluate=True, progress=False
        )  # as settings are tried
        return time.perf_counter() - start

    taken(1)  # warms up
    short, long = taken(1), taken(1 + TIMED_STEPS)
    run = (short + max(0.0, long - short) / TIMED_STEPS * (steps - 1)) / TIMED
    alone = _run_of_a_walk(train, steps=steps, batch_size=batch_size, **fleet) if walks else run
    left = seconds - (time.perf_counter() - began) - searches * max(FRESH, seeds) * run
    return max(2 * seeds, int(left / (searches * run + WALKED * max(0.0, alone - run))))


def _run_of_a_walk(train: Any, *, steps: int, batch_size: int | None, loss: Any, factory: Any, optimizer: Any) -> float:
    """Seconds of as many gradients as a run has, where they are those of a meta-gradient, or of runs of its neighbours."""
    start = time.perf_counter()
    try:
        found = meta_gradient(
            factory, optimizer, train, steps=TIMED_STEPS, loss=loss, batch_size=batch_size, units="natural", progress=False
        )
        gradients = found.gradients + found.products
    except (TheodoliteError, ValueError):  # no derivative: slopes are taken between runs on either side
        start, gradients = time.perf_counter(), 2 * TIMED_STEPS
        pair = Fleet(factory, [0, 0], loss=loss, optimizer=optimizer, rate=0.0)
        pair.train(train, steps=TIMED_STEPS, batch_size=batch_size, progress=False)
    return (time.perf_counter() - start) / gradients * steps


def step_size_findings(found: StepSizeChoice) -> list[Finding]:
    """What a choice says; the first is what was asked."""
    first = ("choice", "setting chosen", found.sentence())
    chosen = _found(
        *first, headline=True, quantity=f"loss after {found.steps} steps", value=found.score, error=_known(found.error)
    )
    return [chosen, *_split_findings(found), *_range_findings(found), *_search_findings(found)]


def _known(error: float) -> float | None:
    return error if math.isfinite(error) else None


def _split_findings(found: StepSizeChoice) -> list[Finding]:
    if found.by_valid is None:
        text = "The choice was scored on the data trained on, where a rate that fits their noise looks best."
        return [_found("splits", "no held-out data", text, advice="Give held-out data (valid=, --valid).")]
    if not found.overfits:
        return []
    text = (
        f"Your tuning set overfits: scored on the data trained on, {values_text(found.by_train)} looks best, a step "
        f"{found.ratio:.3g} times as large as with held-out data ({values_text(found.by_valid)}), and does worse there."
    )
    advice = "Tune on held-out data, or train on more samples: with plenty both agree."
    return [_found("splits", "tuning set overfits", text, quantity="ratio of the rates", value=found.ratio, advice=advice)]


def _range_findings(found: StepSizeChoice) -> list[Finding]:
    said = []
    if found.at_an_end:
        text = f"The best value of {listed(found.at_an_end)} is at an end of what was tried: there may be a better one beyond."
        said.append(_found("curve", "range too narrow", text, advice="Try further values: th.tune_step_size(values={...})."))
    lost = [row for row in found.curve if row["truncated"]]
    rate = next((name for name in found.best if name.split(":")[0] == "lr"), None)
    if lost and rate is not None:
        edge = f"; the critical rate at the start is {found.critical:.3g}" if found.critical else ""
        text = f"Of {len(found.curve)} settings {len(lost)} blow up, from {rate} = {min(row[rate] for row in lost):.3g} on{edge}."
        said.append(_found("curve", "runs blow up", text))
    return said


def _search_findings(found: StepSizeChoice) -> list[Finding]:
    said = []
    worst = max((row for row in found.compared), key=lambda row: row["fresh"], default=None)
    if worst is not None and not worst["won"] and worst["fresh"] > 1.5 * found.fresh:
        text = (
            f"The searches disagree: on seeds that were not tuned on {WORDS[worst['search']]} comes to {number(worst['fresh'])}, "
            f"{WORDS[found.search]} to {number(found.fresh)}, at the same number of gradients."
        )
        said.append(_found("searches", "searches disagree", text))
    if found.health not in ("", "ok"):
        why = {
            "explodes": "it explodes, and then says nothing about a change that one can make",
            "kinked": "the loss over one percent has another slope than the derivative",
            "vanishes": "it has vanished",
            "diverged": "runs diverged",
        }[found.health]
        text = f"The meta-gradient was not used at every step of its search: {why}. Other settings were tried in its place."
        said.append(_found("searches", "meta-gradient not used", text))
    return said


def write_step_size(
    found: StepSizeChoice,
    out: str | PathLike[str],
    *,
    name: str = "step size",
    facts: Mapping[str, str] | None = None,
) -> tuple[Path, list[Finding]]:
    """Write a choice as a self-contained page; its place and its findings, the weightiest first."""
    findings, everything = step_size_findings(found), {**(facts or {}), **_facts(found)}
    try:
        pictures = [plots.to_svg(plots.plot_step_size(found, title="Every setting that was tried"), prefix="rates")]
    except ValueError:  # one setting only
        pictures = []
    answer = Answer(
        sentences=[found.sentence()],
        tone="warning" if found.overfits else "good",
        setting=", ".join(f"{key}={value:.3g}" for key, value in found.best.items()),
        pictures=pictures,
    )
    sections = [_curve_section(found), _searches_section(found), _splits_section(found)]
    return write_analysis(found, out, name, "step size", sections, findings, everything, SOURCE, answer)


def _facts(found: StepSizeChoice) -> dict[str, str]:
    edge = {} if found.critical is None else {"critical rate at the start": f"{found.critical:.3g}"}
    return {
        "steps of a run": str(found.steps),
        "runs of a setting": str(found.runs),
        "scored on": SCORED[found.split],
        "gradients in all": f"{found.gradients:.3g}",
        **edge,
    }


def _rounded(rows: Any) -> list[Row]:
    """Rows with numbers as a table shows them, without columns that are empty."""
    return [{key: f"{v:.4g}" if isinstance(v, float) else v for key, v in row.items() if v not in (None, "")} for row in rows]


def _curve_section(found: StepSizeChoice) -> Section:
    return Section(
        name="curve",
        title="Every setting",
        question="How much worse are the others?",
        sentence=f"{len(found.curve)} settings, each on the same {found.runs} runs: the differences are those of the settings.",
        rows=_rounded(found.curve),
        how=(
            "Every setting starts from the same weights and sees the same batches in the same order, so its difference to the "
            "best one is known far better than its loss. A run whose loss rises to ten times its first counts as blown up."
        ),
        cost=f"{found.cost.seconds:.3g} s; {found.gradients:.4g} gradients of a batch",
    )


def _searches_section(found: StepSizeChoice) -> Section:
    return Section(
        name="searches",
        title="The searches",
        question="Which search found the best setting?",
        sentence=f"The best setting is that of {WORDS[found.search]}, by fresh seeds that none was tuned on.",
        notes=[Note(text=note) for note in found.cost.notes],
        rows=_rounded(found.compared),
        how=(
            "All searches take the same number of gradients, where a product of the Hessian counts as one. Their best settings "
            "then run on fresh seeds, which decide. A meta-gradient that explodes, vanishes or jumps is not followed."
        ),
    )


def _splits_section(found: StepSizeChoice) -> Section:
    rows = [{"scored on": "data trained on", **found.by_train}]
    rows += [] if found.by_valid is None else [{"scored on": "held-out data", **found.by_valid}]
    said = "Nothing was held out." if found.ratio is None else f"The rates differ by a factor of {found.ratio:.3g}."
    return Section(
        name="splits",
        title="Data trained on, and held-out data",
        question="Would the data trained on have chosen the same?",
        sentence=f"{said} From {FACTOR:g} on, where it costs on held-out data, the tuning set overfits.",
        rows=_rounded(rows),
        how=(
            "With few noisy samples the training loss asks for a rate that fits the noise; held-out data ask for one that stops "
            "early."
        ),
    )


def split_off(data: tuple[Any, Any], share: float, seed: int) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Data to train on and a random share of them held out.

    >>> train, valid = split_off((torch.arange(10), torch.arange(10)), 0.2, 0)
    >>> len(train[0]), len(valid[0]), bool((train[0] == train[1]).all())
    (8, 2, True)
    """
    inputs, targets = data
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))
    held = max(1, round(share * len(targets)))
    return (inputs[order[held:]], targets[order[held:]]), (inputs[order[:held]], targets[order[:held]])
