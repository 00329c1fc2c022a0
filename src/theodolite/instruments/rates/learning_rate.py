"""Which learning rate? The curve that people know, and one rate that was tried against yours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import theodolite as th
from theodolite.instruments.base import Instrument, Picture, Results, SurveyContext, Work, inapplicable
from theodolite.instruments.subset import subset
from theodolite.measures.dynamics.range_test import RangeTest, lr_range_test
from theodolite.measures.dynamics.rate_choice import RateChoice, choose_rate
from theodolite.measures.trials import Remedy, Setup, usual_batch_size
from theodolite.results import Finding, Row, Severity

#: Samples on which runs are compared.
SCORED = 1000
#: The faults that a verdict on a rate stands for.
CAUSES = {"too high": "rate too high", "too low": "rate too low", "needs warm-up": "no warm-up"}


def _share(context: SurveyContext) -> float:
    """One step as a share of a pass over the data."""
    return min(1.0, (context.batch_size or usual_batch_size(context.problem)) / context.problem.samples)


class LearningRateRange(Instrument):
    name = "range_test"
    order = 17
    depth = "quick"
    title = "Loss over learning rate"
    question = "From which learning rate on does the loss fall, and from which does it rise?"
    how = (
        "The learning rate of copies rises exponentially, one mini-batch step for each rate, with your optimizer and its state; "
        "three sweeps over different batches."
    )
    source = "Smith (2017), Cyclical Learning Rates for Training Neural Networks: the learning-rate range test."
    efforts = ({"steps": 100, "sweeps": 3}, {"steps": 60, "sweeps": 1}, {"steps": 30, "sweeps": 1})

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        steps = effort["steps"] * effort["sweeps"]
        return Work(gradients=2.0 + 1.7 * steps * _share(context), seconds=0.1 + 1.5e-3 * steps, bytes=16 * context.problem.size)

    @inapplicable(ValueError)
    def run(self, context: SurveyContext, **effort: Any) -> RangeTest:
        given: dict[str, Any] = {"lr": context.lr, "batch_size": context.batch_size, "critical": False}
        return lr_range_test(context.problem, context.optimizer, **given, **effort, seed=context.seed, progress=False)

    def findings(self, context: SurveyContext, result: RangeTest) -> list[Finding]:
        number = ("rate up to which the loss falls fastest", result.suggestion)
        return [self.found(Severity.NOTE, result.sentence(), "range test", *number)]

    def figure(self, results: Results) -> Picture:
        result, edge = results[self.name], results.get("rate")
        critical = getattr(edge, "critical", edge)
        value = getattr(critical, "value", math.inf)
        return th.plots.range_test(
            result.rows(), suggestion=result.suggestion, own=result.lr, critical=value if math.isfinite(value) else None
        )


class LearningRateChoice(Instrument):
    name = "learning_rate"
    order = 18
    depth = "quick"
    title = "One learning rate"
    question = "Keep the learning rate, or take another?"
    how = (
        "Copies are trained for some mini-batch steps at your rate and at lower and higher ones, from the same weights on the "
        "same batches; at the end the rate falls to zero, so that a lower rate does not win by its lesser noise alone. Yours is "
        "kept unless another is clearly better, in longer runs too."
    )
    source = "A comparison of short trainings; what is clearly better is measured by two orders of the batches."
    efforts = ({"steps": 60}, {"steps": 30}, {"steps": 12})

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        steps = 16 * effort["steps"]
        scored = 24 * min(1.0, SCORED / context.problem.samples) / 3
        return Work(gradients=scored + 1.1 * steps * _share(context), seconds=0.1 + 1e-3 * steps, bytes=16 * context.problem.size)

    @inapplicable(ValueError)
    def run(self, context: SurveyContext, **effort: Any) -> RateChoice:
        swept, progress = context.results.get("range_test"), context.results.get("progress")
        others = (
            [] if swept is None else [swept.suggestion, *([] if context.lr else [swept.suggestion / 3, swept.suggestion / 10])]
        )
        return choose_rate(
            context.problem, context.lr, context.optimizer, others=others, batch_size=context.batch_size,
            score_on=subset(context.problem, SCORED), trivial=getattr(progress, "trivial", None),
            seconds=None if context.allowance is None else 0.8 * context.allowance, seed=context.seed, **effort,
        )  # fmt: skip

    def rows(self, result: RateChoice) -> list[Row]:
        names = {"rate": "rate", "from": "from", "warm-up": "warm-up", "steps": "steps", "start": "loss at the start"}
        names |= {"held": "loss before the cool-down", "final": "loss at the end"}
        return [{name: row[key] for key, name in names.items()} for row in result.rows()]

    def findings(self, context: SurveyContext, result: RateChoice) -> list[Finding]:
        cause = CAUSES.get(result.verdict, "")
        number = ("learning rate to set", result.recommended)
        if not cause:
            learns = getattr(context.results.get("progress"), "learning", None) is True
            severity = Severity.GOOD if result.verdict == "keep" and learns else Severity.NOTE
            label = {"keep": "rate kept", "converged": "converged"}.get(result.verdict, "rate suggested")
            return [self.found(severity, result.sentence(), label, *number, headline=True)]
        severity = Severity.CRITICAL if result.diverged else Severity.WARNING
        advice = f"{_advice(result)}."
        return [self.found(severity, result.sentence(), cause, *number, cause=cause, advice=advice, headline=True)]

    def remedies(self, context: SurveyContext, result: RateChoice) -> Mapping[str, Remedy]:
        cause, rate = CAUSES.get(result.verdict), result.recommended
        if cause is None or rate is None:
            return {}

        def change(setup: Setup) -> None:
            setup.set_lr(rate)
            if cause == "no warm-up":
                setup.warmup = result.steps // 2

        advice = _advice(result)
        return {cause: Remedy(f"{advice[0].lower()}{advice[1:]}", change, fresh=result.restart, lr=rate)}

    def figure(self, results: Results) -> Picture:
        rows = [
            row for row in results[self.name].rows() if math.isfinite(row["final"]) and not row["warm-up"] and not row["order"]
        ]
        if len({row["rate"] for row in rows}) < 3:
            return None
        title = "Loss after short trainings, with the rate falling to zero at the end"
        return th.plots.curves(rows, "rate", "final", by="from", log="x", title=title, ylabel="loss at the end", band=None)


def _advice(result: RateChoice) -> str:
    again = " and start again from new weights" if result.restart else ""
    if result.verdict == "needs warm-up":
        return f"Keep lr={result.own:.2g} but let it rise from near zero over the first {result.steps // 2} steps or more"
    return f"Set lr={result.recommended:.2g}{again}"
