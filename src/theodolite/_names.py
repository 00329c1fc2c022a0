"""Public names of a room: its imports are their one list."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def imported(file: str) -> dict[str, str]:
    """Name -> module of all that a file imports from this package by name, also for the type checker alone."""
    found = [node for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in found if str(node.module).startswith("theodolite.")]
    return {alias.name: str(node.module) for node in ours for alias in node.names if alias.asname is not None}


def room(name: str) -> ModuleType:
    """A room by its name: for what hands itself over to one above it, as a result does to be drawn."""
    return importlib.import_module(f"theodolite.{name}")


def attach(package: str, file: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of a room whose names are imported on first use: those under `if TYPE_CHECKING`.

    No name may be called like a file of the room: once imported, the module would hide it.
    """
    homes = imported(file)

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return list(homes), get, lambda: sorted([*vars(sys.modules[package]), *homes])
