"""The scripts of the gallery run, quickly, and each ends in a picture."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples").glob("plot_*.py"))

# Runs a script as `python script.py` would and saves what it shows.
RUN = """
import runpy, sys
import matplotlib.pyplot as plt
script, folder = sys.argv[1:]
sys.argv = [script]
plt.show = lambda: None
runpy.run_path(script, run_name="__main__")
for number in plt.get_fignums():
    plt.figure(number).savefig(f"{folder}/{number}.png")
"""


def test_there_is_a_gallery():
    assert len(SCRIPTS) >= 6


#: Long ones whose calls the README and the guide run as well.
LONG = {f"plot_{name}" for name in ("survey_own_model", "stability", "first_spectrum", "spikes", "layers", "structure")}


@pytest.mark.parametrize(
    "script", [pytest.param(s, marks=pytest.mark.slow if s.stem in LONG else (), id=s.stem) for s in SCRIPTS]
)
def test_the_script_runs_and_draws(script, tmp_path):
    environment = {**os.environ, "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN, str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    pictures = list(tmp_path.glob("*.png"))
    assert pictures
    assert all(picture.stat().st_size > 10_000 for picture in pictures)
    assert len(list(tmp_path.iterdir())) == len(pictures)  # nothing is written unasked


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_script_uses_public_names_only(script):
    tree = ast.parse(script.read_text(encoding="utf-8"))
    assert (ast.get_docstring(tree) or "").splitlines()[1].startswith("===")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert not (node.module or "").startswith("theodolite")
        if isinstance(node, ast.Import):
            assert all(name.name == "theodolite" or not name.name.startswith("theodolite") for name in node.names)
        if isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_") or node.attr == "__init__"
