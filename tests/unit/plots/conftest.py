"""Every drawing leaves matplotlib as it found it, and no figure behind."""

from __future__ import annotations

import sys

import matplotlib
import pytest


def settings() -> dict:
    """All settings but the backend: asking for that one would load pyplot."""
    return {name: matplotlib.rcParams[name] for name in matplotlib.rcParams if name != "backend"}


@pytest.fixture(autouse=True)
def _matplotlib_left_as_found():
    before = settings()
    yield
    assert settings() == before
    if "matplotlib.pyplot" in sys.modules:
        assert sys.modules["matplotlib.pyplot"].get_fignums() == []
