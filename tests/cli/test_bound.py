"""`theodolite bound`: certificates of a small network on the digits by each kind of prior."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import theodolite as th
from theodolite.cli import main

SUBJECT = ("--model", "F-16", "--data", "digits")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Weights before and after training, and those of another network."""
    folder = tmp_path_factory.mktemp("bound")
    digits = th.data.load("digits").scaled().flat()
    model = th.models.build("F-16", inputs=64, seed=0)
    save_file(model.state_dict(), folder / "start.safetensors")
    data, sgd = (digits.x_train, digits.y_train), torch.optim.SGD(model.parameters(), lr=0.5)
    th.train(model, nn.CrossEntropyLoss(), data, sgd, steps=300, batch_size=64, progress=False)
    save_file(model.state_dict(), folder / "trained.safetensors")
    save_file(th.models.build("F-9", inputs=64, seed=0).state_dict(), folder / "other.safetensors")
    for seed in (0, 1):  # networks that never say 8 or 9, and samples of these only
        state = th.models.build("F-9", inputs=64, seed=seed).state_dict()
        state["fc2.bias"][8:] = -300.0
        save_file(state, folder / f"never{seed}.safetensors")
    torch.save((digits.x_test[:60], torch.arange(60) % 2 + 8), folder / "few.pt")
    return folder


@pytest.fixture(autouse=True)
def here(files, monkeypatch):
    monkeypatch.chdir(files)
    monkeypatch.setattr(sys, "path", list(sys.path))


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["bound", *arguments])
    return int(ended.value.code or 0)


def test_the_verdict_comes_first(files, capsys):
    assert call(*SUBJECT, "--weights", "trained.safetensors", "--start", "start.safetensors", "--out", "page") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("With 96.5 % confidence the network, its weights drawn from the posterior, is wrong on at most ")
    assert lines[-1] == "The page is page/index.html"
    text = (files / "page" / "index.html").read_text(encoding="utf-8")
    assert '<p class="kicker">certificate</p>' in text
    assert text.count("<svg id=") == 3


def test_held_out_samples_are_the_test_part(capsys):
    assert call(*SUBJECT, "--weights", "trained.safetensors", "--held-out", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["n"] == len(th.data.load("digits").y_test)
    assert any("test part" in note for note in found["notes"])
    assert found["held_out"] <= found["value"] < found["guessing"]
    assert found["findings"][0]["label"] == "certified"
    assert len(found["trace"]) == 20
    assert found["verdict"].startswith("With 96.5 %")


def test_a_split_within_a_budget(capsys):
    assert call(*SUBJECT, "--split", "0.5", "--budget", "0.01", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prior"] == "split"
    assert len(found["trace"]) == 2
    assert any("pays for 2 of 20 epochs" in note for note in found["notes"])


def test_a_vacuous_bound_ends_with_code_1(capsys):
    few = ("--model", "F-9", "--data", "few.pt", "--weights", "never1.safetensors", "--start", "never0.safetensors")
    assert call(*few, "--out", "few") == 1
    assert capsys.readouterr().out.startswith("Vacuous: nothing can be said about new data from 60 samples")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--weights", "trained.safetensors", "--start", "other.safetensors"), "start is of another architecture"),
        (("--weights", "trained.safetensors", "--start", "trained.safetensors"), "start equals the model's weights"),
        (("--weights", "trained.safetensors", "--start", "gone.safetensors"), "gone.safetensors"),
        (("--weights", "trained.safetensors"), "Say where the prior comes from"),
        (("--start", "start.safetensors", "--held-out"), "Got --start and --held-out"),
        (("--weights", "trained.safetensors", "--split", "0.5"), "--split trains anew"),
        (("--split", "1.5"), "split must be a number above 0 and below 1"),
        (("--weights", "trained.safetensors", "--held-out", "--budget", "soon"), "budget must be a positive time"),
        (("--weights", "trained.safetensors", "--held-out", "--samples", "20"), "50 samples or more"),
    ],
)
def test_bad_words_are_one_line_and_code_2(words, said, capsys):
    assert call(*SUBJECT, *words) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.strip().splitlines()) == 1
