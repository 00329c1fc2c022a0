"""The names of the room: modules do not hide functions of the same name."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import importlib, pkgutil, types
import theodolite.operators as room

modules = [m.name for m in pkgutil.walk_packages(room.__path__, "theodolite.operators.")]
for name in {order}(modules):
    importlib.import_module(name)
hidden = [name for name in room.__all__ if isinstance(getattr(room, name), types.ModuleType)]
raise SystemExit(", ".join(hidden) or 0)
"""


@pytest.mark.parametrize("order", ["list", "reversed"])
def test_a_module_named_like_a_function_does_not_hide_it(order):
    """`theodolite.operators.hessian` is the function, whichever of the room's modules is imported first or last."""
    done = subprocess.run([sys.executable, "-c", CODE.format(order=order)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
