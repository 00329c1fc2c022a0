"""The files beside the package say what is true: who is cited, what `make` can do, where the architecture page points."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import theodolite as th

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "theodolite"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_citation_names_the_sources_as_the_experiments_do():
    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == th.__version__
    assert cited["license"] == PROJECT["project"]["license"]
    sources = tomllib.loads((PACKAGE / "experiments" / "sources.toml").read_text(encoding="utf-8"))
    expected = {(s["title"], tuple(s["authors"]), s["year"], s["link"]) for s in sources.values()}
    found = {
        (r["title"], tuple(f"{a['given-names']} {a['family-names']}" for a in r["authors"]), r["year"], r["url"])
        for r in cited["references"]
    }
    assert found == expected


def test_make_help_explains_every_target():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.search(r"^\.PHONY: (.*)$", makefile, flags=re.MULTILINE)[1].split()
    said = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^  make (\S+) +\S", said, flags=re.MULTILINE) == targets


def test_the_hosted_tests_are_those_of_this_repository():
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))["jobs"]
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert oldest in jobs["test"]["strategy"]["matrix"]["python"]
    assert any(step.get("run") == "make types test test-docs" for step in jobs["test"]["steps"])
    for path in re.findall(r"tests/\S+", jobs["torch-floor"]["steps"][-1]["run"]):
        assert (ROOT / path).is_dir(), path
    assert re.search(r'^  "torch>=[0-9.]+"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_the_hooks_are_those_of_make_lint():
    yaml = pytest.importorskip("yaml")
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert [hook["id"] for hook in repository["hooks"]] == ["ruff", "ruff-format", "mypy"]


def test_what_the_architecture_page_names_is_there():
    text = (ROOT / "docs" / "architecture.rst").read_text(encoding="utf-8")
    named = re.findall(r"``((?:[a-z_]+/)+(?:[a-z_]+\.py)?|[a-z_]+\.py)``", text)
    assert len(named) >= 30
    assert [path for path in named if not (PACKAGE / path).exists()] == []
    rooms = {p.name for p in PACKAGE.iterdir() if (p.is_dir() or p.suffix == ".py") and not p.name.startswith("_")}
    table = text[text.index("list-table") : text.index("Data flows one way")]
    assert {room for room in rooms if f"``{room}``" not in table and f"``{room}/``" not in table} == set()


def test_every_decision_is_listed():
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"^   ([a-z-]+)$", (folder / "index.rst").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(listed) == sorted(path.stem for path in folder.glob("*.rst") if path.stem != "index")
    for name in listed:
        text = (folder / f"{name}.rst").read_text(encoding="utf-8")
        for part in ("Decision", "Alternatives", "Reasons", "Price", "What would change it"):
            assert f"**{part}.**" in text, name
