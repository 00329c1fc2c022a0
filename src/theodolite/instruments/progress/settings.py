"""Does the set-up fit? Faults that show in the objects themselves: optimizer, loss, normalisations, data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.instruments.base import Instrument, SurveyContext, Work
from theodolite.instruments.remedies import best_remedy
from theodolite.measures.dynamics.optimizers import decoupled
from theodolite.measures.mode_connectivity import batch_statistics, statistics_of
from theodolite.measures.progress import LearningProgress, SetupCheck, check_setup
from theodolite.measures.progress.settings import SCALE_FREE, restart
from theodolite.measures.trials import (
    Remedy,
    Setup,
    cannot_restart,
    in_training,
    random_batches,
    start_anew,
)
from theodolite.problem.parameters import clean_names
from theodolite.results import Finding, Severity
from theodolite.text import listed, the_layers

#: Weight decay that alone halves the weights in fewer steps than this, and is larger than anyone uses: where it is a part of the
#: gradient, and where it shrinks the weights beside it.
HALF_LIFE, UNUSUAL, UNUSUAL_BESIDE = 300.0, 0.02, 0.5
#: Dropout from which on less is tried, and that which is tried.
MUCH_DROPOUT, MILD_DROPOUT = 0.75, 0.1
#: A loss below this share of the constant prediction's is good enough for any setting.
FINE = 0.1
#: Running statistics do not fit where the loss with them is higher by this factor, and by this share of the constant one's.
WORSE, HIGHER = 1.5, 0.1
#: Batches after which running statistics should have settled.
YOUNG = 20


class Settings(Instrument):
    name = "settings"
    order = 16
    depth = "quick"
    title = "The set-up"
    question = "Does the optimizer train everything, and do loss, decay, schedule and normalisations fit each other?"
    how = (
        "The optimizer's groups are compared with the parameters that require a gradient, weight decay with it, the rate "
        "with the one that its schedule began with (where little is left, with more of it, on held-out samples). The outputs are "
        "looked at for probabilities, normalisations tried with the statistics of the batches, a sample of a loader read again."
    )
    source = "Each of these is a line of code that runs without an error and trains badly."
    work = Work(gradients=1.2)

    def run(self, context: SurveyContext, **effort: Any) -> SetupCheck:
        progress = context.results.get("progress")
        return check_setup(
            context.problem,
            lr=context.lr,
            optimizer=context.optimizer,
            valid=context.valid,
            batch_size=context.batch_size,
            progress=progress if isinstance(progress, LearningProgress) else None,
            gradient=context.gradient,
            seed=context.seed,
        )

    def findings(self, context: SurveyContext, result: SetupCheck) -> list[Finding]:
        found = [
            *self._missing(result),
            *self._frozen(result),
            *self._decay(context, result),
            *self._dropout(result),
            *self._schedule(context, result),
            *self._loss(context, result),
            *self._statistics(context, result),
            *self._varying(result),
        ]
        if any(finding.severity is not Severity.NOTE for finding in found):
            return found
        text = "The optimizer has every parameter that requires a gradient." if context.optimizer is not None else "Nothing odd."
        text += " Loss, weight decay and normalisations fit together." if context.optimizer is not None else ""
        return [*found, self.found(Severity.GOOD if context.optimizer is not None else Severity.NOTE, text, "set-up fits")]

    def _missing(self, result: SetupCheck) -> Iterator[Finding]:
        if not result.missing:
            return
        count = ("parameters that the optimizer does not have", float(len(result.missing)))
        text = f"The optimizer does not have {_names(result.missing)}: these require a gradient and stay as they are."
        if forgotten(result):
            advice = "Give it model.parameters(), or call requires_grad_(False) on what shall stay."
            yield self.found(Severity.WARNING, text, "missing parameters", *count, cause="missing parameters", advice=advice)
        else:
            text += " The survey measures the others."
            yield self.found(Severity.NOTE, text, "missing parameters", *count)

    def _frozen(self, result: SetupCheck) -> Iterator[Finding]:
        asked = unexpectedly_frozen(result)
        if not asked:
            return
        if result.resting:
            text = f"The learning rate of {_names(result.resting)} is 0, while others train."
        elif result.given:
            text = f"The optimizer has {_names(asked)}, but no gradient is asked for them (requires_grad=False)."
        else:
            text = f"Frozen, and still as they were drawn: {_names(asked)}. Random weights never train there."
        count = ("frozen parameters", float(len(asked)))
        advice = "Call requires_grad_(True) on them and give them to the optimizer, unless that is meant."
        yield self.found(Severity.WARNING, text, "frozen layer", *count, cause="frozen layer", advice=advice)

    def _decay(self, context: SurveyContext, result: SetupCheck) -> Iterator[Finding]:
        if not too_much_decay(context, result):
            return
        text = (
            f"Weight decay {result.decay:g} alone halves the weights in {max(1, round(result.decay_half_life))} steps; here it "
            f"pulls {result.decay_force:.2g} times as hard as the gradient."
        )
        advice = f"Set weight_decay to {_milder(result):g}."
        measured = ("steps in which weight decay alone halves the weights", result.decay_half_life)
        yield self.found(Severity.WARNING, text, "weight decay", *measured, cause="weight decay", advice=advice)

    def _dropout(self, result: SetupCheck) -> Iterator[Finding]:
        if result.dropout < MUCH_DROPOUT:
            return
        kept = f"{100 * (1.0 - result.dropout):.3g} %"
        text = (
            f"Dropout of {result.dropout:g} in {the_layers(result.dropping)} leaves {kept} of the units in each step of training."
        )
        advice = f"Set p={MILD_DROPOUT:g} there."
        yield self.found(
            Severity.WARNING, text, "dropout", "share of units dropped", result.dropout, cause="dropout", advice=advice
        )

    def _schedule(self, context: SurveyContext, result: SetupCheck) -> Iterator[Finding]:
        if result.next_lr is None or result.first_lr is None:
            return
        now = 0.0 if context.lr is None else context.lr
        text = (
            f"The learning rate has gone down from {result.first_lr:g} to {now:g}, and the loss could still fall: on samples "
            f"that were held out, {result.next_lr:g} does better."
        )
        advice = f"Set the learning rate to {result.next_lr:g}, and let the schedule last as long as the training."
        measured = ("learning rate over the one that its schedule began with", now / result.first_lr)
        yield self.found(Severity.WARNING, text, "schedule ended", *measured, cause="schedule ended", advice=advice)

    def _loss(self, context: SurveyContext, result: SetupCheck) -> Iterator[Finding]:
        if result.given_probabilities:
            name = _loss_name(context)
            text = f"{name} takes logits, but the model ends in a {result.given_probabilities}: it is given probabilities."
            advice = f"Remove the {result.given_probabilities} at the end of the model."
            yield self.found(Severity.WARNING, text, "double softmax", cause="double softmax", advice=advice)
        if summed_at_the_rate_of_a_mean(context, result):
            width = context.usual_batch_size
            text = f"The loss is a sum over the batch: gradients are {width} times those of the mean, which the rate would fit."
            advice = f"Use reduction='mean', or divide the learning rate by the batch size {width}."
            measured = ("batch size", float(width))
            yield self.found(Severity.WARNING, text, "summed loss", *measured, cause="summed loss", advice=advice)

    def _statistics(self, context: SurveyContext, result: SetupCheck) -> Iterator[Finding]:
        if not statistics_misfit(context, result) or result.eval_loss is None or result.batch_loss is None:
            return
        seen = "they have seen no batch" if result.tracked == 0 else "they belong to other weights or data"
        if result.norm_momentum == 0.0:
            seen = "their momentum is 0, so no batch ever renews them"
        text = (
            f"With the running statistics of its BatchNorm layers the loss is {result.eval_loss:.3g}, with those of the batches "
            f"{result.batch_loss:.3g}: {seen}."
        )
        advice = "Train in model.train() and evaluate in model.eval(); pass some batches through in train mode to renew them."
        advice = f"Set their momentum to 0.1. {advice}" if result.norm_momentum == 0.0 else advice
        measured = ("loss with running statistics minus that with those of the batch", result.eval_loss - result.batch_loss)
        yield self.found(Severity.WARNING, text, "batch statistics", *measured, cause="batch statistics", advice=advice)

    def _varying(self, result: SetupCheck) -> Iterator[Finding]:
        if result.varying_valid:
            text = "The validation data differ each time they are read: random transforms are left on there."
            advice = "Take augmentation out of the validation data set."
            yield self.found(Severity.WARNING, text, "augmented validation", cause="augmented validation", advice=advice)
        if result.varying:
            text = "Training samples differ each time they are read, as augmentation makes them; one reading of each is measured."
            yield self.found(Severity.NOTE, text, "augmented samples")

    def remedies(self, context: SurveyContext, result: SetupCheck) -> Mapping[str, Remedy]:
        found: dict[str, Remedy] = {}
        if forgotten(result):
            advice = f"give {_names(result.missing)} to the optimizer"
            found["missing parameters"] = Remedy(advice, _training(context, result.missing))
        asked = unexpectedly_frozen(result)
        if asked:
            found["frozen layer"] = Remedy(f"let {_names(asked)} train", _training(context, asked))
        if too_much_decay(context, result):
            found["weight decay"] = best_remedy(context, _less_decay(context, _milder(result)))
        if result.dropout >= MUCH_DROPOUT:
            found["dropout"] = Remedy(f"set p={MILD_DROPOUT:g} in {the_layers(result.dropping)}", _less_dropout)
        if result.next_lr is not None and result.first_lr is not None:
            change = restart(result.next_lr / result.first_lr)
            found["schedule ended"] = Remedy(f"set the learning rate back to {result.next_lr:g}", change, lr=result.next_lr)
        if result.given_probabilities:
            found["double softmax"] = _as_logits(context, result)
        if summed_at_the_rate_of_a_mean(context, result) and context.lr is not None:
            found["summed loss"] = _mean_loss(context, context.lr)
        if statistics_misfit(context, result):
            found["batch statistics"] = _renewed_statistics(context, result)
        if result.varying_valid:
            why = "the validation data without them are not at hand"
            found["augmented validation"] = Remedy("take the random transforms out of the validation data", why_not=why)
        return found


# Whether it is a fault


def forgotten(result: SetupCheck) -> bool:
    """Whether parameters are missing by mistake: their layers were never trained, or they are a few among many.

    Who trains the head of a trained model alone leaves out most layers, and none of them is new.
    """
    layers = {name.rpartition(".")[0] for name in result.missing}
    few = len(layers) < 0.5 * max(1, result.layers)
    return bool(result.missing) and (few or bool(set(result.missing) & set(result.new)))


def unexpectedly_frozen(result: SetupCheck) -> tuple[str, ...]:
    """Parameters that stay as they are though the optimizer has them, or though they are random."""
    if result.resting or result.given:
        return result.resting or result.given
    drawn = [name for name in result.frozen if name in result.new]
    return result.frozen if len(drawn) > 0.5 * len(result.frozen) else tuple(drawn)  # small ones cannot tell by themselves


def too_much_decay(context: SurveyContext, result: SetupCheck) -> bool:
    """Whether weight decay takes away what the gradient brings."""
    unusual = result.decay > (UNUSUAL_BESIDE if decoupled(context.optimizer) else UNUSUAL)
    return unusual and result.decay_half_life < HALF_LIFE and _could_be_lower(context)


def summed_at_the_rate_of_a_mean(context: SurveyContext, result: SetupCheck) -> bool:
    """Whether a summed loss goes wrong, with an optimizer that is not indifferent to the scale of gradients."""
    progress = context.results.get("progress")
    wrong = isinstance(progress, LearningProgress) and progress.state in ("diverges", "not learning")
    return result.summed and wrong and context.usual_batch_size > 1 and not isinstance(context.optimizer, SCALE_FREE)


def statistics_misfit(context: SurveyContext, result: SetupCheck) -> bool:
    """Whether running statistics spoil the loss, and are not merely young."""
    if result.eval_loss is None or result.batch_loss is None or (result.tracked is not None and 0 < result.tracked < YOUNG):
        return False
    progress = context.results.get("progress")
    trivial = progress.trivial if isinstance(progress, LearningProgress) and progress.trivial is not None else result.batch_loss
    return result.eval_loss > max(WORSE * result.batch_loss, result.batch_loss + HIGHER * abs(trivial))


def _could_be_lower(context: SurveyContext) -> bool:
    progress = context.results.get("progress")
    if not isinstance(progress, LearningProgress) or progress.trivial is None:
        return True
    return progress.loss > FINE * progress.trivial


# What takes it away


def _training(context: SurveyContext, names: Sequence[str]) -> Any:
    """A change: these parameters train, with the settings of the first group."""
    keys = {name: key for key, name in clean_names(key for key, _ in context.problem.model.named_parameters()).items()}

    def change(setup: Setup) -> None:
        wanted = {keys[name] for name in names}
        found = [p.requires_grad_(True) for key, p in setup.model.named_parameters() if key in wanted]
        settings = {k: v for k, v in setup.optimizer.param_groups[0].items() if k != "params"}
        held = {id(p): group for group in setup.optimizer.param_groups for p in group["params"]}
        rate = max(float(group["lr"]) for group in setup.optimizer.param_groups)
        for p in found:
            if id(p) in held:
                held[id(p)]["lr"] = rate
        new = [p for p in found if id(p) not in held]
        if new:
            setup.optimizer.add_param_group({**settings, "params": new, "lr": rate})

    return change


def _milder(result: SetupCheck) -> float:
    """A hundredth of the decay, or less where that would still halve the weights within some thousand steps; one digit."""
    shrinks = math.log(2.0) / result.decay_half_life / result.decay
    wanted = min(result.decay / 100, math.log(2.0) / (10 * HALF_LIFE * shrinks))
    return float(f"{wanted:.0e}")


def _less_decay(context: SurveyContext, decay: float) -> list[Remedy]:
    """Less decay; and new weights, where the old ones have decayed to nothing."""

    def change(setup: Setup) -> None:
        for group in setup.optimizer.param_groups:
            group["weight_decay"] = min(decay, float(group["weight_decay"]))

    def begin_again(setup: Setup) -> None:
        change(setup)
        start_anew(setup.model, context.seed)
        setup.optimizer.state.clear()

    options = [Remedy(f"set weight_decay={decay:g}", change)]
    if not cannot_restart(context.problem.model):
        options.append(Remedy(f"set weight_decay={decay:g} and start from new weights", begin_again))
    return options


def _less_dropout(setup: Setup) -> None:
    for module in setup.model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = min(module.p, MILD_DROPOUT)


def _as_logits(context: SurveyContext, result: SetupCheck) -> Remedy:
    """The logarithm of what the model returns is what it computed before its last function, up to a constant."""
    advice = f"remove the {result.given_probabilities} at the end of the model"
    if context.problem.loss_takes_structure:
        return Remedy(advice, why_not="the model returns more than one tensor")
    sigmoid = result.given_probabilities == "sigmoid"

    def undone(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor):
            return None
        small = torch.finfo(output.dtype).tiny
        return torch.logit(output, eps=1e-6) if sigmoid else output.clamp_min(small).log()

    def change(setup: Setup) -> None:
        setup.model.register_forward_hook(undone)

    return Remedy(advice, change)


def _mean_loss(context: SurveyContext, lr: float) -> Remedy:
    """For these optimizers a mean is the sum at a smaller rate."""
    width = context.usual_batch_size
    fresh = not cannot_restart(context.problem.model)  # a run that died of it does not come back
    advice = f"use the mean over the batch (reduction='mean'); with the sum, a learning rate of {lr / width:.2g}"
    return Remedy(advice, lambda setup: setup.set_lr(lr / width), fresh=fresh)


def _renewed_statistics(context: SurveyContext, result: SetupCheck) -> Remedy:
    advice = "renew the running statistics: pass some batches through in model.train() without a step"
    if result.norm_momentum is not None and result.norm_momentum > 0.01:
        gained = f"measured instead: loss {result.eval_loss:.3g} → {result.batch_loss:.3g} with the statistics of the batches"
        return Remedy(advice, why_not=f"{gained}; going on in train mode renews them too")

    def change(setup: Setup) -> None:
        norms = statistics_of(setup.model)
        for norm in norms.values():
            norm.reset_running_stats()
            norm.momentum = 0.1
        with in_training(setup.problem, context.seed), torch.no_grad(), batch_statistics(norms, cumulative=True):
            for batch in random_batches(setup.problem, setup.batch_size, 20, context.seed):
                setup.problem.live_loss(batch)

    return Remedy(f"{advice}, and set their momentum to 0.1", change)


def _names(names: Sequence[str]) -> str:
    """Layers where all that is theirs is meant, which is how people speak of them, and single parameters.

    >>> _names(["0.weight", "0.bias", "2.weight"])
    'layer 0, 2.weight'
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.rpartition(".")[0] or name, []).append(name)
    layers = [layer for layer, found in groups.items() if len(found) > 1]
    single = [found[0] for found in groups.values() if len(found) == 1]
    return ", ".join([*([the_layers(layers)] if layers else []), *([listed(single, 4)] if single else [])])


def _loss_name(context: SurveyContext) -> str:
    loss = context.problem.loss_function
    return type(loss).__name__ if isinstance(loss, nn.Module) else "The loss"
