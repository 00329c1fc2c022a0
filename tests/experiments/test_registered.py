"""Every registered experiment keeps the contract at `tiny` size."""

from __future__ import annotations

import os

import pytest

from theodolite.experiments import get, names
from theodolite.runners import Computations
from theodolite.testing import ExperimentContract


@pytest.fixture(autouse=True, scope="session")
def _shared_computations(tmp_path_factory):
    """What one worker computed, the others find: figures of one study train nothing again."""
    base = tmp_path_factory.getbasetemp()  # of this worker, in the folder of the session; without workers it is that folder
    session = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    ExperimentContract.computations = Computations(session / "computations")


def title(name: str) -> str:
    """`TestFigureB5_of_catapult_Line`: figures of one study stay on one worker, see `tests/conftest.py`."""
    chapter, _, figure = name.partition("/")
    words = "".join(part.capitalize() for part in figure.replace(".", "-").split("-"))
    return f"Test{words}_of_{chapter.replace('-', '_')}_{type(get(name).study).__name__}"


for _name in names():
    globals()[title(_name)] = type(title(_name), (ExperimentContract,), {"id": _name})


def test_there_are_experiments():
    assert {"checks/stability-edge", "checks/kronecker-identity"} <= set(names())
