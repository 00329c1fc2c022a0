"""The recipes of CONTRIBUTING.md, taken from the page and run against their contracts."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from theodolite.experiments import Figure, run
from theodolite.runners import Computations
from theodolite.testing import ExperimentContract, InstrumentContract, OperatorContract, ResultContract

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def recipe(title: str) -> dict[str, str]:
    """The files of one recipe, by the path in their first line."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"```python\n# (\S+)\n(.*?)```", section, flags=re.DOTALL))


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes the code of a recipe into one module and imports it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def write(title: str):
        name = re.sub(r"\W+", "_", title.lower())
        files = recipe(title)
        module = next(path for path in files if path.startswith("src/"))
        home = module.removeprefix("src/").removesuffix(".py").replace("/", ".")
        text = "\n\n".join(files.values())
        text = re.sub(rf"^from {re.escape(home)} import .*\n", "", text, flags=re.MULTILINE)  # both files are one module here
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        made.append(name)
        return importlib.import_module(name)

    yield write
    for name in made:
        sys.modules.pop(name, None)


TITLES = ("A new operator", "A new instrument", "A new figure of a study that is there", "A new study")


@pytest.mark.parametrize("title", TITLES)
def test_a_recipe_is_short(title):
    """At most two files beside the test, each of fewer than 60 lines; the second is a line in a list or a table."""
    files = recipe(title)
    own = [path for path in files if path.startswith("src/")]
    assert len(own) == 1
    assert all(path.startswith(("src/theodolite/", "tests/unit/")) for path in files)
    assert all(text.count("\n") < 60 for text in files.values())
    assert (ROOT / own[0]).parent.is_dir()


def check(suite: object, tmp_path: Path) -> int:
    """Every test of a contract, as pytest would run it."""
    tests = [name for name in dir(suite) if name.startswith("test_")]
    for name in tests:
        one = type(suite)()
        method = getattr(one, name)
        if "tmp_path" in method.__code__.co_varnames[: method.__code__.co_argcount]:
            (tmp_path / name).mkdir()
            method(tmp_path / name)
        else:
            method()
    return len(tests)


def test_the_operator(package, tmp_path):
    suite = package("A new operator").TestLowRank()
    assert isinstance(suite, OperatorContract)
    assert check(suite, tmp_path) >= 18


def test_the_instrument(package, tmp_path):
    made = package("A new instrument")
    assert isinstance(made.TestWidths(), InstrumentContract)
    assert isinstance(made.TestResult(), ResultContract)
    assert check(made.TestWidths(), tmp_path) >= 8
    assert check(made.TestResult(), tmp_path) >= 5


@pytest.mark.parametrize("title", TITLES[2:])
def test_the_figure_of_a_study(title, package):
    made = package(title)
    own = [value for value in vars(made).values() if isinstance(value, type) and value.__module__ == made.__name__]
    (kind,) = (value for value in own if issubclass(value, Figure))
    known = Computations()
    first = run(kind, computations=known)
    assert first.good, str(first)
    assert kind().draw(first.rows).axes
    again = run(kind, computations=known)
    assert again.reused == again.jobs  # what was computed is looked at again, not trained again
    unconvincing = [{k: float("nan") if isinstance(v, float) else v for k, v in row.items()} for row in first.rows]
    assert not any(v.holds for v in kind().judge(unconvincing, "paper"))


def test_the_contract_of_experiments_is_what_the_page_says():
    assert "ExperimentContract" in PAGE
    assert ExperimentContract.__name__ in (ROOT / "tests" / "experiments" / "test_registered.py").read_text(encoding="utf-8")
