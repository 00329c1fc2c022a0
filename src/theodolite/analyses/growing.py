"""`theodolite grow`: what a trial of growth operators says, as findings and as a page, and what it will take."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from theodolite import plots
from theodolite.analyses.page import Findings, labels, write_analysis
from theodolite.measures.growth import Grown, GrowthChoice, GrowthOperator
from theodolite.measures.growth.choice import MOST_STEPS
from theodolite.measures.growth.diagnostics import ranks_mean_something
from theodolite.measures.growth.runs import run_bytes, start, step_flops
from theodolite.measures.growth.search import prepared
from theodolite.problem.tensors import bytes_of
from theodolite.report import Answer, Section
from theodolite.report.page import Note
from theodolite.results import Finding, Row
from theodolite.text import duration, grouped, listed, number, plural

SOURCE = "Karp (2024), chapter 5: landscape-aware growing."
#: Steps that are timed before a trial is priced.
TIMED = 3

#: Every label, with its severities.
LABELS = labels(
    good="operator chosen | growing pays",
    note="operators alike | grown | short trial | ranks not settled | growing does not pay yet",
    warning="all operators diverged",
)
_found = Findings(SOURCE, LABELS)


# What it will take


@dataclass(frozen=True)
class TrialPrice:
    """What a trial will take at most: steps of all candidates, floating-point operations, bytes and seconds.

    `flops` are those of all candidates, `baseline_flops` those of the baselines beside them; validation is not among them, but
    it is in `seconds`. `bytes` are the small model and one grown one with gradients and optimizer state, without activations.
    """

    candidates: int
    steps: int
    step_flops: float
    flops: float
    baseline_flops: float
    bytes: int
    seconds: float

    def row(self) -> Row:
        return dict(vars(self))

    def __str__(self) -> str:
        return (
            f"At most {plural(self.steps, 'step')} of {plural(self.candidates, 'candidate')}, {grouped(self.flops)} FLOPs, and "
            f"{grouped(self.baseline_flops)} for the small model trained on; some {duration(self.seconds)}; "
            f"{self.bytes / 2**30:.3g} GiB beside activations."
        )


def price_trial(
    model: nn.Module, data: Any, optimizer: Optimizer, *, validation: Any, operators: Any, layers: int, lag: int | str,
    steps: int | None, looks: int, baselines: int, seed: int = 0, loss: Any = None,
) -> TrialPrice:  # fmt: skip
    """What `landscape_aware_growth` will take, by a few steps of one candidate that are timed; nothing is kept.

    Args:
        looks: how often each candidate is validated.
        baselines: how many there are; each takes as much as all candidates.
    """
    length = (steps or MOST_STEPS) if lag == "auto" else int(lag)
    options = {"schedule": None, "batch_size": None, "shuffle": True, "first": 0, "state": "copy", "body": None, "clip": None}
    recipe, chosen = prepared(
        model, loss, data, optimizer, validation, operators, layers, length, seed, target="labels", **options
    )  # fmt: skip
    # All trials together take at most as long as the training they are for.
    total = len(chosen) * length if lag != "auto" or steps is None else min(steps, len(chosen) * length)
    run = start(recipe, chosen[0], seed)
    flops = step_flops(run.model, recipe, next(recipe.batches(seed)))
    run.advance(recipe, 0, seed)
    seconds = {}
    for name, end in (("warm", 1), ("step", 1 + TIMED), ("look", 1 + TIMED)):
        began = time.perf_counter()
        if name == "look":
            run.seen.pop(run.step)
        run.advance(recipe, end, seed)
        seconds[name] = time.perf_counter() - began
    step = max(0.0, seconds["step"] - seconds["look"]) / TIMED
    grown = 2 * bytes_of(list(run.model.parameters())) + bytes_of([list(s.values()) for s in run.optimizer.state.values()])
    return TrialPrice(
        candidates=len(chosen),
        steps=total,
        step_flops=flops,
        flops=total * flops,
        baseline_flops=baselines * total * flops,
        bytes=grown + run_bytes(recipe),
        seconds=(1 + baselines) * total * step + len(chosen) * looks * seconds["look"],
    )


# Findings


def growth_verdict(found: GrowthChoice | Grown) -> str:
    """What was found, in one sentence."""
    if isinstance(found, Grown):
        added = sum(found.is_new)
        change = found.preservation
        loss = ""
        if change is not None and change.loss_after is not None and change.loss_before is not None:
            before, after = number(change.loss_before), number(change.loss_after)
            loss = f"; its loss is {after} before any step, that of the small model {before}"
        return (
            f"{len(found.source) - added} layers have become {len(found.source)} by {found.operator}: {found.parameters:,} "
            f"parameters in the place of {found.parameters_before:,}{loss}."
        )
    curves, best = found.curves, found.best
    loss = float(curves.losses[curves.leader, -1])
    after = f"after {plural(found.lag, 'step')}" if found.lag else "right after growing"
    ways = plural(len(found.operators), "way")
    if not math.isfinite(loss):
        return f"All {ways} to grow from {best.layers} to {best.depth} layers diverged {after}: lower the learning rate."
    lead = f"Grow by {best.name}: of {ways} from {best.layers} to {best.depth} layers its validation loss {after} is the least"
    others = [c for c in curves.ranked() if c != curves.leader and c in curves.alive]
    if not others:
        return f"{lead}, {number(loss)}."
    if found.tied:
        return f"{lead}, {number(loss)}, but {listed([o.name for o in found.tied], 3)} cannot be told apart from it."
    behind, error = curves.behind(others[0])
    return f"{lead}, {number(loss)}; the next, {curves.names[others[0]]}, is {number(behind, error)} behind."


def growth_findings(found: GrowthChoice | Grown) -> list[Finding]:
    """What growing says; the first is what was asked."""
    said = growth_verdict(found)
    if isinstance(found, Grown):
        advice = "Which way to grow is best, a short trial says: give --data, --validation and several --strategies."
        return [_found("layers", "grown", said, headline=True, advice=advice)]
    curves = found.curves
    loss = float(curves.losses[curves.leader, -1])
    if not math.isfinite(loss):
        return [_found("choice", "all operators diverged", said, headline=True, advice="Lower the learning rate (--lr).")]
    label = "operators alike" if found.tied or len(found.operators) < 2 else "operator chosen"
    numbers = {"quantity": f"validation loss after {found.lag} steps", "value": loss}
    return [_found("choice", label, said, headline=True, **numbers), *_trial_findings(found), *_pay_findings(found)]


def _trial_findings(found: GrowthChoice) -> list[Finding]:
    said = []
    far = f" of {found.horizon}" if found.horizon else ""
    gaining = f" {listed([o.name for o in found.gaining], 3)} gained fast enough to pass the best." if found.gaining else ""
    text = f"This is what the first {found.lag}{far} steps say; short trials favour operators that preserve the loss.{gaining}"
    advice = "Try longer (--lag), with those that gained among the --strategies." if found.gaining else ""
    said.append(_found("trial", "short trial", text, **({"advice": advice} if advice else {})))
    if found.settled is False:
        text = f"The trial reached its limit of {found.lag} steps before the ranks settled."
        said.append(_found("trial", "ranks not settled", text, advice="Allow more steps (--steps), or try fewer --strategies."))
    return said


def _pay_findings(found: GrowthChoice) -> list[Finding]:
    if found.paid is None or not found.lag:
        return []
    row = max((row for row in found.baselines if row["operator"] == "small"), key=lambda row: row["flops"])
    beside = (
        f"The small model, trained on for as many FLOPs as all trials took, comes to {number(row['loss'])}, which is "
        f"{number(abs(row['behind']), row['error'])} {'behind' if row['behind'] > 0 else 'ahead'}"
    )
    numbers = {"quantity": "the small model behind at equal FLOPs", "value": row["behind"], "error": _known(row["error"])}
    if found.paid:
        return [_found("baselines", "growing pays", f"{beside}: growing has paid within the trial.", **numbers)]
    advice = "Train the grown model on before you judge it, or train the small one longer before growing."
    return [
        _found("baselines", "growing does not pay yet", f"{beside}: growing has not paid so far.", advice=advice, **numbers)
    ]  # fmt: skip


def _known(error: float) -> float | None:
    return error if math.isfinite(error) else None


# The page


def write_growth(
    found: GrowthChoice | Grown,
    out: str | PathLike[str],
    *,
    name: str = "growing",
    facts: Mapping[str, str] | None = None,
) -> tuple[Path, list[Finding]]:
    """Write a choice of operator, or a model that was grown, as a self-contained page; its place and its findings."""
    findings = growth_findings(found)
    pictures = _picture(found) if isinstance(found, GrowthChoice) else []
    paid = [finding.sentence for finding in findings if finding.instrument == "baselines"]
    answer = Answer(sentences=[growth_verdict(found), *paid], tone=findings[0].severity.value, pictures=pictures)
    if isinstance(found, Grown):
        sections = [_layers_section([dict(row) for row in found.rows()], found.operator, found.notes)]
    else:
        sections = [_choice_section(found), _trial_section(found), *_baseline_sections(found)]
        sections.append(_layers_section(layer_rows(found.best), found.best.name, found.notes))
    return write_analysis(found, out, name, "growing", sections, findings, dict(facts or {}), SOURCE, answer)


def layer_rows(operator: GrowthOperator) -> list[Row]:
    """One row for each layer of the grown model."""
    origins = enumerate(operator.layer_map())
    return [{"layer": layer, "source": source, "is_new": is_new} for layer, (source, is_new) in origins]


def _picture(found: GrowthChoice) -> list[str]:
    if len(found.steps) < 2:
        return []
    return [plots.to_svg(plots.plot_growth_choice(found, title="Validation loss after growing"), prefix="trial")]


def _choice_section(found: GrowthChoice) -> Section:
    curves = found.curves
    rows = []
    for operator in found.ranking:
        c = found.operators.index(operator)
        looks = int((curves.losses[c] == curves.losses[c]).sum())
        behind, error = curves.behind(c, look=looks - 1)
        dropped = "" if looks == len(found.steps) else f"after {found.steps[looks - 1]} steps"
        row = {"operator": operator.name, "layers": operator.picture(), "loss": float(curves.losses[c, looks - 1])}
        rows.append({**row, "behind the best": behind, "error": _known(error), "dropped": dropped})
    kept = [float(curves.losses[c, -1]) for c in curves.alive]
    noise = len(kept) > 2 and not ranks_mean_something(kept, curves.noise)
    order = " The spread of all is below three times the noise: their order says nothing." if noise else ""
    return Section(
        name="choice",
        title="Every operator",
        question="How much worse are the others?",
        sentence=f"{plural(len(rows), 'operator')}, new layers in brackets.{order}",
        rows=rows,
        how=(
            "Each candidate starts from the same weights and optimizer state, sees the same batches in the same order and is "
            "judged on the same validation text, in eval mode; the error is that of its difference to the best. R is a random "
            "layer, I1 an identity made from layer 1, S1 a scaled copy."
        ),
        cost=f"{found.cost.seconds:.3g} s",
    )


def _trial_section(found: GrowthChoice) -> Section:
    names = [operator.name for operator in found.ranking]
    losses = {name: found.curves.losses[found.curves.names.index(name)] for name in names}
    rows: list[Row] = [
        {"step": step, **{name: None if math.isnan(losses[name][i]) else float(losses[name][i]) for name in names}}
        for i, step in enumerate(found.steps)
    ]
    turned = found.transition
    said = f"The ranks turned at step {turned:.3g}." if turned is not None else "No step was seen at which the ranks turned."
    settled = {True: " They have settled.", False: " They had not settled when the trial ended.", None: ""}[found.settled]
    return Section(
        name="trial",
        title="The trial",
        question="Was it long enough?",
        sentence=said + settled,
        rows=rows,
        how=(
            "The loss right after growing says little about that after training. A trial whose length is auto ends when ranks "
            "agree with those at half its steps (Spearman 0.8, twice), the lead is above its error and nobody gains fast enough "
            "to pass."
        ),
        cost=f"{plural(found.trial_steps, 'step')} of all candidates, {grouped(found.trial_flops)} FLOPs",
    )


def _baseline_sections(found: GrowthChoice) -> list[Section]:
    rows = [row for row in found.baselines if row["step"]]
    if not rows:
        return []
    said = "Growing has paid within the trial." if found.paid else "Growing has not paid within the trial."
    return [
        Section(
            name="baselines",
            title="At equal FLOPs",
            question="Would training the small model on have done as well?",
            sentence=said,
            rows=[{key.replace("_", " "): value for key, value in row.items()} for row in rows],
            how="Trials are counted: the small model is given what all candidates took together, and what the best took alone.",
        )
    ]


def _layers_section(rows: Sequence[Row], operator: str, notes: Sequence[str]) -> Section:
    names = {"layer": "layer", "source": "comes from layer", "is_new": "new"}
    return Section(
        name="layers",
        title="The grown model",
        question="Where does each layer come from?",
        sentence=f"Grown by {operator}; a layer without a source is random.",
        notes=[Note(text=note) for note in notes],
        rows=[{names[key]: value for key, value in row.items()} for row in rows],
        how="The model is built anew from a configuration of the new depth, and the tensors are copied into it.",
    )
