"""What turns a switch, sets a hook or replaces something is entered and left unbroken (`interrupts.py`)."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from .reading import PACKAGE, room_of, sources, tree_of

#: Contexts of torch and of Python that turn something of the whole process.
GLOBAL = {
    "no_grad", "enable_grad", "set_grad_enabled", "inference_mode", "autocast", "fork_rng", "saved_tensors_hooks", "device",
    "sdpa_kernel", "catch_warnings", "redirect_stderr", "redirect_stdout", "rc_context",
}  # fmt: skip
#: Rooms whose code runs inside a context of ours (jobs of experiments), ends with its process, or only tests.
ELSEWHERE = {"experiments", "cli", "testing", "interrupts"}
#: Starts and ends a cluster, which takes seconds and may be interrupted.
LONG = {"connected"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def called(node: ast.AST) -> set[str]:
    """Names of the functions that are called, or that a bare decorator names."""
    functions = [part.func for part in ast.walk(node) if isinstance(part, ast.Call)] or [node]
    return {getattr(function, "attr", getattr(function, "id", "")) for function in functions}


def faults(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, Function):
            continue
        decorators = {word for decorator in node.decorator_list for word in called(decorator)}
        if GLOBAL & decorators:
            yield f"{node.name} is decorated with a context: use called_within"
        restores = any(isinstance(part, ast.Try) and part.finalbody for part in ast.walk(node))
        if "contextmanager" in decorators and restores and node.name not in LONG:
            yield f"{node.name} puts something back: use unbroken_context"
        if "unbroken_context" not in decorators:
            yield from bare_contexts(node)


def bare_contexts(function: Function) -> Iterator[str]:
    """`with` statements that begin with a global context, where no other `with` of the function surrounds them."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.With):
            first = node.items[0].context_expr
            if GLOBAL & called(first) and "unbroken" not in called(first):
                yield f"{function.name} enters {ast.unparse(first)} bare: use unbroken"
        elif not isinstance(node, Function):
            waiting.extend(ast.iter_child_nodes(node))


def test_global_contexts_are_unbroken():
    found = [
        f"{path.relative_to(PACKAGE).as_posix()}: {fault}"
        for path in sources()
        if room_of(path) not in ELSEWHERE
        for fault in faults(tree_of(path))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("def f():\n    with torch.no_grad():\n        pass", 1),
        ("def f():\n    if x:\n        with torch.random.fork_rng(devices=[]), ours():\n            pass", 1),
        ("@torch.no_grad()\ndef f(): ...", 1),
        ("@contextmanager\ndef f():\n    try:\n        yield\n    finally:\n        x = 1", 1),
        ("def f():\n    with unbroken(torch.no_grad()):\n        pass", 0),
        ("def f():\n    with problem.session(), torch.no_grad():\n        pass", 0),
        ("@called_within(torch.no_grad)\ndef f(): ...", 0),
        ("@unbroken_context\ndef f():\n    with torch.no_grad():\n        yield", 0),
        ("@contextmanager\ndef f():\n    try:\n        yield\n    except ValueError:\n        raise", 0),
    ],
)
def test_a_planted_context_is_found(code, count):
    assert len(list(faults(ast.parse(code)))) == count
