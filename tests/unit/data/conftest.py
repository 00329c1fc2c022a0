"""No test finds data by accident: the cache is empty and the variable unset, except where a test asks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REAL = os.environ.get("THEODOLITE_DATA")


@pytest.fixture(autouse=True)
def _nothing_there(monkeypatch, tmp_path):
    monkeypatch.delenv("THEODOLITE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def real():
    """The folder of real files."""
    if not REAL or not Path(REAL).is_dir():
        pytest.skip("needs real data files: set THEODOLITE_DATA to their folder")
    return Path(REAL)
