"""Which learning rate? The one instrument that names a rate to set; the others measure what rates do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import theodolite as th
from theodolite.errors import TheodoliteError
from theodolite.instruments.base import InapplicableError, Instrument, Picture, Results, SurveyContext, Work
from theodolite.instruments.subset import subset
from theodolite.measures.dynamics import CriticalRate, RangeTest, RateChoice, Regime, choose_rate, lr_range_test
from theodolite.measures.dynamics.range_test import COARSE
from theodolite.measures.dynamics.rate_choice import LEAST, MOST
from theodolite.measures.progress import learning_progress
from theodolite.measures.trials import Remedy, Setup
from theodolite.problem import Problem
from theodolite.results import Finding, Outcome, Result, Row, Severity

#: Samples on which runs are compared.
SCORED = 1000
#: Steps of one sweep of the range test.
SWEEP = 100
#: What runs take on the average, in runs of the usual length: half as many where nothing is wrong, up to 25 where something is.
USUAL_RUNS = 12


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LearningRate(Result):
    """The range test and the trial of rates, and the one rate that follows from them."""

    choice: RateChoice
    range_test: RangeTest | None = None

    @property
    def recommended(self) -> float | None:
        """The rate to set; yours where there is no reason for another, None where none was found."""
        return self.choice.recommended

    def rows(self) -> list[Row]:
        return self.choice.rows()

    def sentence(self) -> str:
        return self.choice.sentence()


class WhichRate(Instrument):
    name = "learning_rate"
    order = 12
    depth = "quick"
    title = "The learning rate"
    question = "Which learning rate should I train with?"
    how = (
        "Range test: on copies of the model the rate rises from step to step, and what the loss of each batch has changed since "
        "the start is drawn over it. Trials: copies are trained with your optimizer at your rate, at lower and higher ones, on "
        "the same batches; each holds its rate for three quarters of its steps and then lets it fall to zero, so that what was "
        "learned is compared and not the noise that a rate leaves. Another rate is named only where it is clearly better, and "
        "longer runs say so too. Weights that no longer recover are tried beside new ones."
    )
    source = "Smith (2017), cyclical learning rates: the range test; Hägele and others (2024): rates compared after a cool-down."
    efforts = ({"steps": 60, "sweeps": 3}, {"steps": 40, "sweeps": 1}, {"steps": 20, "sweeps": 1})
    columns: ClassVar[Mapping[str, str]] = {
        "rate": "rate",
        "from": "from",
        "warm-up": "warm-up",
        "steps": "steps",
        "start": "loss at the start",
        "held": "before the rate falls",
        "final": "at the end",
    }

    def applies(self, context: SurveyContext) -> str:
        trainable = any(p.requires_grad for p in context.problem.parameters)
        return "" if trainable else "no parameter requires a gradient"

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        samples = context.problem.samples
        width = min(1.0, context.usual_batch_size / samples)
        runs = USUAL_RUNS if context.lr is not None else 3
        trained, swept = runs * effort["steps"], COARSE + effort["sweeps"] * SWEEP
        scored = 0.7 * runs * min(1.0, SCORED / samples)
        seconds = 1e-3 * trained + 1.5e-3 * swept  # of the interpreter
        return Work(
            gradients=1.1 * width * (trained + 1.4 * swept) + scored + 0.5, seconds=seconds, bytes=12 * context.problem.size
        )

    def run(self, context: SurveyContext, **effort: Any) -> LearningRate:
        problem, allowed = context.problem, context.allowance
        given: dict[str, Any] = {"batch_size": context.batch_size, "seed": context.seed}
        swept = _range_test(context, sweeps=effort["sweeps"], **given)
        scored = subset(problem, SCORED)
        choice = choose_rate(
            problem,
            context.lr,
            context.optimizer,
            others=() if swept is None else (swept.suggestion,),
            steps=effort["steps"],
            score_on=scored,
            trivial=_trivial(scored),
            seconds=None if allowed is None else max(0.1, 0.6 * MOST / USUAL_RUNS * allowed),
            **given,
        )
        return LearningRate(choice=choice, range_test=swept, outcome=Outcome.FINISHED, seed=context.seed, cost=choice.cost)

    def findings(self, context: SurveyContext, result: LearningRate) -> list[Finding]:
        choice = result.choice
        if choice.own is None:
            return [self._suggested(choice)]
        severity, label, text, advice = _said(choice)
        measured = ("learning rate to set", choice.recommended)
        cause = CAUSE.get(choice.verdict, "")
        if choice.diverged and not cause:
            cause = "rate too high"
        return [self.found(severity, text, label, *measured, cause=cause, advice=advice, headline=True)]

    def _suggested(self, choice: RateChoice) -> Finding:
        if choice.recommended is None:
            text = "No learning rate was given, and none that was tried lowers the loss."
            return self.found(Severity.NOTE, text, "no rate helps", headline=True)
        text = (
            f"No learning rate was given; of those that were tried {choice.recommended:.2g} is best: {choice.steps} steps bring "
            f"the loss from {choice.start:.3g} to {choice.best_final:.3g}."
        )
        measured = ("learning rate to set", choice.recommended)
        advice = f"Set lr={choice.recommended:.2g}."
        return self.found(Severity.NOTE, text, "suggested rate", *measured, advice=advice, headline=True)

    def remedies(self, context: SurveyContext, result: LearningRate) -> Mapping[str, Remedy]:
        choice = result.choice
        if choice.verdict == "needs warm-up":
            rise = choice.warmup
            advice = f"let the learning rate rise to {choice.own:.3g} over the first {rise} steps"
            return {"no warm-up": Remedy(advice, lambda setup: _warm(setup, rise), lr=choice.own)}
        if choice.verdict in CAUSE:
            assert choice.recommended is not None
            rate, again = choice.recommended, "start anew with " if choice.restart else "set "
            change = Remedy(f"{again}lr={rate:.2g}", lambda setup: setup.set_lr(rate), fresh=choice.restart, lr=rate)
            ends = {"start": choice.start, "own": choice.own_final, "changed": choice.best_final}
            change = replace(change, tried={"steps": choice.steps, **ends}) if choice.seen_late else change
            return {CAUSE[choice.verdict]: change}
        if choice.diverged:
            return {"rate too high": Remedy("look for what makes it blow up", why_not="no rate was found at which it does not")}
        return {}

    def figure(self, results: Results) -> Picture:
        result: LearningRate = results[self.name]
        if result.range_test is None:
            return None
        measured = results.get("rate")
        edge: CriticalRate | None = measured.critical if isinstance(measured, Regime) else measured
        known = edge is not None and math.isfinite(edge.value)
        other = result.recommended if result.recommended != result.choice.own else None
        return th.plots.range_test(
            result.range_test.rows(),
            own=result.choice.own,
            suggestion=other,
            critical=edge.value if edge is not None and known else None,
            window=edge.window if edge is not None else None,
        )


#: Verdict -> what is at fault.
CAUSE = {"too high": "rate too high", "too low": "rate too low", "needs warm-up": "no warm-up"}


def _said(choice: RateChoice) -> tuple[Severity, str, str, str]:
    """Severity, label, sentence and advice for the rate that was asked about."""
    own, to = f"{choice.own:.3g}", choice.recommended
    mine = "blow up" if choice.diverged else f"end at {choice.own_final:.3g}"
    start, steps = f"{choice.start:.3g}", f"{choice.steps} steps"
    stops = choice.diverged or choice.own_final > choice.start + choice.margin
    worst = Severity.CRITICAL if stops else Severity.WARNING
    if choice.verdict == "too high":
        new = " from new weights" if choice.restart else ""
        text = (
            f"Your learning rate {own} is too high: {steps}{new} {mine}, at {to:.2g} at {choice.best_final:.3g} (start {start})."
        )
        text += " The present weights do not recover." if choice.restart else ""
        return worst, "rate too high", text, f"{'Start anew with' if choice.restart else 'Set'} lr={to:.2g}."
    if choice.verdict == "too low":
        text = f"Your learning rate {own} is too low: {steps} {mine}, and at {to:.2g} at {choice.best_final:.3g} (start {start})."
        return Severity.WARNING, "rate too low", text, f"Set lr={to:.2g}."
    if choice.verdict == "needs warm-up":
        rise = choice.warmup
        text = (
            f"Your learning rate {own} is too much for the first steps, not for later ones: {steps} {mine}, and with a rate that "
            f"rises over the first {rise} at {choice.best_final:.3g} (start {start})."
        )
        return worst, "no warm-up", text, f"Let the learning rate rise over the first {rise} steps, and keep lr={own}."
    if choice.verdict == "converged":
        lowest = min((row["final"] for row in choice.runs), default=math.inf)
        seen = f"{steps} at the best of the rates that were tried bring it to {lowest:.3g}"
        seen = seen if choice.falls_to(lowest) else "no learning rate that was tried lowers it further"
        text = f"The loss is {start}, where little is left to learn, and {seen}: yours, {own}, is not what limits it."
        return Severity.NOTE, "nothing left to learn", text, ""
    if choice.diverged:
        text = f"Training blows up at your learning rate {own}, and at every lower one that was tried."
        return Severity.CRITICAL, "no rate helps", text, "Look for what makes it blow up: inputs, loss, initial weights."
    if choice.verdict == "unknown":
        text = f"No learning rate that was tried moves the loss noticeably from {start}: your rate, {own}, is not at fault."
        return Severity.NOTE, "no rate helps", text, ""
    return _kept(choice)


def _kept(choice: RateChoice) -> tuple[Severity, str, str, str]:
    """What is said of a rate to which none that was tried is clearly better; that it fits, where longer runs say so too."""
    own, start, end, others = f"{choice.own:.3g}", f"{choice.start:.3g}", f"{choice.own_final:.3g}", len(_tried(choice))
    if choice.own_final > choice.start + LEAST * abs(choice.start):
        brought = f"take the loss up from {start} to {end}"
    else:
        lower = choice.falls_to(choice.own_final)
        brought = f"bring the loss from {start} to {end}" if lower else f"leave the loss at {end} (start {start})"
    steps = f"{choice.steps} steps on a copy {brought}"
    better = f"none of the {others} others that were tried is clearly better" if others > 1 else "no other is clearly better"
    severity = Severity.GOOD if choice.own_final < choice.start - choice.margin else Severity.NOTE
    if choice.compared_longer and choice.falls_to(choice.own_final):
        return severity, "rate fits", f"Your learning rate {own} fits: {steps}, and {better}, in longer runs either.", ""
    text = f"At your learning rate {own}, {steps}; {better} in so many steps."
    rises = choice.own_final > choice.start
    return severity, "no rate helps" if rises else "rate fits", text if others else f"{text.partition(';')[0]}.", ""


def _tried(choice: RateChoice) -> set[float]:
    return {row["rate"] for row in choice.runs} - {choice.own}


def _warm(setup: Setup, steps: int) -> None:
    setup.warmup = steps


def _range_test(context: SurveyContext, *, sweeps: int, **given: Any) -> RangeTest | None:
    """The range test; None where no step moves the weights."""
    with suppress(ValueError):
        return lr_range_test(
            context.problem, context.optimizer, lr=context.lr, steps=SWEEP, sweeps=sweeps, critical=False, progress=False, **given
        )
    if context.lr is None:
        raise InapplicableError("the gradient is zero, so no learning rate moves the weights")
    return None


def _trivial(problem: Problem) -> float | None:
    with suppress(TheodoliteError):
        return learning_progress(problem).trivial
    return None
