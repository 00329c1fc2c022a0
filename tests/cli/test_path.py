"""`theodolite path`: the line between two checkpoints."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import theodolite as th
from theodolite.cli import main
from theodolite.cli.loading.datasets import NoTestPartError
from theodolite.cli.loading.subject import load_subject


@pytest.fixture
def checkpoints(tmp_path, monkeypatch):
    """Two checkpoints of one run on digits, an epoch apart, and one from another seed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    digits = th.data.load("digits").scaled().flat()
    for seed in (0, 1):
        model = th.models.build("F-16", inputs=64, seed=seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for steps, name in ((60, f"run{seed}"), (10, f"later{seed}")):
            th.train(model, nn.CrossEntropyLoss(), (digits.x_train, digits.y_train), optimizer, steps=steps, progress=False)
            save_file(model.state_dict(), tmp_path / f"{name}.safetensors")
    return tmp_path


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["path", *arguments])
    return int(ended.value.code or 0)


def profile(capsys) -> dict:
    found: dict = json.loads(capsys.readouterr().out)
    return found


def test_one_run_is_one_basin(checkpoints, capsys):
    code = call("later0.safetensors", "run0.safetensors", "--model", "F-16", "--data", "digits", "--samples", "300")
    assert code == 0
    said = capsys.readouterr().out
    assert said.startswith("later0 to run0: One basin")
    assert "averaging these two is safe" in said
    text = (checkpoints / "path" / "index.html").read_text()
    assert '<p class="kicker">linear path</p>' in text
    assert text.count("<svg id=") == 1
    assert "<dt>samples</dt><dd>300, test 300</dd>" in text
    assert "Path from later0 to run0" in text


def test_the_profile_as_json(checkpoints, capsys):
    words = ("run0.safetensors", "run1.safetensors", "--model", "F-16", "--data", "digits", "--json")
    assert call(*words, "--points", "11", "--low", "0", "--high", "1", "--out", "elsewhere") == 0
    found = profile(capsys)
    assert [round(row["alpha"], 9) for row in found["profile"]] == [round(0.1 * i, 9) for i in range(11)]
    assert found["page"] == "elsewhere/index.html"
    assert found["finding"]["label"] == ("connected" if found["connected"] else "barrier")
    assert found["batchnorm"] == "none in the model"
    lowest = min(row["train_accuracy"] for row in found["profile"])
    ends = min(found["profile"][i]["train_accuracy"] for i in (0, -1))
    assert found["barrier_train"] == pytest.approx(ends - lowest)
    assert all(row["test_accuracy"] is not None for row in found["profile"])


def test_the_test_data(checkpoints, capsys):
    (checkpoints / "mine.py").write_text("import torch\ndef data(): return torch.rand(40, 64), torch.arange(40) % 10\n")
    few = ("--points", "3", "--json")
    both = ("run0.safetensors", "run1.safetensors", "--model", "F-16")
    assert call(*both, "--data", "digits", "--test", "mine:data", *few) == 0
    assert "test 40" in (checkpoints / "path" / "index.html").read_text()
    capsys.readouterr()
    assert call(*both, "--data", "mine:data", *few) == 0
    assert profile(capsys)["barrier_test"] is None
    assert "<dt>test data</dt><dd>none</dd>" in (checkpoints / "path" / "index.html").read_text()


def test_parts_of_a_data_set(checkpoints):
    digits = th.data.load("digits").scaled().flat()
    subject = load_subject("F-16", "digits", samples=10_000, part="test")
    assert torch.equal(subject.data[0], digits.x_test)
    assert torch.equal(subject.data[1], digits.y_test)
    labels = torch.arange(8) % 2
    torch.save({"x_train": torch.rand(8, 3), "y_train": labels, "x_test": torch.ones(4, 3), "y_test": labels[:4]}, "d.pt")
    assert torch.equal(load_subject("F-16", "d.pt", part="test").data[0], torch.ones(4, 3))
    torch.save((torch.rand(8, 3), labels), "pair.pt")
    with pytest.raises(NoTestPartError, match=r"pair\.pt"):
        load_subject("F-16", "pair.pt", part="test")


def test_bad_words(checkpoints, capsys):
    ends = ("run0.safetensors", "run1.safetensors", "--model", "F-16", "--data", "digits")
    assert call("run0.safetensors", "gone.safetensors", "--model", "F-16", "--data", "digits") == 2
    assert "gone.safetensors" in capsys.readouterr().err
    assert call(*ends, "--batchnorm", "none") == 2
    assert "interpolate" in capsys.readouterr().err
    assert call(*ends, "--points", "1") == 2
    assert "--points" in capsys.readouterr().err
    assert call(*ends, "--low", "2", "--high", "1") == 2
    assert call("run0.safetensors", "run1.safetensors", "--model", "F-17", "--data", "digits") == 2
    assert "wrong shapes" in capsys.readouterr().err
