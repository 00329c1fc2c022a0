"""The certificate of a survey: when it takes part, what it says of a network that is right, and of one that guesses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.instruments import SurveyContext
from theodolite.instruments.data.certificate import Certificate, certificate_findings, fit_work
from theodolite.measures.bounds import risk_certificate
from theodolite.results import Finding, Severity
from theodolite.testing import InstrumentContract


def separable(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two classes with a gap between them."""
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed))
    x[:, 0] += 2 * x[:, 0].sign()
    return x, (x[:, 0] < 0).long()


def planted(valid: int | None = 400, turned: float = 0.7) -> SurveyContext:
    """A linear model that is right on all samples, wrong on all where it is turned round, and blind at 0."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[turned, 0.0], [-turned, 0.0]]))
        model.bias.zero_()
    problem = th.Problem(model, nn.CrossEntropyLoss(), separable(200, 0))
    return SurveyContext(problem, valid=None if valid is None else problem.on(separable(valid, 1)))


class TestCertificate(InstrumentContract):
    labels = frozenset({"certified", "vacuous", "no better than guessing", "held-out bound tighter", "prior unknown"})

    def make(self):
        return Certificate(), planted()

    def test_a_network_that_is_right_is_certified(self):
        found = {finding.label: finding for finding in self.measured.findings}
        assert found["certified"].severity is Severity.GOOD
        assert 0 < found["certified"].value < 0.25
        assert "400 samples" in found["prior unknown"].sentence
        assert "None of them is among the 200 samples that it was trained on" in found["prior unknown"].sentence


def test_without_validation_data_it_says_what_to_do():
    assert "valid=" in Certificate().applies(planted(None))
    assert "start=" in Certificate().applies(planted(None))
    assert Certificate().applies(planted(30)) == "it takes 50 validation samples or more, there are 30"
    regression = th.Problem(nn.Linear(2, 1), nn.MSELoss(), (torch.randn(20, 2), torch.randn(20, 1)))
    assert not Certificate().concerns(SurveyContext(regression))
    assert "classifiers" in Certificate().applies(SurveyContext(regression))


def test_a_network_that_is_wrong_is_not_certified():
    context = planted(turned=-0.7)
    result = Certificate().run(context, epochs=2, passes=2)
    labels = [finding.label for finding in Certificate().findings(context, result)]
    assert "certified" not in labels
    assert result.value > 0.9


def test_validation_samples_that_were_trained_on_certify_nothing():
    context = planted()
    mixed = context.problem.on(tuple(torch.cat(pair) for pair in zip(separable(200, 0), separable(200, 1), strict=True)))
    said = th.survey(context.problem, valid=mixed, only=["certificate"], lr=0.1, progress=False)
    assert "certificate" not in said.results
    assert any("200 of the 400 samples of the data were trained on" in str(row) for row in said.plan)


def test_it_takes_part_when_asked_or_in_a_deep_survey():
    context = planted()
    given = {"valid": context.valid, "lr": 0.1, "progress": False}
    assert "certificate" in th.survey(context.problem, only=["certificate"], **given).results
    assert Certificate.depth == "deep"
    rows = th.survey(context.problem, depth="normal", budget=5.0, **given).plan
    assert "certificate" not in {row["instrument"] for row in rows}


def made(severity: Severity, sentence: str, label: str, **fields) -> Finding:
    return Finding(instrument="certificate", severity=severity, sentence=sentence, label=label, **fields)


@pytest.mark.parametrize(
    ("errors", "kl", "label"),
    [(100, 10.0, "certified"), (3000, 1000.0, "no better than guessing"), (9000, 1e6, "vacuous")],
)
def test_only_what_beats_guessing_is_good(errors, kl, label):
    first = certificate_findings(risk_certificate(errors, 10_000, kl, 1000), made)[0]
    assert first.label == label
    assert (first.severity is Severity.GOOD) == (label == "certified")


def test_a_longer_fit_costs_more():
    short, long = fit_work(1000, 5, 3), fit_work(1000, 20, 10)
    assert long.gradients - short.gradients == 15 * 4 + 7 * 4
    assert long.seconds > short.seconds
