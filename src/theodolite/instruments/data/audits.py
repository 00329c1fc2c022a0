"""Is the data finite, does every sample count the same, does every feature say something, and can every parameter train?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

import theodolite as th
from theodolite.instruments.base import Instrument, Picture, Results, SurveyContext, Work
from theodolite.instruments.remedies import best_remedy
from theodolite.measures import audit
from theodolite.measures.audit import SAMPLES, BatchAudit, InputAudit, ParameterAudit, has_main_input
from theodolite.measures.data_audit.positives import positive_weights
from theodolite.measures.progress.gradient_flow import module_path
from theodolite.measures.progress.new_weights import redraw
from theodolite.measures.trials import Remedy, Setup, start_anew
from theodolite.problem.tensors import named_tensors
from theodolite.results import Finding, Row, Severity
from theodolite.text import listed, plural, the_layers

#: A layer of at least so many units has mostly died where this share of them is dead, a model where that share of all is.
WIDE, MOST_OF_A_LAYER, MOST_OF_ALL = 8, 0.7, 0.5
#: A rate that kills units is lowered by this factor.
LOWER = 0.1


class Batches(Instrument):
    name = "batches"
    depth = "quick"
    order = 10
    title = "Batch by batch"
    question = "Are the loss and its gradient finite everywhere, and is one batch unlike the others?"
    how = "One pass over the data, forward and backward, batch by batch; parameters and buffers are looked through as well."
    source = "Floating-point arithmetic: NaN and infinity spread to everything they touch."
    first = True
    work = Work(gradients=1.0)

    def run(self, context: SurveyContext, **effort: Any) -> BatchAudit:
        return audit.audit_batches(context.problem)

    def findings(self, context: SurveyContext, result: BatchAudit) -> list[Finding]:
        if result.bad:
            advice = "Repair or leave out what is named here; until then no number about this model means anything."
            return [self.found(Severity.CRITICAL, text, "not finite", advice=advice) for text in result.bad[:10]]
        count = len(result.batches)
        where = f"in all {count} batches" if count > 1 else "on all samples"
        return [self.found(Severity.GOOD, f"Loss and gradient are finite {where}.", "finite")]

    def figure(self, results: Results) -> Picture:
        rows = [row for row in results[self.name].rows() if row["loss"] == row["loss"]]
        if len(rows) < 3:
            return None
        return th.plots.curves(rows, x="batch", y="loss", title="Loss of each batch", ylabel="loss")


class Weighting(Instrument):
    name = "weighting"
    depth = "quick"
    order = 20
    title = "What each sample weighs"
    question = "Do batches of different size, ignored labels or weights of classes tilt the objective?"
    how = "From the pass over the batches: each batch weighs what its loss divides by; labels are counted."
    source = "A mean over batches is the mean over samples only if all batches weigh the same."
    needs = ("batches",)
    work = Work()

    def run(self, context: SurveyContext, **effort: Any) -> BatchAudit:
        audit: BatchAudit = context.results["batches"]
        return audit

    def rows(self, result: BatchAudit) -> list[Row]:
        table = {
            "batches": len(result.sizes),
            "samples": sum(result.sizes),
            "smallest batch": min(result.sizes),
            "largest batch": max(result.sizes),
            f"loss, weighted by {result.rule}": result.loss,
            "loss, plain mean of batches": result.naive_loss,
            "labels that count": result.labels,
            "labels ignored": result.ignored,
            "classes seen": result.classes,
        }
        return [{"quantity": quantity, "value": value} for quantity, value in table.items()]

    def findings(self, context: SurveyContext, result: BatchAudit) -> list[Finding]:
        found = [*self._uneven(result), *self._ignored(result), *self._classes(context, result), *self._positives(context)]
        return found or [self.found(Severity.GOOD, "Every sample weighs the same.", "even")]

    def _uneven(self, result: BatchAudit) -> Iterator[Finding]:
        weights = [row["weight"] for row in result.batches if row["weight"]]
        if result.rule == "sum" or len(weights) < 2 or max(weights) <= 1.001 * min(weights):
            return
        text = (
            f"Batches are uneven ({min(weights):g} to {max(weights):g} {result.rule}): a plain mean over batches would give a "
            f"loss of {result.naive_loss:.4g} instead of {result.loss:.4g}."
        )
        advice = "The survey weighs batches rightly. In your own evaluation weigh them by their size, or drop the last one."
        shift = ("shift of the loss by a plain mean over batches", result.naive_loss - result.loss)
        yield self.found(Severity.NOTE, text, "uneven batches", *shift, advice=advice)

    def _ignored(self, result: BatchAudit) -> Iterator[Finding]:
        if result.ignored:
            total = result.labels + result.ignored
            share = result.ignored / total
            text = f"{result.ignored} of {total} labels are ignored ({100 * share:.3g} %); the mean is over the others."
            advice = "Right for padding and for masked positions; if that is not what they are, look at the labels."
            yield self.found(Severity.NOTE, text, "ignored labels", "share of labels ignored", share, advice=advice)

    def _classes(self, context: SurveyContext, result: BatchAudit) -> Iterator[Finding]:
        weights = getattr(context.problem.loss_function, "weight", None)
        if isinstance(weights, Tensor) and weights.numel() > 1 and bool((weights != weights.flatten()[0]).any()):
            text = f"The loss weighs its classes, between {float(weights.min()):.3g} and {float(weights.max()):.3g}."
            spread = float(weights.max() / weights.min().clamp_min(1e-30))
            yield self.found(Severity.NOTE, text, "class weights", "largest over smallest weight", spread)

    def _positives(self, context: SurveyContext) -> Iterator[Finding]:
        found = positive_weights(context.problem)
        if found is None or not bool((found.off != 1).any()):
            return
        weight, off, balanced, positives, negatives = (
            values.flatten() for values in (found.weight, found.off, found.balanced, found.positives, found.negatives)
        )
        worst = int(off.log().abs().argmax())
        times = max(float(off[worst]), 1 / float(off[worst]))
        where = f" of output {worst}" if len(off) > 1 else ""
        more = int((off != 1).sum()) - 1
        text = (
            f"The pos_weight{where} is {float(weight[worst]):.3g}, where {negatives[worst]:.0f} negatives stand against "
            f"{positives[worst]:.0f} positives: {times:.2g} times too {'large' if off[worst] > 1 else 'small'}"
            f"{f', and {more} more like it' if more else ''}."
        )
        each = f"{float(balanced.min()):.3g}" + (f" to {float(balanced.max()):.3g}" if len(off) > 1 else "")
        advice = f"Set pos_weight to negatives / positives of each output ({each})."
        number = ("pos_weight over negatives / positives", float(off[worst]))
        yield self.found(Severity.WARNING, text, "pos_weight", *number, advice=advice, cause="pos_weight")

    def remedies(self, context: SurveyContext, result: BatchAudit) -> Mapping[str, Remedy]:
        """The balanced loss also judges both trainings: losses of different weights cannot be compared."""
        found, loss = positive_weights(context.problem), context.problem.loss_function
        if found is None or not any(self._positives(context)) or not isinstance(loss, nn.BCEWithLogitsLoss):
            return {}
        balanced = nn.BCEWithLogitsLoss(
            weight=loss.weight, reduction=loss.reduction, pos_weight=found.balanced.to(loss.pos_weight)
        )

        def change(setup: Setup) -> None:
            setup.problem = setup.problem.with_model(setup.model, balanced)

        advice = "set pos_weight to negatives / positives of each output"
        return {"pos_weight": Remedy(advice, change, score=lambda model: context.problem.with_model(model, balanced).loss())}


class Inputs(Instrument):
    name = "inputs"
    depth = "quick"
    order = 40
    title = "Input features"
    question = "Which inputs never change, and which say the same as another?"
    how = "Features of up to 2000 samples are centred and scaled; those without spread are constant, equal ones are duplicates."
    source = "Along the difference of the weights of two equal features the loss is flat, whatever the model."

    def applies(self, context: SurveyContext) -> str:
        if context.problem.samples < 3:
            return "two samples do not tell which features vary"
        return "" if has_main_input(context.problem) else "the data has no single floating-point input"

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        first = next(iter(context.problem.data))
        numbers = sum(t.numel() for _, t in named_tensors(first.inputs)) // first.size * min(SAMPLES, context.problem.samples)
        return Work(seconds=5e-8 * numbers, bytes=12 * numbers)

    def run(self, context: SurveyContext, **effort: Any) -> InputAudit:
        return audit.audit_inputs(context.problem)

    def findings(self, context: SurveyContext, result: InputAudit) -> list[Finding]:
        found = []
        if result.duplicated:
            first = " = ".join(result.called(i) for i in result.duplicated[0][:4])
            text = f"{result.redundant} of {result.features} inputs repeat another up to shift and scale ({first})."
            advice = "Remove the copies: the loss is flat along the difference of their weights, and weight decay alone decides."
            count = ("redundant inputs", float(result.redundant))
            cause = "duplicated inputs"
            found.append(self.found(Severity.NOTE, text, "duplicated feature", *count, advice=advice, cause=cause))
        if result.constant:
            few = f" ({listed([result.called(i) for i in result.constant], 6)})" if result.names else ""
            text = f"{len(result.constant)} of {result.features} inputs never change on these samples{few}."
            advice = "The weights on them act as biases, or not at all where they are zero."
            count = ("constant inputs", float(len(result.constant)))
            found.append(self.found(Severity.NOTE, text, "constant feature", *count, advice=advice))
        return found or [self.found(Severity.GOOD, result.sentence(), "inputs vary")]

    def remedies(self, context: SurveyContext, result: InputAudit) -> Mapping[str, Remedy]:
        return {"duplicated inputs": Remedy("leave the copies out", why_not="in a short run copies change little")}


class Parameters(Instrument):
    name = "parameters"
    depth = "quick"
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
        return audit.audit_parameters(context.problem)

    def findings(self, context: SurveyContext, result: ParameterAudit) -> list[Finding]:
        found = [*self._frozen(context, result), *self._dead(result), *self._idle(result), *self._notes(result)]
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
            yield self.found(Severity.CRITICAL, text, "frozen model", quantity, share, cause="frozen model", advice=advice)
            return
        text = f"{100 * share:.3g} % of the parameters are frozen ({listed(result.frozen, 4)}); the survey measures the others."
        yield self.found(Severity.NOTE, text, "frozen parameters", quantity, share)

    def _dead(self, result: ParameterAudit) -> Iterator[Finding]:
        if result.motionless:
            text = "No parameter moves any output here at first order."
            advice = "Weights that are all zero, or units that are all shut, do this: look at the initialisation."
            yield self.found(Severity.WARNING, text, "no effect", cause="dead layer", advice=advice)
            return
        dead = {str(row["layer"]): float(row["dead"]) for row in result.layers}
        for layer, *before in result.shut:
            units = f"{dead[layer]:.0f} units" if dead[layer] > 1 else "units"
            text = f"Layer {layer} is dead: none of its {units} moves an output on any sample, so it gets no gradient"
            text += f", and nothing comes back to {the_layers(before)} before it" if before else ""
            text += f"; {the_layers(result.starved)} behind it sees only zeros." if result.starved else "."
            advice = f"Re-initialise layer {layer}; if it dies again, lower the learning rate, or use a leaky ReLU."
            measured = ("dead units", sum(dead[name] for name in (layer, *before)))
            yield self.found(Severity.CRITICAL, text, "dead layer", *measured, cause="dead layer", advice=advice)
        partly = [row for row in result.layers if row["dead"] and row["layer"] not in result.dead_layers]
        if partly:
            count, total = sum(row["dead"] for row in partly), result.total("units")
            where = _by_layer(partly, "dead") + (", ..." if len(partly) > 4 else "")
            text = f"{count} of {total} units are dead ({where}): they move no output on any sample."
            many = _mostly_dead(result) and not result.dead_layers
            advice = "Re-initialise them, at a lower learning rate." if many else "The others may well suffice."
            said = (Severity.WARNING, text, "dead units") if many else (Severity.NOTE, text, "dead units")
            yield self.found(*said, "dead units", float(count), cause="dead units" if many else "", advice=advice)

    def _idle(self, result: ParameterAudit) -> Iterator[Finding]:
        rows = [row for row in result.layers if row["duplicated"]]
        count = result.total("duplicated")
        text = f"{count} units repeat another unit of their layer ({_by_layer(rows, 'duplicated')}): same weights, same bias."
        advice = (
            "They compute the same feature; where their outgoing weights are equal too they stay equal for ever. "
            "Initialise at random, or remove them."
        )
        if rows:
            measured = ("duplicated units", float(count))
            yield self.found(Severity.WARNING, text, "duplicated units", *measured, cause="duplicated units", advice=advice)
        if result.unreached:
            text = f"The loss does not depend on {listed(result.unreached, 4)} at all."
            advice = "Remove them or connect them; distributed training stumbles over such parameters."
            measured = ("unused parameters", float(len(result.unreached)))
            yield self.found(Severity.WARNING, text, "unused parameters", *measured, cause="unused parameters", advice=advice)

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
            rows = int(result.total("unused_rows"))
            text = f"{plural(rows, 'row')} of embeddings {'is' if rows == 1 else 'are'} never asked for by this data."
            yield self.found(Severity.NOTE, text, "unused embeddings", value=float(result.total("unused_rows")))

    def remedies(self, context: SurveyContext, result: ParameterAudit) -> Mapping[str, Remedy]:
        found = {}
        if result.frozen_count and not any(p.requires_grad for p in context.problem.model.parameters()):
            found["frozen model"] = Remedy("call requires_grad_(True) on what shall train", why_not="as it is, there is no run")
        if result.shut or result.motionless:
            found["dead layer"] = best_remedy(context, _against_a_dead_layer(context, [group[0] for group in result.shut]))
        elif _mostly_dead(result):
            found["dead units"] = best_remedy(context, _against_dead_units(context))
        if result.total("duplicated"):
            twins = [str(row["layer"]) for row in result.layers if row["duplicated"]]
            found["duplicated units"] = Remedy(f"initialise {the_layers(twins)} at random", _redrawing(context, twins))
        if result.unreached:
            why = "the loss does not depend on them"
            found["unused parameters"] = Remedy(f"remove or connect {listed(result.unreached, 4)}", why_not=why)
        return found


def _mostly_dead(result: ParameterAudit) -> bool:
    """Whether a wide layer, or all of them together, have lost most of their units."""
    wide = any(row["units"] >= WIDE and row["dead"] >= MOST_OF_A_LAYER * row["units"] for row in result.layers)
    return wide or result.total("dead") >= MOST_OF_ALL * result.total("units") > 0


def _redrawing(context: SurveyContext, layers: Sequence[str], lr: float | None = None) -> Callable[[Setup], None]:
    """New weights for layers of a copy, or for all of them where none is named, and perhaps another rate."""
    paths = [module_path(context.problem, layer) for layer in layers]

    def change(setup: Setup) -> None:
        if not paths:
            start_anew(setup.model, context.seed)
        for path in paths:
            redraw(setup.model.get_submodule(path), seed=context.seed)
        setup.optimizer.state.clear()
        if lr is not None:
            setup.set_lr(lr)

    return change


def _against_a_dead_layer(context: SurveyContext, layers: Sequence[str]) -> list[Remedy]:
    """New weights for the layer, at this rate or at a lower one; or for all layers, where the rate has spoiled more than one."""
    name = the_layers(layers) if layers else "all layers"
    options = [Remedy(f"re-initialise {name}", _redrawing(context, layers))]
    if context.lr is None:
        return options
    lower = LOWER * context.lr
    for who, which in ((name, layers), ("all layers", [])):
        advice = f"re-initialise {who} and lower the learning rate to {lower:.2g}"
        options.append(Remedy(advice, _redrawing(context, which, lower), lr=lower))
    return options if layers else options[:2]


def _against_dead_units(context: SurveyContext) -> list[Remedy]:
    masks = {module_path(context.problem, layer): dead for layer, dead in audit.dead_units(context.problem).items() if dead.any()}

    def change(setup: Setup) -> None:
        for path, units in masks.items():
            redraw(setup.model.get_submodule(path), units, context.seed)

    def gently(setup: Setup) -> None:
        change(setup)
        setup.set_lr(LOWER * setup.lr)

    options = [Remedy("re-initialise the dead units", change)]
    if context.lr is not None:
        lower = LOWER * context.lr
        advice = f"re-initialise the dead units and lower the learning rate to {lower:.2g}"
        options.append(Remedy(advice, gently, lr=lower))
    return options


def _by_layer(rows: list[Row], column: str) -> str:
    return ", ".join(f"{row[column]} of {row['units']} in {row['layer']}" for row in rows[:4])
