"""The scripts of the gallery run, quickly, and each ends in a picture."""

from __future__ import annotations

import ast
import runpy
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples").glob("plot_*.py"))


def test_there_is_a_gallery():
    assert len(SCRIPTS) >= 6


#: Long ones whose calls the README and the guide run as well; `make docs` runs them all.
_LONG = ("survey_own_model", "stability", "first_spectrum", "spikes", "layers", "structure", "catapult", "dictionary", "growing")
LONG = {f"plot_{name}" for name in _LONG}


@pytest.mark.parametrize(
    "script", [pytest.param(s, marks=pytest.mark.slow if s.stem in LONG else (), id=s.stem) for s in SCRIPTS]
)
def test_the_script_runs_and_draws(script, tmp_path, monkeypatch):
    """In this process, as the documentation runs them; `test_readme.py` runs one as a user does."""
    import matplotlib.pyplot as plt

    monkeypatch.setattr(plt, "show", lambda: None)
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.chdir(tmp_path)
    plt.switch_backend("Agg")
    plt.close("all")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        runpy.run_path(str(script), run_name="__main__")
    for number in plt.get_fignums():
        plt.figure(number).savefig(f"{number}.png")
    plt.close("all")
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
