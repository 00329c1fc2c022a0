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


#: The longest at `tiny`, each with a figure of the same study among the quick ones: `pytest -m slow` runs them too.
LONG = (
    *("stability/figure-2.2", "stability/figure-2.3", "stability/figure-A.10", "stability/figure-A.11"),
    *("catapult/figure-3.2", "catapult/figure-3.4", "catapult/figure-B.12", "catapult/figure-B.13"),
    *("catapult-features/figure-4.3", "catapult-features/figure-4.7", "catapult-features/figure-C.3"),
    *("catapult-features/figure-C.9", "catapult-features/figure-C.11"),
    *("catapult-features/figure-4.10", "catapult-features/figure-C.18", "catapult-features/figure-C.23"),
    "sparse-coding/figure-2.1",
)


for _name in names():
    _marks = {"pytestmark": pytest.mark.slow} if _name in LONG else {}
    globals()[title(_name)] = type(title(_name), (ExperimentContract,), {"id": _name, **_marks})


def test_a_study_left_to_the_slow_tests_has_a_quick_figure():
    assert set(LONG) <= set(names())
    quick = {type(get(name).study) for name in names() if name not in LONG}
    assert {type(get(name).study) for name in LONG} <= quick


def test_there_are_experiments():
    assert {"checks/stability-edge", "checks/kronecker-identity"} <= set(names())
