"""Does the advice help? Each remedy is tried on a copy, beside the training as it is."""

from __future__ import annotations

from typing import Any

import theodolite as th
from theodolite.instruments.base import Instrument, Picture, Results, SurveyContext, Work
from theodolite.instruments.subset import subset
from theodolite.measures.trials import Remedy, TrialRuns, outcome_of, try_changes
from theodolite.results import Finding, Outcome, Row, Severity

#: Samples on which runs are compared.
SCORED = 2000


class Trials(Instrument):
    name = "trials"
    order = 58
    depth = "quick"
    title = "What was tried"
    question = "Does the advice help, in a short training of a copy?"
    how = (
        "Copies of the model are trained for some steps with your optimizer, as they are and with one change each, on the same "
        "batches in the same order; then their losses on the same samples are compared. Advice that does not help is not given."
    )
    source = "A comparison from the same start on the same data, so that what differs is the change."
    efforts = ({"steps": 60}, {"steps": 25}, {"steps": 10})

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        runs = 2 + len(_wanted(context))
        width = context.usual_batch_size
        step = width / max(1, context.problem.samples)
        scored = min(1.0, SCORED / max(1, context.problem.samples))
        return Work(gradients=runs * (effort["steps"] * step + scored), seconds=runs * effort["steps"] * 1e-3)

    def run(self, context: SurveyContext, **effort: Any) -> TrialRuns:
        remedies = _wanted(context)
        if not remedies:
            return TrialRuns(trials=(), outcome=Outcome.FINISHED, seed=context.seed)
        lr = context.lr or next((r.lr for r in remedies.values() if r.lr is not None), None)
        if lr is None:
            why = "no learning rate was given (lr=, --lr, or an optimizer)"
            remedies = {cause: Remedy(r.advice, why_not=r.why_not or why) for cause, r in remedies.items()}
        return try_changes(
            context.problem,
            remedies,
            lr=lr or 1.0,
            optimizer=context.optimizer,
            batch_size=context.batch_size,
            score_on=subset(context.problem, SCORED),
            seconds=context.allowance,
            seed=context.seed,
            **effort,
        )

    def rows(self, result: TrialRuns) -> list[Row]:
        return [{"cause": row["cause"], "advice": row["advice"], "what became of it": outcome_of(row)} for row in result.trials]

    def findings(self, context: SurveyContext, result: TrialRuns) -> list[Finding]:
        return [
            self.found(
                Severity.NOTE,
                f"Tried: {row['advice']}: {outcome_of(row)}.",
                _label(row),
                "loss with the change",
                row["changed"],
                cause=row["cause"],
            )
            for row in result.trials
            if not row["not_tried"]
        ]

    def figure(self, results: Results) -> Picture:
        rows = list(results[self.name].curves)
        if not rows:
            return None
        return th.plots.curves(
            rows, x="step", y="loss", by="run", markers=False, title="Short trainings of copies", ylabel="loss"
        )


def _label(trial: Row) -> str:
    return "advice helps" if trial["better"] else "advice does not help"


def _wanted(context: SurveyContext) -> dict[str, Remedy]:
    """The remedies of what is serious."""
    serious = {f.cause for f in context.findings if f.severity.rank >= Severity.WARNING.rank}
    return {cause: remedy for cause, remedy in context.remedies.items() if cause in serious}
