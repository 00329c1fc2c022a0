"""How much hangs on one training example?"""

from __future__ import annotations

from typing import Any

import theodolite as th
from theodolite.instruments.base import Instrument, Picture, Results, SurveyContext, Work, inapplicable
from theodolite.instruments.verdict import first_sentence
from theodolite.measures.dynamics.noise import joined_parts
from theodolite.measures.stability import StabilityResult, stability
from theodolite.measures.trials import cannot_restart, start_anew
from theodolite.problem.calling import copy_model
from theodolite.results import Finding, Severity


class OneExample(Instrument):
    name = "stability"
    order = 210
    depth = "deep"
    title = "One example exchanged"
    question = "How far apart do two trainings end whose data differ in one example, and does more data help?"
    how = (
        "Pairs of fresh copies are trained in lock-step by plain SGD at your rate on sets that differ in one example, at three "
        "sizes; before that every pair is trained on equal sets and must end the same, bit by bit."
    )
    source = "Bousquet and Elisseeff (2002); Hardt, Recht and Singer (2016): stability and generalisation."
    efforts = ({"pairs": 6, "steps": 200}, {"pairs": 4, "steps": 80})

    def applies(self, context: SurveyContext) -> str:
        problem = context.problem
        if context.valid is None:
            return "it takes examples that were not trained on (valid=, --valid)"
        if context.lr is None:
            return "no learning rate was given (lr=, --lr, or an optimizer)"
        if problem.loss_function is None or problem.samples < 80 or problem.loss_takes_structure:
            return "it takes a loss of its own on one output, and at least 80 samples"
        why = cannot_restart(problem.model)
        return f"every training begins anew, and {why}" if why else ""

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        share = context.usual_batch_size / context.problem.samples
        runs = 2 * 3 * effort["pairs"]
        return Work(gradients=1.5 * runs * effort["steps"] * share, seconds=1.0 + 1e-4 * runs * effort["steps"])

    @inapplicable(ValueError, TypeError, NotImplementedError)  # batches that cannot be joined, layers that have no fleet
    def run(self, context: SurveyContext, **effort: Any) -> StabilityResult:
        problem, valid, size = context.problem, context.valid, context.problem.samples
        assert valid is not None

        def build(seed: int) -> Any:
            model = copy_model(problem.model)
            start_anew(model, seed)
            return model

        return stability(
            build, "sgd", _pool(problem), _pool(valid), sizes=[size // 4, size // 2, size - 1], loss=problem.loss_function,
            batch_size=context.usual_batch_size, rate=context.lr, init_seed=context.seed,
            eval_size=500, progress=False, **effort,
        )  # fmt: skip

    def findings(self, context: SurveyContext, result: StabilityResult) -> list[Finding]:
        fit = result.fit("stab")
        text = f"{first_sentence(result.sentence())} {fit.sentence()}"
        return [self.found(Severity.NOTE, text, "one example", "exponent of stability in the number of examples", fit.b)]

    def figure(self, results: Results) -> Picture:
        return th.plots.stability_panels(results[self.name].rows())


def _pool(problem: th.Problem) -> Any:
    """The data as one pair of inputs and targets."""
    (whole,) = joined_parts(list(problem.data))
    if len(whole.args) != 1 or whole.kwargs:
        raise ValueError("the model takes more than one input")
    return whole.args[0], whole.target
