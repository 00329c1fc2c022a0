"""`theodolite compare`: checkpoints of one network."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from safetensors.torch import save_file

import theodolite as th
from theodolite.cli import main
from theodolite.experiments.hessian.networks import Setup, problem_of

SETUP = Setup("F-20", epochs=10, samples=200)


@pytest.fixture
def checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for seed in (0, 1):
        state = problem_of(SETUP, seed).model.state_dict()
        save_file({k: v.float().contiguous() for k, v in state.items()}, tmp_path / f"run{seed}.safetensors")
    return tmp_path


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["compare", *arguments])
    return int(ended.value.code or 0)


def test_two_checkpoints(checkpoints, capsys):
    code = call(
        "run0.safetensors", "run1.safetensors", "--model", "F-20", "--data", "digits", "--samples", "200", "--k", "30", "--json"
    )
    assert code == 0
    everything = json.loads(capsys.readouterr().out)
    *found, path = everything["findings"]
    assert path["label"] in ("connected", "barrier")
    assert [f["label"] for f in found] == ["overlap", "overlap"]
    text = (checkpoints / "comparison" / "index.html").read_text()
    assert text.count("<svg id=") == 7  # loss, accuracy, rate and path beside the verdict; the path and two layers below
    assert text.index('id="verdict"') < text.index("<svg id=") < text.index("<table")
    for sentence in everything["verdict"]:
        assert f"<p>{sentence}</p>" in text.replace("<wbr>", "")
    assert [row["model"] for row in everything["scores"]] == ["run0", "run1"]
    assert "run0 and run1" in text
    assert '<p class="kicker">comparison</p>' in text
    assert "from 5 sections" in text
    assert "Path from run0 to run1" in text
    assert 'id="section-path-0"' in text
    header = {"network": "F-20", "data": "digits", "samples": "200", "directions per layer": "30", "tolerance": "0.001"}
    for name, value in header.items():
        assert f"<dt>{name}</dt><dd>{value}</dd>" in text
    assert "<dt>checkpoints</dt>" in text
    for finding in found:
        layer = finding["quantity"].removeprefix("overlap of ")
        assert f'id="section-layer-{layer}"' in text


def test_a_peak_at_the_end_is_called_rising():
    problems = {"a": problem_of(SETUP, 0), "b": problem_of(SETUP, 1)}
    short, longer = (th.compare(problems, "fc1", k=k, progress=False) for k in (3, 40))
    for found in (short, longer):
        (pair,), (finding, _) = found.pairs, found.findings
        rising = pair.peak == len(pair.overlap)
        assert ("still rises" in finding.sentence) == rising
        assert (f"is largest at {pair.peak};" in finding.sentence) == (not rising)
    assert "still rises at 3" in short.findings[0].sentence


def test_one_is_not_enough_and_a_missing_file_is_named(checkpoints, capsys):
    assert call("run0.safetensors", "--model", "F-20") == 2
    assert "two checkpoints" in capsys.readouterr().err
    assert call("run0.safetensors", "gone.safetensors", "--model", "F-20", "--data", "digits") == 2
    assert "gone.safetensors" in capsys.readouterr().err


def test_a_model_shares_everything_with_itself_and_the_law_holds_for_hidden_layers():
    problems = {"a": problem_of(SETUP, 0), "again": problem_of(SETUP, 0), "b": problem_of(SETUP, 1)}
    found = th.compare(problems, k=40, progress=False)
    same = next(p for p in found.pairs if (p.first, p.second, p.layer) == ("a", "again", "fc1"))
    assert torch.allclose(same.overlap[:5], torch.ones(5).double(), atol=1e-6)
    assert torch.allclose(same.predicted, torch.ones(len(same.predicted)).double(), atol=1e-8)
    other = next(p for p in found.pairs if (p.first, p.second, p.layer) == ("a", "b", "fc1"))
    assert 0 < float(other.overlap[19]) < 1
    assert abs(float(other.overlap[19]) - float(other.permuted[19])) < 0.3
    between = [p for p in found.pairs if p.layer == "fc1"]
    sentence = next(f.sentence for f in found.findings if f.quantity == "overlap of fc1")
    assert f"predict {sum(float(p.predicted[19]) for p in between) / 3:.2g}" in sentence
    assert f"chance is {20 / (20 * 64):.2g}" in sentence  # 20 directions of 20·64 weights
    with pytest.raises(ValueError, match="at least two"):
        th.compare({"a": problems["a"]})


def test_the_paths_between_the_models(tmp_path):
    problems = {"a": problem_of(SETUP, 0), "again": problem_of(SETUP, 0), "b": problem_of(SETUP, 1)}
    found = th.compare(problems, "fc1", k=3, progress=False)
    same, other = found.paths["a"]["again"], found.paths["a"]["b"]
    assert same.connected
    assert same.barrier_train == 0
    assert other.train_loss[[50, 25]].tolist() == pytest.approx([found.losses["a"], found.losses["b"]], rel=1e-6)
    assert found.paths["again"]["b"].rows() == other.rows()
    assert [f.label for f in found.findings[1:]] == [("barrier", "connected")[p.connected] for p in (same, other, other)]
    assert found.findings[1].severity == "good"
    assert found.findings[1].sentence.startswith("a to again: One basin")
    found.save(tmp_path / "comparison")
    assert type(found).load(tmp_path / "comparison").paths["a"]["b"].summary() == other.summary()
    assert "Path from again to b" in found.to_html(tmp_path / "page.html").read_text()
    assert th.compare(problems, "fc1", k=3, path=False, progress=False).paths == {}


def linear(weight: float, flips: int = 0) -> th.Problem:
    """Two classes told apart by the sign of one input, of 40 samples `flips` labelled wrong; `weight` is the confidence."""
    x = torch.linspace(0.5, 1.5, 40, dtype=torch.float64)[:, None] * torch.tensor([1.0, -1.0] * 20, dtype=torch.float64)[:, None]
    y = torch.tensor([0, 1] * 20)
    y[:flips] = 1 - y[:flips]
    model = torch.nn.Linear(1, 2, bias=False, dtype=torch.float64)
    model.weight.data = torch.tensor([[weight], [-weight]], dtype=torch.float64)
    return th.Problem(model, torch.nn.CrossEntropyLoss(), (x, y))


def test_the_verdict_names_the_better_model_by_paired_errors():
    found = th.compare({"unsure": linear(0.4, 4), "wrong": linear(-0.4, 4)}, k=1, progress=False)
    assert found.verdict()[0] == "unsure is better on these 40 samples: lower loss and higher accuracy."
    rows = {row["model"]: row for row in found.scores}
    right = torch.tensor([0.0] * 4 + [1.0] * 36).double()
    assert rows["unsure"]["accuracy"] == pytest.approx(0.9)
    assert rows["unsure"]["accuracy_error"] == pytest.approx(float(right.std()) / 40**0.5)
    problem = linear(0.4, 4)
    (batch,) = problem.data
    logits = problem.model(*batch.inputs.values())
    each = torch.nn.functional.cross_entropy(logits, batch.target, reduction="none").detach()
    assert rows["unsure"]["loss_error"] == pytest.approx(float(each.std()) / 40**0.5)
    other = torch.nn.functional.cross_entropy(-logits, batch.target, reduction="none").detach()
    loss = next(row for row in found.contests if row["quantity"] == "loss")
    assert (loss["best"], loss["clear"]) == ("unsure", True)
    assert loss["error"] == pytest.approx(float((each - other).std()) / 40**0.5)
    assert rows["unsure"]["critical_lr"] == pytest.approx(th.critical_learning_rate(problem).value, rel=1e-3)


def test_models_that_differ_in_confidence_only_and_equal_ones():
    sure, unsure = linear(3.0), linear(0.4)
    found = th.compare({"unsure": unsure, "sure": sure}, k=1, progress=False)
    head, *_, flat, between = found.verdict()
    assert head == "sure is better on these 40 samples: lower loss; its accuracy is not clearly higher."
    assert flat.startswith("Lower sharpness (flatter): sure, ")
    assert between.startswith("Between them: One basin")
    same = th.compare({"a": sure, "b": sure}, k=1, path=False, progress=False)
    assert same.verdict()[0] == "Neither model is clearly better on these 40 samples."
    assert not any(row["clear"] for row in same.contests)


def test_better_in_loss_and_worse_in_accuracy():
    # Wrong labels cost a model that is very sure more loss than one that is always a little wrong.
    found = th.compare({"sure": linear(6.0, 12), "coin": linear(-0.001, 12)}, k=1, path=False, progress=False)
    assert found.verdict()[0] == "It depends on these 40 samples: coin has the lower loss, sure has the higher accuracy."


def test_models_that_share_a_layer_but_no_path():
    problems = {"wide": problem_of(SETUP, 0), "deep": problem_of(Setup("F-20^2", epochs=1, samples=200), 0)}
    found = th.compare(problems, "fc1", k=3, progress=False)
    assert found.paths == {}
    assert "state_b" in found.without["path from wide to deep"]
    assert "path from wide to deep: not compared" in found.sentence()
