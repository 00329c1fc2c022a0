"""Rooms whose names are imported on first use: the imports that only the type checker sees are their one list."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def attach(package: str, file: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of a package, from the imports in its file under `if TYPE_CHECKING`.

    No name may be called like a file of the package: once imported, the module would hide it.
    """
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    hidden = [node for block in tree.body if isinstance(block, ast.If) for node in block.body]
    homes = {alias.name: str(node.module) for node in hidden if isinstance(node, ast.ImportFrom) for alias in node.names}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return list(homes), get, lambda: sorted([*vars(sys.modules[package]), *homes])
