"""Can every parameter train: none dead, doubled, unused or frozen unawares?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from theodolite.instruments.base import Instrument, SurveyContext, Work
from theodolite.measures.audit import ParameterAudit, audit_parameters
from theodolite.results import Finding, Row, Severity
from theodolite.text import listed


class Parameters(Instrument):
    name = "parameters"
    order = 30
    title = "Parameters that cannot train"
    question = "Which units are dead, which repeat another, which parameters are tied, frozen or never used?"
    how = (
        "One backward pass from random combinations of all outputs: a parameter is dead if no output of any sample changes with "
        "it at first order. Units are duplicates if their incoming weights and bias agree to 1e-6."
    )
    source = "A unit whose derivative is zero on all data gets no gradient; units that are equal get equal gradients."
    work = Work(gradients=1.2)

    def run(self, context: SurveyContext, **effort: Any) -> ParameterAudit:
        return audit_parameters(context.problem)

    def findings(self, context: SurveyContext, result: ParameterAudit) -> list[Finding]:
        found = [
            *self._frozen(context, result),
            *self._dead(result),
            *self._duplicated(result),
            *self._unreached(result),
            *self._notes(result),
        ]
        if not (result.motionless or result.total("dead") or result.total("duplicated") or result.unreached):
            text = f"All {result.total('units')} units of {len(result.layers)} layers can train, and no two are the same."
            found.append(self.found(Severity.GOOD, text, "all can train"))
        return found

    def _frozen(self, context: SurveyContext, result: ParameterAudit) -> Iterator[Finding]:
        if not result.frozen:
            return
        total = sum(p.numel() for p in context.problem.model.parameters())
        share = result.frozen_count / total
        quantity = "share of parameters frozen"
        if result.frozen_count == total:
            text = f"The model is frozen: none of its {total} parameters requires a gradient, so training changes nothing."
            advice = "Call requires_grad_(True) on what shall train. The survey measures all parameters as if they could."
            yield self.found(Severity.CRITICAL, text, "frozen model", quantity, share, advice=advice)
            return
        text = f"{100 * share:.3g} % of the parameters are frozen ({listed(result.frozen, 4)}); the survey measures the others."
        yield self.found(Severity.NOTE, text, "frozen parameters", quantity, share)

    def _dead(self, result: ParameterAudit) -> Iterator[Finding]:
        if result.motionless:
            text = "No parameter moves any output here at first order."
            advice = "Weights that are all zero, or units that are all shut, do this: look at the initialisation."
            yield self.found(Severity.WARNING, text, "no effect", advice=advice)
            return
        advice = (
            "Its activation is shut (a large negative bias, exploded weights) or nothing reads it: initialise it anew, "
            "lower the learning rate, or use an activation with a slope on both sides."
        )
        for row in result.layers:
            if row["layer"] in result.dead_layers:
                text = f"Layer {row['layer']} is dead: none of its units moves an output on any sample, so it gets no gradient."
                yield self.found(Severity.CRITICAL, text, "dead layer", "dead units", float(row["dead"]), advice=advice)
        partly = [row for row in result.layers if row["dead"] and row["layer"] not in result.dead_layers]
        if partly:
            dead, units = sum(row["dead"] for row in partly), result.total("units")
            where = _by_layer(partly, "dead") + (", ..." if len(partly) > 4 else "")
            severity = Severity.WARNING if dead > 0.05 * units else Severity.NOTE
            text = f"{dead} of {units} units are dead ({where}): they move no output on any sample."
            advice = "A few are harmless; many say that the learning rate was too high or the initialisation off."
            yield self.found(severity, text, "dead units", "dead units", float(dead), advice=advice)

    def _duplicated(self, result: ParameterAudit) -> Iterator[Finding]:
        rows = [row for row in result.layers if row["duplicated"]]
        count = result.total("duplicated")
        text = f"{count} units repeat another unit of their layer ({_by_layer(rows, 'duplicated')}): same weights, same bias."
        advice = (
            "They compute the same feature; where their outgoing weights are equal too they stay equal for ever. "
            "Initialise at random, or remove them."
        )
        if rows:
            yield self.found(Severity.WARNING, text, "duplicated units", "duplicated units", float(count), advice=advice)

    def _unreached(self, result: ParameterAudit) -> Iterator[Finding]:
        if result.unreached:
            text = f"The output does not depend on {listed(result.unreached, 4)} at all."
            advice = "Remove them or connect them; distributed training stumbles over such parameters."
            yield self.found(Severity.WARNING, text, "unused parameters", "", float(len(result.unreached)), advice=advice)

    def _notes(self, result: ParameterAudit) -> Iterator[Finding]:
        for group in result.tied[:3]:
            yield self.found(Severity.NOTE, f"{' and '.join(group)} are one tensor, counted once.", "tied parameters")
        if result.waiting:
            text = (
                f"No gradient reaches {listed(result.waiting, 4)} yet, because {listed(result.waiting_for, 4)} "
                f"{'is' if len(result.waiting_for) == 1 else 'are'} zero; that begins after the first step."
            )
            yield self.found(Severity.NOTE, text, "zero initialisation", value=float(len(result.waiting)))
        silent = [row for row in result.layers if row["silent_inputs"]]
        if silent and not result.motionless and not result.total("dead"):  # behind dead units they are no news
            where = ", ".join(f"{row['silent_inputs']} into {row['layer']}" for row in silent[:3])
            text = f"Some inputs of layers are zero on all samples ({where}): the weights on them cannot train on this data."
            yield self.found(Severity.NOTE, text, "silent inputs", value=float(result.total("silent_inputs")))
        if result.total("unused_rows"):
            text = f"{result.total('unused_rows')} rows of embeddings are never asked for by this data."
            yield self.found(Severity.NOTE, text, "unused embeddings", value=float(result.total("unused_rows")))


def _by_layer(rows: list[Row], column: str) -> str:
    return ", ".join(f"{row[column]} of {row['units']} in {row['layer']}" for row in rows[:4])
