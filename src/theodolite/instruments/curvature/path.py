"""Do the checkpoints that were given lie in one basin with the model as it stands?"""

from __future__ import annotations

from typing import Any

import theodolite as th
from theodolite.instruments.base import Instrument, Picture, Results, SurveyContext, Work
from theodolite.measures.mode_connectivity import LinearPath, path_between
from theodolite.results import Finding, Severity

#: Points of the path from one end to the other.
POINTS = 11


class PathToCheckpoint(Instrument):
    name = "path"
    order = 145
    title = "Path to the checkpoint"
    question = "Does the checkpoint lie in one basin with the model as it stands, so that their weights may be averaged?"
    how = (
        "Loss and accuracy at eleven points of the straight line between the two. The barrier is how far accuracy falls between "
        "the ends below the weaker one; up to 2 percentage points count as connected."
    )
    source = "Frankle and others (2020), Linear Mode Connectivity and the Lottery Ticket Hypothesis."

    def concerns(self, context: SurveyContext) -> bool:
        return bool(context.checkpoints)

    def applies(self, context: SurveyContext) -> str:
        return "" if context.checkpoints else "no checkpoint was given to measure the path to (checkpoints=, --checkpoint)"

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        return Work(gradients=POINTS * (1 if context.valid is None else 2) / 2.5)

    def run(self, context: SurveyContext, **effort: Any) -> LinearPath:
        points = [i / (POINTS - 1) for i in range(POINTS)]
        ends = (context.checkpoints[-1], context.problem.model)
        return path_between(context.problem, *ends, context.valid, alphas=points, progress=False)

    def findings(self, context: SurveyContext, result: LinearPath) -> list[Finding]:
        barrier = result.barrier("train")
        value, error = (result.loss_barrier_train, None) if barrier is None else (barrier.value, barrier.error)
        label = ("connected" if result.conclusive else "no verdict") if result.connected else "barrier"
        advice = "Their weights may be averaged." if label == "connected" else ""
        number = (f"barrier of train {'loss' if barrier is None else 'accuracy'}", value, error)
        text = f"Checkpoint to model: {result.sentence()}"
        return [self.found(Severity.NOTE, text, label, *number, advice=advice)]

    def figure(self, results: Results) -> Picture:
        return th.plots.linear_path_panels(results[self.name].rows(), ends=("checkpoint", "model"))
