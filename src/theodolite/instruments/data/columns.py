"""Are inputs and targets on a scale that layers are made for?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.optim import SGD

from theodolite.errors import TheodoliteError
from theodolite.instruments.base import Instrument, Picture, Results, SurveyContext, Work, inapplicable
from theodolite.instruments.remedies import leave_out
from theodolite.instruments.subset import subset
from theodolite.measures.data_audit.columns import STEPS, ColumnAudit, audit_columns, standardiser, whitener
from theodolite.measures.data_audit.targets import TargetAudit, audit_targets, standardised_targets
from theodolite.measures.data_audit.views import SAMPLES, labels_of, numbers_of, sample_tensors
from theodolite.measures.dynamics.critical import critical_learning_rate
from theodolite.measures.dynamics.optimizers import copy_optimizer
from theodolite.measures.progress.trivial import first_loss
from theodolite.measures.trials import Remedy, Setup, cannot_restart, start_anew
from theodolite.problem import Problem
from theodolite.results import Finding, Row, Severity
from theodolite.text import grouped, listed, plural

#: A column is learned too slowly where it takes this many times as long as it would if all were standardised.
SLOW = 1e4
#: Inputs of this root mean square and more, or of this and less, are on no scale that layers are initialised for.
LARGE, SMALL = 20.0, 0.005
#: Shares of the targets' variance that a linear model loses by the scale of its inputs, or by their being alike.
LOST = 0.1
#: Targets farther from the outputs than this, in units of the outputs' spread or of 1, or of less spread than this.
FAR, TINY = 20.0, 0.005
#: Outliers that hold this share of the squared error rule the training.
HOLD = 0.5
#: A model that explains this share of the variance has coped.
COPED = 0.5
#: Samples on which the rate of a changed training is found, and the kind of the loss.
RATED = 256


class Columns(Instrument):
    name = "columns"
    order = 22
    depth = "quick"
    title = "Scale of the inputs"
    question = "Are the columns of the input on one scale, and on one that layers are made for?"
    how = (
        "Means and spreads of what the first layer gets, column by column (or channel by channel), on up to 2000 samples. Their "
        "second moment bounds the learning rate; from it follows how much slower each column is then learned than with "
        "standardised columns, and what 1000 steps of descent reach on a linear model."
    )
    source = "LeCun and others (1998), Efficient BackProp: the curvature of a first layer is the second moment of its inputs."

    def concerns(self, context: SurveyContext) -> bool:
        return any(t.is_floating_point() for t in sample_tensors(next(iter(context.problem.data))))

    def applies(self, context: SurveyContext) -> str:
        if not self.concerns(context):
            return "the inputs are no real numbers"
        return "fewer than ten samples say nothing of spreads" if context.problem.samples < 10 else ""

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        share = min(1.0, 2000 / context.problem.samples)
        return Work(gradients=0.4 * share, seconds=0.1)

    @inapplicable(ValueError, TheodoliteError)
    def run(self, context: SurveyContext, **effort: Any) -> ColumnAudit:
        return audit_columns(context.problem, seed=context.seed)

    def findings(self, context: SurveyContext, result: ColumnAudit) -> list[Finding]:
        found = [*self._scale(context, result), *self._collinear(context, result)]
        return found or [self.found(Severity.GOOD, result.sentence(), "inputs scaled")]

    def _scale(self, context: SurveyContext, result: ColumnAudit) -> Iterator[Finding]:
        slowest = result.slowest
        if slowest is None or result.normalised:
            return
        called = _namer(context.problem, result)
        lost = result.reached_standardised - result.reached
        wide = len(result.table) > 200
        uneven = (result.usually_slower >= SLOW or lost >= LOST) and slowest["slower"] >= 0.1 * SLOW
        given: dict[str, Any] = {"advice": self._advice(context, result), "cause": "input scale"}
        if not uneven and not SMALL < result.size < LARGE:
            text = (
                f"The inputs have a size of {result.size:.3g} (root mean square), while layers are initialised for about 1: "
                f"{'the first outputs are as many times too large' if result.size > 1 else 'biases drown them'}."
            )
            size = ("root mean square of the inputs", result.size)
            yield self.found(Severity.WARNING, text, "input scale", *size, **given)
        elif uneven or (slowest["slower"] >= SLOW and not wide):
            largest = max(result.plain, key=lambda row: math.hypot(row["mean"], row["spread"]))
            text = (
                f"The scales of the inputs differ: {called(largest)} has mean {grouped(largest['mean'])} and spread "
                f"{grouped(largest['spread'])}, {called(slowest)} a spread of {grouped(slowest['spread'])}. At the largest "
                f"stable rate descent learns along {called(slowest)} {slowest['slower']:.1g} times slower than if all were "
                "standardised"
            )
            text += _reach(result) if lost >= LOST else "."
            numbers = ("how many times slower the slowest column is learned", slowest["slower"])
            yield self.found(Severity.WARNING if uneven else Severity.NOTE, text, "input scale", *numbers, **given)

    def _advice(self, context: SurveyContext, result: ColumnAudit) -> str:
        called = _namer(context.problem, result)
        lows, highs = (getattr(result, name) for name in ("smallest", "largest"))
        if lows >= 0 and 100 < highs <= 255 and result.size > LARGE and result.usually_slower < SLOW:
            return "Divide the inputs by 255."
        if len(result.plain) > 20:
            return "Standardise the inputs: subtract their mean and divide by their standard deviation."
        worst = sorted(result.plain, key=lambda row: -math.hypot(row["mean"], row["spread"]))
        each = ", ".join(f"{called(row)} ({grouped(row['mean'])}, {grouped(row['spread'])})" for row in worst[:6])
        more = f" and {len(worst) - 6} more" if len(worst) > 6 else ""
        return f"Standardise the inputs: subtract the mean and divide by the standard deviation: {each}{more}."

    def _collinear(self, context: SurveyContext, result: ColumnAudit) -> Iterator[Finding]:
        lost = result.explained - result.reached_standardised
        costly = lost >= LOST
        if not result.pairs and not costly:
            return
        pair = max(result.pairs, key=lambda row: abs(row["correlation"]), default=None)
        text = "Some columns are nearly a combination of others."
        if pair is not None:
            called = _namer(context.problem, result)
            first, second = (called({"column": pair[name]}) for name in ("first", "second"))
            text = f"{first} and {second} are nearly the same: they correlate to {pair['correlation']:.7g}."
            text = text[0].upper() + text[1:]
        if costly:
            text = (
                f"{text} The targets depend on what little they differ in: a line explains {100 * result.explained:.3g} % of "
                f"their variance, and {STEPS} steps of descent reach {100 * max(0.0, result.reached_standardised):.2g} %."
            )
        advice = "Replace such columns by their mean and their difference, each standardised, or whiten the inputs."
        number = ("share of the variance that descent does not reach", lost) if costly else ("pairs", float(len(result.pairs)))
        severity = Severity.WARNING if costly else Severity.NOTE
        yield self.found(severity, text, "collinear inputs", *number, advice=advice if costly else "", cause="collinear inputs")

    def remedies(self, context: SurveyContext, result: ColumnAudit) -> Mapping[str, Remedy]:
        serious = {f.cause for f in self.findings(context, result) if f.severity.rank >= Severity.WARNING.rank}
        hooks = {"input scale": (standardiser, "standardise the inputs"), "collinear inputs": (whitener, "whiten the inputs")}
        found = {}
        for cause in serious:
            make, advice = hooks[cause]
            hook = make(result)

            def change(setup: Setup, hook: Any = hook) -> None:
                setup.model.get_submodule(result.layer).register_forward_pre_hook(hook, with_kwargs=True)

            found[cause] = changed_training(context, advice, change)
        return found

    def rows(self, result: ColumnAudit) -> list[Row]:
        names = {"column": "column", "mean": "mean", "spread": "standard deviation", "kind": "kind", "slower": "times slower"}
        return [{name: row[key] for key, name in names.items()} for row in result.rows()[:200]]

    def figure(self, results: Results) -> Picture:
        result: ColumnAudit = results[self.name]
        return result.plot() if len(result.plain) > 1 else None


def _namer(problem: Problem, result: ColumnAudit) -> Callable[[Row], str]:
    """How a sentence calls a column: by its name in quotes, or by its number."""
    if result.channels:
        return lambda row: str(row["column"])
    known = problem.data.columns or ()
    return lambda row: f"'{row['column']}'" if row["column"] in known else f"column {row['column']}"


def _reach(result: ColumnAudit) -> str:
    raw, standard = (100 * max(0.0, share) for share in (result.reached, result.reached_standardised))
    return (
        f"; a linear model explains {raw:.2g} % of the targets after {STEPS} steps, {standard:.3g} % with standardised columns."
    )


def changed_training(context: SurveyContext, advice: str, change: Callable[[Setup], None]) -> Remedy:
    """A change of the data's scale as a remedy: from new weights where there can be some, at a rate that suits the new scale."""
    fresh = not cannot_restart(context.problem.model)
    rate = _suited_rate(context, change, fresh)
    if rate is None:
        return Remedy(advice, change, fresh=fresh)

    def with_rate(setup: Setup) -> None:
        change(setup)
        setup.set_lr(rate)

    return Remedy(f"{advice} and set lr={rate:.2g}", with_rate, fresh=fresh, lr=rate)


def _suited_rate(context: SurveyContext, change: Callable[[Setup], None], fresh: bool) -> float | None:
    """For plain descent, whose rate is bound to the scale: a quarter of the critical rate after the change, less with momentum.

    None where the user's own rate suits the change as well.
    """
    if context.lr is None or not (context.optimizer is None or isinstance(context.optimizer, SGD)):
        return None
    with suppress(TheodoliteError, ValueError, RuntimeError):
        copy = subset(context.problem, RATED).copied()
        if fresh:
            start_anew(copy.model, context.seed)
        setup = Setup(copy, copy_optimizer(context.optimizer, context.problem, copy, context.lr), 1)
        change(setup)
        critical = critical_learning_rate(setup.problem, tol=0.05, max_matvecs=60, progress=False).value
        critical *= 1 - float(setup.optimizer.param_groups[0].get("momentum", 0.0))
        if 0 < critical < math.inf and not 1e-3 * critical <= context.lr <= critical:
            return float(f"{0.25 * critical:.2g}")
    return None


class Targets(Instrument):
    name = "targets"
    order = 24
    depth = "quick"
    title = "Scale of the targets"
    question = "Are the targets of the regression on a scale that the outputs start from?"
    how = "Means and spreads of targets and outputs on up to 2000 samples, and on outliers among all, in one forward pass."
    source = "A fresh network returns numbers of about 1: whatever targets are beyond that has to be learned first."

    def concerns(self, context: SurveyContext) -> bool:
        problem = context.problem
        return labels_of(problem) is None and numbers_of(problem, torch.arange(min(8, problem.samples))) is not None

    def applies(self, context: SurveyContext) -> str:
        return "" if self.concerns(context) else "the targets are no numbers"

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        looked_at = 2 * SAMPLES  # as many outliers at the most as others
        return Work(gradients=0.4 * min(1.0, looked_at / context.problem.samples), seconds=0.01)

    @inapplicable(ValueError, TheodoliteError)
    def run(self, context: SurveyContext, **effort: Any) -> TargetAudit:
        return audit_targets(context.problem, seed=context.seed)

    def findings(self, context: SurveyContext, result: TargetAudit) -> list[Finding]:
        return [*self._outliers(context, result), *self._scale(result)]

    def _outliers(self, context: SurveyContext, result: TargetAudit) -> Iterator[Finding]:
        if result.outlier_share <= HOLD or result.explained > COPED or not _squares(context.problem):
            return
        one = len(result.outliers) == 1
        text = (
            f"{plural(len(result.outliers), 'sample')} of {context.problem.samples} ({listed(result.outliers, 4)}) "
            f"{'has a target' if one else 'have targets'} far outside the others, and {100 * result.outlier_share:.0f} % of the "
            f"squared error: {'it decides' if one else 'they decide'} where the training goes."
        )
        advice = "Correct or leave out those that are wrong; if they are right, train on logarithms, or with nn.HuberLoss."
        share = ("share of the squared error", result.outlier_share)
        yield self.found(Severity.WARNING, text, "outliers", *share, advice=advice, cause="outliers")

    def _scale(self, result: TargetAudit) -> list[Finding]:
        far, tiny = min(result.distance, result.size) > FAR, 0 < min(result.spreads) < TINY
        if (far or tiny) and not result.explained > COPED:
            mean, spread = result.means[0], result.spreads[0]
            at, wide = grouped(result.output_means[0]), grouped(result.output_spreads[0])
            text = (
                f"The targets lie at {grouped(mean)} with a spread of {grouped(spread)}, the outputs at {at} with a spread of "
                f"{wide}: {_BECAUSE[far]}."
            )
            advice = f"Train on (target - {grouped(mean)}) / {grouped(spread)}, and undo it where the outputs are used."
            distance = ("distance of the targets from the outputs, in spreads", result.distance)
            number = distance if far else ("smallest spread of the targets", min(result.spreads))
            return [self.found(Severity.WARNING, text, "target scale", *number, advice=advice, cause="target scale")]
        return [] if far or tiny else [self.found(Severity.GOOD, result.sentence(), "targets scaled")]

    def remedies(self, context: SurveyContext, result: TargetAudit) -> Mapping[str, Remedy]:
        causes = {f.cause for f in self.findings(context, result)}
        found = {"outliers": leave_out(context, list(result.outliers), "leave the outliers out")} if "outliers" in causes else {}
        return {**found, **self._standardised(context, result)} if "target scale" in causes else found

    def _standardised(self, context: SurveyContext, result: TargetAudit) -> Mapping[str, Remedy]:
        advice = "standardise the targets"
        loss = context.problem.loss_function
        if loss is None:
            return {"target scale": Remedy(advice, why_not="the model computes its own loss")}
        standard = standardised_targets(result, loss)

        def change(setup: Setup) -> None:
            setup.model.register_forward_hook(standard.rescale)
            setup.problem = setup.problem.with_model(setup.model, standard)

        return {"target scale": changed_training(context, advice, change)}


def _squares(problem: Problem) -> bool:
    """Whether the loss is known to square the error."""
    kind = first_loss(problem, RATED)[0]
    return kind is not None and kind.name == "squared error"


_BECAUSE = {
    True: "most of the training goes into getting there, and a rate that is safe now is too low then",
    False: "what is to be learned drowns in the noise of the outputs",
}
