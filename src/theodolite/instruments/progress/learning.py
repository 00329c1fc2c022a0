"""Is it learning?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from theodolite.instruments.base import Instrument, Picture, Results, SurveyContext, Work
from theodolite.instruments.remedies import best_remedy
from theodolite.measures.dynamics.optimizers import decoupled
from theodolite.measures.dynamics.rate_choice import HERE
from theodolite.measures.progress import LearningProgress, learning_progress
from theodolite.measures.progress.learning import DONE, SIGMAS
from theodolite.measures.trials import Remedy, Setup, cannot_restart, start_anew
from theodolite.problem import Problem
from theodolite.results import Finding, Severity

#: A model overfits where this share of what it gained over the constant prediction is missing on validation data.
OVERFIT = 0.3
#: And where it has learned its own data: a loss below this share of the constant prediction's.
LEARNED = 0.5
#: Factors of weight decay and rate that are tried against overfitting.
MORE_DECAY, LOWER_RATE = 10.0, 0.1


class Progress(Instrument):
    name = "progress"
    order = 14
    depth = "quick"
    title = "Is it learning?"
    question = "Is the loss better than without looking at the inputs, and does it fall?"
    how = (
        "The loss is compared with that of the best prediction that is the same for all samples, by your own loss function. Then "
        "a copy is trained for some steps as it stands, with your optimizer, rate and batch size; the loss of each batch is "
        "compared with that of the same batch without training. Errors by the jackknife over groups of samples."
    )
    source = "A model that knows nothing of its inputs does no better than the frequencies of the classes or the mean."
    efforts = ({"steps": 40}, {"steps": 15})

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        passes = 0.5 if context.valid is None else 0.5 * (1 + context.valid.samples / context.problem.samples)
        if context.lr is None:
            return Work(gradients=passes, seconds=0.02)
        width = context.usual_batch_size
        run = 1.5 * effort["steps"] * min(1.0, width / context.problem.samples)
        return Work(gradients=passes + 0.5 + run, seconds=0.02 + 2e-3 * effort["steps"], bytes=8 * context.problem.size)

    def run(self, context: SurveyContext, **effort: Any) -> LearningProgress:
        given: dict[str, Any] = {"lr": context.lr, "optimizer": context.optimizer, "valid": context.valid}
        found = learning_progress(context.problem, **given, batch_size=context.batch_size, **effort, seed=context.seed)
        choice = getattr(context.results.get("learning_rate"), "choice", None)
        if choice is None or choice.own != context.lr or choice.own_run is None:
            return found
        start = next(row["start"] for row in choice.runs if row["from"] == HERE)
        return found.followed(start, *choice.own_run)

    def findings(self, context: SurveyContext, result: LearningProgress) -> list[Finding]:
        return [self._state(result), *self._validation(context, result)]

    def _state(self, result: LearningProgress) -> Finding:
        measured = ("loss", result.loss, result.loss_error)
        right = "" if result.accuracy is None else f" ({100 * result.accuracy:.3g} % of the answers are right)"
        text = f"{result.sentence().partition('. The validation')[0].rstrip('.')}{right}."
        label = result.state if result.state != "unknown" else "progress unknown"
        if result.state == "diverges":
            advice = "Lower the learning rate, by a factor of ten to begin with."
            return self.found(Severity.CRITICAL, text, label, *measured, cause="rate too high", advice=advice, headline=True)
        if _stands_still(result):
            text = f"Nothing is learned in {result.steps} steps on a copy: {_why_nothing(result)}{right}."
            advice = f"{UNKNOWN_CAUSE[0].upper()}{UNKNOWN_CAUSE[1:]}."
            return self.found(Severity.CRITICAL, text, label, *measured, cause="not learning", advice=advice, headline=True)
        doubtful = result.little or result.hardly or (result.trained_otherwise and not result.below)
        severity = Severity.GOOD if result.learning and not doubtful else Severity.NOTE
        return self.found(severity, text, label, *measured, headline=True)

    def _validation(self, context: SurveyContext, result: LearningProgress) -> Iterator[Finding]:
        if result.gap is None or result.gap_error is None:
            return
        measured = ("validation loss minus training loss", result.gap, result.gap_error)
        losses = f"The validation loss is {result.valid_loss:.3g}, the training loss {result.loss:.3g}"
        if overfits(context, result):
            assert result.lost_share is not None
            lost = f"{100 * result.lost_share:.0f} % of what was learned" if result.lost_share < 1 else "all that was learned"
            text = f"{losses}: {lost} does not hold on the validation data."
            advice = "Stop at the step of the lowest validation loss, or use more data, more weight decay or a smaller model."
            yield self.found(Severity.WARNING, text, "overfitting", *measured, cause="overfitting", advice=advice)
        elif result.gap > 3 * result.gap_error:
            yield self.found(Severity.NOTE, f"{losses}.", "validation gap", *measured)
        else:
            text = f"{losses}: no higher than the choice of samples explains."
            yield self.found(Severity.GOOD if result.learning else Severity.NOTE, text, "no validation gap", *measured)

    def remedies(self, context: SurveyContext, result: LearningProgress) -> Mapping[str, Remedy]:
        found = {}
        if _stands_still(result):
            found["not learning"] = Remedy(UNKNOWN_CAUSE, why_not="what is wrong is not known")
        if overfits(context, result) and context.valid is not None:
            found["overfitting"] = best_remedy(context, _against_overfitting(context, context.valid, result))
        return found

    def figure(self, results: Results) -> Picture:
        result: LearningProgress = results[self.name]
        return result.plot() if sum(map(math.isfinite, result.losses)) > 2 else None


UNKNOWN_CAUSE = (
    "train on 16 samples until their loss is zero; if that fails, look at what lies between the inputs and the loss, if it "
    "succeeds, at whether the labels belong to the inputs"
)


def _stands_still(result: LearningProgress) -> bool:
    """Whether nothing is learned and the loss does not even begin to fall, as it would at a rate that is only too low."""
    falls = _begins_to_fall(result) or result.later_fall is not None
    return result.state == "not learning" and (result.constant or not falls)


def _begins_to_fall(result: LearningProgress) -> bool:
    return result.slope is not None and result.slope < -SIGMAS * (result.slope_error or 0.0)


def _why_nothing(result: LearningProgress) -> str:
    """How it shows that nothing is learned."""
    loss = f"{result.loss:.3g}"
    if result.constant and (_begins_to_fall(result) or result.later_fall is not None):
        return f"the outputs are the same for all samples, the loss is {loss}"
    return f"the loss stays at {loss}" if result.flat else f"the loss is {loss}, and outputs fit their own targets no better"


def overfits(context: SurveyContext, result: LearningProgress) -> bool:
    """Whether the training data were learned, and much of it does not hold on validation data that are what they should be."""
    if result.gap is None or result.gap_error is None or result.lost_share is None or result.trivial is None:
        return False
    if context.valid is None or context.valid.data.varying:
        return False
    return result.loss < LEARNED * result.trivial and result.lost_share > OVERFIT and result.gap > 3 * result.gap_error


def _against_overfitting(context: SurveyContext, valid: Problem, result: LearningProgress) -> list[Remedy]:
    """More weight decay, a lower rate, or an earlier end; judged by the validation loss.

    Where no training loss is left a lower rate changes nothing.
    """

    def score(model: Any) -> float:
        return valid.with_model(model).loss()

    groups = [] if context.optimizer is None else context.optimizer.param_groups
    own = max((float(group.get("weight_decay", 0.0)) for group in groups), default=0.0)
    decay = max(MORE_DECAY * own, 0.3 if decoupled(context.optimizer) else 0.01)

    def decay_more(setup: Setup) -> None:
        for group in setup.optimizer.param_groups:
            group["weight_decay"] = decay

    def begin_again(setup: Setup) -> None:
        start_anew(setup.model, context.seed)
        setup.optimizer.state.clear()

    options = [Remedy(f"set weight_decay={decay:g}", decay_more, score=score)]
    if context.lr is not None and result.trivial is not None and result.loss > DONE * abs(result.trivial):
        lower = LOWER_RATE * context.lr
        options.append(Remedy(f"lower the learning rate to {lower:.2g}", lambda s: s.set_lr(lower), score=score, lr=lower))
    if not cannot_restart(context.problem.model):
        options.append(Remedy("begin anew and stop as soon as the validation loss rises", begin_again, score=score))
    return options
