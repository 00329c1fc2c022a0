"""What saved files call a result class, where it is found again, and files that were saved before classes moved."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import theodolite as th
from theodolite.experiments.running import load_run
from theodolite.results.base import type_key
from theodolite.results.storage import homes

PACKAGE = Path(th.__file__).parent
OLD = Path(__file__).parents[2] / "data" / "before-second-plan"
FACTS = json.loads((OLD / "facts.json").read_text())


def result_classes() -> dict[str, list[str]]:
    """The modules of all result classes by key, read from the sources: a subclass of `Result` is one, wherever it stands."""
    classes = []
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(("theodolite", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                frozen = any("dataclass" in ast.unparse(d) for d in node.decorator_list)
                classes.append((node.name, {ast.unparse(base) for base in node.bases}, module, _stated_key(node), frozen))
    parents = {"Result"}
    while more := {name for name, bases, *_ in classes if bases & parents} - parents:
        parents |= more
    found: dict[str, list[str]] = {}
    for name, bases, module, key, frozen in classes:
        if bases & parents and frozen:
            found.setdefault(key or type_key(name, module), []).append(module)
    return found


def _stated_key(node: ast.ClassDef) -> str | None:
    assigned = (n for n in node.body if isinstance(n, ast.Assign | ast.AnnAssign))
    values = (n.value for n in assigned if "type_key" in ast.unparse(n).split("=")[0])
    return next((str(ast.literal_eval(v)) for v in values if v is not None), None)


def test_every_key_is_unique_and_its_module_is_known():
    found = result_classes()
    assert {key: modules for key, modules in found.items() if len(modules) > 1} == {}
    assert {key: homes().get(key) for key in found} == {key: modules[0] for key, modules in found.items()}


def test_a_file_names_no_module(tmp_path):
    th.top_eigenpairs(torch.eye(3), 1).save(tmp_path / "pairs")
    text = (tmp_path / "pairs.json").read_text()
    assert json.loads(text)["content"]["type"] == "eigenpairs"
    assert "theodolite." not in text


def test_loading_imports_the_module_of_the_result_and_no_more(tmp_path):
    th.top_eigenpairs(torch.eye(3), 1).save(tmp_path / "pairs")
    code = (
        "import sys; from theodolite.results import load; "
        f"load({str(tmp_path / 'pairs')!r}); raise SystemExit('theodolite.measures' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_key_names_the_nearest(tmp_path):
    (tmp_path / "odd.json").write_text(
        json.dumps({"format": "theodolite-result", "content": {"type": "eigenpair", "fields": {}}})
    )
    with pytest.raises(ValueError, match=r"Unknown result type 'eigenpair'; the nearest known: eigenpairs"):
        th.load(tmp_path / "odd")


def same(measured: object, expected: object) -> bool:
    if isinstance(expected, float) or isinstance(measured, float):
        return measured == pytest.approx(expected, rel=1e-9, nan_ok=True)
    return measured == expected


def without_tiny_errors(sentence):
    """Errors that do not show at the precision of a sentence are left to the tables by now."""
    return re.sub(r" ± \d+e-\d+", "", sentence)


@pytest.mark.parametrize("name", FACTS)
def test_a_file_saved_before_loads_with_equal_numbers(name):
    result = th.load(OLD / "results" / name)
    assert type(result).__name__ == FACTS[name]["class"]
    if name != "survey":  # whose sentence has become a verdict, which an older file does not hold
        assert result.sentence() in (FACTS[name]["sentence"], without_tiny_errors(FACTS[name]["sentence"]))
    rows = json.loads(json.dumps(result.rows(), default=str))
    assert len(rows) == len(FACTS[name]["rows"])
    for measured, expected in zip(rows, FACTS[name]["rows"], strict=True):
        assert measured.keys() - {"cause"} == expected.keys()
        assert all(same(measured[column], expected[column]) for column in expected), name


@pytest.mark.parametrize("name", FACTS)
def test_an_old_file_saved_anew_is_the_same_result(name, tmp_path):
    result = th.load(OLD / "results" / name)
    result.save(tmp_path / name)
    again = th.load(tmp_path / name)
    assert type(again) is type(result)
    assert again.sentence() == result.sentence()
    assert str(again.rows()) == str(result.rows())


def test_a_run_folder_from_before_loads():
    run = load_run(OLD / "run" / "checks" / "kronecker-identity" / "tiny")
    assert [verdict.holds for verdict in run.verdicts] == [True] * 3
