"""The house: imports only point down, hot paths stay in torch, importing stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import theodolite as th

PACKAGE = Path(th.__file__).parent

# Lowest first; rooms on one line may not import each other.
FLOORS = [
    ["errors", "files", "progress"],
    ["results"],
    ["problem"],
    ["operators"],
    ["linalg"],
    ["training"],
    ["measures"],
    ["monitors", "plots", "models", "data"],
    ["runners"],
    ["experiments"],
    ["testing"],
    ["report"],
    ["instruments"],
    ["cli"],
]
FLOOR = {room: i for i, rooms in enumerate(FLOORS) for room in rooms}


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def violations(root: Path) -> list[str]:
    found = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        if parts == ("__init__",):
            continue  # the table of contents sees everything
        here = parts[0]
        for module in imports_of(path):
            names = module.split(".")
            if names[0] != "theodolite" or len(names) < 2 or names[1] == here:
                continue
            if FLOOR[names[1]] >= FLOOR[here]:
                found.append(f"{path.relative_to(root)} imports {module}")
    return found


def test_imports_only_point_down():
    assert violations(PACKAGE) == []


def test_the_test_of_imports_can_fail(tmp_path):
    (tmp_path / "problem").mkdir()
    (tmp_path / "problem" / "bad.py").write_text("from theodolite.linalg import trace\n")
    assert violations(tmp_path) == ["problem/bad.py imports theodolite.linalg"]


def test_every_room_has_a_floor():
    rooms = {
        p.name if p.is_dir() else p.stem for p in PACKAGE.iterdir() if p.suffix in ("", ".py") and not p.name.startswith("_")
    }
    assert rooms - {"py"} <= set(FLOOR)


def test_linalg_knows_nothing_of_networks():
    for path in (PACKAGE / "linalg").rglob("*.py"):
        assert not any(module.startswith(("theodolite.problem", "torch.nn")) for module in imports_of(path)), path.name


def test_no_numpy_on_the_hot_paths():
    """Everything runs where the parameters live; NumPy is met by the bridge to SciPy and where its random state is kept."""
    for room in ("problem", "operators", "linalg"):
        for path in (PACKAGE / room).rglob("*.py"):
            if path.name in ("scipy_bridge.py", "state_guard.py"):
                continue
            text = path.read_text()
            assert "numpy" not in text, f"{path.name} mentions numpy"


def test_nothing_prints():
    for path in PACKAGE.rglob("*.py"):
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        assert not any(isinstance(c.func, ast.Name) and c.func.id == "print" for c in calls), path


@pytest.mark.parametrize("module", ["torch", "matplotlib", "pandas", "sklearn"])
def test_importing_theodolite_is_light(module):
    code = f"import theodolite, sys; raise SystemExit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_table_of_contents_is_complete():
    for name in th.__all__:
        assert getattr(th, name) is not None
    assert set(th.__all__) <= set(dir(th))
    with pytest.raises(AttributeError, match="nosuch"):
        th.nosuch  # noqa: B018


def test_every_public_name_is_documented():
    for name in th.__all__:
        assert (getattr(th, name).__doc__ or "").strip(), name


def test_no_folder_is_named_like_a_function():
    rooms = {p.name for room in (PACKAGE, PACKAGE / "operators") for p in room.iterdir() if p.is_dir()}
    assert not rooms & set(th._HOME)


def test_only_runners_name_an_engine():
    """`joblib`, `ray` and their like are imported in one room."""
    engines = ("joblib", "ray", "dask", "submitit", "multiprocessing", "concurrent")
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] != "runners":
            assert not any(module.split(".")[0] in engines for module in imports_of(path)), path


def test_help_imports_no_torch():
    code = "import sys; import theodolite.cli.app; raise SystemExit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["hessian", "gauss_newton", "jacobian", "layer_hessians", "tangent_kernel", "kronecker_factors"])
def test_a_module_named_like_a_function_does_not_hide_it(name):
    """`theodolite.operators.hessian` is the function, whichever of the room's modules is imported first or last."""
    code = (
        "import importlib, pkgutil, types, theodolite.operators as room\n"
        "modules = [m.name for m in pkgutil.walk_packages(room.__path__, 'theodolite.operators.')]\n"
        "[importlib.import_module(m) for m in reversed(modules)]\n"
        f"raise SystemExit(isinstance(room.{name}, types.ModuleType))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
