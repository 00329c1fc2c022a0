"""What a choice of step size says on its page: every label, from choices with and without trouble."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from theodolite.analyses import step_size as module
from theodolite.analyses.step_size import LABELS, runs_within, split_off, step_size_findings, write_step_size
from theodolite.measures.stepsize import tune_step_size
from theodolite.measures.stepsize.search.tuning import fleet_optimizer_of


@pytest.fixture(scope="module")
def choice():
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    train, valid = ((part, part[:, :1]) for part in x.split(20))
    options = {"steps": 5, "loss": nn.MSELoss(), "seeds": 2, "budget": 12, "progress": False}
    return tune_step_size(lambda seed: nn.Linear(3, 1), "sgd", train, valid, **options)


def labels(found):
    return [finding.label for finding in step_size_findings(found)]


def test_the_choice_comes_first_and_trouble_is_named(choice):
    found = step_size_findings(choice)
    assert found[0].label == "setting chosen"
    assert found[0].headline
    assert found[0].value == choice.score
    assert found[0].sentence == choice.sentence()
    assert "no held-out data" in labels(replace(choice, by_valid=None, ratio=None))
    bad = replace(choice, overfits=True, ratio=5.0)
    assert "tuning set overfits" in labels(bad)
    assert "5 times as large" in next(f for f in step_size_findings(bad) if f.label == "tuning set overfits").sentence
    assert "meta-gradient not used" in labels(replace(choice, health="explodes"))
    row = {**choice.compared[0], "fresh": 100.0, "won": False}
    assert "searches disagree" in labels(replace(choice, compared=(*choice.compared, row)))
    lost = ({**choice.curve[-1], "truncated": 1.0}, *choice.curve)
    assert "runs blow up" in labels(replace(choice, curve=lost))
    shown = {label for one in (choice, bad, replace(choice, curve=lost)) for label in labels(one)}
    assert shown <= set(LABELS)


def test_the_page_has_the_picture_and_every_search(choice, tmp_path):
    page, findings = write_step_size(choice, tmp_path / "page.html", name="a line")
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg id=") == 1
    assert all(name in text for name in ("the sweep", "random search", "gradient search", "critical rate at the start"))
    assert findings


def test_a_budget_pays_for_fewer_runs():
    data = (torch.randn(30, 3), torch.randn(30, 1))
    given = {"steps": 50, "batch_size": 10, "searches": 3, "seeds": 2, "loss": nn.MSELoss()}
    few, many = (runs_within(s, data, factory=lambda seed: nn.Linear(3, 1), optimizer="sgd", **given) for s in (1e-6, 100.0))
    assert few == 4  # two settings on two seeds: no search tries less
    assert many > 100


def test_a_budget_knows_what_a_walk_costs(monkeypatch):
    """Its gradients come one by one: where each run of them takes a second, 77 seconds pay for no more than 102."""
    monkeypatch.setattr(module, "_run_of_a_walk", lambda *data, **given: 1.0)
    data = (torch.randn(30, 3), torch.randn(30, 1))
    given = {"steps": 5, "batch_size": 10, "searches": 3, "seeds": 2, "loss": nn.MSELoss(), "optimizer": "sgd"}
    assert module.runs_within(77.0, data, data, factory=lambda seed: nn.Linear(3, 1), walks=True, **given) <= 77 / module.WALKED


@pytest.mark.parametrize("optimizer", ["adam", lambda parameters: torch.optim.SGD(parameters, lr=0.1)])
def test_runs_of_a_walk_are_timed(optimizer):
    data = (torch.randn(30, 3), torch.randn(30, 1))
    given = {"steps": 5, "batch_size": 10, "loss": nn.MSELoss(), "optimizer": fleet_optimizer_of(optimizer)}
    for factory in (lambda seed: nn.Linear(3, 1), lambda seed: nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.5))):
        assert math.isfinite(module._run_of_a_walk(data, factory=factory, **given))


def test_data_are_split_without_overlap():
    train, valid = split_off((torch.arange(30), torch.arange(30)), 0.2, 1)
    assert sorted([*train[1].tolist(), *valid[1].tolist()]) == list(range(30))
