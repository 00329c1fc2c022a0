"""`theodolite survey`: the embedded example, a user's file, Hugging Face folders, JSON, plans, exit codes, bad input."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from theodolite.cli import main

MINE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))

    def forward(self, x):
        return self.body(x)

def build():
    torch.manual_seed(0)
    return Net()

def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(150, 5, generator=generator)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, torch.arange(150) % 3), batch_size=64, shuffle=True)
    return loader

def spoiled():
    batches = [(x.clone(), y) for x, y in data()]
    batches[1][0][0, 0] = float("nan")
    return batches

def adam(parameters, lr=1e-3):
    return torch.optim.Adam(parameters, lr=lr)

def fails():
    raise RuntimeError("the builder is broken")
"""


@pytest.fixture
def theodolite(capsys, monkeypatch, tmp_path):
    """Run the command in an empty folder that holds the user's file."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.delitem(sys.modules, "mine", raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["survey", *arguments])
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


def test_without_arguments_it_trains_and_surveys_the_embedded_example(theodolite, tmp_path):
    code, out, err = theodolite("--save")
    assert code == 0, err
    assert "It has learned: loss" in out or "It learns: loss" in out
    assert "lr=0.1\n" in out
    assert len(out.splitlines()) <= 20
    assert "The page is survey/index.html" in out
    page = tmp_path / "survey" / "index.html"
    assert 20_000 < page.stat().st_size < 3_000_000
    assert (tmp_path / "survey" / "survey.json").exists()
    assert "handwritten digits" in page.read_text()


def test_a_users_own_file_with_no_edits(theodolite, tmp_path):
    arguments = (
        "--model",
        "mine:build",
        "--data",
        "mine:data",
        "--optimizer",
        "mine:adam",
        "--lr",
        "0.01",
        "--only",
        "rate",
        "--only",
        "weighting",
    )
    code, out, err = theodolite(*arguments, "--json", "--out", "elsewhere")
    assert code == 0, err
    found = json.loads(out)
    by = {f["instrument"]: f for f in found["findings"]}
    assert "Adam" in by["rate"]["sentence"]
    assert "live Adam adapts" in by["rate"]["sentence"]
    assert found["lr"] == 0.01
    assert found["learning"] is None  # it was not asked
    assert not found["good"]
    assert by["weighting"]["label"] == "uneven batches"  # 64, 64, 22
    assert (tmp_path / "elsewhere" / "index.html").exists()


def test_nan_in_one_batch_is_a_finding_and_exit_code_1(theodolite, tmp_path):
    code, out, _ = theodolite("--model", "mine:build", "--data", "mine:spoiled")
    assert code == 1
    assert "✗" in out
    assert "batch 1" in out
    assert "batch 1" in (tmp_path / "survey" / "index.html").read_text()


def test_an_expected_divergence_is_exit_code_1(theodolite):
    code, out, _ = theodolite("--model", "mine:build", "--data", "mine:data", "--lr", "1e6", "--only", "rate")
    assert code == 1
    assert "divergence expected" in out or "unstable" in out


def test_the_dry_run_prints_a_plan_and_writes_nothing(theodolite, tmp_path):
    code, out, _ = theodolite("--model", "mine:build", "--data", "mine:data", "--dry-run", "--budget", "30s")
    assert code == 0
    assert "gradients" in out
    assert "density" in out
    assert "within a budget" in out
    assert not (tmp_path / "survey").exists()
    code, out, _ = theodolite("--model", "mine:build", "--data", "mine:data", "--dry-run", "--json")
    assert {row["instrument"] for row in json.loads(out)["steps"]} >= {"curvature", "rate"}


def test_a_checkpoint_is_loaded_and_never_unpickled(theodolite, tmp_path):
    from safetensors.torch import save_file

    mine: dict[str, Any] = {"__name__": "mine"}
    exec(MINE, mine)
    weights = mine["build"]().state_dict()
    state = {k: torch.zeros_like(v) for k, v in weights.items()}
    save_file(state, tmp_path / "zero.safetensors")
    common = ("--model", "mine:build", "--data", "mine:data", "--only", "parameters")
    code, out, _ = theodolite(*common, "--checkpoint", "zero.safetensors")
    assert code == 1  # critical: with zero weights the first layer moves nothing
    assert "Layer body.0 is dead" in out
    torch.save({"state_dict": weights, "hook": print}, tmp_path / "evil.pt")
    code, _, err = theodolite(*common, "--checkpoint", "evil.pt")
    assert code == 2
    assert err.count("\n") == 1


@pytest.mark.parametrize("kind", ["llama", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gpt2", "bert", "vit"))])
def test_hugging_face_folders_as_they_come(theodolite, tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
    text = {"vocab_size": 40, "max_position_embeddings": 16}
    configs = {
        "gpt2": lambda: transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=40, n_positions=16),
        "llama": lambda: transformers.LlamaConfig(**small, **text),
        "bert": lambda: transformers.BertConfig(**small, **text),
        "vit": lambda: transformers.ViTConfig(**small, image_size=8, patch_size=4),
    }
    configs[kind]().save_pretrained(tmp_path / kind)
    code, out, err = theodolite("--model", f"hf:{kind}", "--lr", "1e-3", "--json", "--budget", "10s")
    assert code == 0, err
    found = json.loads(out)
    assert not [row for row in found["plan"] if row["state"] == "failed"]
    assert {"sharpness"} <= {f["label"] for f in found["findings"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "F-4O^2"), "F-40^2"),
        (("--model", "mine:biuld", "--data", "mine:data"), "build"),
        (("--model", "mine:fails"), "the builder is broken"),
        (("--model", "nosuchmodule:thing"), "nosuchmodule"),
        (("--model", "hf:nowhere"), "nowhere"),
        (("--data", "mnits"), "mnist"),
        (("--optimizer", "sdg"), "sgd"),
        (("--budget", "soon"), "60s"),
        (("--lr", "-1"), "lr must be positive"),
        (("--only", "curvatur"), "curvature"),
        (("--model", "mine:build", "--data", "mine:data", "--checkpoint", "absent.pt"), "absent.pt"),
        (("--train", "-3"), "--train"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(theodolite, tmp_path, arguments, message):
    code, _, err = theodolite(*arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert err.strip().count("\n") == 0
    assert not (tmp_path / "survey").exists()


def test_a_script_as_a_name_is_shown_as_text(theodolite, tmp_path):
    (tmp_path / "bad.py").write_text(MINE + '\nclass Evil(Net): pass\nEvil.__name__ = "<script>alert(1)</script>"\n')
    code, _, err = theodolite("--model", "bad:Evil", "--data", "bad:data", "--only", "batches")
    assert code == 0, err
    assert "<script" not in (tmp_path / "survey" / "index.html").read_text()


def test_the_folder_is_tried_before_anything_is_measured(theodolite, tmp_path, monkeypatch):
    monkeypatch.setattr("theodolite.cli.loading.subject.load_subject", None)  # what is not reached
    (tmp_path / "file").write_text("")
    for out, reason in ((tmp_path / "file" / "below", "is a file"), (Path("/proc/nosuch"), "cannot be written")):
        code, _, err = theodolite("--model", "mine:build", "--data", "mine:data", "--out", str(out))
        assert code == 2
        assert reason in err
        assert err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mine.py"]


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_findings_are_printed_before_the_page_is_written(theodolite, monkeypatch, options):
    def full(self, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("theodolite.instruments.Survey.to_html", full)
    code, out, err = theodolite("--model", "mine:build", "--data", "mine:data", "--only", "batches", *options)
    assert code == 2
    assert "No space left" in err
    assert json.loads(out)["findings"] if options else "Survey of" in out
    assert "The page is" not in out


def test_help_is_light(tmp_path):
    program = (
        "import sys; from theodolite.cli import main\n"
        "try: main(['survey', '--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'matplotlib', 'numpy', 'pandas', 'transformers'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--dry-run" in done.stdout
