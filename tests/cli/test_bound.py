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
    torch.save((digits.x_test[:90], digits.y_test[:90]), folder / "test.pt")
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


def test_what_was_trained_on_is_compared(files, capsys):
    assert call(*SUBJECT, "--weights", "trained.safetensors", "--held-out", "--json") == 0
    assert json.loads(capsys.readouterr().out)["trained_on"] == len(th.data.load("digits").y_train)
    held_out = ("--model", "F-16", "--data", "test.pt", "--weights", "trained.safetensors", "--held-out")
    assert call(*held_out, "--trained-on", "digits", "--json") == 0
    capsys.readouterr()
    assert call(*held_out, "--trained-on", "test.pt") == 2
    assert "90 of the 90 samples of the data were trained on" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [pytest.param("start", marks=pytest.mark.long), "split"])
def test_a_killed_fit_goes_on_to_the_same_certificate(kind, files, capsys, monkeypatch, tmp_path):
    from theodolite.measures.bounds import checkpoints

    words = ("--weights", "trained.safetensors", "--start", "start.safetensors") if kind == "start" else ("--split", "0.5")
    words = (*SUBJECT, *words, "--out", str(tmp_path / "page"), "--json")
    assert call(*words) == 0
    whole = json.loads(capsys.readouterr().out)
    assert not (tmp_path / "page" / "fit").exists()
    saves, save = [], checkpoints.save_state

    def save_then_die(*arguments):
        save(*arguments)
        saves.append(1)
        if len(saves) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "save_state", save_then_die)
    assert call(*words) == 130
    assert "the same command with --resume goes on" in capsys.readouterr().err
    assert call(*words) == 2
    assert "Go on with it by --resume, do it anew by --fresh" in capsys.readouterr().err
    assert call(*words, "--resume", "--seed", "1") == 2
    assert "of other data, weights or settings" in capsys.readouterr().err
    assert call(*words, "--resume", "--fresh") == 2
    assert "choose one of them" in capsys.readouterr().err
    epochs = []
    take = checkpoints.keep
    monkeypatch.setattr(checkpoints, "keep", lambda *given: (epochs.append(given[1]), take(*given)))
    assert call(*words, "--resume") == 0
    resumed = json.loads(capsys.readouterr().out)
    assert epochs == ["fit"] * (17 if kind == "start" else 18)  # the first saves were not done anew
    assert {name: value for name, value in resumed.items() if name != "seconds"} == {
        name: value for name, value in whole.items() if name != "seconds"
    }
    assert not (tmp_path / "page" / "fit").exists()


def test_a_fit_that_goes_on_keeps_its_length(capsys, monkeypatch, tmp_path):
    """A budget is spent once: what is left of the fit does not depend on how fast the machine is now."""
    from theodolite.measures.bounds import checkpoints

    save = checkpoints.save_state

    def save_then_die(*arguments):
        save(*arguments)
        raise KeyboardInterrupt

    words = (*SUBJECT, "--weights", "trained.safetensors", "--held-out", "--out", str(tmp_path), "--json")
    monkeypatch.setattr(checkpoints, "save_state", save_then_die)
    assert call(*words, "--budget", "0.01") == 130
    monkeypatch.setattr(checkpoints, "save_state", save)
    capsys.readouterr()
    assert call(*words, "--resume") == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["trace"]) == 2
    assert any("is for 2 of 20 epochs" in note for note in found["notes"])


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
        (("--split", "0.5", "--trained-on", "digits"), "--trained-on belongs to --held-out"),
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
