"""Do the labels fit the inputs, are they right, and are the classes shared out so that all can be learned?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from theodolite.errors import TheodoliteError
from theodolite.instruments.base import Instrument, Picture, Results, SurveyContext, Work, inapplicable
from theodolite.instruments.remedies import leave_out
from theodolite.measures.data_audit.labels import ORDERS, SAMPLES, LabelAudit, audit_labels
from theodolite.measures.data_audit.neighbours import DIRECTIONS
from theodolite.measures.data_audit.positives import positive_weight
from theodolite.measures.data_audit.views import labels_of, numbers_of
from theodolite.measures.trials import Remedy, Setup
from theodolite.problem import Problem
from theodolite.results import Finding, Row, Severity
from theodolite.text import listed, plural

#: Shares of wrong labels, less two errors, from which they are worth a note and a warning.
SOME, MANY = 0.02, 0.05
#: A rare class is recognised where half of its samples are.
RECOGNISED = 0.5
#: So many samples show what there is to see of a relation.
CERTAIN = 500
#: A model that takes away this share of the error, on the data it was trained on, has found what the inputs say of the targets.
LEARNED = 0.3


class Labels(Instrument):
    name = "labels"
    order = 26
    depth = "quick"
    title = "Labels"
    question = "Do the labels fit the inputs, are they right, and is no class too rare to be learned?"
    how = (
        "The target of each of up to 1000 samples is predicted from the inputs of all others, by kernel ridge regression in "
        "closed form; shuffled targets say what chance gives. Where inputs are sure of a class, another label is suspected. "
        "Wrong labels are told from inputs that do not determine their labels by errors that do not grow with doubt."
    )
    source = "Northcutt and others (2021), confident learning; Patrini and others (2017), anchor points; permutation tests."

    def concerns(self, context: SurveyContext) -> bool:
        problem = context.problem
        return labels_of(problem) is not None or numbers_of(problem, torch.arange(min(8, problem.samples))) is not None

    def applies(self, context: SurveyContext) -> str:
        return "" if self.concerns(context) else "samples have no class or number of their own as target"

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        count = min(SAMPLES, context.problem.samples)
        judged = 0 if context.valid is None else min(SAMPLES, context.valid.samples)
        forward = 0.4 * (count + judged) / context.problem.samples
        orders = count * min(DIRECTIONS, _width(context.problem))  # numbers in one order of the targets
        seconds = 0.05 + 0.4 * (count / 1000) ** 3 + 2.2e-8 * count * orders
        return Work(gradients=forward, seconds=seconds, bytes=8 * 6 * (count**2 + ORDERS * orders))

    @inapplicable(ValueError, TheodoliteError)
    def run(self, context: SurveyContext, **effort: Any) -> LabelAudit:
        return audit_labels(context.problem, valid=context.valid, seed=context.seed)

    def findings(self, context: SurveyContext, result: LabelAudit) -> list[Finding]:
        unfit = list(self._unfit(result))
        found = [*unfit, *([] if unfit else self._noise(result)), *self._classes(context, result)]
        clean = result.noise_told and result.noise + 2 * result.noise_error < MANY
        if not found and clean:
            text = (
                f"Predicted from the inputs alone {100 * result.agreement:.3g} % of the labels come out as they are, and nearly "
                "all of those that the inputs are sure of: few labels can be wrong."
            )
            found.append(self.found(Severity.GOOD, text, "labels fit", "share of labels predicted", result.agreement))
        return found

    def _unfit(self, result: LabelAudit) -> Iterator[Finding]:
        learned = result.model_skill > (0.1 if result.validated else LEARNED)
        if not result.samples or result.p_value <= 0.01 or learned:
            return
        what = "labels" if result.classes else "targets"
        score = f"{100 * result.agreement:.3g} % right, {100 * result.chance:.3g} % by chance" if result.classes else "no better"
        model = "validation data" if result.validated else "this data"
        text = (
            f"The {what} do not fit the inputs: predicted from {result.samples} samples they come out as if they were shuffled "
            f"({score}), and the model does no better on {model}."
        )
        advice = (
            "Look at some samples with their labels: were inputs and labels read in different orders, or joined by a wrong key?"
        )
        if result.few_values:
            advice = (
                "A rule such as parity looks the same on inputs of so few values; if it is none, check the order of the labels."
            )
        certain = bool(result.classes) and result.samples >= CERTAIN
        severity = Severity.NOTE if result.few_values else Severity.CRITICAL if certain else Severity.WARNING
        p = ("probability that shuffled labels are predicted as well", result.p_value)
        yield self.found(severity, text, "labels do not fit", *p, advice=advice, cause="labels do not fit")

    def _noise(self, result: LabelAudit) -> Iterator[Finding]:
        least = result.noise - 2 * result.noise_error
        if not result.noise_told or math.isnan(least) or least <= SOME or result.noise < MANY:
            return
        worst = result.suspects[0] if result.suspects else None
        example = (
            "" if worst is None else f" (sample {worst['sample']}: '{worst['label']}', the inputs say '{worst['inputs_say']}')"
        )
        text = (
            f"About {100 * result.noise:.2g} % of the labels are wrong (give or take {100 * result.noise_error:.1g} %): other "
            f"samples contradict the labels of {plural(len(result.suspected), 'sample')}{example}."
        )
        few = listed([row["sample"] for row in result.suspects])
        advice = f"Look at samples {few}; correct the labels that are contradicted or leave them out."
        severity = Severity.WARNING if least > MANY and not result.few_values else Severity.NOTE
        share = ("share of wrong labels", result.noise, result.noise_error)
        yield self.found(severity, text, "label noise", *share, advice=advice, cause="label noise")

    def _classes(self, context: SurveyContext, result: LabelAudit) -> Iterator[Finding]:
        if len(result.classes) == 1:
            text = "All labels are one class: the loss falls to zero without anything being learned."
            advice = "Look at how the data was chosen or sorted."
            yield self.found(Severity.WARNING, text, "one class", advice=advice, cause="class imbalance")
            return
        if not result.rare or _weighted(context.problem.loss_function):
            return
        total = sum(result.counts)
        rarest = min(result.rare, key=lambda i: result.counts[i])
        common = tuple(i for i in range(len(result.classes)) if i not in result.rare)
        by_model, by_inputs = (result.recall(of, result.rare) for of in (result.recalls, result.predicted_recalls))
        trained = result.recall(result.recalls, common) >= RECOGNISED
        recognised = by_model if trained or math.isnan(by_inputs) else by_inputs
        lost = recognised < RECOGNISED
        share = ("share of the rarest class", result.counts[rarest] / total)
        what = f"Class '{result.classes[rarest]}' has {result.counts[rarest]} of {total} samples ({100 * share[1]:.2g} %)"
        if len(result.rare) > 1:
            what += f", and {len(result.rare) - 1} more classes have few"
        how = "" if math.isnan(recognised) else (
            f": {'the model recognises' if trained else 'a prediction from the inputs recognises'} {100 * recognised:.2g} % of "
            f"{'them' if len(result.rare) > 1 else 'these'}"
        )  # fmt: skip
        advice = "Weigh the classes in the loss, and judge the model by the recall of each class."
        severity = Severity.WARNING if lost else Severity.NOTE
        yield self.found(severity, f"{what}{how}.", "class imbalance", *share, advice=advice, cause="class imbalance")

    def remedies(self, context: SurveyContext, result: LabelAudit) -> Mapping[str, Remedy]:
        found = {f.cause for f in self.findings(context, result) if f.severity.rank >= Severity.WARNING.rank}
        makers = {"labels do not fit": self._no_labels, "label noise": self._without_suspects, "class imbalance": self._balanced}
        return {cause: make(context, result) for cause, make in makers.items() if cause in found}

    def _no_labels(self, context: SurveyContext, result: LabelAudit) -> Remedy:
        return Remedy("check the order of inputs and labels", why_not="the right labels are not known")

    def _without_suspects(self, context: SurveyContext, result: LabelAudit) -> Remedy:
        advice = f"leave the {len(result.suspected)} samples out whose labels are contradicted"
        return leave_out(context, result.suspected, advice, judge=context.valid)

    def _balanced(self, context: SurveyContext, result: LabelAudit) -> Remedy:
        advice = "weigh the classes in the loss"
        if len(result.classes) < 2:
            return Remedy("add samples of other classes", why_not="there are none")
        loss = balanced_loss(context.problem, result)
        if loss is None:
            return Remedy(advice, why_not="the loss takes no weights of classes")

        def change(setup: Setup) -> None:
            setup.problem = setup.problem.with_model(setup.model, loss)

        return Remedy(advice, change, score=lambda model: context.problem.with_model(model, loss).loss())

    def rows(self, result: LabelAudit) -> list[Row]:
        """The samples that are suspected where there are some, else the classes."""
        names = {"class": "class", "samples": "samples", "share": "share", "model_is_right": "model is right",
                 "predicted_from_inputs": "inputs give it"}  # fmt: skip
        if result.suspects:
            names = {"sample": "sample", "label": "label", "inputs_say": "inputs say", "certainty": "certainty", "loss": "loss"}
        return [{name: row[key] for key, name in names.items()} for row in (result.suspects or result.rows()[:100])]

    def figure(self, results: Results) -> Picture:
        result: LabelAudit = results[self.name]
        return result.plot() if len(result.classes) > 1 else None


def _width(problem: Problem) -> int:
    """Classes, or numbers of a target."""
    labels, numbers = labels_of(problem), numbers_of(problem, torch.zeros(1, dtype=torch.long))
    return len(labels.names) if labels is not None else 1 if numbers is None else numbers.shape[1]


def _weighted(loss: Any) -> bool:
    """Whether a loss weighs its classes already; whether a `pos_weight` is the right one is another instrument's question."""
    weight = getattr(loss, "weight", None)
    return positive_weight(loss) is not None or (
        isinstance(weight, Tensor) and weight.numel() > 1 and bool((weight != weight.flatten()[0]).any())
    )


def balanced_loss(problem: Problem, result: LabelAudit) -> nn.Module | None:
    """The loss with each class weighing alike in sum, where it is one of torch's; None where it is not."""
    loss, counts = problem.loss_function, torch.tensor(result.counts, dtype=torch.float32)
    if isinstance(loss, nn.BCEWithLogitsLoss) or loss is functional.binary_cross_entropy_with_logits:
        return nn.BCEWithLogitsLoss(pos_weight=counts[0] / counts[1], **_settings(loss, "weight", "reduction"))
    if not (isinstance(loss, nn.CrossEntropyLoss) or loss is functional.cross_entropy):
        return None
    known = labels_of(problem)
    numbers = None if known is None else [_class_number(problem, name) for name in known.names]
    if numbers is None:
        return None
    first = next(iter(problem.data))
    with problem.session(second=False), torch.no_grad():
        classes = problem.output(problem.tensors(problem.leaves(grad=False)), problem.placed(first.part(slice(0, 1))), 0).shape[1]
    weights = torch.ones(classes)
    weights[torch.tensor(numbers)] = counts.mean() / counts
    settings = _settings(loss, "ignore_index", "reduction", "label_smoothing")
    return nn.CrossEntropyLoss(weight=weights.to(problem.device, problem.dtype), **settings)


def _settings(loss: object, *names: str) -> dict[str, Any]:
    """Those of a loss that is a module; a function has none."""
    return {name: getattr(loss, name) for name in names if hasattr(loss, name)}


def _class_number(problem: Problem, name: str) -> int:
    known = problem.data.classes
    return known.index(name) if known is not None and name in known else int(name)
