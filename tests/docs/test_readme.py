"""What the README promises works."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.models.transformers import gpt

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TOUR = (ROOT / "docs" / "tour.md").read_text()


def blocks(text):
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def test_the_blocks_run_as_pasted(monkeypatch, tmp_path):
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks(README):
        exec(block, names)
    assert (tmp_path / "survey" / "index.html").exists()
    assert len(names["survey"].sentences) <= 3
    assert len(names["monitor"].steps) == 30


def test_it_fits_on_a_screen_or_two():
    assert len(README.splitlines()) < 100
    assert all(len(line) <= 130 for line in README.splitlines())


def test_the_tour_runs(monkeypatch, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    data, loss = (torch.randn(40, 4), torch.randint(3, (40,))), nn.CrossEntropyLoss()
    names = {"model": model, "loss": loss, "data": data, "th": th}
    monkeypatch.chdir(tmp_path)
    first, *rest = blocks(TOUR)
    exec(first, names)
    assert names["pairs"].converged
    x = torch.randn(12, 4)
    network = nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 1))
    names |= {"other": names["pairs"], "inputs": x, "network": network, "x": x, "y": x[:, :1]}
    names["build"] = lambda seed: nn.Linear(4, 3)
    names |= {"train": (torch.randn(250, 4), torch.randint(3, (250,))), "test": data}
    names |= {f"state_{end}": copy.deepcopy(model.state_dict()) for end in "ab"}
    names["loader"] = list(zip(data[0].split(10), data[1].split(10), strict=True))
    names |= {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "other_model": nn.Linear(4, 3)}
    names |= {"signals": torch.randn(100, 20), "language_model": gpt(vocabulary=30, depth=1, dim=16)}
    names["tokens"] = torch.randint(30, (2000,))
    names["deep"] = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    for snippet in rest:
        exec(snippet, names)


def test_the_commands_of_the_readme_are_targets():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert "theodolite survey" in makefile


def test_the_first_example_runs(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "plot_first_spectrum.py"), "--out", str(tmp_path / "survey")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "eigenvalue    residual" in done.stdout
    assert "converged" in done.stdout
    for name in ("spectrum.png", "layers.png", "eigenpairs.json", "eigenpairs.safetensors"):
        assert (tmp_path / "survey" / name).stat().st_size > 0
    assert th.load(tmp_path / "survey" / "eigenpairs").converged


def test_the_local_links_exist():
    for text, folder in ((README, ROOT), (TOUR, ROOT / "docs")):
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            if not link.startswith("http"):
                assert (folder / link).exists(), link


@pytest.mark.parametrize("name", ["torch", "pytest", "hypothesis", "transformers", "scipy", "ruff", "mypy"])
def test_constraints_pin_what_the_tests_need(name):
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert name in {key.lower() for key in pins}
    assert pins["torch"] == "2.13.0"
