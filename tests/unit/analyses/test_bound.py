"""A certificate as findings and as a page, and what a budget pays for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.analyses.bound import bound_findings, scaled_to, within, write_bound
from theodolite.measures.bounds import risk_certificate


def problem() -> th.Problem:
    torch.manual_seed(0)
    x = torch.randn(300, 4)
    return th.Problem(
        nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), nn.CrossEntropyLoss(), (x, (x[:, 0] > 0).long())
    )


def test_the_page_of_a_split(tmp_path):
    found = th.pac_bayes_bound(problem(), prior="split", epochs=2, passes=2, progress=False)
    page, findings = write_bound(found, tmp_path / "index.html", name="<b>net", facts={"network": "small"})
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg id=") == 3
    assert found.sentence() in text
    for form in found.bounds:
        assert f">{form}<" in text
    assert "&lt;b&gt;net" in text
    assert "centre of the prior" in text
    assert "prior unknown" not in [finding.label for finding in findings]  # the split was made here


def test_where_the_prior_wins_the_page_has_the_fitted_posterior_too(tmp_path):
    ours = risk_certificate(5000, 10_000, 0.0, 1000)
    theirs = replace(
        risk_certificate(4000, 10_000, 400.0, 1000), trace=({"epoch": 1, "error": 0.4, "kl": 400.0, "objective": 0.9},)
    )
    page, _ = write_bound(replace(ours, prior_value=ours.value, fitted=theirs, trace=theirs.trace), tmp_path / "index.html")
    text = page.read_text(encoding="utf-8")
    assert f"the fitted posterior, at {100 * theirs.value:.3g} %, says less" in text
    assert "maurer, of the fitted posterior" in text
    assert f"Its certificate is {100 * theirs.value:.3g} % (40 % of the draws were wrong, 400 nats from the prior)" in text


def test_a_certificate_from_its_numbers_has_a_page_too(tmp_path):
    found = risk_certificate(9000, 10_000, 1e6, 1000)
    page, findings = write_bound(found, tmp_path / "index.html")
    assert page.read_text(encoding="utf-8").count("<svg id=") == 1
    assert [finding.label for finding in findings] == ["vacuous"]
    assert findings[0].headline


def test_findings_of_the_untrained_weights():
    model = problem()
    start = {name: p + 0.3 for name, p in model.model.state_dict().items()}
    found = th.pac_bayes_bound(model, start=start, epochs=1, passes=1, progress=False)
    assert "before training" in {f.label: f for f in bound_findings(found)}["prior unknown"].sentence


@pytest.mark.parametrize("budget", [0.01, 0.5, 1.0, 3.0])
def test_a_smaller_budget_buys_less_and_never_nothing(budget):
    less, more = (scaled_to(share * budget, 5000, 0.05, epochs=20, passes=10) for share in (1, 2))
    assert 2 <= less[0] <= more[0] <= 20
    assert 1 <= less[1] <= more[1] <= 10


def test_what_a_budget_takes_away_is_said():
    assert within(None, problem(), split=None, epochs=20, passes=10) == (20, 10, "")
    assert within(1e6, problem(), split=0.5, epochs=20, passes=10) == (20, 10, "")
    epochs, passes, said = within(1e-3, problem(), split=None, epochs=20, passes=10)
    assert (epochs, passes) == (2, 1)
    assert "2 of 20 epochs and 1 of 10 passes" in said
