"""`theodolite stability` on the user's own builder and data: what it says, keeps, resumes and refuses."""

from __future__ import annotations

import importlib
import json
import sys

import pytest
import torch

import theodolite as th
from theodolite.cli import main
from theodolite.cli.loading import stability_study as jobs
from theodolite.cli.loading.stability_study import StudyOptions, load_study
from theodolite.testing.experiment_contract import same

CODE = """
import torch
from torch import nn

generator = torch.Generator().manual_seed(0)
X = torch.randn(200, 4, generator=generator)
Y = (X[:, 0] > 0).long()
calls = []

def data():
    return X[:120], Y[:120]

def test():
    return X[120:], Y[120:]

def empty():
    return X[:0], Y[:0]

def build():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))

def line():
    return nn.Linear(4, 2)

held = build()

def changing():
    calls.append(0)
    model = build()
    nn.init.constant_(model[0].bias, float(len(calls)))
    return model

def growing():
    calls.append(0)
    return nn.Sequential(nn.Linear(4, 6 + len(calls)), nn.ReLU(), nn.Linear(6 + len(calls), 2))

class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def forward(self, x):
        return self.layer(x) + torch.randn(1)

class Moving(torch.utils.data.Dataset):
    def __len__(self):
        return 20
    def __getitem__(self, i):
        calls.append(0)
        return X[i] + len(calls), Y[i]

moving = Moving()

def hinge(outputs, targets):
    return (1 + outputs.gather(1, 1 - targets[:, None]) - outputs.gather(1, targets[:, None])).clamp(min=0).mean()

def momentum(parameters, lr):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.5)

def whole():
    model = build()
    adam = torch.optim.Adam(model.parameters(), lr=0.02)
    return {"model": model, "loss": nn.CrossEntropyLoss(), "data": data(), "optimizer": adam}
"""

OWN = ("--model", "mine_stability:build", "--data", "mine_stability:data", "--test", "mine_stability:test")
FEW = ("--sizes", "10,20,40", "--pairs", "2", "--steps", "20", "--batch-size", "5", "--paths", "1")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the user's module; pages without pictures, which take most of the time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    drawing = {"plots": "to_svg", "plots.stability": "stability_panels", "plots.linear_path": "linear_path_panels"}
    for module, name in drawing.items():
        monkeypatch.setattr(importlib.import_module(f"theodolite.{module}"), name, lambda *given, **options: "")
    (tmp_path / "mine_stability.py").write_text(CODE)
    jobs._study.cache_clear()
    yield tmp_path
    for name in [name for name in sys.modules if name == "mine_stability" or name.startswith("_theodolite_mine")]:
        del sys.modules[name]


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["stability", *arguments])
    return int(ended.value.code or 0)


def answer(capsys) -> dict:
    return json.loads(capsys.readouterr().out)


def library(**more):
    """The same study by the library's own function."""
    mine = importlib.import_module("mine_stability")
    settings = {"sizes": [10, 20, 40], "pairs": 2, "steps": 20, "batch_size": 5, "paths": 1, "rate": 0.1, "progress": False}
    loss = torch.nn.CrossEntropyLoss()
    return th.stability(lambda seed: mine.build(), "sgd", mine.data(), mine.test(), **{**settings, "loss": loss, **more})


def test_the_command_gives_the_rows_of_the_function(here, capsys):
    assert call(*OWN, *FEW, "--trials", "2", "--checkpoints", "10", "--json") == 0
    found, wanted = answer(capsys), library(trials=2, checkpoints=[10])
    assert same(found["rows"], wanted.rows())
    assert found["verdict"] == wanted.verdict
    assert set(found["paths"]) == set(wanted.paths)
    for name, path in wanted.paths.items():
        assert found["paths"][name] == pytest.approx(path.summary(), nan_ok=True)
    assert [row["b"] for row in found["laws"]] == pytest.approx([fit.b for fit in wanted.explanation.fits.values()])
    assert (here / "stability" / "index.html").is_file()
    assert {"sensitivity", "generalisation gap", "distance", "repeatable", "trials"} <= {f["label"] for f in found["findings"]}


def test_a_page_with_pictures_and_words(here, capsys, monkeypatch):
    monkeypatch.undo()
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert call("--model", "mine_stability:line", "--data", "mine_stability:data", *FEW, "--out", "<b>out") == 0
    said = capsys.readouterr().out
    assert "24 of 120 examples, a seeded choice, were held out" in said
    assert "Exchanging one of 40 training examples changed the loss of a test example by up to" in said
    text = (here / "<b>out" / "index.html").read_text(encoding="utf-8")
    assert text.count("<svg id=") == 5
    assert "24 examples held out" in text
    assert "SGD, learning rate 0.1" in text


def test_workers_in_other_processes_give_the_same(here, capsys):
    few = (*FEW[2:], "--sizes", "10,20")
    assert call(*OWN, *few, "--json", "--engine", "joblib", "--workers", "1", "--out", "there") == 0
    assert same(answer(capsys)["rows"], library(sizes=[10, 20]).rows())


def test_a_run_goes_on_and_is_not_done_twice(here, capsys, monkeypatch):
    real, done = jobs.measure_size, []

    def killed(recipe, bench, config, m, trial, **options):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(m)
        return real(recipe, bench, config, m, trial, **options)

    monkeypatch.setattr(jobs, "measure_size", killed)
    assert call(*OWN, *FEW) == 130
    assert "the same command with --resume goes on" in capsys.readouterr().err
    assert not (here / "stability" / "index.html").exists()
    assert call(*OWN, *FEW) == 2
    assert "already holds a run" in capsys.readouterr().err
    done.clear()
    assert call(*OWN, *FEW, "--resume", "--json") == 0
    assert done == [40]
    assert same(answer(capsys)["rows"], library().rows())
    # Other data are another study, under whatever name.
    (here / "mine_stability.py").write_text(CODE.replace("manual_seed(0)", "manual_seed(1)"))
    for name in [name for name in sys.modules if name == "mine_stability" or name.startswith("_theodolite_mine")]:
        del sys.modules[name]
    jobs._study.cache_clear()
    done.clear()
    monkeypatch.setattr(jobs, "measure_size", lambda *given, **options: done.append(given[3]) or real(*given, **options))
    assert call(*OWN, *FEW, "--resume") == 0
    assert done == [10, 20, 40]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--sizes", "10,500"),
            "must hold 1 to 120 examples, as many as the training pool has. Got 500.",
        ),
        (("--sizes", "10,ten"), "--sizes must be whole numbers with commas"),
        (("--sizes", "10,10"), "--sizes must be different numbers"),
        (("--sizes", "0,10"), "--sizes must be at least 1"),
        (("--checkpoints", "-3"), "--checkpoints must be at least 0"),
        (("--pairs", "0"), "--pairs must be at least 1. Got 0."),
        (("--paths", "-1"), "--paths must be at least 0"),
        (("--test", "mine_stability:empty"), "--test is empty"),
        (("--model", "mine_stability:changing"), "gave other weights when called again"),
        (("--model", "mine_stability:growing"), "All replicas must have the same architecture"),
        (("--model", "mine_stability:Noisy"), "Two runs on the same data differ"),
        (("--model", "mine_stability:nothing"), "has no 'nothing'"),
        (("--model", "F-9z"), "must be the name of a built-in network"),
        (("--data", "mine_stability:moving"), "changed between two readings"),
        (("--model", "F-6", "--data", "mine_stability:moving"), "changed between two readings"),
        (("--data", "wibble"), "must be the name of a data set"),
        (("--loss", "wibble"), "must be one of cross-entropy"),
        (("--optimizer", "wibble"), "must be one of sgd"),
        (("--optimizer", "adam", "--momentum", "0.9"), "Adam has no setting momentum"),
        (("--optimizer", "mine_stability:momentum"), "needs a learning rate"),
        (("--lr", "-1"), "--lr must be a positive number"),
        (("--engine", "wibble"), "engine must be one of"),
        (("--address", "auto"), "address is for engine='ray' alone"),
        (("--epochs", "2", "--steps", "5"), "give one way to end a run"),
        (("--loss-target", "-1"), "--loss-target must be a positive loss"),
        (("--out", "mine_stability.py"), "--out must be a folder"),
    ],
    ids=lambda words: " ".join(words)[:40] if isinstance(words, tuple) else "",
)
def test_bad_input_is_one_line(here, capsys, words, said):
    given = dict(zip(OWN[::2], OWN[1::2], strict=True)) | {"--sizes": "10,20"} | dict(zip(words[::2], words[1::2], strict=True))
    if given.get("--pairs") is None:
        given["--pairs"] = "2"
    if "--epochs" not in given:
        given["--steps"] = "4"
    assert call(*(word for pair in given.items() for word in pair)) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert err.count("\n") == 1
    assert out == ""
    assert not (here / "stability").exists()


def test_what_a_builder_brings_is_used(here):
    study = load_study(StudyOptions(model="mine_stability:whole", steps=5))
    assert study.facts["optimizer"].startswith("Adam, learning rate 0.02")
    assert len(study.bench.train) == 96
    assert len(study.bench.test) == 24
    assert study.places is not None
    own = load_study(
        StudyOptions(
            model="mine_stability:build",
            data="mine_stability:data",
            loss="mine_stability:hinge",
            optimizer="mine_stability:momentum",
            lr=0.3,
        )
    )
    assert own.facts["optimizer"] == "SGD, learning rate 0.3, momentum 0.5"
    other = load_study(
        StudyOptions(
            model="mine_stability:build", data="mine_stability:data", optimizer="sgd:nesterov=true,momentum=0.8", weight_decay=0.1
        )
    )
    assert other.facts["optimizer"] == "SGD, learning rate 0.1, momentum 0.8, nesterov True, weight decay 0.1"


def test_weights_by_the_seed_or_fixed(here):
    fresh = load_study(StudyOptions(model="mine_stability:build", data="mine_stability:data"))
    first, second = (fresh.recipe.factory(seed)[0].weight for seed in (0, 1))
    assert not torch.equal(first, second)
    assert fresh.fingerprint(0) != fresh.fingerprint(1)
    assert not any("same weights" in note for note in fresh.notes)
    held = load_study(StudyOptions(model="mine_stability:held", data="mine_stability:data"))
    assert any("every seed starts from the same weights (as mine_stability:held holds them)" in note for note in held.notes)
    assert held.fingerprint(0) == held.fingerprint(1)
    torch.save(held.recipe.factory(0).state_dict(), "start.pt")
    started = load_study(StudyOptions(model="mine_stability:build", data="mine_stability:data", weights="start.pt"))
    assert started.fingerprint(3) == held.fingerprint(0)
    assert any("(start.pt)" in note for note in started.notes)
    named = load_study(StudyOptions(model="F-6", data="digits", samples=50))
    assert named.fingerprint(0) != named.fingerprint(1)
    assert len(named.bench.train) == 50
    assert named.places is None
    example = load_study(StudyOptions(model="F-6"))
    assert (len(example.bench.train), len(example.bench.test)) == (1438, 359)


def test_a_model_of_hugging_face(here):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(config).save_pretrained("model")
    (here / "poem.txt").write_text("".join(chr(97 + i * i % 23) for i in range(2000)))
    study = load_study(StudyOptions(model="hf:model", data="poem.txt"))
    x, y = study.bench.train.both
    assert torch.equal(x[:, 1:], y)
    model = study.recipe.factory(0)
    own = model.model(input_ids=x[:3], labels=x[:3]).loss
    assert study.recipe.loss(model(x[:3]), y[:3]).item() == pytest.approx(own.item(), rel=1e-5)
    assert any("(model/model.safetensors)" in note for note in study.notes)


def test_the_estimate(here, capsys):
    assert call(*OWN, *FEW, "--dry-run") == 0
    assert "It would train 4 models at each of 3 sizes (10, 20, 40), and take about" in capsys.readouterr().out
    assert not (here / "stability").exists()
    assert call(*OWN, *FEW, "--dry-run", "--json", "--trials", "2", "--engine", "joblib", "--workers", "3") == 0
    found = answer(capsys)
    assert found["jobs"] == 6
    assert found["seconds"] > 0


def test_a_long_run_is_announced(here, capsys, monkeypatch):
    monkeypatch.setattr(jobs, "estimate_seconds", lambda plan, study: 7200.0)
    assert call(*OWN, *FEW) == 0
    assert "this takes about 2 hours" in capsys.readouterr().err


def test_pairs_that_diverge_and_jobs_that_fail(here, capsys, monkeypatch):
    assert call(*OWN, *FEW, "--lr", "1e30", "--checkpoints", "0") == 1  # what was measured before does not count
    assert "critical: All 6 pairs diverged" in capsys.readouterr().out
    real = jobs.measure_size

    def partly(recipe, bench, config, m, trial, **options):
        if m == 10:
            raise RuntimeError("no luck")
        return real(recipe, bench, config, m, trial, **options)

    monkeypatch.setattr(jobs, "measure_size", partly)
    assert call(*OWN, *FEW, "--fresh") == 1
    out, err = capsys.readouterr()
    assert "m = 10, trial 0 failed: RuntimeError: no luck" in err
    assert "a rate is read from 3 sizes or more, and there are 2" in out


def test_other_ways_to_end(here, capsys):
    few = ("--sizes", "10,20", "--pairs", "2", "--batch-size", "5", "--paths", "0", "--json")
    assert call(*OWN, *few, "--epochs", "3") == 0
    assert {(row["m"], row["step"]) for row in answer(capsys)["rows"]} == {(10, 6), (20, 12)}
    assert call(*OWN, *few, "--steps", "400", "--loss-target", "0.5", "--lr", "0.5", "--out", "target") == 0
    assert all(row["steps_taken"] < 400 for row in answer(capsys)["rows"])
