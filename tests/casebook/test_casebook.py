"""For each planted fault: the verdict names the cause, its advice helps at equal steps, and little else is said to be wrong."""

from __future__ import annotations

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
