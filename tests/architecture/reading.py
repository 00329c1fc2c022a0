"""What the source files import: every way of writing it, resolved to the module where the thing lives."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import theodolite as th

PACKAGE = Path(th.__file__).parent
NAME = "theodolite"


def sources(root: Path = PACKAGE) -> list[Path]:
    """All source files below a folder, in order."""
    return sorted(root.rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file; each is read once."""
    return ast.parse(path.read_text(encoding="utf-8"))


def room_of(path: Path, root: Path = PACKAGE) -> str:
    """The room a file belongs to: `operators` for operators/autograd/hessian.py."""
    return path.relative_to(root).with_suffix("").parts[0]


def imports_of(path: Path, root: Path = PACKAGE) -> Iterator[str]:
    """Dotted names of all that a file imports, at the top, in a function or for the type checker only.

    `from theodolite import x` is resolved to the home of x, relative imports to absolute names, and `th.x` after
    `import theodolite as th` counts as an import of x.
    """
    tree = tree_of(path)
    package = [NAME, *path.relative_to(root).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from _imported_from(node, package, root)
        elif isinstance(node, ast.Call) and _called(node) == "import_module":
            yield from (a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str))
    yield from _attributes_of_the_package(tree, root)


def _imported_from(node: ast.ImportFrom, package: list[str], root: Path) -> Iterator[str]:
    base = package[: len(package) - node.level + 1] if node.level else []
    module = ".".join([*base, *([node.module] if node.module else [])])
    for alias in node.names:
        yield home_of(alias.name, root) if module == NAME else f"{module}.{alias.name}"


def _attributes_of_the_package(tree: ast.AST, root: Path) -> Iterator[str]:
    """`th.x` where `th` is the package."""
    imports = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    bound = {a.asname or NAME for a in imports if a.name == NAME or (a.name.startswith(f"{NAME}.") and not a.asname)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in bound:
            yield home_of(node.attr, root)


def home_of(name: str, root: Path = PACKAGE) -> str:
    """Where a name of the package's top level lives: `hessian` is theodolite.operators…, `plots` is theodolite.plots."""
    if (root / name).is_dir() or (root / f"{name}.py").is_file():
        return f"{NAME}.{name}"
    thing: Any = getattr(th, name, None)
    home = thing.__name__ if inspect.ismodule(thing) else getattr(thing, "__module__", NAME)
    return f"{home}.{name}"


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def names_in(node: ast.AST) -> set[str]:
    """All identifiers that appear below a node, as names, attributes or imported names."""
    return {
        word
        for part in ast.walk(node)
        for word in (getattr(part, "id", None), getattr(part, "attr", None), getattr(part, "name", None))
        if isinstance(word, str)
    }
