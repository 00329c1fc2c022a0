"""The house: imports only point down, each outside thing is named in one room, hot paths stay in torch."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import theodolite as th

from .reading import PACKAGE, home_of, imports_of, names_in, room_of, sources, tree_of

# Lowest first; rooms on one line may not import each other.
FLOORS = [
    ["text", "errors", "interrupts"],
    ["files", "progress", "arguments"],
    ["results"],
    ["problem"],
    ["operators"],
    ["linalg"],
    ["training"],
    ["measures"],
    ["monitors", "plots", "models", "data"],
    ["runners"],
    ["experiments"],
    ["report"],
    ["instruments"],
    ["analyses"],
    ["testing"],  # contracts for authors of all that is below
    ["cli"],
]
FLOOR = {room: i for i, rooms in enumerate(FLOORS) for room in rooms}


def violations(root: Path) -> list[str]:
    """Each import that does not point down."""
    found = set()
    for path in sources(root):
        here = room_of(path, root)
        if here in ("__init__", "__main__"):
            continue  # the table of contents sees everything
        for module in imports_of(path, root):
            package, _, rest = module.partition(".")
            there = rest.split(".")[0]
            if package == "theodolite" and there in FLOOR and there != here and FLOOR[there] >= FLOOR[here]:
                found.add(f"{path.relative_to(root).as_posix()} imports {module}")
    return sorted(found)


def test_imports_only_point_down():
    assert violations(PACKAGE) == []


PLANTED = {
    "problem/plain.py": ("from theodolite.linalg import trace", "theodolite.linalg.trace"),
    "problem/whole.py": ("import theodolite.linalg.trace", "theodolite.linalg.trace"),
    "results/room.py": ("from theodolite import plots", "theodolite.plots"),
    "problem/renamed.py": ("from theodolite import plots as p, errors", "theodolite.plots"),
    "problem/exported.py": ("from theodolite import hessian", home_of("hessian")),
    "problem/attribute.py": ("import theodolite as th\nth.hessian", home_of("hessian")),
    "problem/path.py": ("import theodolite.errors\ntheodolite.plots.curves", "theodolite.plots"),
    "problem/relative.py": ("from ..linalg import trace", "theodolite.linalg.trace"),
    "problem/relative_room.py": ("from .. import linalg", "theodolite.linalg"),
    "problem/deep/relative.py": ("from ...linalg.trace import trace", "theodolite.linalg.trace.trace"),
    "problem/deep/er/file.py": ("from theodolite.cli import app", "theodolite.cli.app"),
    "linalg/late.py": ("def f():\n    from theodolite.training import train", "theodolite.training.train"),
    "linalg/types.py": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from theodolite.monitors import Monitor",
        "theodolite.monitors.Monitor",
    ),
    "linalg/by_name.py": ('import importlib\nimportlib.import_module("theodolite.data")', "theodolite.data"),
    "models/beside.py": ("from theodolite.data import load", "theodolite.data.load"),
}


@pytest.mark.parametrize("file", PLANTED)
def test_a_planted_violation_is_found(file, tmp_path):
    code, target = PLANTED[file]
    for room in ("plots", "linalg", "errors", "data"):  # a bare name is a room where there is one
        (tmp_path / room).mkdir()
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(code + "\n")
    assert violations(tmp_path) == [f"{file} imports {target}"]


@pytest.mark.parametrize(
    "code",
    [
        "from theodolite import __version__",
        "from theodolite.results import Result\nfrom . import beside\nfrom .deep import other\nfrom .. import errors",
        "from theodolite import Problem, Result, errors",
        "import torch\nfrom torch import linalg\nlinalg.norm",
    ],
)
def test_what_is_allowed_is_not_reported(code, tmp_path):
    (tmp_path / "operators").mkdir()
    (tmp_path / "errors.py").write_text("")
    (tmp_path / "operators" / "good.py").write_text(code + "\n")
    assert violations(tmp_path) == []


def test_every_room_has_a_floor():
    rooms = {p.stem for p in PACKAGE.iterdir() if (p.is_dir() or p.suffix == ".py") and not p.name.startswith("_")}
    assert rooms <= set(FLOOR)


def test_no_folder_is_named_like_a_function():
    rooms = {p.name for room in (PACKAGE, PACKAGE / "operators") for p in room.iterdir() if p.is_dir()}
    functions = {name for name in th.__all__ if not isinstance(getattr(th, name), type(th))}
    assert not rooms & functions


def test_no_flat_folder_is_crowded():
    """More than twenty files side by side show no structure."""
    folders = {path.parent for path in sources()}
    crowded = {f.relative_to(PACKAGE).as_posix(): n for f in folders if (n := len(list(f.glob("*.py")))) > 20}
    assert crowded == {}


# What each room may know


def test_linalg_knows_nothing_of_networks():
    for path in sources(PACKAGE / "linalg"):
        assert not any(module.startswith(("theodolite.problem", "torch.nn")) for module in imports_of(path)), path


#: The bridge to SciPy, where NumPy's random state is kept, and where arrays and tables become tensors.
MEETS_NUMPY = {"scipy_bridge.py", "state_guard.py", "tables.py"}


def test_no_numpy_on_the_hot_paths():
    """Everything runs where the parameters live."""
    for room in ("problem", "operators", "linalg"):
        for path in sources(PACKAGE / room):
            if path.name not in MEETS_NUMPY:
                assert "numpy" not in path.read_text(encoding="utf-8"), f"{path} mentions numpy"


def test_only_runners_name_an_engine():
    """`joblib`, `ray` and their like are imported in one room."""
    engines = ("joblib", "ray", "dask", "submitit", "multiprocessing", "concurrent")
    for path in sources():
        if room_of(path) != "runners":
            assert not any(module.split(".")[0] in engines for module in imports_of(path)), path


#: Frameworks that own the training loop or its log, and the names by which transformers' trainer is known.
TRAINERS = ("lightning", "pytorch_lightning", "torch.utils.tensorboard", "tensorboard", "tensorboardX", "wandb", "mlflow")
TRAINER_NAMES = {"Trainer", "TrainerCallback", "TrainerControl", "TrainerState", "TrainingArguments", "SummaryWriter"}


def names_a_trainer(path: Path, root: Path = PACKAGE) -> bool:
    modules = list(imports_of(path, root))
    if any(module == name or module.startswith(f"{name}.") for module in modules for name in TRAINERS):
        return True
    uses = any(module.split(".")[0] == "transformers" for module in modules)
    return uses and bool(names_in(tree_of(path)) & TRAINER_NAMES)


def test_only_adapters_name_a_trainer():
    found = {path.relative_to(PACKAGE) for path in sources() if names_a_trainer(path)}
    assert [path for path in found if path.parts[:2] != ("monitors", "adapters")] == []
    assert len(found) >= 3  # Lightning, transformers, TensorBoard


@pytest.mark.parametrize(
    ("code", "guilty"),
    [
        ("import lightning.pytorch as pl", True),
        ("def f():\n    from torch.utils.tensorboard import SummaryWriter", True),
        ("from transformers import TrainerCallback", True),
        ("import transformers\nclass Mine(transformers.TrainerCallback): ...", True),
        ("from transformers import AutoTokenizer", False),
        ("class Trainer: ...", False),
    ],
)
def test_a_planted_trainer_is_found(code, guilty, tmp_path):
    (tmp_path / "file.py").write_text(code + "\n")
    assert names_a_trainer(tmp_path / "file.py", tmp_path) is guilty


def test_nothing_prints():
    for path in sources():
        calls = [n for n in ast.walk(tree_of(path)) if isinstance(n, ast.Call)]
        assert not any(isinstance(c.func, ast.Name) and c.func.id == "print" for c in calls), path


def test_nothing_is_mocked_outside_of_tests():
    for path in sources():
        assert not any(module.startswith("unittest") for module in imports_of(path)), path
