"""What a trial of operators says on its page: every label, from trials with and without trouble."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.analyses.growing import LABELS, growth_findings, growth_verdict, price_trial, write_growth
from theodolite.results import Severity

X = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
TRAIN, VALID = (X[:64], X[:64, :2]), (X[64:], X[64:, :2])


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


@pytest.fixture(scope="module")
def choice():
    model, optimizer = small()
    names = {"operators": ["0/1/copy", "last", "random-top"], "layers": 3, "validation": VALID, "progress": False}
    return th.landscape_aware_growth(model, nn.MSELoss(), TRAIN, optimizer, lag=4, batch_size=16, **names)


def planted(choice, *losses: float, gain: float = 0.0):
    """The same trial with these losses at every look, the same on all parts of the data; the last gains so much in each."""
    parts = torch.tensor(losses).double()[:, None, None].expand_as(choice.parts).clone()
    parts[-1] -= gain * torch.arange(parts.shape[1])[:, None]
    return replace(choice, parts=parts, baselines=())


def labels(found):
    return [finding.label for finding in growth_findings(found)]


def test_the_verdict_names_the_best_and_how_far_ahead_it_is(choice):
    ahead = planted(choice, 3.0, 1.0, 2.0)
    best = ahead.operators[1].name
    assert growth_verdict(ahead) == (
        f"Grow by {best}: of 3 ways from 2 to 3 layers its validation loss after 4 steps is the least, 1; the next, "
        f"{ahead.operators[2].name}, is 1 behind."
    )
    assert growth_findings(ahead)[0].headline
    assert labels(ahead) == ["operator chosen", "short trial"]
    alike = planted(choice, 1.0, 1.0, 1.0)
    assert growth_verdict(alike).endswith("cannot be told apart from it.")
    assert labels(alike)[0] == "operators alike"


def test_who_is_catching_up_and_what_has_not_settled_is_said(choice):
    found = growth_findings(planted(choice, 1.0, 3.0, 2.0, gain=0.1))
    short = next(f for f in found if f.label == "short trial")
    assert f"{choice.operators[2].name} gained fast enough" in short.sentence
    assert "--lag" in short.advice
    assert "ranks not settled" in labels(replace(choice, settled=False))


@pytest.mark.parametrize(("behind", "error", "label"), [(0.5, 0.1, "growing pays"), (0.1, 0.1, "growing does not pay yet"),
                                                        (-0.5, 0.1, "growing does not pay yet")])  # fmt: skip
def test_growing_pays_only_where_the_small_model_is_told_apart(choice, behind, error, label):
    row = {"operator": "small", "step": 9, "loss": 1.5, "behind": behind, "error": error, "flops": 9.0, "equal_to": "all trials"}
    found = replace(choice, baselines=(row,))
    finding = growth_findings(found)[-1]
    assert (finding.label, finding.value, finding.error) == (label, behind, error)
    assert ("ahead" in finding.sentence) == (behind < 0)


def test_divergence_is_the_only_finding(choice):
    lost = replace(choice, parts=torch.full_like(choice.parts, torch.inf))
    (finding,) = growth_findings(lost)
    assert finding.severity is Severity.WARNING
    assert "diverged after 4 steps" in finding.sentence


def test_a_model_that_was_grown_says_its_loss():
    model, _ = small()
    grown = th.grow(model, "last", layers=3, data=VALID, loss=nn.MSELoss())
    assert growth_verdict(grown).startswith("2 layers have become 3 by 1/1/copy: 127 parameters in the place of 97; its loss is ")
    assert labels(grown) == ["grown"]


def test_the_page_has_the_picture_and_every_operator(choice, tmp_path):
    page, findings = write_growth(choice, tmp_path / "page.html", name="<b>")
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg id=") == 1
    assert "<b>" not in text
    assert all(operator.name in text for operator in choice.operators)
    assert {finding.label for finding in findings} <= set(LABELS)


def test_a_price_counts_steps_as_the_trial_does(choice):
    model, optimizer = small()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    names = {"operators": ["0/1/copy", "last", "random-top"], "layers": 3, "validation": VALID, "loss": nn.MSELoss()}
    data = [tuple(t[i : i + 16] for t in TRAIN) for i in range(0, 64, 16)]
    found = price_trial(model, data, optimizer, lag=4, steps=None, looks=5, baselines=1, **names)
    assert (found.candidates, found.steps) == (3, 12)
    assert found.step_flops == choice.step_flops
    assert found.flops == 3 * 4 * choice.step_flops
    assert found.seconds > 0
    capped = price_trial(model, data, optimizer, lag="auto", steps=7, looks=5, baselines=0, **names)
    assert (capped.steps, capped.baseline_flops) == (7, 0)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
