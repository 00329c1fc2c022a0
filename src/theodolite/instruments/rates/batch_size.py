"""Are the batches large enough?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from theodolite.instruments.base import Instrument, SurveyContext, Work, inapplicable
from theodolite.instruments.subset import subset
from theodolite.measures.dynamics.batch_choice import BatchChoice, choose_batch_size
from theodolite.measures.trials import Remedy, Setup
from theodolite.results import Finding, Severity

#: Samples on which runs are compared.
SCORED = 1000
#: Batches of more samples are not asked about: what such training lacks is hardly size.
SMALL = 8


class BatchSize(Instrument):
    name = "batch_size"
    order = 19
    depth = "quick"
    title = "The size of batches"
    question = "Would larger batches get much further in as many steps?"
    how = (
        "Copies are trained at your rate with your batches and with batches eight times as large, from the same weights for as "
        "many steps. Yours are called too small only where they make less than a third of that progress, and a lower rate does "
        "not mend it. Batches of more than eight samples are not tried."
    )
    source = "McCandlish, Kaplan, Amodei and others (2018), An Empirical Model of Large-Batch Training."

    def applies(self, context: SurveyContext) -> str:
        if context.lr is None:
            return "no learning rate was given (lr=, --lr, or an optimizer)"
        return "" if 2 * context.usual_batch_size < context.problem.samples else "the batches are as large as the data"

    def concerns(self, context: SurveyContext) -> bool:
        return context.usual_batch_size <= SMALL

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        step = context.usual_batch_size / context.problem.samples
        return Work(gradients=600 * step * 9 + 4, seconds=0.6)

    @inapplicable(ValueError)
    def run(self, context: SurveyContext, **effort: Any) -> BatchChoice:
        assert context.lr is not None  # `applies` looked
        progress = context.results.get("progress")
        return choose_batch_size(
            context.problem, context.lr, context.optimizer, batch_size=context.usual_batch_size,
            score_on=subset(context.problem, SCORED), trivial=getattr(progress, "trivial", None), seconds=context.allowance,
            seed=context.seed,
        )  # fmt: skip

    def findings(self, context: SurveyContext, result: BatchChoice) -> list[Finding]:
        number = ("loss with larger batches", result.larger_final)
        if not result.too_small:
            return [self.found(Severity.NOTE, result.sentence(), "batches large enough", *number)]
        advice = f"Set batch_size={result.larger}, or accumulate gradients over as many samples."
        return [
            self.found(Severity.WARNING, result.sentence(), "batch too small", *number, cause="batch too small", advice=advice)
        ]

    def remedies(self, context: SurveyContext, result: BatchChoice) -> Mapping[str, Remedy]:
        if not result.too_small:
            return {}

        def enlarge(setup: Setup) -> None:
            setup.batch_size = result.larger

        return {"batch too small": Remedy(f"set batch_size={result.larger}", enlarge, fresh=result.restart)}
