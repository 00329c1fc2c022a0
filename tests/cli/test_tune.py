"""`theodolite tune`: the step size of a small network on the digits, within a time, interrupted, and with bad words."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from theodolite.cli import main
from theodolite.measures.stepsize.search import tuned_runs

SUBJECT = ("--model", "F-16", "--data", "digits", "--steps", "8", "--samples", "200")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["tune", *arguments])
    return int(ended.value.code or 0)


def test_the_verdict_comes_first(here, capsys):
    assert call(*SUBJECT, "--seeds", "2", "--budget", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Best is lr = ")
    assert lines[-1] == "The page is tune/index.html"
    text = (here / "tune" / "index.html").read_text(encoding="utf-8")
    assert '<p class="kicker">step size</p>' in text
    assert text.index("Best is lr = ") < text.index("<svg id=")
    assert not (here / "tune" / "search").exists()


def test_numbers_for_machines_and_an_interruption(here, capsys, monkeypatch):
    words = (*SUBJECT, "--hyper", "lr,momentum", "--seeds", "1", "--budget", "0.001", "--json", "--no-compare")
    assert call(*words) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["verdict"].startswith("Best is lr = ")
    assert set(whole["best"]) == {"lr", "momentum"}
    assert "setting chosen" in {finding["label"] for finding in whole["findings"]}
    assert whole["split"] == "valid"
    assert len(whole["curve"]) == 4  # two by two: no search tries less
    take, pieces = tuned_runs.Ledger.piece, []

    def interrupted(self, work):
        if pieces:
            raise KeyboardInterrupt
        pieces.append(1)
        return take(self, work)

    with monkeypatch.context() as patched:
        patched.setattr(tuned_runs.Ledger, "piece", interrupted)
        assert call(*words) == 130
    assert "--resume" in capsys.readouterr().err
    assert (here / "tune" / "search").exists()
    assert call(*words) == 2
    assert "Go on with it by --resume" in capsys.readouterr().err
    assert call(*words, "--resume") == 0
    again = json.loads(capsys.readouterr().out)
    assert again["curve"] == whole["curve"]
    assert again["fresh"] == whole["fresh"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--hyper", "lr,momentun"), "nearest: 'momentum'"),
        (("--steps", "0"), "--steps must be at least 1"),
        (("--lr", "-0.1"), "lr must be a positive number"),
        (("--search", "grid"), "search must be"),
        (("--optimizer", "lion"), "lion"),
        (("--budget", "soon"), "budget must be a positive time"),
    ],
)
def test_bad_words_end_with_code_2(words, said, capsys):
    assert call(*SUBJECT[:4], *words) == 2
    assert said in capsys.readouterr().err


def test_no_run_starts_from_the_weights_of_the_model_unless_they_are_named():
    import torch
    from torch import nn

    from theodolite.cli.commands.tune import _factory
    from theodolite.problem import Problem
    from theodolite.training.fleets.state import stack_replicas

    model = nn.Linear(4, 3)
    nn.init.constant_(model.weight, 7.0)
    problem = Problem(model, nn.CrossEntropyLoss(), (torch.ones(6, 4), torch.arange(6) % 3))
    anew, as_given = (stack_replicas(_factory(problem, path)[0], [0, 1]).parameters["weight"] for path in (None, "path"))
    assert not (anew == 7).any()
    assert not torch.equal(anew[0], anew[1])
    assert (as_given == 7).all()


def test_help_imports_no_torch():
    code = "import sys; from theodolite.cli import main\ntry: main(['tune', '--help'])\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "--hyper" in found.stdout
