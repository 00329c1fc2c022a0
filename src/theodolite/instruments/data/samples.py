"""Does a sample stand twice, with another label or in the validation data, and are those of the same kind?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from theodolite.errors import TheodoliteError
from theodolite.instruments.base import Instrument, SurveyContext, Work, inapplicable
from theodolite.instruments.remedies import leave_out
from theodolite.measures.data_audit.samples import SampleAudit, ValidationAudit, audit_samples, audit_validation
from theodolite.measures.data_audit.views import sample_tensors
from theodolite.measures.trials import Remedy
from theodolite.problem import Problem
from theodolite.results import Finding, Severity
from theodolite.text import listed

#: Shares of samples: copies worth a note, and contradictions worth a warning.
REPEATED, CONTRADICTED = 0.01, 0.02
#: Shares of validation samples that stand, or nearly stand, in the training data.
LEAKED, NEARLY = 0.02, 0.05
#: Areas under the curve of a rule that tells training from validation data, less three and four errors.
APART, DIFFERENT = 0.7, 0.55
#: Shares of tokens that only fill up.
PADDED, SOME_PADDING = 0.5, 0.25


def _numbers(problem: Problem) -> int:
    """How many numbers the inputs hold."""
    first = next(iter(problem.data))
    return sum(t.numel() for t in sample_tensors(first)) // max(1, first.size) * problem.samples


class Samples(Instrument):
    name = "samples"
    order = 27
    depth = "quick"
    title = "Samples that repeat"
    question = "Does a sample stand twice, with another label even, and how many tokens only fill up?"
    how = (
        "The inputs of a sample are reduced to one whole number, equal only where all their bits are. Padding is known by the "
        "attention mask, by the padding index of an embedding, or by ignored labels at the end."
    )
    source = "Copies with different labels bound what any model can reach."

    def applies(self, context: SurveyContext) -> str:
        return "" if sample_tensors(next(iter(context.problem.data))) else "the inputs are no tensors with one entry per sample"

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        return Work(seconds=0.02 + 1e-8 * _numbers(context.problem))

    @inapplicable(ValueError, TheodoliteError)
    def run(self, context: SurveyContext, **effort: Any) -> SampleAudit:
        return audit_samples(context.problem, seed=context.seed)

    def findings(self, context: SurveyContext, result: SampleAudit) -> list[Finding]:
        found = [*self._contradictions(result), *self._copies(result), *self._padding(result)]
        if found or result.repeated or result.samples == 1:
            return found
        return [self.found(Severity.GOOD, result.sentence(), "samples differ")]

    def _contradictions(self, result: SampleAudit) -> Iterator[Finding]:
        if result.contradicted <= 0.001:
            return
        first = result.contradictions[0] if result.contradictions else None
        same = [] if first is None else [row for row in result.contradictions if row["copies"] == first["copies"]]
        example = ", ".join(f"sample {row['sample']}: {row['label']}" for row in same[:3])
        text = (
            f"{len(result.contradicting)} of {result.samples} samples have a copy with another label ({example}): no model of "
            f"these inputs gets more than {100 * (1 - result.contradicted):.3g} % right."
        )
        advice = "Decide which label holds, or leave these samples out."
        severity = Severity.WARNING if result.contradicted > CONTRADICTED and not result.few_values else Severity.NOTE
        if result.few_values:
            advice = "The inputs take few values, so samples coincide; a column that tells them apart would help."
        share = ("share of samples that cannot be right", result.contradicted)
        yield self.found(severity, text, "contradictory labels", *share, advice=advice, cause="contradictory labels")

    def _copies(self, result: SampleAudit) -> Iterator[Finding]:
        if result.repeated <= REPEATED or result.few_values:
            return
        text = f"{100 * result.repeated:.3g} % of the {result.samples} samples are exact copies of another: they count twice."
        advice = "Remove the copies before the data is split, or they stand on both sides."
        share = ("share of copies", result.repeated)
        yield self.found(Severity.NOTE, text, "duplicated samples", *share, advice=advice, cause="duplicated samples")

    def _padding(self, result: SampleAudit) -> Iterator[Finding]:
        if not result.padding > SOME_PADDING:
            return
        share = f"{100 * result.padding:.2g} %"
        text = f"{share} of the tokens only fill up (known by {result.padding_known_by}), and so much of the work is for nothing."
        advice = "Put sequences of similar length into one batch, or pack several into one."
        severity = Severity.WARNING if result.padding > PADDED else Severity.NOTE
        yield self.found(severity, text, "padding", "share of padding", result.padding, advice=advice, cause="padding")

    def remedies(self, context: SurveyContext, result: SampleAudit) -> Mapping[str, Remedy]:
        found = {f.cause for f in self.findings(context, result) if f.severity.rank >= Severity.WARNING.rank}
        remedies = {}
        if "contradictory labels" in found:
            advice = f"leave the {len(result.contradicting)} samples out that contradict each other"
            remedies["contradictory labels"] = leave_out(context, result.contradicting, advice, judge=context.valid)
        if "padding" in found:
            remedies["padding"] = Remedy(
                "put sequences of similar length into one batch", why_not="it saves time, and changes no loss"
            )
        return remedies


class Validation(Instrument):
    name = "validation"
    order = 28
    depth = "quick"
    title = "Validation data"
    question = "Do validation samples stand in the training data, and are they of the same kind?"
    how = (
        "Exact copies by a number that stands for all bits of a sample; near ones by the distance to the nearest of up to 20 000 "
        "training samples, beside what is usual among those. A linear rule made on one half of both sets tries to tell the "
        "other halves apart."
    )
    source = "Lopez-Paz and Oquab (2017), classifier two-sample tests."

    def concerns(self, context: SurveyContext) -> bool:
        return context.valid is not None

    def applies(self, context: SurveyContext) -> str:
        if context.valid is None:
            return "there are no validation data (valid=, --valid)"
        return "" if sample_tensors(next(iter(context.problem.data))) else "the inputs are no tensors with one entry per sample"

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        assert context.valid is not None
        numbers = _numbers(context.problem) + _numbers(context.valid)
        return Work(seconds=0.05 + 3e-8 * numbers + 2e-5 * min(20_000, context.problem.samples))

    @inapplicable(ValueError, TheodoliteError)
    def run(self, context: SurveyContext, **effort: Any) -> ValidationAudit:
        assert context.valid is not None
        return audit_validation(context.problem, context.valid, seed=context.seed)

    def findings(self, context: SurveyContext, result: ValidationAudit) -> list[Finding]:
        found = [*self._leaked(result), *self._shift(result)]
        if found or result.few_values or not result.separable_error > 0:
            return found
        text = (
            f"None of the {result.samples} validation samples stands in the training data, and a linear rule tells the two sets "
            f"apart in {100 * result.separable:.2g} % of pairs (50 % is chance)."
        )
        return [self.found(Severity.GOOD, text, "validation apart")] if not result.near else []

    def _leaked(self, result: ValidationAudit) -> Iterator[Finding]:
        share = max(result.copied, result.near)
        if not share or result.few_values:
            return
        exact = result.copied >= 0.5 * share
        some = listed(result.leaked[:5].tolist())
        text = (
            f"{100 * share:.3g} % of the {result.samples} validation samples {'stand' if exact else 'nearly stand'} in the "
            f"training data (validation samples {some}, ...): their loss says nothing about new data."
        )
        advice = "Take them out of the validation data, and split by source before anything is copied or augmented."
        severity = Severity.WARNING if result.copied >= LEAKED or result.near >= NEARLY else Severity.NOTE
        number = ("share of validation samples in the training data", share)
        yield self.found(severity, text, "leaked validation", *number, advice=advice, cause="leaked validation")

    def _shift(self, result: ValidationAudit) -> Iterator[Finding]:
        apart = result.separable - 3 * result.separable_error
        different = result.separable - 4 * result.separable_error
        classes = result.class_shift - 3 * result.class_shift_error
        if not (different > DIFFERENT or classes > 0.1):
            return
        parts = []
        if different > DIFFERENT:
            parts.append(f"a linear rule tells them apart in {100 * result.separable:.3g} % of pairs (50 % is chance)")
        if result.shifts and abs(result.shifts[0]["shift_in_spreads"]) > 0.3:
            row = result.shifts[0]
            parts.append(f"the mean of '{row['column']}' is shifted by {row['shift_in_spreads']:.2g} standard deviations")
        if classes > 0.1:
            parts.append(
                f"{100 * result.class_shift:.2g} % of the labels would have to change for the classes to be shared out alike"
            )
        text = f"The validation data are of another kind than the training data: {'; '.join(parts)}."
        advice = "Split at random, or by what the model will meet; or collect training data like the validation data."
        # Texts of one author differ by what they speak of: a split by place is usual, and no fault.
        far = (apart > APART and not result.tokens) or classes > 0.25
        severity = Severity.WARNING if far else Severity.NOTE
        number = ("area under the curve of a rule that tells the sets apart", result.separable, result.separable_error)
        yield self.found(severity, text, "validation shift", *number, advice=advice, cause="validation shift")

    def remedies(self, context: SurveyContext, result: ValidationAudit) -> Mapping[str, Remedy]:
        why = {
            "leaked validation": (
                "take these samples out of the validation data",
                "it changes what is judged, not what is learned",
            ),
            "validation shift": ("make the validation data by a random split", "other data are needed for it"),
        }
        return {cause: Remedy(advice, why_not=why_not) for cause, (advice, why_not) in why.items()}
