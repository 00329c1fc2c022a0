"""For each planted fault: the verdict names the cause, its advice helps at equal steps, and little else is said to be wrong."""

from __future__ import annotations

import re
from functools import cache

import pytest

import theodolite as th
from theodolite.results import Severity

from .cases import CASES, HEALTHY, planted
from .trainings import Training

ALL = {case.name: case for case in planted()}
#: Those of every day; the others take minutes and stand behind `slow`.
QUICK = {
    "rate too high, MLP, SGD",
    "dead layer, MLP, AdamW",
    "raw columns, regression, AdamW",
    "softmax twice, MLP, SGD",
    "class imbalance, MLP, SGD",
    "MLP, SGD, on its way",
    "regression, AdamW, on its way",
}


def marked(names):
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


@cache
def examined(name: str) -> tuple[Training, th.instruments.Survey]:
    """The training with its fault, and its survey; made once."""
    training = ALL[name].fault()
    arguments = {"optimizer": training.made, "valid": training.valid, "batch_size": training.batch_size, **training.survey}
    survey = th.survey(training.model, training.loss, training.data, depth="quick", progress=False, **arguments)
    return training, survey


def serious(survey: th.instruments.Survey) -> list[str]:
    return [f.cause for f in survey.findings if f.severity.rank >= Severity.WARNING.rank]


@pytest.mark.parametrize("name", marked(CASES))
def test_the_verdict_names_the_cause(name):
    _, survey = examined(name)
    assert survey.causes, survey
    assert survey.causes[0] in CASES[name].causes, (survey.causes, survey)
    assert not survey.good


@pytest.mark.parametrize("name", marked(CASES))
def test_little_else_is_said_to_be_wrong(name):
    _, survey = examined(name)
    assert len({cause for cause in serious(survey) if cause not in CASES[name].causes}) <= 2, survey


@pytest.mark.parametrize("name", marked(name for name, case in CASES.items() if case.mended))
def test_the_advice_helps_at_equal_steps(name):
    case = CASES[name]
    _, survey = examined(name)
    mended = case.mended(survey.lr).run(case.steps)
    faulty = case.fault()
    if "not finite" not in case.causes:
        faulty.run(case.steps)
    assert case.better_by(mended) < case.better_by(faulty), (survey.lr, survey.verdict)


@pytest.mark.parametrize("name", marked(HEALTHY))
def test_nothing_is_wrong_with_a_healthy_training(name):
    _, survey = examined(name)
    assert serious(survey) == [], survey
    assert survey.causes == ()


@pytest.mark.parametrize("name", marked(ALL))
def test_verdicts_are_short(name):
    _, survey = examined(name)
    assert 1 <= len(survey.sentences) <= 3
    assert len(survey.shown) <= 7


RATE = re.compile(r"lr=([\d.e-]*\d)|learning rate(?: back)? to ([\d.e-]*\d)")
#: What is praised -> the causes beside which it would be a contradiction.
DENIED = {
    "rate fits": {"rate too high", "rate too low", "no warm-up", "schedule ended"},
    "inputs scaled": {"input scale"},
    "targets scaled": {"target scale"},
    "labels fit": {"labels do not fit", "label noise", "contradictory labels", "class imbalance"},
    "set-up fits": {"missing parameters", "frozen layer", "weight decay", "double softmax", "summed loss", "batch statistics"},
    "all can train": {"dead layer", "dead units", "frozen model"},
    "gradients reach all layers": {"vanishing gradients", "exploding gradients", "dead layer"},
    "validation apart": {"leaked validation"},
    "finite": {"not finite"},
    "no validation gap": {"overfitting"},
}


@pytest.mark.parametrize("name", marked(ALL))
def test_no_two_findings_contradict_each_other(name):
    """Rates: one is advised. Directions: no cause and its opposite. Severities: nothing is praised that is at fault."""
    _, survey = examined(name)
    said = " ".join([*survey.sentences, *(f.advice for f in survey.findings)])
    rates = [float(one or other) for one, other in RATE.findall(said)]
    assert rates == pytest.approx([survey.lr] * len(rates), rel=0.06)
    causes = {f.cause for f in survey.findings if f.severity.rank >= Severity.WARNING.rank}
    assert not {"rate too high", "rate too low"} <= causes
    assert not {"vanishing gradients", "exploding gradients"} <= causes
    praised = {f.label for f in survey.findings if f.severity is Severity.GOOD}
    assert {label: DENIED[label] & causes for label in praised & DENIED.keys() if DENIED[label] & causes} == {}
    if survey.learning is False:
        assert not praised & {"learning", "learned"}
