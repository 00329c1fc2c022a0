"""The rules by which findings and trials become a verdict."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.instruments.verdict import first_sentence, gain, judge, shown
from theodolite.measures.trials import TrialRuns
from theodolite.results import CAUSES, Finding, Severity


def finding(cause, severity=Severity.WARNING, **more):
    return Finding(instrument="x", severity=severity, sentence=f"There is {cause}.", label=cause, cause=cause, **more)


def trial(cause, changed, own=2.0, **more):
    better = own - changed > 0.1
    row = {"cause": cause, "advice": f"mend {cause}", "lr": None, "steps": 60, "start": 2.0, "own": own, "changed": changed}
    return {**row, "better": better, "not_tried": "", **more}


def judged(findings, *trials, **more):
    return judge(findings, {"trials": TrialRuns(trials=tuple(trials))}, **more)


def test_the_change_that_helps_most_names_the_cause():
    verdict, _ = judged(
        [finding("rate too high"), finding("label noise")], trial("rate too high", 1.5), trial("label noise", 0.2)
    )
    assert verdict.causes == ("label noise", "rate too high")
    assert "mend label noise" in str(verdict)
    assert "loss 2 → 0.2 in 60 steps" in str(verdict)


def test_what_follows_from_another_cause_is_a_note():
    verdict, found = judged(
        [finding("rate too high"), finding("input scale")], trial("rate too high", 1.0), trial("input scale", 0.9)
    )
    assert verdict.causes == ("input scale",)
    assert [f.severity for f in found if f.cause == "rate too high"] == [Severity.NOTE]


def test_a_consequence_whose_remedy_helps_far_more_is_a_cause():
    verdict, _ = judged(
        [finding("rate too high"), finding("input scale")], trial("rate too high", 0.1), trial("input scale", 1.5)
    )
    assert verdict.causes[0] == "rate too high"


def test_advice_that_was_tried_in_vain_is_not_given():
    verdict, found = judged([finding("class imbalance")], trial("class imbalance", 2.0))
    assert verdict.causes == ()
    assert found[0].severity is Severity.NOTE


def test_what_an_inspection_proves_stands_whatever_the_trial_says():
    verdict, _ = judged(
        [finding("dead layer", Severity.CRITICAL), finding("label noise")], trial("dead layer", 2.0), trial("label noise", 0.1)
    )
    assert verdict.causes[0] == "dead layer"


def test_overfitting_that_was_measured_stands_though_its_remedy_brings_nothing():
    found = finding("overfitting", advice="Use more data.")
    verdict, findings = judged([found], trial("overfitting", 2.0))
    assert verdict.causes == ("overfitting",)
    assert findings[0].severity is Severity.WARNING
    assert "There is overfitting: use more data." in str(verdict)
    assert "Not enough on a copy: mend overfitting, loss 2 → 2 in 60 steps" in str(verdict)


def test_overfitting_does_not_come_before_what_stops_a_training():
    causes = judged([finding("overfitting"), finding("dead layer", Severity.CRITICAL)], trial("overfitting", 2.0))[0].causes
    assert causes == ("dead layer", "overfitting")


@pytest.mark.parametrize("other", ["padding", "leaked validation", "validation shift", "unused parameters", "duplicated samples"])
def test_that_nothing_is_learned_follows_only_from_what_can_bring_it_about(other):
    verdict, found = judged([finding(other), finding("not learning", Severity.CRITICAL)])
    assert verdict.causes == ("not learning", other)
    assert [f.severity for f in found if f.cause == "not learning"] == [Severity.CRITICAL]


def test_validation_data_are_not_what_stops_a_training():
    causes = judged([finding("leaked validation"), finding("rate too high")], trial("rate too high", 0.5, math.inf))[0].causes
    assert causes == ("rate too high", "leaked validation")


def test_what_could_not_be_tried_is_marked_so():
    row = trial("padding", math.nan, not_tried="the data cannot be packed here")
    verdict, _ = judged([finding("padding")], row)
    assert "Not tried: the data cannot be packed here." in str(verdict)


def test_the_rate_is_that_of_the_advice_and_else_the_users_own():
    row = trial("rate too high", 0.5, lr=0.01)
    assert judged([finding("rate too high")], row, lr=1.0)[0].lr == 0.01
    assert judged([], lr=1.0)[0].lr == 1.0


def test_at_most_three_sentences_and_seven_findings():
    many = [finding(cause) for cause in list(CAUSES)[:12]]
    verdict, found = judged(many, *(trial(f.cause, 0.5) for f in many))
    assert len(verdict.sentences) <= 3
    assert len(shown(found)) <= 7


def test_findings_of_one_cause_are_shown_once():
    found = [finding("dead layer", Severity.CRITICAL), finding("dead layer", Severity.CRITICAL), finding("padding")]
    assert [f.cause for f in shown(found)] == ["dead layer", "padding"]


@pytest.mark.parametrize("cause", CAUSES)
def test_consequences_are_causes_too(cause):
    assert set(CAUSES[cause]) <= set(CAUSES)


def test_a_run_that_blew_up_loses_everything():
    assert gain(trial("rate too high", 1.0, own=math.inf)) == 1.0


def test_interrupted_surveys_keep_what_was_finished():
    class Impatient(nn.Linear):
        calls = 0

        def forward(self, x):
            Impatient.calls += 1
            if Impatient.calls > 400:
                raise KeyboardInterrupt
            return super().forward(x)

    model = Impatient(2, 1)
    data = (torch.randn(20, 2), torch.randn(20, 1))
    with pytest.raises(th.instruments.SurveyInterrupted) as stopped:
        th.survey(model, nn.MSELoss(), data, lr=0.1, progress=False)
    found = stopped.value.survey
    assert found.plan
    assert found.verdict
    assert "batches" in found.results


def test_a_survey_ends_when_its_time_is_over():
    import time

    class Slow(nn.Linear):
        def forward(self, x):
            time.sleep(0.01)
            return super().forward(x)

    began = time.perf_counter()
    found = th.survey(Slow(2, 1), nn.MSELoss(), (torch.randn(20, 2), torch.randn(20, 1)), lr=0.1, budget=2.0, progress=False)
    assert {row["state"] for row in found.plan} <= {"done", "skipped"}
    assert time.perf_counter() - began < 10  # generous: this is about the end, not about speed


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("The scales differ: 'Avg. Income' has mean 3. More.", "The scales differ: 'Avg. Income' has mean 3."),
        ("It is 'driver's No. 2' that counts. 'Avg. Age' is less.", "It is 'driver's No. 2' that counts."),
        ("The model's loss is 2. The units' outputs are 3.", "The model's loss is 2."),
        ("Only one", "Only one"),
    ],
)
def test_the_first_sentence_does_not_end_within_a_name(text, first):
    assert first_sentence(text) == first


@pytest.mark.parametrize(("causes", "follows"), [(["batch statistics"], True), (["padding"], False)])
def test_that_no_rate_moves_the_loss_in_eval_mode_follows_from_batch_statistics(causes, follows):
    rate = Finding(instrument="learning_rate", severity=Severity.NOTE, sentence="No rate moves the loss.", label="no rate helps")
    _, found = judged([*map(finding, causes), rate], *(trial(cause, 0.5) for cause in causes))
    text = next(f.sentence for f in found if f.instrument == "learning_rate")
    assert text == ("In eval mode: no rate moves the loss. It follows from: batch statistics." if follows else rate.sentence)


def test_a_training_that_blows_up_is_no_matter_of_batch_statistics():
    blown = Finding(
        instrument="x", severity=Severity.CRITICAL, sentence="It blows up.", label="no rate helps", cause="rate too high"
    )
    _, found = judged([finding("batch statistics"), blown], trial("batch statistics", 0.5))
    assert next(f for f in found if f.label == "no rate helps").severity is Severity.CRITICAL
