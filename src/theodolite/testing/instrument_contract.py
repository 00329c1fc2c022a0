"""The contract that every instrument keeps. Inherit it and write `make`; pytest does the rest.

class TestWidths(InstrumentContract):
    labels = frozenset({"bottleneck", "even widths"})       # all that its documentation explains
    def make(self):
        return Widths(), SurveyContext(small_problem, lr=0.1)
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from theodolite.instruments import Instrument, SurveyContext, Work, names
from theodolite.instruments.registry import get
from theodolite.results import Finding, Result, Severity
from theodolite.testing.equality import model_state, same


@dataclass(frozen=True)
class Measured:
    """One run of an instrument, with the state of the model before and after it."""

    instrument: Instrument
    context: SurveyContext
    refusal: str
    works: list[Work]
    result: Result | None
    findings: list[Finding]
    before: dict[str, Any]
    after: dict[str, Any]


class InstrumentContract:
    """States its question, says why it does not apply, gives a price, a result and findings, and leaves the model as found.

    It runs once, at its cheapest effort, after the instruments it needs.
    """

    #: Labels that findings may carry; None where they are not checked.
    labels: ClassVar[frozenset[str] | None] = None
    _measured: ClassVar[Measured | None] = None

    @abstractmethod
    def make(self) -> tuple[Instrument, SurveyContext]:
        """The instrument and the small problem it is tried on."""

    @property
    def measured(self) -> Measured:
        if "_measured" not in vars(type(self)):
            type(self)._measured = self._measure()
        done = type(self)._measured
        assert done is not None
        return done

    def _measure(self) -> Measured:
        instrument, context = self.make()
        before = model_state(context.problem.model)
        refusal = instrument.applies(context)
        result, findings, works = None, [], []
        if not refusal:
            for name in instrument.needs:
                run_with_needs(get(name), context)
            works = [instrument.cost(context, **effort) for effort in instrument.efforts]
            result = context.results[instrument.name] = instrument.run(context, **instrument.efforts[-1])
            findings = instrument.findings(context, result)
        return Measured(instrument, context, refusal, works, result, findings, before, model_state(context.problem.model))

    def test_it_states_its_question(self) -> None:
        instrument = self.measured.instrument
        for text in (instrument.name, instrument.title, instrument.question, instrument.how):
            assert isinstance(text, str)
            assert text.strip() == text != ""
        assert instrument.question.endswith("?")
        assert instrument.efforts
        assert set(instrument.needs) <= set(names())

    def test_it_applies_or_says_why_not(self) -> None:
        done = self.measured
        assert isinstance(done.refusal, str)
        assert isinstance(done.instrument.concerns(done.context), bool)
        assert done.refusal or done.result is not None

    def test_every_effort_has_its_price(self) -> None:
        for work in self.measured.works:
            assert isinstance(work, Work)
            seconds = self.measured.context.timings.seconds(work)
            assert math.isfinite(seconds)
            assert seconds >= 0

    def test_it_measures_a_result(self) -> None:
        done = self.measured
        if done.refusal:
            return
        assert isinstance(done.result, Result)
        assert done.result.sentence().strip()
        assert isinstance(done.instrument.rows(done.result), list)

    def test_its_findings_can_be_relied_on(self) -> None:
        done = self.measured
        for finding in done.findings:
            assert finding.instrument == done.instrument.name
            assert isinstance(finding.severity, Severity)
            assert finding.sentence.strip().endswith((".", "!", "?"))
            assert finding.label, f"no label: {finding.sentence}"
            assert self.labels is None or finding.label in self.labels
            assert finding.value is None or not math.isnan(finding.value)
            assert finding.error is None or finding.error >= 0

    def test_its_figure_is_drawn_or_absent(self) -> None:
        done = self.measured
        if done.refusal:
            return
        import matplotlib.pyplot as plt
        from matplotlib.artist import Artist

        picture = done.instrument.figure(done.context.results)
        assert picture is None or isinstance(picture, Artist)
        plt.close("all")

    def test_the_model_is_left_as_found(self) -> None:
        changed = [part for part, state in self.measured.before.items() if not same(state, self.measured.after[part])]
        assert changed == []


def run_with_needs(instrument: Instrument, context: SurveyContext) -> None:
    """Put the instrument's result, and those it needs, into `context.results`, each at its cheapest effort."""
    for name in instrument.needs:
        run_with_needs(get(name), context)
    if instrument.name not in context.results:
        context.results[instrument.name] = instrument.run(context, **instrument.efforts[-1])
